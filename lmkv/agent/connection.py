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
"""Limit for a whole request, from the connection or the previous answer on."""

_MAX_CONNECTIONS = 128
_SHARE_OF_FILES = 8
"""Connections may take this fraction of the files that the process may open."""
_HEADER_STEP = 512

# uvicorn logs a warning for each malformed request, with which anybody could fill the log.
_errors = logging.getLogger("lmkv.agent.errors")
_errors.setLevel(logging.ERROR)


def max_connections() -> int:
    """Most connections at a time: a small part of the files that the engine may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // _SHARE_OF_FILES)


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP with limits on time and number. h11 bounds a request's line and headers.

    A stranger is a caller whose token `Guard` has not accepted yet. When there are too many connections, the oldest
    stranger is closed. A body is parsed only after the guard has judged its header.
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
        # Small steps, so that the header is judged before a large body behind it is parsed.
        for start in range(0, len(data), _HEADER_STEP):
            super().data_received(data[start : start + _HEADER_STEP])
            if self.conn.their_state is not h11.IDLE:
                self.loop.call_soon(self._go_on, data[start + _HEADER_STEP :])
                return

    def _go_on(self, data: bytes) -> None:
        """Parse the body, unless the application has refused the request in its first step."""
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
        # An answer that has begun cannot be replaced. The application must not answer after this one.
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        if self.scope:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
