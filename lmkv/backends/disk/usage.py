"""How many bytes all processes together have below one root: two numbers in a small file.

A process that dies between counting and writing leaves the count too high; whoever lists the root next sets
it right. A count that cannot be read or changed is no reason to fail: it is taken for 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator

from attrs import frozen

from lmkv.backends.disk.fileio import opened

NAME = ".lmkv-use"
_NUMBERS = struct.Struct("<QQ")
_MOST = (1 << 64) - 1
_PATIENCE = 0.2
_PAUSE = 0.001


@frozen
class Usage:
    """Any number of threads and processes may use it; the file is locked for each change, some 10 us long."""

    path: str

    def reserve_bytes(self, nbytes: int) -> int:
        """Count bytes that are about to be written; returns the bytes in use, these included."""
        return self._change(os.O_CREAT, nbytes, nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """They were deleted, or never written."""
        self._change(0, -nbytes)

    def reserved(self) -> int:
        """All bytes that were ever reserved."""
        with contextlib.suppress(OSError), self._open(0) as fd:
            return _read(fd)[1]
        return 0

    def set(self, found: int, reserved: int) -> None:
        """`found` bytes were counted from the moment on when `reserved` had been reserved."""
        with contextlib.suppress(OSError), self._open(os.O_CREAT) as fd:
            reservations = _read(fd)[1]
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
        with opened(self.path, os.O_RDWR | flags) as fd:
            _lock(fd)
            try:
                yield fd
            finally:
                # Closing would not do: the lock stays as long as a child that was forked has the file open.
                fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int) -> None:
    """Not for ever: a process may be stopped while it holds the lock."""
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
    os.pwrite(fd, _NUMBERS.pack(min(used, _MOST), reserved & _MOST), 0)
