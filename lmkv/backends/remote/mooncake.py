"""`MooncakeBackend`: stores chunks as objects in a Mooncake store."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Any, ClassVar

from lmkv.backends.remote.base import HostPortBackend
from lmkv.backends.remote.child import Memory, Part
from lmkv.backends.remote.subprocess_backend import START_LIMIT, ClientProcess, SubprocessBackend

_NO_ROOM, _INVALID, _EXISTS, _NOT_MOVED = -200, -600, -705, -800
_ABSENT = (-703, -704)
"""Mooncake's codes for a value that is incomplete or unknown."""
_AWAY = (-900, -901)
CONNECT_LIMIT = 0.8
_PINNED_PER_SECOND = 1 << 30
"""Slowest registration of memory with RDMA, in bytes per second."""


class MooncakeBackend(SubprocessBackend, HostPortBackend):
    """Stores chunks in a Mooncake store.

    Parameters
    ----------
    url
        `mooncake://host:port/` with the address of the store's master; LMCache's `mooncakestore://` works as well.
        Options in the query of the URL: `segment_size` (bytes of this host that become part of the store, default 0);
        `local_hostname` (default: this host's address towards the master); `protocol` (`tcp` or `rdma`); `device_name`;
        `metadata_server` (default `P2PHANDSHAKE`); `local_buffer_size` (bytes, default 0); `clients` (number of client
        processes, default 2); `zero_copy` (default 1; with 0, host memory is not registered).
    namespace
        32 bytes: a digest of the model, layout and versions.
    options
        The settings of remote backends. `username`, `password` and `ttl` do not work with Mooncake.

    Raises
    ------
    ConfigError
        mooncake-transfer-engine is not installed, or the URL has no port or an unknown option.

    Notes
    -----
    The backend connects at the first call. Mooncake's client runs in separate processes, because its `setup` holds the
    GIL for half a minute if the master does not answer. A read from a dead host takes equally long.

    Host memory is registered with the client, so that values are transferred without a copy. After a failed read, lmkv
    kills the client's process, so that late bytes cannot reach a slot that meanwhile belongs to another chunk. Anybody
    who reaches the client's port can read and write registered memory. Therefore, over TCP, `drop_inbound` drops all
    packets to this port. Over RDMA, host memory is not registered if an `authentication_key` is set.

    Examples
    --------
    >>> MooncakeBackend("mooncake://localhost", bytes(32))
    Traceback (most recent call last):
        ...
    lmkv.errors.ConfigError: mooncake://localhost must have a host and a port: mooncake://host:port/
    """

    module = "mooncake"
    extra = "mooncake"
    known: ClassVar[dict[str, type[str] | type[int]]] = {
        **dict.fromkeys(("clients", "zero_copy", "segment_size", "global_segment_size", "local_buffer_size"), int),
        **dict.fromkeys(("local_hostname", "protocol", "device_name", "metadata_server"), str),
    }

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        # Over TCP registration pins no memory and takes no time.
        self._pins = options.get("protocol", "tcp") != "tcp"
        if self._pins and self.codec.format.authenticator is not None:
            self._zero_copy = 0
        nbytes = options.pop("global_segment_size", 0)
        nbytes = options.pop("segment_size", nbytes)
        # A separate process: a slow call must not end it, because its chunks would be lost.
        with_segment = {**options, "segment_size": nbytes}
        self._segment = ClientProcess(self._module, with_segment, START_LIMIT) if nbytes else None
        self._pool, self._lock = ThreadPoolExecutor(1, "lmkv-mooncake"), threading.Lock()
        self._connecting: Future[None] | None = None
        return options

    def _seconds_to_register(self, nbytes: int) -> float:
        return nbytes / _PINNED_PER_SECOND if self._pins else 0.0

    def _client(self, name: str) -> ClientProcess:
        if self._segment is not None and not self._segment.connected:
            # Connect in another thread, which may take longer than this call.
            with self._lock:
                if self._connecting is None or self._connecting.done():
                    self._connecting = self._pool.submit(self._segment.ask, "connect")
            self._connecting.result(self.options.timeout)
        return super()._client(name)

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._segment is not None:
            self._segment.close()
            self._pool.shutdown(wait=False)


open_url = MooncakeBackend


# -- in the child process ---------------------------------------------------------------------------------


