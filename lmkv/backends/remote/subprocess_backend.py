"""`SubprocessBackend`: the base class for stores with a client in C++ or Rust, which may hang, crash or hold the GIL.

The client runs in child processes (module `child`). Parent and child share a buffer and, after `register_memory`, the
slots of host memory. If a call takes too long or a read fails, the parent kills the child, so that no late bytes reach
the shared memory. The next call starts another child.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair
from typing import Any, ClassVar
from zlib import crc32

from lmkv.backends.remote.base import MIN_BYTES_PER_SECOND, Fill, RemoteBackend, batches, filler
from lmkv.backends.remote.child import MAX_MESSAGE_BYTES, ROOM, SLAB, Part
from lmkv.chunks.codec import FormatError
from lmkv.errors import ConfigError, UsageError, how_to_install
from lmkv.protocols import PRESENT, STORED, Chunk, ChunkKey, Written

START_LIMIT = 10.0
"""Seconds within which a child process must start and import the client."""

_END_LIMIT = 5.0
_MAX_CLIENTS = 64
_MIN_ROOM_BYTES = 16 << 20
_MAX_ROOM_BYTES = 1 << 30


class SubprocessBackend(RemoteBackend):
    """Base class of backends with a client that runs in child processes.

    The URL may have the options `clients` (number of processes) and `zero_copy` (0: do not register host memory).

    All calls for one value go to the same process, one after the other. So no other call of this backend comes between
    the lookup and the write of a value.
    """

    module: ClassVar[str]
    """The name of the module from which the client is imported."""

    extra: ClassVar[str]
    """The extra of lmkv that installs the client."""

    client_module: ClassVar[str] = ""
    """The name of the module with `StoreClient`, which runs in the child; by default the module of the subclass."""

    requests: ClassVar[int] = 1
    """Largest number of requests that a call makes one after the other. Each request may take the whole timeout."""

    def _set_up(self, options: dict[str, Any]) -> None:
        self._module = self.client_module or type(self).__module__
        clients = options.pop("clients", 2)
        if not 1 <= clients <= _MAX_CLIENTS:
            raise ConfigError(f"{self._safe_url}: the option clients must be 1 to {_MAX_CLIENTS}")
        if find_spec(self.module) is None:
            raise ConfigError(f"{self._safe_url} needs the package {self.module}: {how_to_install(self.extra)}")
        self._zero_copy = options.pop("zero_copy", 1)
        options = self._prepared(options)
        self._clients = [self._process(self._renewed(options)) for _ in range(clients)]

    def _process(self, options: Mapping[str, Any] | Callable[[], Any]) -> ClientProcess:
        return ClientProcess(self._module, options, self.requests * self.options.timeout)

    def _renewed(self, options: dict[str, Any]) -> Mapping[str, Any] | Callable[[], Any]:
        """Return the client's options or, if they may change, a function that returns the current options."""
        return options

    def _prepared(self, options: dict[str, Any]) -> dict[str, Any]:
        """Convert the options of the URL to the arguments of `StoreClient`."""
        return options

    def register_memory(self, descriptor: int, address: int, nbytes: int) -> None:
        """Register memory, so that payloads in this memory are transferred without a copy.

        Does nothing if the URL has `zero_copy=0`.
        """
        if self._zero_copy:
            for client in self._clients:
                client.register(descriptor, address, nbytes, self._seconds_to_register(nbytes))

    def _seconds_to_register(self, nbytes: int) -> float:
        """Return how many seconds the registration of `nbytes` bytes adds to the timeout of a process's first call."""
        return 0.0

    # -- requests to the store --------------------------------------------------------------------------------

    def _client(self, name: str) -> ClientProcess:
        return self._clients[crc32(name.encode()) % len(self._clients)]

    def _client_for(self, names: Sequence[str]) -> ClientProcess:
        """Return the client process for a call about all of `names`."""
        return self._client(names[0])

    def _exist(self, names: Sequence[str]) -> list[bool]:
        asked = batches(names, _batch_size(names))
        return [found for batch in asked for found in self._client_for(batch).ask("exist", batch)]

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        with self._client(name).value(name, self.codec.format.header_bytes(len(into)), into) as value:
            if value is not None:
                self.codec.receive(key, *value, into)
            return value is not None

    def _put(self, name: str, chunk: Chunk) -> Written:
        answer = self._client(name).put(name, self.codec.header_of(chunk), chunk.payload)
        return {"stored": STORED, "present": PRESENT}.get(answer) or Written.rejected(answer)

    def _remove(self, names: Sequence[str]) -> None:
        for batch in batches(names, _batch_size(names)):
            while batch:
                # A call has a limit, however long the store takes for all of them.
                batch = batch[self._client_for(batch).ask("remove", batch) :]

    def _disconnect(self) -> None:
        for client in self._clients:
            client.close()

    def _is_unavailable(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    def _reason(self, error: Exception) -> str:
        # The client's process has named the error.
        return str(error)


def _batch_size(names: Sequence[str]) -> int:
    """Return how many of `names` fit into one message. All names have the same length."""
    return max(1, (MAX_MESSAGE_BYTES - 1000) // (len(json.dumps(names[0])) + 2)) if names else 1


class ClientProcess:
    """A child process with a client, and the memory that parent and child share. The process runs one call at a time.

    `options`: the options of the client, or a function that returns the current options. If a call fails and the
    options have changed, the next call starts another process.

    Raises
    ------
    OSError
        The store or the process does not answer.
    RuntimeError
        The call failed.
    """

    def __init__(self, module: str, options: Mapping[str, Any] | Callable[[], Any], timeout: float) -> None:
        self._module, self._timeout = module, timeout
        self._options = options if callable(options) else lambda: options
        self._lock = threading.Lock()
        self._room = _MIN_ROOM_BYTES
        self._slab = -1, 0, 0
        self._first_timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connected = self._closed = False
        self._pid = os.getpid()
        _clients.add(self)

    def register(self, descriptor: int, address: int, nbytes: int, seconds: float) -> None:
        """Register memory with the client, so that payloads in this memory are transferred without a copy.

        `seconds`: how much longer the client's first call may take because of the registration. Raises UsageError if
        the child process has already started, or if memory is already registered.
        """
        with self._lock:
            if self._process is not None or self._slab[0] >= 0:
                raise UsageError("call register_memory() only once, and before any other method")
            self._slab = os.dup(descriptor), address, nbytes
            self._first_timeout = self._timeout + seconds

    def ask(self, action: str, *arguments: Any) -> Any:
        with self._running():
            return self._ask(action, *arguments)

    @contextmanager
    def value(self, name: str, header_bytes: int, into: memoryview) -> Iterator[tuple[int, Fill] | None]:
        """Read a value for a `with` block. Yields `(length, fill)`, or None if there is no value.

        `length`: the length of the value in bytes. `fill`: a function that reads the next bytes of the value. If `into`
        is registered memory and `length` is `header_bytes + len(into)`, `into` already has the payload. `fill` then
        reads only the header.
        """
        nbytes = header_bytes + len(into)
        place = self._place(into, header_bytes)
        with self._running(nbytes if place[0] == ROOM else header_bytes, nbytes):
            found = in_room = self._get(name, [(ROOM, 0, header_bytes), place], nbytes)
            if found == nbytes and place[0] == SLAB:
                in_room = header_bytes
            elif found not in (None, nbytes):
                if found > self._room:
                    raise FormatError(f"the value has {found} bytes instead of {nbytes}")
                self._get(name, [(ROOM, 0, found)], found)
            yield None if found is None else (found, filler(memoryview(self._memory)[:in_room]))

    def _get(self, name: str, parts: Sequence[Part], nbytes: int) -> Any:
        try:
            found = self._ask("get", name, parts, moving=nbytes)
        except RuntimeError:
            # Late bytes must not arrive in memory that is another chunk's by then.
            self._end(at_once=True)
            raise
        if found not in (None, nbytes):
            self._end(at_once=True)
            self._start()
        return found

    def put(self, name: str, header: memoryview, payload: memoryview) -> str:
        """Store a value. Returns "stored", "present", or the reason for the failure."""
        nbytes = len(header) + len(payload)
        place = self._place(payload, len(header))
        with self._running(nbytes if place[0] == ROOM else len(header), nbytes):
            self._memory[: len(header)] = header
            if place[0] == ROOM:
                self._memory[len(header) : nbytes] = payload
            return str(self._ask("put", name, [(ROOM, 0, len(header)), place], moving=nbytes))

    def _place(self, payload: memoryview, otherwise: int) -> Part:
        """Return where a payload is in shared memory. A payload outside registered memory uses the buffer from
        `otherwise` on.
        """
        nbytes = len(payload)
        _, start, length = self._slab
        if length and nbytes and not payload.readonly:
            offset = ctypes.addressof(ctypes.c_char.from_buffer(payload)) - start
            if 0 <= offset <= length - nbytes:
                return SLAB, offset, nbytes
        return ROOM, otherwise, nbytes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()
            descriptor, *_ = self._slab
            self._slab = -1, 0, 0
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._lock.locked()

    @property
    def connected(self) -> bool:
        """Whether the child process has answered and is still running."""
        process = self._process
        return self._connected and process is not None and process.poll() is None

    def leave_to_parent(self) -> None:
        """Close the connection in a forked copy of this process. So only the original process holds the connection, and
        the client's process notices when the original process ends.
        """
        self._lock = threading.Lock()
        if self._process is not None:
            self._connection.close()

    @contextmanager
    def _running(self, room: int = 0, moving: int = 0) -> Iterator[None]:
        timeout = self._timeout + max(self._room, moving) / MIN_BYTES_PER_SECOND
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError(f"an earlier call takes more than {timeout:.1f} s")
        try:
            if self._closed or os.getpid() != self._pid:
                raise ConnectionError("the backend is closed, or belongs to the parent process")
            if room > self._room:
                self._make_room(room)
            elif self._process is None:
                self._start()
            yield
        finally:
            self._lock.release()

    def _make_room(self, nbytes: int) -> None:
        if nbytes > _MAX_ROOM_BYTES:
            raise FormatError(f"a value of {nbytes} bytes is larger than {_MAX_ROOM_BYTES} bytes")
        self._end()
        self._room = 1 << (nbytes - 1).bit_length()
        self._start()

    def _start(self) -> None:
        near, far = socketpair(AF_UNIX, SOCK_SEQPACKET)
        memory, slab = os.memfd_create("lmkv"), self._slab[0]
        shared = [memory] if slab < 0 else [memory, slab]
        self._connected = False
        try:
            os.ftruncate(memory, self._room)
            self._memory = mmap.mmap(memory, self._room)
            # Own process group, so that Ctrl-C reaches only the engine; same session, because autogroup scheduling
            # starved a new one.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "lmkv.backends.remote.child"),
                    *(self._module, str(far.fileno()), *map(str, shared)),
                ],
                pass_fds=(far.fileno(), *shared),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
            self._connection = near
        finally:
            far.close()
            os.close(memory)
        # Arguments of a process are visible to other users, and the options may have a password.
        self._given = self._options()
        self._exchange(self._given, START_LIMIT)

    def _ask(self, action: str, *arguments: Any, moving: int = 0) -> Any:
        timeout = self._timeout if self._connected else self._first_timeout
        answer = self._exchange([action, *arguments], timeout + moving / MIN_BYTES_PER_SECOND)
        self._connected = True
        return answer

    def _exchange(self, question: Any, timeout: float) -> Any:
        """Send a request to the child process, and return the answer."""
        try:
            self._connection.settimeout(timeout)
            self._connection.send(json.dumps(question).encode())
            message = self._connection.recv(MAX_MESSAGE_BYTES)
            if not message:
                raise EOFError
            kind, answer = json.loads(message)
        except BaseException as error:
            # A late answer must not be taken for that of the next question.
            code = self._end(at_once=True)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"the store did not answer within {timeout:.1f} s") from error
            if not isinstance(error, EOFError | OSError):
                raise
            raise ConnectionError(f"the process of the store's client ended with exit code {code}") from error
        if kind == "unavailable":
            if self._options() != self._given:
                self._end()
            raise ConnectionError(answer)
        if kind == "failed":
            raise RuntimeError(answer)
        return answer

    def _end(self, *, at_once: bool = False) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        # The process sees the end of the connection, disconnects from the store, and ends.
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.1 if at_once else _END_LIMIT)
        process.kill()
        # Wait without a limit: until it has ended it may write to the slab.
        return process.wait()


_clients: weakref.WeakSet[ClientProcess] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _clients:
        client.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {"MC_LOG_LEVEL": "ERROR", **os.environ, "PYTHONPATH": path}
