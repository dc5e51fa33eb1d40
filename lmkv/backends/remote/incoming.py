"""`drop_incoming`: nobody reaches a process whose client listens without being asked to."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from socket import AF_INET, AF_INET6, SO_ACCEPTCONN, SOL_SOCKET, socket

_SO_ATTACH_FILTER = 26
_KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""One instruction of a classic BPF program: return 0 bytes of each packet."""


def drop_incoming() -> None:
    """Have the kernel drop what others send to the ports on which this process listens.

    Its client does not notice: connections that it makes itself are as before. Linux only.
    """
    # Again for what was accepted while the first filters were set.
    for _ in range(2):
        sockets = list(_sockets())
        ports = {each.getsockname()[1] for each in sockets if each.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)}
        for each in sockets:
            if each.getsockname()[1] in ports:
                program = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
                each.setsockopt(SOL_SOCKET, _SO_ATTACH_FILTER, program)
            each.close()


def _sockets() -> Iterator[socket]:
    """Of the internet, this process's own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            each = socket(fileno=os.dup(int(name)))
            if each.family in (AF_INET, AF_INET6):
                yield each
