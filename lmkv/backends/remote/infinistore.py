"""`InfiniStoreBackend`: chunks as values of an InfiniStore server, over TCP."""

from __future__ import annotations

import ctypes
import logging
import mmap
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from lmkv.backends.remote.child import Memory
from lmkv.backends.remote.isolated import IsolatedBackend

T = TypeVar("T")

logger = logging.getLogger(__name__)


class InfiniStoreBackend(IsolatedBackend):
    """An InfiniStore server as a backend, over TCP.

    Parameters
    ----------
    url
        `infinistore://host:port/`. `?clients=2`: processes with a client each. LMCache's `?device=mlx5_0` is read
        and not used: there is no RDMA here.
    namespace
        32 bytes: model, layout and versions whose KV is interchangeable.
    username, password, ttl
        Not used: InfiniStore has none of them.
    prefix
        Of every name.
    timeout
        Seconds for each call; one that moves a value has a second more for each 16 MiB.
    chunk_tokens
        Most token ids that a value records.
    name
        What logs and statistics call the tier.
    authentication_key
        32 random bytes or more: only values that were written with them are served.

    Raises
    ------
    ConfigError
        infinistore is not installed, or the URL has no port or an option that is none.

    Notes
    -----
    Nothing is connected before the first call. InfiniStore's client waits for ever for a value that is not there,
    and crashes when its server ends while it reads: it lives in processes of its own, and a name is asked for
    before its value. A put replaces what is there, so a name is asked for before that, too: engines that store a
    chunk at the same moment each do, the same bytes.

    Examples
    --------
    >>> InfiniStoreBackend("infinistore://localhost", bytes(32))
    Traceback (most recent call last):
        ...
    lmkv.errors.ConfigError: infinistore://localhost must have a host and a port: infinistore://host:port/
    """

    module = "infinistore"
    install = "pip install 'lmkv[infinistore]'"
    known: ClassVar[dict[str, type[str] | type[int]]] = {"device": str}
    # Each is asked for alone, and all within `timeout`.
    at_once: ClassVar[int] = 4

    def stored_bytes(self, payload_bytes: int) -> int:
        return _padded(super().stored_bytes(payload_bytes))

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.pop("device", ""):
            logger.warning("lmkv: %s: device is not used: lmkv speaks TCP with InfiniStore", self._shown)
        return options


open_url = InfiniStoreBackend

_PIECE = 256 << 10
"""Bytes that the server sends at once. On loopback a value that ends in a short piece takes 40 ms: its end waits for
the acknowledgement of what came before it. So values are padded; the last eight bytes say how long they were."""

_LENGTH = struct.Struct("<Q")


class Engine:
    """InfiniStore's client, in a process of its own."""

    def __init__(self, memory: Memory, *, host: str, port: int) -> None:
        import infinistore

        self._memory, self._library = memory, infinistore
        self._address = (host, port)
        self._connection: Any = None

    def exist(self, names: Sequence[str]) -> list[bool]:
        return self._connected(lambda store: [store.check_exist(name) for name in names])

    def get(self, name: str, room: int) -> int | None:
        """Bytes of the value, which is in the memory if it has room; None when there is none."""

        def get(store: Any) -> int | None:
            if not store.check_exist(name):
                return None
            value = store.tcp_read_cache(name)
            nbytes = _unpadded(memoryview(value).cast("B"))
            if nbytes <= room:
                ctypes.memmove(self._memory.address, value.ctypes.data, nbytes)
            return nbytes

        return self._connected(get)

    def put(self, name: str, nbytes: int) -> str:
        def put(store: Any) -> str:
            if store.check_exist(name):
                return "present"
            store.tcp_write_cache(name, self._memory.address, _pad(self._memory.view, nbytes))
            return "stored"

        return self._connected(put)

    def remove(self, names: Sequence[str]) -> None:
        self._connected(lambda store: store.delete_keys(names))

    def close(self) -> None:
        """Its socket ends with the process."""

    def _connected(self, work: Callable[[Any], T]) -> T:
        # Its exceptions do not tell what failed: after any, the connection is made anew.
        store, self._connection = self._connection, None
        try:
            if store is None:
                store = self._library.InfinityConnection(self._config())
                store.connect()
            result = work(store)
        except Exception as error:
            raise ConnectionError(str(error)) from error
        self._connection = store
        return result

    def _config(self) -> Any:
        host, port = self._address
        return self._library.ClientConfig(
            # It knows no names.
            host_addr=socket.gethostbyname(host),
            service_port=port,
            connection_type=self._library.TYPE_TCP,
            log_level="error",
        )


def _pad(memory: mmap.mmap, nbytes: int) -> int:
    """Bytes of a value with its padding, if the memory has room for it."""
    padded = _padded(nbytes)
    if padded > len(memory):
        return nbytes
    memory[nbytes:padded] = _LENGTH.pack(nbytes).rjust(padded - nbytes, b"\0")
    return padded


def _padded(nbytes: int) -> int:
    return -(-(nbytes + _LENGTH.size) // _PIECE) * _PIECE


def _unpadded(value: memoryview) -> int:
    """Bytes of a value without its padding. Not all have one; the checksums tell whether it is right."""
    if len(value) < _LENGTH.size:
        return len(value)
    (nbytes,) = _LENGTH.unpack_from(value, len(value) - _LENGTH.size)
    return nbytes if 0 <= len(value) - _LENGTH.size - nbytes < _PIECE else len(value)
