"""`InfiniStoreBackend`: chunks as values of an InfiniStore server, over TCP."""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from lmkv.backends.remote.child import Memory
from lmkv.backends.remote.isolated import IsolatedBackend

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

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.pop("device", ""):
            logger.warning("lmkv: %s: device is not used: lmkv speaks TCP with InfiniStore", self._shown)
        return options


open_url = InfiniStoreBackend


class Engine:
    """InfiniStore's client, in a process of its own."""

    def __init__(self, memory: Memory, *, host: str, port: int) -> None:
        import infinistore

        self._memory, self._library = memory, infinistore
        self._address = (host, port)
        self._connections: dict[str, Any] = {}

    def exist(self, names: Sequence[str]) -> list[bool]:
        with self._connected("ask") as store:
            return [store.check_exist(name) for name in names]

    def get(self, name: str, room: int) -> int | None:
        """Bytes of the value, which is in the memory if it has room; None when there is none."""
        if not self.exist([name])[0]:
            return None
        with self._connected("read") as store:
            value = store.tcp_read_cache(name)
        if value.nbytes <= room:
            ctypes.memmove(self._memory.address, value.ctypes.data, value.nbytes)
        return int(value.nbytes)

    def put(self, name: str, nbytes: int) -> str:
        if self.exist([name])[0]:
            return "present"
        with self._connected("write") as store:
            store.tcp_write_cache(name, self._memory.address, nbytes)
        return "stored"

    def remove(self, names: Sequence[str]) -> None:
        with self._connected("ask") as store:
            store.delete_keys(names)

    def close(self) -> None:
        """Its sockets end with the process."""

    @contextmanager
    def _connected(self, use: str) -> Iterator[Any]:
        """A connection of its own for each use.

        After short answers the kernel delays the acknowledgement that the end of a long one waits for: a value
        that was asked for on the connection that it is read from took 40 ms.
        """
        try:
            if use not in self._connections:
                store = self._library.InfinityConnection(self._config())
                store.connect()
                self._connections[use] = store
            yield self._connections[use]
        except Exception as error:
            # It does not tell what failed: after any, all are made anew.
            self._connections.clear()
            raise ConnectionError(str(error)) from error

    def _config(self) -> Any:
        host, port = self._address
        return self._library.ClientConfig(
            # It knows no names.
            host_addr=socket.gethostbyname(host),
            service_port=port,
            connection_type=self._library.TYPE_TCP,
            log_level="error",
        )
