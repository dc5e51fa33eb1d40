"""`InfiniStoreBackend`: chunks as values of an InfiniStore server, over TCP.

It speaks the server's protocol itself: InfiniStore's client waits for ever for a value that is not there and crashes
with its server. Bytes go from the caller's memory to the socket and from the socket into the caller's memory.

A chunk is two values: its payload, under a name that nobody else writes, then an entry under the chunk's own name,
which has the other name and the header. For the server says that a value is there as soon as it begins to come, and
ends when somebody asks for it, or deletes it, before it is complete: nobody must know of it earlier.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TypeVar

from attrs import frozen

from lmkv.backends.remote.base import SLOWEST, RemoteBackend, address_of, tell_unused
from lmkv.chunks.codec import FormatError
from lmkv.errors import masked
from lmkv.outcomes import PRESENT, STORED, Written
from lmkv.protocols import Chunk, ChunkKey

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IcI")
_EXIST, _VALUE, _DELETE = b"C", b"L", b"X"
_GET, _PUT = ord("G"), ord("P")
_NUMBER = struct.Struct("<I")
_VALUE_TABLE = struct.Struct("<I2x5Hi3xBII")
_DELETE_TABLE = struct.Struct("<I2x3HiII")
_SUFFIX_BYTES = 8
_MOST_ENTRY_BYTES = 16 << 20
_ANSWER = struct.Struct("<II")
"""A code and a number."""
_TIMEVAL = struct.Struct("@ll")
_OK, _ABSENT, _FULL = 200, 404, 507
_AT_ONCE = 500
"""Names in one round trip."""
_REST = 0.002
"""Seconds before a connection that a value came over is used again. The server takes a request that comes before it
has noted that the value is sent for the one before, without end."""
_MOMENT = 0.001
"""Seconds for a value that came too late."""
_MOST_IDLE = 32


class InfiniStoreBackend(RemoteBackend):
    """An InfiniStore server as a backend, over TCP.

    Parameters
    ----------
    url
        `infinistore://host:port/`. LMCache's `?device=mlx5_0` is read and not used: there is no RDMA here.
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
        The URL has no port, or an option that is none.

    Notes
    -----
    Nothing is connected before the first call. Any number of threads may call, each with a connection of its own
    for as long. A put replaces what is there, so a name is asked for before it: engines that store a chunk at the
    same moment both do, the same bytes.

    Examples
    --------
    >>> InfiniStoreBackend("infinistore://localhost:22345", bytes(32))
    <InfiniStoreBackend 'infinistore': infinistore://localhost:22345>
    >>> InfiniStoreBackend("infinistore://localhost", bytes(32))
    Traceback (most recent call last):
        ...
    lmkv.errors.ConfigError: infinistore://localhost must have a host and a port: infinistore://host:port/
    """

    def __init__(
        self,
        url: str,
        namespace: bytes,
        *,
        username: str | None = None,
        password: str | None = None,
        prefix: str = "lmkv:",
        ttl: int | None = None,
        timeout: float = 1.0,
        chunk_tokens: int = 512,
        name: str = "infinistore",
        authentication_key: bytes | None = None,
    ) -> None:
        super().__init__(
            namespace, prefix=prefix, chunk_tokens=chunk_tokens, name=name, authentication_key=authentication_key
        )
        self._shown = masked(url)
        options = address_of(url, {"device": str})
        self._address = (options["host"], options["port"])
        tell_unused(self._shown, user=username, password=password, ttl=ttl)
        if options.get("device"):
            logger.warning("lmkv: %s: device is not used: lmkv speaks TCP with InfiniStore", self._shown)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        self._written, self._writing = threading.Condition(), set[str]()

    def __repr__(self) -> str:
        return f"<InfiniStoreBackend {self.name!r}: {self._shown}>"

    # -- of the engine ------------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        def exist(connection: _Connection) -> list[bool]:
            found: list[bool] = []
            for at in range(0, len(names), _AT_ONCE):
                batch = names[at : at + _AT_ONCE]
                connection.ask(batch)
                found += connection.found(len(batch))
            return found

        return self._call(exist)

    def stored_bytes(self, payload_bytes: int) -> int:
        return super().stored_bytes(payload_bytes) + _SUFFIX_BYTES

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        def get(connection: _Connection) -> bool:
            entry = self._entry(connection, name)
            if entry is None:
                return False
            header = self.blobs.parsed(key, entry.header, len(into))
            if header.header_bytes != len(entry.header):
                raise FormatError(f"its header has {len(entry.header)} bytes, {header.header_bytes} by itself")
            nbytes = connection.get(entry.payload_name)
            if nbytes is None:
                # Evicted: an entry without a payload would keep the chunk from being stored again.
                connection.delete([name])
                return False
            if nbytes != len(into):
                raise FormatError(f"its payload has {nbytes} bytes, {len(into)} by its header")
            self.blobs.receive_payload(header, connection.fill, into)
            return True

        return self._call(get, len(into))

    def _entry(self, connection: _Connection, name: str) -> _Entry | None:
        nbytes = connection.get(name)
        if nbytes is None:
            return None
        if not _SUFFIX_BYTES < nbytes <= _MOST_ENTRY_BYTES:
            raise FormatError(f"it has {nbytes} bytes")
        value = memoryview(bytearray(nbytes))
        connection.fill(value)
        return _Entry(f"{name}/{value[:_SUFFIX_BYTES].hex()}", value[_SUFFIX_BYTES:])

    def _put(self, name: str, chunk: Chunk) -> Written:
        def put(connection: _Connection) -> Written:
            connection.ask([name])
            # While the server looks.
            header = self.blobs.header_of(chunk)
            if connection.found(1) == [True]:
                return PRESENT
            suffix = memoryview(os.urandom(_SUFFIX_BYTES))
            values = [(f"{name}/{suffix.hex()}", [chunk.payload]), (name, [suffix, header])]
            return STORED if connection.put(values) else Written.rejected("the server has no memory left")

        with self._alone(name, self._timeout + len(chunk.payload) / SLOWEST):
            return self._call(put, len(chunk.payload))

    def _remove(self, names: Sequence[str]) -> None:
        def remove(connection: _Connection) -> None:
            found: list[str] = []
            for name in names:
                with suppress(FormatError):
                    entry = self._entry(connection, name)
                    found += [name, entry.payload_name] if entry else []
                connection.skip_value()
            # What is no entry has no payload.
            connection.delete(list(dict.fromkeys([*names, *found])))

        self._call(remove)

    def _is_away(self, error: Exception) -> bool:
        return isinstance(error, OSError)

    @contextmanager
    def _alone(self, name: str, limit: float) -> Iterator[None]:
        """No other thread writes the name."""
        with self._written:
            if not self._written.wait_for(lambda: name not in self._writing, limit):
                raise TimeoutError("another thread still writes it")
            self._writing.add(name)
        try:
            yield
        finally:
            with self._written:
                self._writing.discard(name)
                self._written.notify_all()

    # -- connections --------------------------------------------------------------------------------------

    def _call(self, work: Callable[[_Connection], T], moving: int = 0) -> T:
        """`work` with a connection; once more with a new one where the server had closed it."""
        deadline = time.monotonic() + self._timeout + moving / SLOWEST
        if connection := self._taken():
            with suppress(ConnectionError):
                return self._do(work, connection, deadline)
            self._forget_idle()
        return self._do(work, _Connection(self._address, self._timeout), deadline)

    def _do(self, work: Callable[[_Connection], T], connection: _Connection, deadline: float) -> T:
        connection.deadline = deadline
        try:
            return work(connection)
        finally:
            self._release(connection)

    def _taken(self) -> _Connection | None:
        """The one that was used last among those that have rested: its window is open."""
        if os.getpid() != self._pid:
            raise ConnectionError("it is another process's")
        now = time.monotonic()
        if late := self._pick(lambda each: each.is_behind):
            late.deadline = now + _MOMENT
            self._release(late)
        return self._pick(lambda each: each.in_step and each.rests_until <= now)

    def _pick(self, fits: Callable[[_Connection], bool]) -> _Connection | None:
        with self._lock:
            found = next(filter(fits, reversed(self._idle)), None)
            if found is not None:
                self._idle.remove(found)
            return found

    def _release(self, connection: _Connection) -> None:
        connection.skip_value()
        with self._lock:
            usable = connection.in_step or connection.is_behind
            if usable and not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _forget_idle(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    _disconnect = _forget_idle


open_url = InfiniStoreBackend


@frozen
class _Entry:
    payload_name: str
    header: memoryview


class _Connection:
    """Requests and answers over one socket, until `deadline`, for one thread at a time.

    Raises OSError when there is no answer in time, or none of InfiniStore's.
    """

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._socket = socket.create_connection(address, timeout)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = 0.0
        self.rests_until = 0.0
        self.in_step = True
        """Whether the next byte is of the next answer."""
        self.is_behind = False
        """Whether a value, or how long it is, still comes."""
        self._left = 0
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def ask(self, names: Sequence[str]) -> None:
        """Which of them there are; `found` has the answers."""
        self._send([b"".join(_request(_EXIST, name.encode()) for name in names)])

    def found(self, count: int) -> list[bool]:
        answers = list(_ANSWER.iter_unpack(self._read(count * _ANSWER.size)))
        for code, _ in answers:
            self._check(code, _OK)
        self.in_step = True
        return [absent == 0 for _, absent in answers]

    def get(self, name: str) -> int | None:
        """Bytes of the value, which `fill` reads next; None when there is none."""
        self._send([_request(_VALUE, _value_request(name, 0, _GET))])
        self.is_behind = True
        return self._length()

    def _length(self) -> int | None:
        if self._code(_OK, _ABSENT) == _ABSENT:
            self.in_step, self.is_behind = True, False
            return None
        self._left = self._number()
        return self._left

    def fill(self, view: memoryview) -> None:
        """Read exactly as many bytes of the value."""
        while len(view):
            received = self._receive(view)
            view = view[received:]
            self._left -= received
            if not self._left:
                self.in_step, self.is_behind = True, False
                self.rests_until = time.monotonic() + _REST

    def skip_value(self) -> None:
        """Read what is left of a value that nobody wants: a server ends when its client leaves in the middle of one."""
        try:
            if self.is_behind and not self._left:
                self._length()
            scratch = memoryview(bytearray(min(self._left, 1 << 20)))
            while self._left:
                self.fill(scratch[: self._left])
        except TimeoutError:
            pass  # next time
        except OSError:
            self.is_behind = False

    def put(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> bool:
        """Whether there was room for these values, of parts each."""
        parts: list[bytes | memoryview] = []
        for name, value in values:
            parts += [_request(_VALUE, _value_request(name, sum(map(len, value)), _PUT)), *value]
        # One that is full says so at once, takes the value for requests, and closes the connection.
        with suppress(ConnectionError):
            self._send(parts)
        self.in_step = all(self._code(_OK, _FULL) == _OK for _ in values)
        return self.in_step

    def delete(self, names: Sequence[str]) -> None:
        self._send([_request(_DELETE, _delete_request(names))])
        self._check(_ANSWER.unpack(self._read(_ANSWER.size))[0], _OK)
        self.in_step = True

    def close(self) -> None:
        self._socket.close()

    def _code(self, *expected: int) -> int:
        code = self._number()
        self._check(code, *expected)
        return code

    @staticmethod
    def _check(code: int, *expected: int) -> None:
        if code not in expected:
            raise ConnectionError(f"the server answers {code}")

    def _number(self) -> int:
        return int(_NUMBER.unpack(self._read(_NUMBER.size))[0])

    def _read(self, nbytes: int) -> bytearray:
        read = bytearray(nbytes)
        left = memoryview(read)
        try:
            while left:
                left = left[self._receive(left) :]
        except TimeoutError as error:
            if len(left) < nbytes:
                raise ConnectionError("half of an answer came in time") from error
            raise
        return read

    def _receive(self, view: memoryview) -> int:
        """Read as many bytes, or fewer if the rest does not come in time."""
        while True:
            self._limit(socket.SO_RCVTIMEO)
            # What the server sends next may wait for an acknowledgement, which Linux delays by 40 ms.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            with suppress(BlockingIOError):
                if received := self._socket.recv_into(view, 0, socket.MSG_WAITALL):
                    return received
                raise ConnectionError("the connection was closed within an answer")

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self.in_step:
            raise TimeoutError("the answer before has not come")
        self.in_step = False
        left = [memoryview(part) for part in parts]
        while left:
            self._limit(socket.SO_SNDTIMEO)
            with suppress(BlockingIOError):
                sent = self._socket.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]

    def _limit(self, option: int) -> None:
        """Let the next call of the socket end by the deadline: the kernel moves all bytes in one call."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("no answer in time")
        if not 0.9 < self._limits[option] / remaining < 1.1:
            seconds, microseconds = divmod(int(remaining * 1e6) + 1, 1_000_000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, microseconds))
            self._limits[option] = remaining


def _request(action: bytes, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, action, len(body)) + body


def _value_request(name: str, nbytes: int, action: int) -> bytes:
    """A table of FlatBuffers: a name, a length, what to do."""
    return _VALUE_TABLE.pack(16, 10, 16, 8, 12, 7, 10, action, 8, nbytes) + _text(name)


def _delete_request(names: Sequence[str]) -> bytes:
    """A table of FlatBuffers: names."""
    texts = [_text(name) for name in names]
    # Each offset counts from where it stands.
    starts = accumulate((len(text) - 4 for text in texts[:-1]), initial=4 * len(texts))
    return _DELETE_TABLE.pack(12, 6, 8, 4, 6, 4, len(texts)) + struct.pack(f"<{len(texts)}I", *starts) + b"".join(texts)


def _text(text: str) -> bytes:
    """A string of FlatBuffers, which ends with a zero, in whole words."""
    encoded = text.encode()
    return _NUMBER.pack(len(encoded)) + encoded + bytes(4 - len(encoded) % 4)
