"""`CacheService` over HTTP: a FastAPI application."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.convertors import PathConvertor, register_url_convertor

from lmkv.agent.guard import Guard, as_json, max_body_bytes, refused
from lmkv.agent.history import History
from lmkv.agent.page import PAGE, PAGE_HEADERS
from lmkv.agent.peers import Call, PeerError, Peers, answering, merged, merged_requests, merged_stats
from lmkv.agent.reference import HEADERS, reference
from lmkv.agent.service import CacheService, Prompt
from lmkv.errors import LmkvError, UsageError

_BEARER = HTTPBearer(auto_error=False)
_MAX_FIELDS = 256


class _AnyText(PathConvertor):
    """The rest of a path: slashes and line breaks, too."""

    regex = "(?s:.*)"


register_url_convertor("any_text", _AnyText())


class PromptBody(BaseModel):
    """A prompt: one of `text`, `messages` and `tokens`. `engine`: number of the only engine to ask.

    `tools`, `chat_template_kwargs`: the same as in the request of the chat.
    """

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = Field(default=None, fail_fast=True)
    cache_salt: str | None = None
    tags: dict[str, str] = {}
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    chat_template_kwargs: dict[str, Any] = {}
    engine: int | None = None

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, given: Any) -> Any:
        """Reject a million fields before pydantic validates every one of them, which takes many seconds."""
        for fields in (given, given.get("tags")) if isinstance(given, dict) else ():
            if isinstance(fields, dict) and len(fields) > _MAX_FIELDS:
                raise ValueError(f"there are more than {_MAX_FIELDS} fields or tags")
        return given

    def prompt(self) -> Prompt:
        template = self.chat_template_kwargs | ({} if self.tools is None else {"tools": self.tools})
        if template and self.messages is None:
            raise UsageError("tools and chat_template_kwargs belong to messages")
        if "chat_template" in template:
            raise UsageError("chat_template is the server's, and not for a caller to give")
        return Prompt(self.text, self.messages, self.tokens, self.cache_salt, self.tags, template)


class SessionBody(BaseModel):
    """`cache_salt`, `tags`: those of the session's requests; others have sessions of their own."""

    model_config = ConfigDict(extra="forbid")

    cache_salt: str | None = None
    tags: dict[str, str] = Field(default={}, max_length=_MAX_FIELDS)


class PrefetchBody(PromptBody):
    """`wait`: seconds to wait for its end. `id`: a name for it; random unless it is given."""

    id: str | None = Field(default=None, pattern=r"^[\w-]{1,64}$")
    wait: float = Field(default=0.0, ge=0, le=60)


class PinBody(PromptBody):
    """`seconds`: how long the pin lasts; the engine's `pin_ttl` unless it is given."""

    seconds: float | None = Field(default=None, gt=0, le=86_400)


class ClearBody(PromptBody):
    """A prompt, or `everything`, or a `namespace` by its first digits, as `lmkv inspect` shows them."""

    everything: bool = False
    namespace: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{1,64}$")


