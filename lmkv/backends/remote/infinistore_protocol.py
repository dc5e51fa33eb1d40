"""The TCP protocol of InfiniStore servers of release 0.2: requests and answers.

A request is a header and a body. The body of a request for a value is a FlatBuffers table with fixed fields.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

_MAGIC = 0xDEADBEEF
_HEADER = struct.Struct("<IcI")
_EXIST, _VALUE, _DELETE = b"C", b"L", b"X"
_GET, _PUT = ord("G"), ord("P")
_VALUE_TABLE = struct.Struct("<I2x5Hi3xBII")
_DELETE_TABLE = struct.Struct("<I2x3HiII")
_CODE = struct.Struct("<I")
_ANSWER = struct.Struct("<II")
"""A code and a number."""
_OK, _ABSENT, _FULL = 200, 404, 507
_SKIPPED = 1 << 20


class Connection:
    """Requests and their answers, until `deadline`, for one thread at a time.

    Raises OSError when the answer is late or not valid.
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
        """Whether the rest of a value, or its length, is still to come."""
        self._left = 0
        self._answer = bytearray()

    def ask(self, names: Sequence[str]) -> None:
        """Ask which of these names exist; `found` reads the answers."""
        self._send([b"".join(_request(_EXIST, name.encode()) for name in names)])

    def found(self, count: int) -> list[bool]:
        answers = list(_ANSWER.iter_unpack(self._read(count * _ANSWER.size)))
        for code, _ in answers:
            _check(code, _OK)
        self.in_step = True
        return [absent == 0 for _, absent in answers]

    def get(self, name: str) -> int | None:
        """Bytes of the value, which `fill` reads next; None when there is none."""
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
        """Fill `view` with the next bytes of the value."""
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
        """Read the rest of an unwanted value, because the server crashes when a client leaves within one."""
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
        """Store values, each given in parts; returns False when the server has no room."""
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
        """Read some bytes."""
        self._socket.settimeout(_remaining(self.deadline))
        # The server's next packet may wait for an acknowledgement, which Linux delays by 40 ms.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if received := self._socket.recv_into(view):
            return received
        raise ConnectionError("the connection was closed within an answer")

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self.in_step:
            raise TimeoutError("the answer before has not come")
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
        raise TimeoutError("no answer in time")
    return remaining


def _check(code: int, *expected: int) -> None:
    if code not in expected:
        raise ConnectionError(f"the server answers {code}")


def _request(action: bytes, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, action, len(body)) + body


def _value_request(name: str, nbytes: int, action: int) -> bytes:
    """A table of a name, a length and an action."""
    return _VALUE_TABLE.pack(16, 10, 16, 8, 12, 7, 10, action, 8, nbytes) + _text(name)


def _delete_request(names: Sequence[str]) -> bytes:
    """A table of names."""
    texts = [_text(name) for name in names]
    # Each offset counts from where it stands.
    starts = accumulate((len(text) - 4 for text in texts[:-1]), initial=4 * len(texts))
    return _DELETE_TABLE.pack(12, 6, 8, 4, 6, 4, len(texts)) + struct.pack(f"<{len(texts)}I", *starts) + b"".join(texts)


def _text(text: str) -> bytes:
    """A zero-terminated string, padded to whole words."""
    encoded = text.encode()
    return _CODE.pack(len(encoded)) + encoded + bytes(4 - len(encoded) % 4)
