"""Complete reads and writes, temporary files with locks, atomic publishing, and free space.

Nothing here depends on what the bytes mean. All functions release the GIL during system calls, and raise
`OSError` when those fail.
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
    """The file ended before all bytes were read."""


def address_of(view: memoryview) -> int:
    """Address of the memory; 0 when there is none."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


class Scratch(threading.local):
    """Page-aligned memory for headers and parts of pages: per thread, one piece of each kind."""

    def __init__(self) -> None:
        self._pieces: dict[str, memoryview] = {}

    def take(self, kind: str, nbytes: int) -> memoryview:
        """`nbytes` of undefined content, to use until this thread takes the same kind again."""
        piece = self._pieces.get(kind)
        if piece is None or len(piece) < nbytes:
            # mmap's default would share it with a forked child, which would use the same pieces.
            memory = mmap.mmap(-1, align_up(max(nbytes, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            piece = self._pieces[kind] = memoryview(memory)
        return piece[:nbytes]


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The views that remain after the first `nbytes` were transferred."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def write_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Write all of `views` from `offset` on, in as many calls as the kernel needs."""
    left = [view for view in views if len(view)]
    while left:
        done = os.pwritev(fd, left, offset)
        if done == 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        offset += done
        left = _advance(left, done)


def read_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Fill all of `views` from `offset` on. Raises `ShortReadError` when the file ends before."""
    left = [view for view in views if len(view)]
    while left:
        done = os.preadv(fd, left, offset)
        if done == 0:
            raise ShortReadError(f"the file ends at byte {offset}")
        offset += done
        left = _advance(left, done)


_open: dict[object, str] = {}
"""Names of the files that threads of this process use, from before they are opened until they are closed."""


def _close_inherited() -> None:
    """In a forked child, close its copies of the parent's files: they would keep locks and deleted files.

    By name: when a thread is in `os.open` while another one forks, nobody knows the descriptor yet.
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
    """A file descriptor for the time of a block. Does not follow links, nor wait for the end of a pipe."""
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
    """A new file with a unique name, locked while it is written and removed when the block ends.

    `is_abandoned` tells by the lock whether the writer lives. The kernel releases it when the process ends,
    however it ends, so that process ids, which are recycled and differ between containers, do not matter.
    """
    path = os.path.join(folder, f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags) as fd:
        try:
            # Fails when another process has found the file between its creation and this line, and is about
            # to remove it as abandoned: publishing will fail then, and the write is tried again.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def is_abandoned(path: str) -> bool:
    """Whether the writer of a temporary file has ended. False when that cannot be found out."""
    try:
        with opened(path, os.O_RDONLY) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def publish(temporary_path: str, path: str) -> None:
    """Give a complete file its final name, atomically. Raises `FileExistsError` when there is such a file."""
    try:
        os.link(temporary_path, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Without hard links two writers may both get here. The file that is replaced has the same content.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "already published", path) from None
        os.rename(temporary_path, path)


def sync_folder(folder: str) -> None:
    """Have the names in `folder` survive a power failure."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def probe_direct(folder: str) -> bool:
    """Whether whole pages can be written to and read from files in `folder` with O_DIRECT."""
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
    """Free bytes of a file system, which the kernel is asked for at most once per `max_age` seconds.

    One lock guards the remembered number. The kernel is asked under it, so that concurrent writers ask once.
    """

    folder: str
    min_free: int
    clock: Clock
    max_age: float = 0.5
    _asked_at: float = field(default=float("-inf"), init=False)
    _free: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` more leave `min_free`. If so they are used until the kernel is asked again."""
        if not self.min_free:
            return True
        with self._lock:
            self._refresh()
            if self._free - nbytes < self.min_free:
                return False
            self._free -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """`nbytes` were deleted."""
        with self._lock:
            self._free += nbytes

    def _refresh(self) -> None:
        now = self.clock()
        if now - self._asked_at < self.max_age:
            return
        stats = os.statvfs(self.folder)
        self._free = stats.f_bavail * stats.f_frsize
        self._asked_at = now
