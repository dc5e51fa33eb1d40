"""Reads files that somebody has named: whatever is there, in bounded time and size."""

from __future__ import annotations

import os
import select
import stat
import time
from typing import Final

SMALL: Final = 1 << 17
"""Bytes of a file with settings or a secret, at most."""
_WRITER: Final = 1.0
_SILENCE: Final = 5.0
_PATIENCE: Final = 10.0
"""Seconds to wait for somebody who writes into a pipe, for the next bytes, and for all that is written."""


def read_named(path: str | os.PathLike[str], limit: int = SMALL, *, pipes: bool = True) -> bytes:
    """The content of a file, or what is written into a pipe, as the shell's `<(...)` is one.

    Raises OSError for anything else, also for more than `limit` bytes. `pipes`: a pipe is nothing to read either.
    """
    fd, mode = _opened(path, pipes=pipes)
    try:
        until, data = time.monotonic() + _PATIENCE, bytearray()
        while len(data) <= limit and (part := _part(fd, limit + 1, until, begun=bool(data) or stat.S_ISREG(mode))):
            data += part
        if len(data) > limit:
            raise OSError(f"it has more than {limit:,} bytes")
        return bytes(data)
    finally:
        os.close(fd)


def _opened(path: str | os.PathLike[str], *, pipes: bool) -> tuple[int, int]:
    """`(file descriptor, mode)`. Nothing else is opened: some devices act on that alone."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode) and not (pipes and stat.S_ISFIFO(mode)):
            raise OSError("it is a folder" if stat.S_ISDIR(mode) else "it is no file")
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), mode
    except OSError as error:
        if error.filename is not None:
            error.filename = os.fspath(path)
        raise
    finally:
        os.close(place)


def _part(fd: int, most: int, until: float, *, begun: bool) -> bytes:
    """The next bytes; none at the end. `begun`: without a writer this is the end."""
    left, said = until - time.monotonic(), "nobody writes into it"
    try:
        if (part := os.read(fd, most)) or begun:
            return part
        patience = min(_WRITER, left)
    except BlockingIOError:
        # There is a writer, who has not written yet.
        patience = min(_SILENCE, left)
        said = f"its writer is slow: nothing came for {_SILENCE:.0f} s, or it has not ended after {_PATIENCE:.0f} s"
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if left <= 0 or not poll.poll(patience * 1000):
        raise OSError(f"it is a pipe, and {said}")
    return os.read(fd, most)
