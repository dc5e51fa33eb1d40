"""`BoundedConnection`: the bounds that hold for every caller, before a token has been seen."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmkv.agent.guard import ADMITTED

REQUEST_SECONDS = 10.0
"""From a connection, or the answer before, until a request is there, its body included."""

_MAX_CONNECTIONS = 128
_SHARE_OF_FILES = 8
"""One in so many of the files that this process may open."""
_HEADER_STEP = 512

# Without one line for each request that is none.
_errors = logging.getLogger("lmkv.agent.errors")
_errors.setLevel(logging.ERROR)


def max_connections() -> int:
    """At a time: few beside the files that the engine may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // _SHARE_OF_FILES)


class BoundedConnection(H11Protocol):
    """HTTP as uvicorn speaks it. h11 bounds a request's line and headers; here are the bounds of time and number.

    A stranger is who has not shown the token yet, by `Guard`. When there are too many connections, the stranger that
    came first gives way. Nothing of a stranger's body is parsed before its header has been judged.
    """

    _since = 0.0
    _is_known = False
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _errors
        self._since = time.monotonic()
        self._await_request()
        here = [each for each in self.connections if isinstance(each, BoundedConnection)]
        here = [each for each in here if not each.transport.is_closing()]
        if len(here) > max_connections():
            first = min((each for each in here if each.is_stranger()), key=lambda each: each._since, default=self)
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def is_stranger(self) -> bool:
        return not self._is_known and ADMITTED not in (self.scope or {}).get("state", ())

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is not h11.IDLE:
            super().data_received(data)
            return
        # A header that ends within these bytes may be followed by more chunks of a body than can be parsed in a second.
        for start in range(0, len(data), _HEADER_STEP):
            super().data_received(data[start : start + _HEADER_STEP])
            if self.conn.their_state is not h11.IDLE:
                self.loop.call_soon(self._go_on, data[start + _HEADER_STEP :])
                return

    def _go_on(self, data: bytes) -> None:
        """After the first step of the application, in which it refuses who may not go on."""
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_response_complete(self) -> None:
        self._is_known = not self.is_stranger()
        is_read = self.conn.their_state is not h11.SEND_BODY
        super().on_response_complete()
        if is_read:
            self._await_request()

    def _await_request(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self.loop.call_later(REQUEST_SECONDS, self._end_unless_answering)

    def _end_unless_answering(self) -> None:
        is_read = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if self.is_stranger() or not is_read or self.conn.our_state not in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        # Where an answer has begun there can be no other one; and the application's would come after this one.
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        if self.scope:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
