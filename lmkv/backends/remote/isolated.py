"""`IsolatedBackend`: a store whose client is C++ that may hang, crash or hold the GIL.

So the client runs in processes of its own (`child`), each with memory that both sides map. A call that takes
too long ends with its process, which cannot write anywhere afterwards; the next call starts another one.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import Any, ClassVar
from zlib import crc32

from lmkv.backends.remote.addressed import AddressedBackend
from lmkv.backends.remote.base import SLOWEST, batches
from lmkv.chunks.codec import FormatError
from lmkv.errors import ConfigError
from lmkv.outcomes import PRESENT, STORED, Written
from lmkv.protocols import Chunk, ChunkKey

START_LIMIT = 10.0
"""Seconds for a process to start and to import its client."""

_AT_ONCE = 500
"""Names in one call, so that its message fits into a socket's buffer."""

_END_LIMIT = 5.0
_ROOM = 16 << 20
_LARGEST = 1 << 30


class IsolatedBackend(AddressedBackend):
    """A store behind a C++ client. A subclass says which; among the options that it knows is `clients`.

    All calls about a name go to the same process, one after the other: it asks for a name and stores its value,
    and no other call of this backend is between the two.
    """

    module: ClassVar[str]
    """What the client is imported from."""

    install: ClassVar[str]
    """What installs it."""

    def _set_up(self, options: dict[str, Any]) -> None:
        self._engine = type(self).__module__
        clients = options.pop("clients", 2)
        if clients < 1:
            raise ConfigError(f"{self._shown}: clients must be 1 at least")
        if find_spec(self.module) is None:
            raise ConfigError(f"{self._shown} needs {self.module}: {self.install}")
        options = self._prepared(options)
        self._clients = [Client(self._engine, options, self._timeout) for _ in range(clients)]

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those of the URL as the engine takes them."""
        return options

    # -- of the engine ------------------------------------------------------------------------------------

    def _client(self, name: str) -> Client:
        return self._clients[crc32(name.encode()) % len(self._clients)]

    def _exist(self, names: Sequence[str]) -> list[bool]:
        asked = batches(names, _AT_ONCE)
        return [found for batch in asked for found in self._client(batch[0]).ask("exist", batch)]

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        with self._client(name).value(name, self.blobs.blob_bytes(len(into))) as value:
            if value is not None:
                self.blobs.unpack(key, value, into)
            return value is not None

    def _put(self, name: str, chunk: Chunk) -> Written:
        answer = self._client(name).put(name, self.blobs.header_of(chunk), chunk.payload)
        return {"stored": STORED, "present": PRESENT}.get(answer) or Written.rejected(answer)

    def _remove(self, names: Sequence[str]) -> None:
        for batch in batches(names, _AT_ONCE):
            self._client(batch[0]).ask("remove", batch)

    def _disconnect(self) -> None:
        for client in self._clients:
            client.close()


class Client:
    """A process with a client in it, which does one call at a time, and what it moves values through.

    Raises
    ------
    OSError
        The store or the process does not answer.
    """

    def __init__(self, engine: str, options: Mapping[str, Any], timeout: float) -> None:
        self._engine, self._options, self._timeout = engine, options, timeout
        self._lock = threading.Lock()
        self._room = _ROOM
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._pid = os.getpid()

    def ask(self, action: str, *arguments: Any) -> Any:
        with self._running():
            return self._ask(action, *arguments)

    @contextmanager
    def value(self, name: str, expected: int) -> Iterator[memoryview | None]:
        """The value of a name, until the next call, or None."""
        with self._running(expected):
            nbytes = self._ask("get", name, self._room, moving=expected)
            if nbytes is not None and nbytes > self._room:
                raise FormatError(f"it has {nbytes} bytes, {expected} at most were expected")
            yield None if nbytes is None else memoryview(self._memory)[:nbytes]

    def put(self, name: str, header: memoryview, payload: memoryview) -> str:
        """`stored`, `present`, or why neither."""
        nbytes = len(header) + len(payload)
        with self._running(nbytes):
            self._memory[: len(header)] = header
            self._memory[len(header) : nbytes] = payload
            return str(self._ask("put", name, nbytes, moving=nbytes))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    @contextmanager
    def _running(self, room: int = 0) -> Iterator[None]:
        timeout = self._timeout + self._room / SLOWEST
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError(f"calls before this one take more than {timeout} s")
        try:
            if self._closed or os.getpid() != self._pid:
                raise ConnectionError("it was closed, or it is another process's")
            if room > self._room:
                self._make_room(room)
            elif self._process is None:
                self._start()
            yield
        finally:
            self._lock.release()

    def _make_room(self, nbytes: int) -> None:
        if nbytes > _LARGEST:
            raise FormatError(f"it has {nbytes} bytes")
        self._end()
        self._room = 1 << (nbytes - 1).bit_length()
        self._start()

    def _start(self) -> None:
        near, far = socketpair()
        memory = os.memfd_create("lmkv")
        try:
            os.ftruncate(memory, self._room)
            self._memory = mmap.mmap(memory, self._room)
            # It is no part of the terminal's group: an interrupt there is the engine's to handle.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "lmkv.backends.remote.child"),
                    *(self._engine, str(far.fileno()), str(memory)),
                ],
                pass_fds=(far.fileno(), memory),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._connection: Connection[Any, Any] = Connection(near.detach())
            # Not as arguments, which other users see: a password may be among them.
            self._connection.send_bytes(json.dumps(self._options).encode())
        finally:
            near.close()
            far.close()
            os.close(memory)
        self._answer(START_LIMIT)

    def _ask(self, action: str, *arguments: Any, moving: int = 0) -> Any:
        # If it has ended, so says the answer.
        with suppress(OSError):
            self._connection.send_bytes(json.dumps([action, *arguments]).encode())
        return self._answer(self._timeout + moving / SLOWEST)

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError(f"no answer within {timeout} s")
            kind, answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            code = self._end(at_once=True)
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(f"the client's process ended with {code}") from error
        if kind == "away":
            raise ConnectionError(answer)
        if kind == "failed":
            raise RuntimeError(answer)
        return answer

    def _end(self, *, at_once: bool = False) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        # Its end of the connection closes: it leaves the store, and ends.
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.1 if at_once else _END_LIMIT)
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_END_LIMIT)
        return None


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {"MC_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path}
