"""`CacheService` over HTTP: a FastAPI application, and the thread that serves it."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Any

from attrs import frozen
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from uvicorn import Config, Server

from lmkv.agent.guard import Guard, as_json, refused
from lmkv.agent.service import CacheService, Prompt
from lmkv.errors import ConfigError, LmkvError, UsageError, shown

logger = logging.getLogger("lmkv.agent")

_UNIX = "unix:"
_END_LIMIT = 5.0


class PromptBody(BaseModel):
    """A prompt: one of `text`, `messages` and `tokens`."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = None
    cache_salt: str | None = None
    tags: dict[str, str] = {}

    def prompt(self) -> Prompt:
        return Prompt(self.text, self.messages, self.tokens, self.cache_salt, self.tags)


class PrefetchBody(PromptBody):
    """`wait`: seconds to wait for the end of it."""

    wait: float = Field(default=0.0, ge=0, le=60)


class PinBody(PromptBody):
    """`seconds`: how long; the engine's `pin_ttl` unless it is given."""

    seconds: float | None = Field(default=None, gt=0, le=86_400)


class ClearBody(PromptBody):
    """A prompt, or everything."""

    everything: bool = False


def application(service: CacheService, token: str | None) -> FastAPI:
    """The routes. With a token each request must have it: `Authorization: Bearer ...`."""

    def authorized(authorization: Annotated[str, Header()] = "") -> None:
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "the header Authorization: Bearer TOKEN is missing or wrong")

    app = FastAPI(
        title="lmkv", summary="The KV cache of an engine", dependencies=[Depends(authorized)], redirect_slashes=False
    )
    app.add_exception_handler(LmkvError, _as_answer)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_middleware(Guard, token=token)

    @app.post("/v1/lookup")
    def lookup(body: PromptBody) -> dict[str, Any]:
        """How many leading tokens of a prompt are stored, and where."""
        return service.lookup(body.prompt())

    @app.post("/v1/prefetch")
    def prefetch(body: PrefetchBody) -> dict[str, Any]:
        """Load a prompt's chunks into host memory ahead of its request."""
        return service.prefetch(body.prompt(), body.wait)

    @app.get("/v1/prefetch/{name}")
    def prefetched(name: str) -> dict[str, Any]:
        """How far a prefetch is."""
        state = service.prefetched(name)
        if state is None:
            raise HTTPException(404, f"there is no prefetch {name}, or its time is over")
        return state

    @app.delete("/v1/prefetch/{name}")
    def cancel(name: str) -> dict[str, Any]:
        """Stop a prefetch, and keep its chunks no longer than any others."""
        if not service.cancel(name):
            raise HTTPException(404, f"there is no prefetch {name}, or its time is over")
        return {"id": name, "cancelled": True}

    @app.post("/v1/pin")
    def pin(body: PinBody) -> dict[str, Any]:
        """Keep a prompt's chunks in host memory for a while."""
        return service.pin(body.prompt(), body.seconds)

    @app.post("/v1/unpin")
    def unpin(body: PromptBody) -> dict[str, Any]:
        """End the pins of a prompt's chunks."""
        return service.unpin(body.prompt())

    @app.post("/v1/clear")
    def clear(body: ClearBody) -> dict[str, Any]:
        """Delete a prompt's chunks, or everything, from every tier."""
        return service.clear(None if body.everything else body.prompt())

    @app.get("/v1/stats")
    def stats() -> dict[str, Any]:
        """The counters of the tiers."""
        return service.stats()

    return app


async def _as_answer(_: Request, error: Exception) -> Response:
    return as_json(str(error), 400 if isinstance(error, UsageError) else 503)


@frozen
class Address:
    """Where the service listens: a port of loopback, or the path of a unix socket."""

    text: str

    def of_engine(self, number: int) -> Address:
        """Of one of several engines of a server: each has the next port, or a socket of its own."""
        if not number:
            return self
        host, _, port = self.text.rpartition(":")
        unix = self.text.startswith(_UNIX) or not port.isdigit()
        return Address(f"{self.text}.{number}" if unix else f"{host}:{int(port) + number}")

    def bind(self) -> tuple[socket.socket, str]:
        """`(socket, URL)`. Raises ConfigError for other addresses, OSError where it cannot be bound."""
        # Without a path it would be an abstract socket, which is open to all users.
        if self.text.startswith(f"{_UNIX}/") and "\0" not in self.text:
            return _unix_socket(self.text.removeprefix(_UNIX)), self.text
        host, _, port = self.text.rpartition(":")
        host = host.strip("[]")
        with suppress(ValueError):
            loopback = ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
            if loopback and port.isdigit() and int(port) < 1 << 16:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                bound = socket.create_server((host, int(port)), family=family)
                literal = f"[{host}]" if ":" in host else host
                return bound, f"http://{literal}:{bound.getsockname()[1]}"
        raise ConfigError(
            f"agent_listen = {shown(self.text)} must be an address of this machine alone, 127.0.0.1:8377, or unix:/path"
        )


def _unix_socket(path: str) -> socket.socket:
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path):
            # Of a server that has ended.
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(path)
        # Its user's alone before anybody can connect, which takes a `listen`. An umask would be every thread's.
        os.chmod(path, 0o600)
    except OSError:
        bound.close()
        raise
    return bound


class AgentServer:
    """Serves an application in a thread of its own, until `close`. `url`: where."""

    def __init__(self, make: Callable[[], FastAPI], address: Address) -> None:
        self._socket, self.url = address.bind()
        config = Config(make(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = Server(config)
        self._thread = threading.Thread(target=self._run, name="lmkv-agent", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<AgentServer {self.url}>"

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except Exception:
            logger.exception("lmkv: the agent API at %s has ended; the engine goes on without it", self.url)

    def close(self) -> None:
        """End it, within seconds. Idempotent."""
        self._server.should_exit = True
        self._thread.join(_END_LIMIT)
        self._socket.close()
        if self.url.startswith(_UNIX):
            with suppress(OSError):
                os.unlink(self.url.removeprefix(_UNIX))
