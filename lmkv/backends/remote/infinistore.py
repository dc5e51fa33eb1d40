"""`InfiniStoreBackend`: stores chunks on an InfiniStore server, over TCP.

This module implements the server's protocol itself, because InfiniStore's client waits forever for a missing value, and
crashes together with its server. Bytes are copied directly between the caller's memory and the socket.

A chunk becomes two values. First the payload is stored under a random name. Then an entry with the header and the
random name is stored under the chunk's name. The reason: the server offers a value as soon as the first byte
has arrived, but crashes if a client reads or deletes the value before the last byte has arrived. Other clients learn
the random name only when the payload is complete.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

from attrs import frozen

from lmkv.backends.remote.base import MIN_BYTES_PER_SECOND, HostPortBackend, batches
from lmkv.chunks.codec import FormatError
from lmkv.protocols import PRESENT, STORED, Chunk, ChunkKey, Written

# -- the protocol -----------------------------------------------------------------------------------------


_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IcI")
_EXIST, _VALUE, _DELETE = b"C", b"L", b"X"
_GET, _PUT = ord("G"), ord("P")
_VALUE_TABLE = struct.Struct("<I2x5Hi3xBII")
_DELETE_TABLE = struct.Struct("<I2x3HiII")
_CODE = struct.Struct("<I")
_ANSWER = struct.Struct("<II")
"""The format of an answer: a code and a number."""
_OK, _ABSENT, _FULL = 200, 404, 507
_SKIPPED = 1 << 20


class Connection:
    """A connection to an InfiniStore server, for one thread at a time.

    `deadline`: the time, in seconds of `time.monotonic`, by which all answers must arrive. Methods raise OSError if an
    answer is late or invalid.
    """

    def __init__(self, address: tuple[str, int], deadline: float) -> None:
        self._socket = socket.create_connection(address, _remaining(deadline))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = deadline
        self.asked_at = 0.0
        self.value_ended_at = 0.0
        self.in_step = True
        """Whether the next byte begins a new answer."""
        self.is_behind = False
        """Whether a value's length, or the rest of a value, has not arrived yet."""
        self._left = 0
        self._answer = bytearray()

    def ask(self, names: Sequence[str]) -> None:
        """Request whether the values `names` exist. `found` reads the answers."""
        self._send([b"".join(_request(_EXIST, name.encode()) for name in names)])

    def found(self, count: int) -> list[bool]:
        answers = list(_ANSWER.iter_unpack(self._read(count * _ANSWER.size)))
        for code, _ in answers:
            _check(code, _OK)
        self.in_step = True
        return [absent == 0 for _, absent in answers]

    def get(self, name: str) -> int | None:
        """Request a value. Returns the value's length in bytes, or None if there is no value. `fill` then reads the
        value.
        """
        self._send([_request(_VALUE, _value_request(name, 0, _GET))])
        self.is_behind = True
        return self._length()

    def _length(self) -> int | None:
        # A partial answer is kept if the rest does not come in time.
        self._receive_answer(_CODE.size)
        (code,) = _CODE.unpack_from(self._answer)
        _check(code, _OK, _ABSENT)
        if code == _OK:
            self._receive_answer(_ANSWER.size)
            _, self._left = _ANSWER.unpack(self._answer)
        self._answer.clear()
        self._note_end()
        return self._left if code == _OK else None

    def _receive_answer(self, nbytes: int) -> None:
        while missing := nbytes - len(self._answer):
            some = bytearray(missing)
            self._answer += some[: self._receive(memoryview(some))]

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the value that `get` has found."""
        while len(view):
            received = self._receive(view)
            view = view[received:]
            self._left -= received
        self._note_end()

    def _note_end(self) -> None:
        if not self._left:
            self.in_step, self.is_behind = True, False
            self.value_ended_at = time.monotonic()

    def skip_value(self) -> None:
        """Read the rest of an unwanted value, because the server crashes if a client disconnects before the end."""
        try:
            if self.is_behind and not self._left:
                self._length()
            while self.is_behind:
                self.fill(memoryview(bytearray(min(self._left, _SKIPPED))))
        except TimeoutError:
            pass  # next time
        except OSError:
            self.is_behind = False

    def put(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> bool:
        """Store values, given as pairs `(name, parts)`. Returns False if the server has no space."""
        parts: list[bytes | memoryview] = []
        for name, value in values:
            parts += [_request(_VALUE, _value_request(name, sum(map(len, value)), _PUT)), *value]
        # A full server answers at once, reads the value as requests, and closes the connection.
        with suppress(ConnectionError):
            self._send(parts)
        for _ in values:
            (code,) = _CODE.unpack(self._read(_CODE.size))
            _check(code, _OK, _FULL)
            if code == _FULL:
                return False
        self.in_step = True
        return True

    def delete(self, names: Sequence[str]) -> None:
        self._send([_request(_DELETE, _delete_request(names))])
        self.found(1)

    def close(self) -> None:
        self._socket.close()

    def _read(self, nbytes: int) -> bytearray:
        read = bytearray(nbytes)
        left = memoryview(read)
        while left:
            left = left[self._receive(left) :]
        return read

    def _receive(self, view: memoryview) -> int:
        """Read some bytes into `view`, and return the number of bytes."""
        self._socket.settimeout(_remaining(self.deadline))
        # The server's next packet may wait for an acknowledgement, which Linux delays by 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if received := self._socket.recv_into(view):
            return received
        raise ConnectionError("the server closed the connection in the middle of an answer")

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self.in_step:
            raise TimeoutError("the server has not answered the previous request yet")
        self.in_step = False
        self.asked_at = time.monotonic()
        left = [memoryview(part) for part in parts]
        while left:
            self._socket.settimeout(_remaining(self.deadline))
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the server did not answer in time (remote_timeout)")
    return remaining


def _check(code: int, *expected: int) -> None:
    if code not in expected:
        raise ConnectionError(f"the server answered with error code {code}")


def _request(action: bytes, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, action, len(body)) + body


def _value_request(name: str, nbytes: int, action: int) -> bytes:
    """Return a request for a value: a FlatBuffers table of the name, the length in bytes and the action (get or
    put).
    """
    return _VALUE_TABLE.pack(16, 10, 16, 8, 12, 7, 10, action, 8, nbytes) + _text(name)


def _delete_request(names: Sequence[str]) -> bytes:
    """Return a request to delete values, as a FlatBuffers table of names."""
    texts = [_text(name) for name in names]
    # Each offset counts from where it stands.
    starts = accumulate((len(text) - 4 for text in texts[:-1]), initial=4 * len(texts))
    return _DELETE_TABLE.pack(12, 6, 8, 4, 6, 4, len(texts)) + struct.pack(f"<{len(texts)}I", *starts) + b"".join(texts)


def _text(text: str) -> bytes:
    """Return a string as FlatBuffers needs it: zero-terminated and padded to whole words."""
    encoded = text.encode()
    return _CODE.pack(len(encoded)) + encoded + bytes(4 - len(encoded) % 4)


# -- the backend ------------------------------------------------------------------------------------------


T = TypeVar("T")

logger = logging.getLogger(__name__)

_SUFFIX_BYTES = 8
_MAX_ENTRY_BYTES = 16 << 20
_BATCH_NAMES = 500
"""Number of names in one round trip."""
_GRACE_SECONDS = 0.001
"""Seconds to wait for the rest of a late value."""
_MAX_IDLE = 32


class InfiniStoreBackend(HostPortBackend):
    """Stores chunks on an InfiniStore server, over TCP.

    Parameters
    ----------
    url
        `infinistore://host:port/`. LMCache's `?device=mlx5_0` is ignored, because lmkv uses no RDMA.
    namespace
        32 bytes: a digest of the model, layout and versions.
    options
        The settings of remote backends. `username`, `password` and `ttl` do not work with InfiniStore.

    Raises
    ------
    ConfigError
        The URL has no port, or an unknown option.

    Notes
    -----
    Thread-safe. The backend connects at the first call, and concurrent calls use separate connections. InfiniStore
    replaces existing values, so a write first checks whether its name has a value. If two engines write a chunk at the
    same moment, one replaces the other's equal copy.

    Examples
    --------
    >>> InfiniStoreBackend("infinistore://localhost:22345", bytes(32))
    <InfiniStoreBackend 'infinistore': infinistore://localhost:22345>
    >>> InfiniStoreBackend("infinistore://localhost", bytes(32))
    Traceback (most recent call last):
        ...
    lmkv.errors.ConfigError: infinistore://localhost must have a host and a port: infinistore://host:port/
    """

    known: ClassVar[dict[str, type[str] | type[int]]] = {"device": str}

    def _set_up(self, options: dict[str, Any]) -> None:
        if options.get("device"):
            logger.warning("lmkv: %s: lmkv ignores the option device, and uses TCP", self._safe_url)
        self._address = (options["host"], options["port"])
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._answered_at = 0.0
        self._pid = os.getpid()
        self._written, self._writing = threading.Condition(), set[str]()

    # -- requests to the store --------------------------------------------------------------------------------

    def _exist(self, names: Sequence[str]) -> list[bool]:
        def exist(connection: Connection) -> list[bool]:
            found: list[bool] = []
            for batch in batches(names, _BATCH_NAMES):
                connection.ask(batch)
                found += connection.found(len(batch))
            return found

        return self._call(exist)

    def stored_bytes(self, payload_bytes: int) -> int:
        return super().stored_bytes(payload_bytes) + _SUFFIX_BYTES

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        entry = self._call(lambda connection: self._entry(connection, name))
        if entry is None:
            return False
        header = self.codec.parsed(key, entry.header, len(into))
        if header.header_bytes != len(entry.header):
            raise FormatError(f"the chunk's header has {len(entry.header)} bytes instead of {header.header_bytes}")

        def get(connection: Connection) -> bool:
            nbytes = connection.get(entry.payload_name)
            if nbytes is None:
                return False
            if nbytes != len(into):
                raise FormatError(f"the chunk has {nbytes} bytes, but its header says {len(into)}")
            self.codec.receive_payload(header, connection.fill, into)
            return True

        found = self._call(get, len(into))
        if not found:
            # The payload was evicted. Its entry would keep the chunk from being stored again.
            self._delete([name])
        return found

    def _entry(self, connection: Connection, name: str) -> _Entry | None:
        nbytes = connection.get(name)
        if nbytes is None:
            return None
        if not _SUFFIX_BYTES < nbytes <= _MAX_ENTRY_BYTES:
            raise FormatError(f"a value of {nbytes} bytes cannot be a chunk's header")
        value = memoryview(bytearray(nbytes))
        connection.fill(value)
        return _Entry(f"{name}/{value[:_SUFFIX_BYTES].hex()}", value[_SUFFIX_BYTES:])

    def _put(self, name: str, chunk: Chunk) -> Written:
        limit = self.options.timeout + len(chunk.payload) / MIN_BYTES_PER_SECOND
        with self._written:
            if not self._written.wait_for(lambda: name not in self._writing, limit):
                return Written.rejected("another thread still writes this chunk", None)
            self._writing.add(name)
        try:
            return self._call(lambda connection: self._put_alone(connection, name, chunk), len(chunk.payload))
        finally:
            with self._written:
                self._writing.discard(name)
                self._written.notify_all()

    def _put_alone(self, connection: Connection, name: str, chunk: Chunk) -> Written:
        connection.ask([name])
        # Computed while the server looks up the name.
        header = self.codec.header_of(chunk)
        if connection.found(1) == [True]:
            return PRESENT
        suffix = memoryview(os.urandom(_SUFFIX_BYTES))
        values = [(f"{name}/{suffix.hex()}", [chunk.payload]), (name, [suffix, header])]
        return STORED if connection.put(values) else Written.rejected("the server has no memory left")

    def _remove(self, names: Sequence[str]) -> None:
        there = [name for name, found in zip(names, self._exist(names), strict=True) if found]
        for batch in batches(there, _BATCH_NAMES):
            self._delete([each for name in batch for each in (name, self._payload_name(name)) if each])

    def _delete(self, names: Sequence[str]) -> None:
        self._call(lambda connection: connection.delete(names))

    def _payload_name(self, name: str) -> str:
        """Return the payload's name from the entry `name`, or "" if there is no valid entry."""
        with suppress(FormatError):
            entry = self._call(lambda connection: self._entry(connection, name))
            return entry.payload_name if entry else ""
        return ""

    # -- connections --------------------------------------------------------------------------------------

    def _call(self, work: Callable[[Connection], T], moving: int = 0) -> T:
        """Return the result of `work(connection)`. Replaces an idle connection that the server has closed.

        `moving`: the number of bytes to transfer, which extends the deadline.
        """
        deadline = time.monotonic() + self.options.timeout + moving / MIN_BYTES_PER_SECOND
        if connection := self._taken():
            with suppress(ConnectionError):
                return self._do(work, connection, deadline)
            self._forget_idle()
        return self._do(work, Connection(self._address, deadline), deadline)

    def _do(self, work: Callable[[Connection], T], connection: Connection, deadline: float) -> T:
        connection.deadline = deadline
        try:
            done = work(connection)
            self._answered_at = max(self._answered_at, connection.asked_at)
            return done
        except BaseException as error:
            if not isinstance(error, Exception):
                # A signal may have interrupted the count of received bytes.
                connection.in_step = connection.is_behind = False
            raise
        finally:
            self._release(connection)

    def _taken(self) -> Connection | None:
        """Return an idle connection that the server is ready for, or None.

        InfiniStore has a bug: if a request follows a value immediately, the server repeats its last answer forever. The
        server has one thread. So a connection is ready again once the server has answered a later request of another
        connection.
        """
        if os.getpid() != self._pid:
            raise ConnectionError("a forked process cannot use its parent's connections")
        if late := self._pick(lambda each: each.is_behind):
            late.deadline = time.monotonic() + _GRACE_SECONDS
            self._release(late)
        return self._pick(lambda each: each.in_step and each.value_ended_at < self._answered_at)

    def _pick(self, fits: Callable[[Connection], bool]) -> Connection | None:
        """Remove and return the most recently used idle connection for which `fits` is True, or None.

        The TCP window of such a connection is open.
        """
        with self._lock:
            found = next(filter(fits, reversed(self._idle)), None)
            if found is not None:
                self._idle.remove(found)
            return found

    def _release(self, connection: Connection) -> None:
        connection.skip_value()
        with self._lock:
            usable = connection.in_step or connection.is_behind
            if usable and not self._closed and len(self._idle) < _MAX_IDLE:
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
