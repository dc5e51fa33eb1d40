"""Counts the bytes that all processes together have below one root, in a small file.

A process that is killed between counting and writing leaves the count too high, until the next listing of
the root corrects it. A count that cannot be read or changed is taken for 0 rather than being an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator

from attrs import frozen

from lmkv.backends.disk.root import Root

NAME = ".lmkv-use"
_NUMBERS = struct.Struct("<QQ")
_MAX_COUNT = (1 << 64) - 1
_PATIENCE = 0.2
"""Seconds to wait for the lock."""
_PAUSE = 0.001
"""Seconds between two attempts."""


@frozen
class Usage:
    """The count in a root's file: bytes in use, and all bytes that were ever reserved.

    Any number of threads and processes may use it: the file is locked for each change, about 10 us long.
    """

    root: Root

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that will be written; returns the bytes in use, these included."""
        return self._change(os.O_CREAT, nbytes, nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """Subtract bytes that were deleted, or not written after all."""
        self._change(0, -nbytes)

    def reserved(self) -> int:
        """All bytes that were ever reserved."""
        with contextlib.suppress(OSError), self._open(0) as fd:
            return _read(fd)[1]
        return 0

    def set(self, found: int, reserved: int) -> None:
        """Set the count to the result of a listing. `reserved`: value of `reserved()` when the listing began."""
        with contextlib.suppress(OSError), self._open(os.O_CREAT) as fd:
            reservations = _read(fd)[1]
            # The listing may have missed bytes that were reserved since then. Counting them twice is the safe error.
            _write(fd, found + max(0, reservations - reserved), reservations)

    def _change(self, flags: int, use: int, reservations: int = 0) -> int:
        with contextlib.suppress(OSError), self._open(flags) as fd:
            used, reserved = _read(fd)
            used = max(0, used + use)
            _write(fd, used, reserved + reservations)
            return used
        return 0

    @contextlib.contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        with self.root.entered() as folder, folder.opened(NAME, os.O_RDWR | flags) as fd:
            self.root.check_owner(NAME, os.fstat(fd), folder)
            _lock(fd)
            try:
                yield fd
            finally:
                # Closing is not enough: a child that was forked meanwhile may have the file open.
                fcntl.flock(fd, fcntl.LOCK_UN)


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