class StoreClient:
    """Runs Mooncake's client in the child process."""

    def __init__(
        self,
        memories: Sequence[Memory],
        *,
        host: str,
        port: int,
        segment_size: int = 0,
        local_hostname: str = "",
        protocol: str = "tcp",
        device_name: str = "",
        metadata_server: str = "P2PHANDSHAKE",
        local_buffer_size: int = 0,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._memories, self._make = memories, MooncakeDistributedStore
        self._master, self._local = (host, port), local_hostname
        self._segment_size = segment_size
        # Without a segment nobody needs to reach this process over TCP; RDMA's handshake goes both ways.
        self._alone = protocol == "tcp" and not segment_size
        self._options = (metadata_server, segment_size, local_buffer_size, protocol, device_name)
        self._store: Any = None

    def connect(self) -> None:
        if self._store is not None:
            return
        # Probe the master, because `setup` takes seconds to notice that nobody listens.
        with socket.create_connection(self._master, CONNECT_LIMIT) as probe:
            local = self._local or probe.getsockname()[0]
        store = self._make()
        host, port = self._master
        _checked(store.setup(local, *self._options, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), "setup")
        if self._alone:
            drop_inbound()
        for memory in self._memories:
            asked = f"register_buffer of {len(memory)} bytes (fewer with zero_copy=0 in the URL)"
            _checked(store.register_buffer(memory.address, len(memory)), asked)
        self._store = store

    def exist(self, names: Sequence[str]) -> list[bool]:
        self.connect()
        return [bool(_checked(found, "is_exist")) for found in self._store.batch_is_exist(names)]

    def get(self, name: str, parts: Sequence[Part]) -> int | None:
        """Read a value into the memory `parts` if its length fits. Returns the value's length in bytes, or None if
        absent.
        """
        self.connect()
        addresses, sizes = self._located(parts)
        (code,) = self._store.batch_get_into_multi_buffers([name], [addresses], [sizes])
        if code in (_INVALID, _NOT_MOVED):
            nbytes = self._store.get_size(name)
            if nbytes >= 0 and nbytes != sum(sizes):
                return int(nbytes)
        return None if code in _ABSENT else _checked(code, "get_into")

    def _located(self, parts: Sequence[Part]) -> tuple[list[int], list[int]]:
        return [self._memories[memory].address + offset for memory, offset, _ in parts], [part[2] for part in parts]

    def put(self, name: str, parts: Sequence[Part]) -> str:
        """Store the memory `parts` as one value. Returns "stored", "present", or the reason for the failure.

        The write uses a Mooncake session, which fails at once if another client is writing the same value. Mooncake's
        plain put would report success in that case.
        """
        self.connect()
        addresses, sizes = self._located(parts)
        (code,) = self._store.batch_put_session_start([name], [sum(sizes)])
        if code == _EXISTS:
            return "present" if self.exist([name])[0] else "another client is writing this chunk"
        if code == _NO_ROOM:
            return "the store is full"
        _checked(code, "put_session_start")
        places = list(accumulate(sizes, initial=0))[:-1]
        (code,) = self._store.batch_put_from_multi_buffer_ranges([name], [addresses], [sizes], [places])
        if code != sum(sizes):
            self._store.batch_put_session_revoke([name])
            _checked(min(code, -1), "put_from")
        _checked(self._store.batch_put_session_end([name])[0], "put_session_end")
        return "stored"

    def remove(self, names: Sequence[str]) -> int:
        """Delete values, even while other processes read them. Returns the number of names.

        Readers detect a deletion during a read, because they verify every byte.
        """
        self.connect()
        for code in self._store.batch_remove(names, True):
            if code not in _ABSENT:
                _checked(code, "remove")
        return len(names)

    def close(self) -> None:
        # Otherwise the master offers the segment's values for ten more seconds.
        if self._store is not None and self._segment_size:
            self._store.close()


def _checked(code: int, call: str) -> int:
    if code in _AWAY or (code < 0 and call == "setup"):
        raise ConnectionError(f"Mooncake's master does not answer {call}: error code {code}")
    if code < 0:
        raise RuntimeError(f"Mooncake's {call} failed with error code {code}")
    return code


_SO_ATTACH_FILTER = 26
_KEEP_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""The classic BPF instruction that keeps 0 bytes of each packet."""
_PROGRAM = struct.pack("HP", 1, ctypes.addressof(_KEEP_NOTHING))
"""A BPF program that consists of the instruction `_KEEP_NOTHING`."""
_UNACKED = struct.Struct("24xI")
"""The format of a listening socket's `tcp_info`, from which it reads the number of connections not yet accepted."""
_LIMIT = 1.0
"""Seconds that the client has to accept earlier connections."""


def drop_inbound() -> None:
    """Make the kernel drop all packets to the ports on which this process listens. Linux only.

    Connections that this process opens continue to work. Raises ConnectionError if another program's connection waits
    too long to be accepted, because a waiting connection cannot be filtered.
    """
    deadline = time.monotonic() + _LIMIT
    while _drop_once():
        if time.monotonic() > deadline:
            raise ConnectionError("lmkv stopped its Mooncake client, from which a connected program could read KV")
        time.sleep(0.001)
    # Filter connections that were accepted since.
    _drop_once()


def _drop_once() -> int:
    """Attach the filter to the listening sockets and to their accepted connections.

    Returns the number of connections that are not accepted yet.
    """
    with _sockets() as sockets:
        listening = [each for each in sockets if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        ports = {each.getsockname()[1] for each in listening}
        for each in sockets:
            if each.getsockname()[1] in ports:
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
        return sum(
            _UNACKED.unpack(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.size))[0]
            for each in listening
        )


@contextmanager
def _sockets() -> Iterator[list[socket.socket]]:
    """Yield copies of this process's IPv4 and IPv6 sockets for a `with` block."""
    with ExitStack() as stack:
        opened = []
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            # It may be closed since, as the descriptor of this listing is.
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    opened.append(stack.enter_context(socket.socket(fileno=os.dup(descriptor))))
        yield [each for each in opened if each.family in (socket.AF_INET, socket.AF_INET6)]
