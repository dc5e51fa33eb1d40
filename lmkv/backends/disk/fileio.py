"""File I/O for any content: complete reads and writes, locked temporary files, atomic renames, free space.

All functions release the GIL during system calls, and raise `OSError` if a system call fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Self

import numpy as np
from attrs import define, field, frozen

from lmkv.chunks.layout import ALIGNMENT, align_up
from lmkv.protocols import Clock

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
TEMPORARY_SUFFIX = ".tmp"
HUGE = 2 << 20
"""Bytes of a huge page on most processors."""
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class ShortReadError(Exception):
    """The file is shorter than the bytes to read."""


def address_of(view: memoryview) -> int:
    """Return the address of a view's memory, or 0 if the view is empty."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


@cache
def has_huge_pages() -> bool:
    """Return whether the kernel supports transparent huge pages of `HUGE` bytes."""
    folder = "/sys/kernel/mm/transparent_hugepage"
    try:
        with open(f"{folder}/enabled") as enabled, open(f"{folder}/hpage_pmd_size") as size:
            return "[never]" not in enabled.read() and int(size.read()) == HUGE
    except (OSError, ValueError):
        return False


class Scratch(threading.local):
    """Scratch buffers: one for each thread and each `kind` of content. Large buffers use huge pages."""

    def __init__(self) -> None:
        self._pieces: dict[str, memoryview] = {}

    def borrow(self, kind: str, nbytes: int) -> memoryview:
        """Return `nbytes` undefined bytes, valid until this thread borrows memory of the same `kind` again."""
        piece = self._pieces.get(kind)
        if piece is None or len(piece) < nbytes:
            piece = self._pieces[kind] = self._made(nbytes)
        return piece[:nbytes]

    @staticmethod
    def _made(nbytes: int) -> memoryview:
        huge = nbytes >= HUGE and has_huge_pages()
        room = align_up(max(nbytes, 1)) + (HUGE if huge else 0)
        # mmap's default would share it with a forked child, which would use the same pieces.
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)
        if huge:
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            view = view[-address_of(view) % HUGE :]
        return view[: align_up(max(nbytes, 1))]


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return what remains of `views` after the first `nbytes` bytes were transferred."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def write_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Write all bytes of `views` to a file from `offset` on, with as many system calls as needed."""
    left = [view for view in views if len(view)]
    while left:
        done = os.pwritev(fd, left, offset)
        if done == 0:
            raise OSError(errno.EIO, "the file system wrote none of the remaining bytes")
        offset += done
        left = _advance(left, done)


def read_fully(fd: int, views: Sequence[memoryview], offset: int = 0) -> None:
    """Fill all of `views` with a file's bytes from `offset` on. Raises `ShortReadError` if the file ends too early."""
    left = [view for view in views if len(view)]
    while left:
        done = os.preadv(fd, left, offset)
        if done == 0:
            raise ShortReadError(f"the file ends too early, at byte {offset}")
        offset += done
        left = _advance(left, done)


_open: dict[object, Sequence[str]] = {}
"""For each `closed_in_children` block that is running, the names of the files and folders that the block has open."""


def _close_inherited() -> None:
    """Close the parent's files in a forked child. Open copies would keep locks, and the space of deleted files.

    The function finds the files by name, because a thread of the parent may have been in `os.open` during the fork.
    """
    names = {name for opened in _open.values() for name in opened}
    _open.clear()
    for number in os.listdir("/proc/self/fd") if names else ():
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")
            if path in names or os.path.basename(path) in names:
                os.close(int(number))


os.register_at_fork(after_in_child=_close_inherited)


@contextlib.contextmanager
def closed_in_children(*names: str) -> Iterator[None]:
    """Close files and folders in each child that is forked during a `with` block.

    `names`: the paths or names of files and folders that the block may open.
    """
    this = object()
    _open[this] = names
    try:
        yield
    finally:
        _open.pop(this, None)


@frozen
class Folder:
    """An open folder. Files are opened relative to the open folder, so renames of parent folders do not matter.

    `path`: the path for messages. `status`: the status of the folder when it was opened.
    """

    fd: int
    path: str
    status: os.stat_result = field(repr=False)

    @property
    def for_group(self) -> bool:
        """Whether the folder's group may use the files that lmkv creates here.

        True if the folder is setgid, its group may write, and other users may not.
        """
        wanted = stat.S_ISGID | stat.S_IWGRP
        return self.status.st_mode & (wanted | stat.S_IWOTH) == wanted

    @contextlib.contextmanager
    def opened(self, name: str, flags: int) -> Iterator[int]:
        """Open a file for a `with` block. Links are not followed, and opening a pipe does not wait."""
        flags |= _CAREFULLY
        with closed_in_children(name):
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
            try:
                # A file with several names may be somebody else's.
                if flags & os.O_CREAT and os.fstat(fd).st_nlink == 1:
                    self._give_to_group(fd, 0o660)
                yield fd
            finally:
                os.close(fd)

    def make(self, name: str) -> None:
        """Create the folder `name` in this folder, unless an entry of this name exists."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
            if self.for_group:
                with self.opened(name, os.O_RDONLY | os.O_DIRECTORY) as fd:
                    self._give_to_group(fd, 0o2770)

    def _give_to_group(self, fd: int, mode: int) -> None:
        if self.for_group:
            with contextlib.suppress(PermissionError):  # another member of the group has made it, and did the same
                os.fchmod(fd, mode)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of an entry, without following a link."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of the folder. The path of an entry is only its name."""
        with os.scandir(self.fd) as entries:
            yield from entries

    def sync(self) -> None:
        """Sync the folder, so that the names of its entries survive a power failure."""
        os.fsync(self.fd)


