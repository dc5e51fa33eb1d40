"""`Answers`: redis-py's parser with bounds. Whatever listens at the address, an answer ends in time, and in bytes.

It takes the place of redis-py's own parsers: those make whatever an answer announces, and hiredis holds the GIL
meanwhile. Here as many bytes as have come are looked at, between calls that let other threads run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import socket
from ssl import SSLWantReadError
from typing import Any, NoReturn

from attrs import define
from redis import RedisCluster, exceptions
from redis._parsers import _RESP2Parser

_MAX_LINE_BYTES = 4096
_MAX_BYTES = 16 << 20
_MAX_PARTS = 1 << 19
"""Bytes and items of all answers to a call, at most: a cluster's slots are the largest."""
_MAX_DEPTH = 8
_READ_BYTES = 1 << 16


@define
class _Budget:
    """What is left to the answers of a call. Values that are read into a caller's memory do not count."""

    deadline: float
    nbytes: int = _MAX_BYTES
    parts: int = _MAX_PARTS

    def take(self, nbytes: int, parts: int = 0) -> None:
        self.nbytes -= nbytes
        self.parts -= parts
        if self.nbytes < 0 or self.parts < 0:
            raise exceptions.InvalidResponse(f"answers of more than {_MAX_BYTES:,} bytes or {_MAX_PARTS:,} items")


class _Limit(threading.local):
    budget: _Budget | None = None


_limit = _Limit()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Have all answers to this thread come within this time, and with one answer's bytes and items, together."""
    before, _limit.budget = _limit.budget, _Budget(time.monotonic() + seconds)
    try:
        yield
    finally:
        _limit.budget = before


class Answers:
    """The answers on one connection, for one thread at a time: what redis-py asks of a parser."""

    EXCEPTION_CLASSES = _RESP2Parser.EXCEPTION_CLASSES
    parse_error = _RESP2Parser.parse_error

    def __init__(self, socket_read_size: int) -> None:
        self._buffer = None  # redis-py looks for its own
        self._sock: socket | None = None
        self._ahead = bytearray()
        self._timeout = 0.0
        self._budget = _Budget(0.0)

    def on_connect(self, connection: Any) -> None:
        self._sock, self._timeout = connection._sock, connection.socket_timeout
        self._ahead.clear()

    def on_disconnect(self) -> None:
        self._sock = None
        self._ahead.clear()

    def can_read(self, timeout: float = 0) -> bool:
        """Whether there are bytes that nobody has asked for. Raises when the connection is closed."""
        if not self._ahead and self._sock is not None:
            self._sock.settimeout(timeout)
            try:
                with suppress(TimeoutError, BlockingIOError, SSLWantReadError):
                    self._ahead += self._sock.recv(_READ_BYTES) or _closed()
            finally:
                self._sock.settimeout(self._timeout)
        return bool(self._ahead)

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """The next answer: bytes, a number, None, an error, or a list of such."""
        with self._bounded():
            return self._answer(_MAX_DEPTH)

    def _answer(self, depth: int) -> Any:
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            error = self.parse_error(text.decode("utf-8", "replace"))
            if isinstance(error, exceptions.ConnectionError):
                raise error
            return error
        number = _number(text)
        if kind == b":":
            return number
        if number == -1 and kind in (b"$", b"*"):
            return None
        if kind == b"$" and number >= 0:
            self._budget.take(number)
            value = bytearray(number + 2)
            self._fill(memoryview(value))
            return bytes(value[:-2])
        if kind == b"*" and number >= 0 and depth:
            self._budget.take(0, number)
            return [self._answer(depth - 1) for _ in range(number)]
        raise exceptions.InvalidResponse(f"an answer that begins with {bytes(kind + text[:40])!r}")

    def length(self) -> int | None:
        """Length of a value that `fill` reads; None when there is none. Raises the error that the server answers."""
        with self._bounded():
            kind, text = self._line()
        if kind == b"-":
            raise self.parse_error(text.decode("utf-8", "replace"))
        number = _number(text)
        if kind != b"$" or number < -1:
            raise exceptions.InvalidResponse(f"{bytes(kind + text[:40])!r} instead of a value")
        return None if number == -1 else number

    def fill(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of a value."""
        with self._bounded():
            self._fill(view)

    def end(self) -> None:
        """Read the line break after a value."""
        self.fill(memoryview(bytearray(2)))

    # -- bytes ------------------------------------------------------------------------------------------------

    def _line(self) -> tuple[bytes, bytes]:
        """The first character of a line, and the others."""
        while (end := self._ahead.find(b"\r\n", 0, _MAX_LINE_BYTES)) < 0:
            if len(self._ahead) >= _MAX_LINE_BYTES:
                raise exceptions.InvalidResponse("a line without an end")
            self._read_ahead()
        self._budget.take(end + 2)
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line[:1], line[1:]

    def _read_ahead(self) -> None:
        room = bytearray(_READ_BYTES)
        self._ahead += room[: self._receive(memoryview(room))]

    def _fill(self, view: memoryview) -> None:
        known = min(len(self._ahead), len(view))
        view[:known] = self._ahead[:known]
        del self._ahead[:known]
        view = view[known:]
        while len(view):
            view = view[self._receive(view) :]

    def _receive(self, view: memoryview) -> int:
        if self._sock is None:
            raise exceptions.ConnectionError("the connection is closed")
        if (left := self._budget.deadline - time.monotonic()) <= 0:
            raise exceptions.TimeoutError("no answer in time")
        self._sock.settimeout(left)
        try:
            received = self._sock.recv_into(view)
        except TimeoutError:
            raise exceptions.TimeoutError("no answer in time") from None
        return received or _closed()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        self._budget = _limit.budget or _Budget(time.monotonic() + self._timeout)
        try:
            yield
        finally:
            if self._sock is not None:
                self._sock.settimeout(self._timeout)


class SentinelAnswers(Answers):
    """The answers of a sentinel, each within the connection's own time."""

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        with within(self._timeout):
            return super().read_response()


class Cluster(RedisCluster):
    """redis-py's client of a cluster, which takes no parser as an option."""

    def on_connect(self, connection: Any) -> None:
        connection.set_parser(Answers)
        super().on_connect(connection)


def _closed() -> NoReturn:
    raise exceptions.ConnectionError("the connection was closed by the server")


def _number(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= 19):
        raise exceptions.InvalidResponse(f"{text[:40]!r} is no number")
    return int(text)
