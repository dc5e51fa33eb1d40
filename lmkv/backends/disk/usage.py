"""Counts the bytes that all processes together have below one root, in a small file.

A process that is killed between counting and writing leaves the count too high, until the next listing of
the root corrects it. A count that cannot be read or changed is taken for 0 rather than being an error.

A listing misses files that are written behind it, so each process has a small file of its own that says how many bytes
it has reserved and not written yet. The file is locked as long as the process lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from functools import cache

from attrs import define, field

from lmkv.backends.disk.fileio import OwnFile, is_abandoned
from lmkv.backends.disk.root import Root

logger = logging.getLogger(__name__)

NAME = ".lmkv-use"
PENDING = f"{NAME}-"
_NUMBERS = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_MAX_COUNT = (1 << 64) - 1
_NEVER_LOCKS = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_PATIENCE = 0.2
"""Seconds to wait for the lock."""
_PAUSE = 0.001
"""Seconds between two attempts."""


@define(eq=False)
class Usage:
    """The count in a root's file: bytes in use, and all bytes that were ever reserved.

    Any number of threads and processes may use it: the file is locked for each change, about 10 us long.
    """

    root: Root
    _has_locks: bool = field(default=True, init=False)
    _pid: int = field(factory=os.getpid, init=False)
    _pending: int = field(default=0, init=False)
    _own: OwnFile | None = field(default=None, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False, repr=False)

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that will be written; returns the bytes in use, these included."""
        # Before they are counted: a listing that begins in between counts them twice, not never.
        self._pend(nbytes)
        return self._change(os.O_CREAT, nbytes, nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """Subtract bytes that were reserved, and not written after all."""
        self.subtract(nbytes)
        self._pend(-nbytes)

    def wrote(self, nbytes: int) -> None:
        """Note that bytes, if they were reserved, are in a file now."""
        self._pend(-nbytes)

    def subtract(self, nbytes: int) -> None:
        """Subtract bytes that were deleted."""
        self._change(0, -nbytes)

    def listed_from(self) -> tuple[int, int]:
        """All bytes that were ever reserved, and those not written yet: what `set` needs of a listing's beginning."""
        # In this order: what is no longer pending then is in a file, which the listing finds.
        reserved = 0
        with contextlib.suppress(OSError), self._open(0) as fd:
            reserved = _read(fd)[1]
        return reserved, self._pending_of_all()

    def set(self, found: int, since: tuple[int, int]) -> None:
        """Set the count to the result of a listing. `since`: `listed_from()` when the listing began."""
        reserved, pending = since
        with contextlib.suppress(OSError), self._open(os.O_CREAT) as fd:
            reservations = _read(fd)[1]
            # The listing may have missed bytes that were written since then. Counting them twice is the safe error.
            _write(fd, found + pending + max(0, reservations - reserved), reservations)

    def close(self) -> None:
        """Let go of this process's file."""
        with self._lock, contextlib.suppress(OSError):
            own, self._own = self._own, None
            if own is not None and self._pid == os.getpid():
                with self.root.entered() as folder:
                    own.remove(folder)

    def _pend(self, nbytes: int) -> None:
        with self._lock, contextlib.suppress(OSError), self._locking():
            if self._pid != os.getpid():
                self._pid, self._pending, self._own = os.getpid(), 0, None
            self._pending = max(0, self._pending + nbytes)
            if self._own is None or not self._own.is_there:
                if not (self._pending and self._has_locks):
                    return
                with self.root.entered() as folder:
                    self._own = OwnFile.made(folder, f"{PENDING}{self._pid}-{secrets.token_hex(8)}")
            self._own.write(_NUMBER.pack(min(self._pending, _MAX_COUNT)))

    def _pending_of_all(self) -> int:
        """What all processes have reserved and not written; removes the files of those that have ended."""
        found = 0
        with contextlib.suppress(OSError), self.root.entered() as folder:
            for name in [entry.name for entry in folder.entries() if entry.name.startswith(PENDING)]:
                with contextlib.suppress(OSError):
                    self.root.check_owner(name, folder.stat(name), folder)
                    if is_abandoned(folder, name):
                        folder.unlink(name)
                        continue
                    with folder.opened(name, os.O_RDONLY) as fd:
                        data = os.pread(fd, _NUMBER.size, 0)
                        found += int.from_bytes(data, "little") if len(data) == _NUMBER.size else 0
        return found

    def _change(self, flags: int, use: int, reservations: int = 0) -> int:
        with contextlib.suppress(OSError), self._open(flags) as fd:
            used, reserved = _read(fd)
            used = max(0, used + use)
            _write(fd, used, reserved + reservations)
            return used
        return 0

    @contextlib.contextmanager
    def _locking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in {*_NEVER_LOCKS, errno.ENOLCK}:
                self._has_locks = error.errno not in _NEVER_LOCKS
                _say_once(self.root.path, error.strerror)
            raise

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        with self.root.entered() as folder, folder.opened(NAME, os.O_RDWR | flags) as fd:
            self.root.check_owner(NAME, os.fstat(fd), folder)
            with self._locking():
                _lock(fd)
            try:
                yield fd
            finally:
                # Closing is not enough: a child that was forked meanwhile may have the file open.
                fcntl.flock(fd, fcntl.LOCK_UN)


@cache
def _say_once(path: str, reason: str) -> None:
    logger.warning(
        "lmkv: files in %s cannot be locked (%s). Each engine keeps to the capacity by its own listings alone: several "
        "exceed it together until the next one, and unfinished files of a killed engine stay. Share a folder on a file "
        "system with flock, or give each engine its own",
        path,
        reason,
    )


def _lock(fd: int) -> None:
    """Lock the file. Raises `BlockingIOError` after a while, because a stopped process may have the lock."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)


def _read(fd: int) -> tuple[int, int]:
    data = os.pread(fd, _NUMBERS.size, 0)
    used, reserved = _NUMBERS.unpack(data) if len(data) == _NUMBERS.size else (0, 0)
    return used, reserved


def _write(fd: int, used: int, reserved: int) -> None:
    os.pwrite(fd, _NUMBERS.pack(min(used, _MAX_COUNT), reserved & _MAX_COUNT), 0)
