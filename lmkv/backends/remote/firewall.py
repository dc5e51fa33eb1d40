"""`drop_inbound`: shields a process whose client library opens listening ports by itself."""

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
"""The classic BPF instruction that keeps 0 bytes of each packet."""
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
"""A BPF program of that instruction."""
_UNACKED = struct.Struct("24xI")
"""Position in a listening socket's `tcp_info` of the count of connections not yet accepted."""
_LIMIT = 1.0
"""Seconds for the client to accept earlier connections."""


def drop_inbound() -> None:
    """Have the kernel drop all packets to the ports on which this process listens.

    Connections that the client makes itself work as before. Raises ConnectionError when a caller stays connected whom
    the client does not accept, because such a connection cannot be filtered. Linux only.
    """
    deadline = time.monotonic() + _LIMIT
    while _drop_once():
        if time.monotonic() > deadline:
            raise ConnectionError("unaccepted connections to the ports of the client cannot be dropped")
        time.sleep(0.001)
    # Filter connections that were accepted since.
    _drop_once()


def _drop_once() -> int:
    """Filter listening sockets and their connections; returns the number of connections not yet accepted."""
    with _sockets() as sockets:
        listening = [each for each in sockets if each.getsockopt(SOL_SOCKET, SO_ACCEPTCONN)]
        ports = {each.getsockname()[1] for each in listening}
        for each in sockets:
            if each.getsockname()[1] in ports:
                each.setsockopt(SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
        return sum(_UNACKED.unpack(each.getsockopt(IPPROTO_TCP, TCP_INFO, _UNACKED.size))[0] for each in listening)


@contextmanager
def _sockets() -> Iterator[list[socket]]:
    """This process's IPv4 and IPv6 sockets."""
    with ExitStack() as stack:
        opened = []
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            # It may be closed since, as the descriptor of this listing is.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    opened.append(stack.enter_context(socket(fileno=os.dup(descriptor))))
        yield [each for each in opened if each.family in (AF_INET, AF_INET6)]