@contextlib.contextmanager
def temporary(folder: Folder, flags: int) -> Iterator[tuple[int, str]]:
    """Provide a new file with a unique name for a `with` block. Yields `(descriptor, name)`.

    The file is locked during the block, and removed at the end. `is_abandoned` tests the lock, which the kernel
    releases when the writer's process ends. A process id would not do, because ids are reused, and differ between
    containers.
    """
    name = f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    with folder.opened(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags) as fd:
        try:
            # Fails when another process has found the file between its creation and this line, and is about
            # to remove it as abandoned: publishing will fail then, and the write is tried again.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, name
        finally:
            with contextlib.suppress(OSError):
                folder.unlink(name)


class OwnFile:
    """A file that this process keeps locked. `is_abandoned` tells other processes when this process has ended.

    Forked children close the file. Without a call of `remove`, the file remains after the process has ended.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name, self._pid = fd, name, os.getpid()
        self._key = object()
        _open[self._key] = [name]

    @classmethod
    def made(cls, folder: Folder, name: str) -> Self:
        """Create and lock a new file. Raises `OSError`, for example if the file system has no locks."""
        with folder.opened(name, os.O_CREAT | os.O_EXCL | os.O_RDWR) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                folder.unlink(name)
                raise
            # Another descriptor of the same lock.
            return cls(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), name)

    @property
    def is_there(self) -> bool:
        """Whether the file still exists on disk. Raises `OSError`."""
        return os.fstat(self._fd).st_nlink > 0

    def write(self, data: bytes) -> None:
        os.pwrite(self._fd, data, 0)

    def remove(self, folder: Folder) -> None:
        """Remove the file. Raises `OSError`."""
        self.close()
        folder.unlink(self._name)

    def close(self) -> None:
        # A forked child has closed it already, and may have another file of that number.
        if os.getpid() == self._pid and _open.pop(self._key, None) is not None:
            os.close(self._fd)

    __del__ = close


def is_abandoned(folder: Folder, name: str) -> bool:
    """Return whether the process that locked a file has ended. Returns False if this cannot be found out."""
    try:
        # NFS locks only files that are open for writing.
        with folder.opened(name, os.O_RDWR) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def publish(folder: Folder, unfinished: str, name: str, *, replace: bool = False) -> None:
    """Give a complete file its final name, atomically. Raises `FileExistsError` if the name is in use.

    `replace`: whether to replace an existing file.
    """
    here = {"src_dir_fd": folder.fd, "dst_dir_fd": folder.fd}
    if replace or not _link(unfinished, name, here):
        # Without hard links two writers may both get here. The file that is replaced has the same content.
        if not replace and folder.has(name):
            raise FileExistsError(errno.EEXIST, "already published", name)
        os.rename(unfinished, name, **here)


def _link(unfinished: str, name: str, here: dict[str, int]) -> bool:
    """Make a hard link. Returns False if the file system has no hard links. Raises `OSError`."""
    try:
        os.link(unfinished, name, **here, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return False
    return True


def probe_direct(folder: Folder) -> bool:
    """Return whether O_DIRECT works for files in a folder. Writes and reads one page as a test."""
    if not O_DIRECT:
        return False
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        with temporary(folder, O_DIRECT) as (fd, name):
            write_fully(fd, [page], ALIGNMENT)
            with folder.opened(name, os.O_RDONLY | O_DIRECT) as reader:
                read_fully(reader, [page], ALIGNMENT)
        return True
    except OSError:
        return False


@define
class FreeSpace:
    """Estimates the free bytes of a file system. Asks the kernel at most once in `max_age` seconds. Thread-safe."""

    folder: str
    min_free: int
    clock: Clock
    max_age: float = 0.5
    _asked_at: float = field(default=float("-inf"), init=False)
    _free: int = field(default=0, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def claim(self, nbytes: int) -> int:
        """Claim `nbytes` free bytes and return 0. If fewer than `min_free` bytes would remain, only return how many are
        missing.
        """
        if not self.min_free:
            return 0
        with self._lock:
            self._refresh()
            lacking = max(0, self.min_free + nbytes - self._free)
            if not lacking:
                self._free -= nbytes
            return lacking

    def give_back(self, nbytes: int) -> None:
        """Note that `nbytes` bytes are free again after a deletion."""
        with self._lock:
            self._free += nbytes

    def _refresh(self) -> None:
        now = self.clock()
        if now - self._asked_at < self.max_age:
            return
        stats = os.statvfs(self.folder)
        self._free = stats.f_bavail * stats.f_frsize
        self._asked_at = now
