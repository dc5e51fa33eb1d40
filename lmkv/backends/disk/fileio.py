"""Moving bytes between caller-owned memory and files: all of them, and without a copy.

Nothing here knows what the bytes mean. All functions let go of the interpreter lock while the kernel works,
and raise `OSError` when the medium does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import define, field

from lmkv.chunks.layout import ALIGNMENT, align_up
from lmkv.protocols import Clock

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
TEMPORARY_SUFFIX = ".tmp"
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class ShortReadError(Exception):
    """A file ended before what was asked of it."""


def address_of(view: memoryview) -> int:
    """Where the memory begins; 0 when there is none."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


class Scratch(threading.local):
    """Page-aligned memory for headers and edges: one piece of each kind a thread, as long as the thread."""

    def __init__(self) -> None:
        self._pieces: dict[str, memoryview] = {}

    def take(self, kind: str, nbytes: int) -> memoryview:
        """`nbytes` of undefined content, valid until this thread takes the same kind again."""
        piece = self._pieces.get(kind)
        if piece is None or len(piece) < nbytes:
            # Private, because otherwise a forked child and its parent would use the same memory.
            memory = mmap.mmap(-1, align_up(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            piece = self._pieces[kind] = memoryview(memory)
        return piece[:nbytes]


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of `views` after their first `nbytes` were transferred."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def write_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Write all of `views` from `offset` on, however often the kernel stops short."""
    left = [view for view in views if len(view)]
    while left:
        done = os.pwritev(fd, left, offset)
        if done == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        offset += done
        left = _advance(left, done)


def read_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Fill all of `views` from `offset` on. Raises `ShortReadError` at an early end of file."""
    left = [view for view in views if len(view)]
    while left:
        done = os.preadv(fd, left, offset)
        if done == 0:
            raise ShortReadError(f"the file ends at byte {offset}")
        offset += done
        left = _advance(left, done)


_open: dict[object, str] = {}
"""The names of the files that threads of this process work with, from before they are opened until after."""


def _close_inherited() -> None:
    """In a forked child: its copies would keep their locks, and the bytes of deleted files, while it lives.

    By name, because a thread that was forked in the middle of opening a file has not learnt its number.
    """
    names = set(_open.values())
    _open.clear()
    for number in os.listdir("/proc/self/fd") if names else ():
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if os.path.basename(path).removesuffix(" (deleted)") in names:
                os.close(int(number))


os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def opened(path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """A file descriptor for the time of a block. Never follows a link, never waits for a pipe's other end."""
    this = object()
    _open[this] = os.path.basename(path)
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
        try:
            yield fd
        finally:
            os.close(fd)
    finally:
        _open.pop(this, None)


@contextlib.contextmanager
def temporary(folder: str, flags: int) -> Iterator[tuple[int, str]]:
    """A new file of a unique name, locked while it is written, gone from `folder` when the block ends.

    The lock tells a live writer from a dead one (`is_abandoned`): the kernel drops it with the process,
    whatever killed it, and neither recycled process ids nor containers that each have a process 1 confuse it.
    """
    path = os.path.join(folder, f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags) as fd:
        try:
            # A sweeper that holds the lock is about to unlink: publishing then fails and is tried anew.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def is_abandoned(path: str) -> bool:
    """Whether the writer of a temporary file is dead. False when that cannot be told."""
    try:
        with opened(path, os.O_RDONLY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def publish(temporary_path: str, path: str) -> None:
    """Give a complete file its final name, all at once. Raises `FileExistsError` when that name is taken."""
    try:
        os.link(temporary_path, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Without hard links a race may replace a file, by one of the same content: keys name content.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "already published", path) from None
        os.rename(temporary_path, path)


def sync_folder(folder: str) -> None:
    """Make the names in `folder` durable."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def probe_direct(folder: str) -> bool:
    """Whether files in `folder` can be written and read past the page cache by the page."""
    if not O_DIRECT:
        return False
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        with temporary(folder, O_DIRECT) as (fd, path):
            write_fully(fd, [page], ALIGNMENT)
            with opened(path, os.O_RDONLY | O_DIRECT) as reader:
                read_fully(reader, [page], ALIGNMENT)
        return True
    except OSError:
        return False


@define
class FreeSpace:
    """How much the file system still takes, asked for at most once per `max_age` seconds.

    Locks: `_lock` guards the remembered figure; the question to the kernel is asked under it, so that a burst
    of writers asks once.
    """

    folder: str
    min_free: int
    clock: Clock
    max_age: float = 0.5
    _asked_at: float = field(default=float("-inf"), init=False)
    _free: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` more leave `min_free`; if so they count as used until the next question."""
        if not self.min_free:
            return True
        with self._lock:
            self._refresh()
            if self._free - nbytes < self.min_free:
                return False
            self._free -= nbytes
            return True

    def _refresh(self) -> None:
        now = self.clock()
        if now - self._asked_at < self.max_age:
            return
        stats = os.statvfs(self.folder)
        self._free = stats.f_bavail * stats.f_frsize
        self._asked_at = now