def application(
    service: CacheService, token: str | None, peers: Peers | None = None, longest: int = 1 << 18
) -> FastAPI:
    """The routes. With a token each request must have it: `Authorization: Bearer ...`. The page needs none.

    `longest`: tokens of the longest prompt, which bounds the size of a body.
    """
    peers = peers or Peers()

    async def authorized(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        # The guard has checked already. This declares the token in the OpenAPI document.
        if token is not None and not hmac.compare_digest((given.credentials if given else "").encode(), token.encode()):
            raise HTTPException(401, "the header Authorization: Bearer TOKEN is missing or wrong")

    async def stats_of_all() -> dict[str, Any]:
        return merged_stats(await peers.ask(_at_once(service.stats), "GET", "/v1/stats"))

    history = History(stats_of_all)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in (history.run(), peers.announce())]
        yield
        for task in tasks:
            task.cancel()
        await peers.close()

    # FastAPI's own documentation pages load scripts from other servers.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = FastAPI(title="lmkv", summary="The KV cache of an engine", lifespan=running, redirect_slashes=False, **pages)
    app.add_exception_handler(LmkvError, _as_answer)
    app.add_exception_handler(RequestValidationError, refused)
    app.add_middleware(Guard, token=token, most=max_body_bytes(longest))
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(authorized)])

    async def each(call: Call, path: str, body: PromptBody) -> dict[str, Any]:
        fields = body.model_dump(exclude_defaults=True)
        return merged(await peers.ask(call, "POST", path, fields))

    async def named(
        call: Call, method: str, kind: str, name: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        found = await peers.ask(call, method, f"/v1/{kind}/{quote(name, safe='')}", body)
        if not found:
            raise HTTPException(404, f"there is no {kind} {name}, or its time is over")
        return merged(found)

    @v1.post("/lookup")
    async def lookup(body: PromptBody) -> dict[str, Any]:
        """How many leading tokens of a prompt are stored, and where."""
        return await each(lambda: service.lookup(body.prompt()), "/v1/lookup", body)

    @v1.post("/prefetch")
    async def prefetch(body: PrefetchBody) -> dict[str, Any]:
        """Load a prompt's chunks into host memory ahead of its request."""
        name = body.id = body.id or secrets.token_hex(8)

        async def begun() -> dict[str, Any]:
            loop = asyncio.get_running_loop()
            state, ended = await loop.run_in_executor(None, lambda: service.prefetch(body.prompt(), name))
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.wrap_future(ended), body.wait)
            return state()

        return await each(begun, "/v1/prefetch", body)

    @v1.get("/prefetch/{name}")
    async def prefetched(name: str) -> dict[str, Any]:
        """How far a prefetch is."""
        return await named(_at_once(lambda: service.prefetched(name)), "GET", "prefetch", name)

    @v1.delete("/prefetch/{name}")
    async def cancel(name: str) -> dict[str, Any]:
        """Stop a prefetch, and keep its chunks no longer than any others."""
        answer = {"id": name, "cancelled": True}
        call = _at_once(lambda: answer if service.cancel(name) else None)
        return await named(call, "DELETE", "prefetch", name)

    @v1.delete("/session/{name:any_text}")
    async def end_session(name: str, body: SessionBody | None = None) -> dict[str, Any]:
        """End a session of `agent_hint`: its chunks that no other session shares are evicted first."""
        body = body or SessionBody()

        def end() -> dict[str, Any] | None:
            known = service.end_session(name, body.cache_salt, body.tags)
            return {"session": name, "ended": True} if known else None

        return await named(end, "DELETE", "session", name, body.model_dump(exclude_defaults=True))

    @v1.post("/pin")
    async def pin(body: PinBody) -> dict[str, Any]:
        """Keep a prompt's chunks in host memory for a while."""
        return await each(lambda: service.pin(body.prompt(), body.seconds), "/v1/pin", body)

    @v1.post("/unpin")
    async def unpin(body: PromptBody) -> dict[str, Any]:
        """End the pins of a prompt's chunks."""
        return await each(lambda: service.unpin(body.prompt()), "/v1/unpin", body)

    @v1.post("/clear")
    async def clear(body: ClearBody) -> dict[str, Any]:
        """Delete a prompt's chunks, or everything, from every tier; or another namespace of the folder."""
        if (body.everything or body.namespace) and len(body.model_fields_set - {"engine"}) > 1:
            raise UsageError("this cannot be narrowed down: chunks do not say whose they are; give a prompt")
        return await each(lambda: cleared(body), "/v1/clear", body)

    def cleared(body: ClearBody) -> dict[str, Any]:
        if body.namespace:
            return service.clear_namespace(body.namespace)
        return service.clear(None if body.everything else body.prompt())

    @v1.get("/stats")
    async def stats() -> dict[str, Any]:
        """Counters of the tiers, and tokens that requests looked up and found."""
        return await stats_of_all()

    @v1.get("/history")
    async def samples() -> dict[str, Any]:
        """Samples of the counters over the last hour."""
        return history.snapshot()

    @v1.get("/trace")
    async def trace(after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0) -> dict[str, Any]:
        """Which chunks the requests used from this number on, by names of this process alone: see lmkv record."""
        return dict(service.trace(after))

    @v1.get("/value")
    async def value() -> dict[str, Any]:
        """Estimates of the hits with more or less of each tier, from a sample of this engine's requests."""
        return dict(await asyncio.get_running_loop().run_in_executor(None, service.value))

    @v1.get("/requests")
    async def requests(limit: Annotated[int, Query(ge=1, lt=1 << 63)] = 200) -> dict[str, Any]:
        """Reports of the last requests, 200 at most, newest first: found and missed tokens."""
        return merged_requests(await peers.ask(_at_once(service.requests), "GET", "/v1/requests"), limit)

    @v1.get("/explain/{request:any_text}")
    async def explain(request: str) -> dict[str, Any]:
        """Why a request was not loaded from the cache, or not all of it. Several prompts or answers have `parts`."""
        call = _at_once(lambda: service.explain(request))
        found = await peers.ask(call, "GET", f"/v1/explain/{quote(request, safe='')}")
        parts = [{"engine": n, **part} for n, one in answering(found).items() for part in one.pop("parts", [one])]
        if not parts:
            raise HTTPException(404, f"request {request} is not among the last ones that were scheduled")
        return {**parts[0], "parts": parts} if len(parts) > 1 else parts[0]

    @v1.post("/engines", include_in_schema=False)
    async def announced(engine: Annotated[int, Body(embed=True)]) -> dict[str, Any]:
        """Another engine of this server announces itself by its number."""
        peers.announced(engine)
        return {}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference(app.openapi()), headers=HEADERS)

    app.include_router(v1)
    return app


def _at_once(call: Callable[[], dict[str, Any] | None]) -> Call:
    """A call of the loop's thread, for what takes little time: it does not wait behind others' prompts."""

    async def made() -> dict[str, Any] | None:
        return call()

    return made


async def _as_answer(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, PeerError) else 400 if isinstance(error, UsageError) else 503
    return as_json(str(error), status)
