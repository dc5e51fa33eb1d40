"""`MooncakeBackend`: chunks as objects of a Mooncake store."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, ClassVar

from lmkv.backends.remote.child import Memory
from lmkv.backends.remote.isolated import START_LIMIT, Client, IsolatedBackend

_NO_ROOM, _INVALID, _EXISTS = -200, -600, -705
_ABSENT = (-703, -704)
"""Not complete, which it becomes or not, and unknown."""
_AWAY = (-900, -901)
CONNECT_LIMIT = 0.8


class MooncakeBackend(IsolatedBackend):
    """A Mooncake store, by its master, as a backend.

    Parameters
    ----------
    url
        `mooncake://host:port/`, the master's address; LMCache's `mooncakestore://` is the same. In its query:
        `segment_size`, bytes of this host that become part of the store (0: none; other processes have it),
        `local_hostname` (default: the address that this host has on the way to the master), `protocol` (`tcp` or
        `rdma`), `device_name`, `metadata_server` (`P2PHANDSHAKE`), `local_buffer_size` (0 bytes) and `clients`,
        processes with a client each (2).
    namespace
        32 bytes: model, layout and versions whose KV is interchangeable.
    username, password, ttl
        Not used: Mooncake has none of them.
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
        mooncake-transfer-engine is not installed, or the URL has no port or an option that is none.

    Notes
    -----
    Nothing is connected before the first call. Values are copied once, through memory that is registered with
    the client, which lives in processes of its own: `setup` holds the GIL for half a minute when
    the master does not answer, and a read from a host that does not answer takes as long.

    Examples
    --------
    >>> MooncakeBackend("mooncake://localhost", bytes(32))
    Traceback (most recent call last):
        ...
    lmkv.errors.ConfigError: mooncake://localhost must have a host and a port: mooncake://host:port/
    """

    module = "mooncake"
    install = "pip install 'lmkv[mooncake]', or mooncake-transfer-engine-non-cuda on a machine without CUDA"
    known: ClassVar[dict[str, type[str] | type[int]]] = {
        **dict.fromkeys(("clients", "segment_size", "global_segment_size", "local_buffer_size"), int),
        **dict.fromkeys(("local_hostname", "protocol", "device_name", "metadata_server"), str),
    }

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        nbytes = options.pop("global_segment_size", 0)
        nbytes = options.pop("segment_size", nbytes)
        # In a process that no slow call ends: its chunks would end with it.
        with_segment = {**options, "segment_size": nbytes}
        self._segment = Client(self._engine, with_segment, START_LIMIT) if nbytes else None
        return options

    def _client(self, name: str) -> Client:
        if self._segment is not None:
            self._segment.ask("connect")
        return super()._client(name)

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._segment is not None:
            self._segment.close()


open_url = MooncakeBackend


class Engine:
    """Mooncake's client, in a process of its own."""

    def __init__(
        self,
        memory: Memory,
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

        self._memory, self._make = memory, MooncakeDistributedStore
        self._master, self._local = (host, port), local_hostname
        self._segment_size = segment_size
        self._options = (metadata_server, segment_size, local_buffer_size, protocol, device_name)
        self._store: Any = None

    def connect(self) -> None:
        if self._store is not None:
            return
        # Asked first: `setup` takes seconds to find out that nobody listens.
        with socket.create_connection(self._master, CONNECT_LIMIT) as probe:
            local = self._local or probe.getsockname()[0]
        store = self._make()
        host, port = self._master
        _checked(store.setup(local, *self._options, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"), "setup")
        _checked(store.register_buffer(self._memory.address, len(self._memory)), "register_buffer")
        self._store = store

    def exist(self, names: Sequence[str]) -> list[bool]:
        self.connect()
        return [bool(_checked(found, "is_exist")) for found in self._store.batch_is_exist(names)]

    def get(self, name: str, room: int) -> int | None:
        """Bytes of the value, which is in the memory if it has room; None when there is none."""
        self.connect()
        code = self._store.get_into(name, self._memory.address, room)
        if code == _INVALID:
            code = self._store.get_size(name)
        return None if code in _ABSENT else _checked(code, "get_into")

    def put(self, name: str, nbytes: int) -> str:
        """Store what is in the memory.

        A plain put says that it succeeded where the name is there, even if another client is only writing it, or
        ended while it wrote; a session says so when it begins.
        """
        self.connect()
        (code,) = self._store.batch_put_session_start([name], [nbytes])
        if code == _EXISTS:
            return "present" if self.exist([name])[0] else "another client is writing it"
        if code == _NO_ROOM:
            return "the store has no room"
        _checked(code, "put_session_start")
        (code,) = self._store.batch_put_from_multi_buffer_ranges([name], [[self._memory.address]], [[nbytes]], [[0]])
        if code != nbytes:
            self._store.batch_put_session_revoke([name])
            _checked(min(code, -1), "put_from")
        _checked(self._store.batch_put_session_end([name])[0], "put_session_end")
        return "stored"

    def remove(self, names: Sequence[str]) -> None:
        """Delete them, whoever reads them: readers verify what they read."""
        self.connect()
        for code in self._store.batch_remove(names, True):
            if code not in _ABSENT:
                _checked(code, "remove")

    def close(self) -> None:
        # Or the master believes for ten seconds that the segment's values are there.
        if self._store is not None and self._segment_size:
            self._store.close()


def _checked(code: int, call: str) -> int:
    if code in _AWAY or (code < 0 and call == "setup"):
        raise ConnectionError(f"the master does not answer {call}: {code}")
    if code < 0:
        raise RuntimeError(f"{call} failed: {code}")
    return code
