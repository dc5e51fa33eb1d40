"""`drop_inbound`: nobody reaches a process whose client listens without being asked to."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from socket import AF_INET, AF_INET6, IPPROTO_TCP, SO_ACCEPTCONN, SOL_SOCKET, TCP_INFO, socket

_SO_ATTACH_FILTER = 26
_KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""An instruction of classic BPF: return 0 bytes of each packet."""
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
"""Of that one instruction."""
_UNACKED = struct.Struct("24xI")
"""In a listening socket's `tcp_info`: connections that nobody has accepted yet."""
_LIMIT = 1.0
"""Seconds for the client to accept who came before."""


def drop_inbound() -> None:
    """Have the kernel drop what others send to the ports on which this process listens.

    Its client does not notice: connections that it makes itself are as before. Raises ConnectionError when somebody
    is connected whom the client does not accept, so that he cannot be dropped. Linux only.
    """
    deadline = time.monotonic() + _LIMIT
    while _drop_once():
        if time.monotonic() > deadline:
            raise ConnectionError("others are connected to the ports of the client, and are to be dropped")
        time.sleep(0.001)
    # Those who were accepted since.
    _drop_once()


def _drop_once() -> int:
    """Filter what listens, and who has come there; returns how many have come and are not accepted."""
    with _sockets() as sockets:
        listening = [each for each in sockets if each.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)]
        ports = {each.getsockname()[1] for each in listening}
        for each in sockets:
            if each.getsockname()[1] in ports:
                each.setsockopt(SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
        return sum(_UNACKED.unpack(each.getsockopt(IPPROTO_TCP, TCP_INFO, _UNACKED.size))[0] for each in listening)


@contextmanager
def _sockets() -> Iterator[list[socket]]:
    """Of the internet, this process's own."""
    with ExitStack() as stack:
        opened = []
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            # Closed since: that of the listing, for one.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    opened.append(stack.enter_context(socket(fileno=os.dup(descriptor))))
        yield [each for each in opened if each.family in (AF_INET, AF_INET6)]
