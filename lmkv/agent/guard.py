"""`Guard`: checks the token before a byte of a body is read, and bounds bodies."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOKEN_BYTES = 32
_MIN_BYTES, _MAX_BYTES = 1 << 20, 8 << 20


def max_body_bytes(longest: int) -> int:
    """Largest body for prompts of up to `longest` tokens. Parsing one blocks the interpreter."""
    return min(max(_MIN_BYTES, _TOKEN_BYTES * longest), _MAX_BYTES)


PROTECTED = "/v1/"
_SHOWN_ERRORS = 3


class Guard:
    """An ASGI application before another one. With a `token` each request below `/v1/` must have it.

    `most`: the largest body in bytes.
    """

    def __init__(self, app: ASGIApp, token: str | None, most: int) -> None:
        self._app = app
        self._most = most
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self._answer(scope, _bounded(receive, self._most), send)
        elif scope["path"].startswith(PROTECTED):
            refusal = as_json("the header Authorization: Bearer TOKEN is missing or wrong", 401)
            await refusal(scope, receive, _closing(send))
        else:
            await self._answer(scope, _bounded(receive, self._most), _closing(send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # The server is ending, and waits for this answer.
            if begun:
                raise
            await as_json("the engine is shutting down", 503)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if self._expected is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


def _closing(send: Send) -> Send:
    """Close the connection after the answer: only callers with the token keep theirs."""

    async def send_and_close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return send_and_close


def _bounded(receive: Receive, most: int) -> Receive:
    read = 0

    async def receive_at_most() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, f"the body has more than {most} bytes, which no prompt of this engine takes")
        return message

    return receive_at_most


def as_json(detail: str, status: int) -> Response:
    """A refusal with its reason, in ASCII, because the caller's text may not be encodable."""
    return Response(json.dumps({"detail": detail}), status, media_type="application/json")


async def refused(_: Request, error: Any) -> Response:
    """Name the wrong fields without their values, which are prompts and salts."""
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg']}" for each in error.errors()[:_SHOWN_ERRORS]]
    return as_json("; ".join(wrong), 422)
