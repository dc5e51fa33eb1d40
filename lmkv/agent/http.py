"""The HTTP application of the agent API, built with FastAPI. The application calls a `CacheService`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from html import escape
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import quote

from attrs import define, field, frozen
from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkv.agent.peers import Call, PeerError, Peers, answering, merged, merged_requests, merged_stats
from lmkv.agent.service import CacheService, Prompt
from lmkv.errors import LmkvError, UsageError, safe_repr

logger = logging.getLogger("lmkv.agent")


# -- the pages --------------------------------------------------------------------------------------------


PAGE = files("lmkv.agent").joinpath("page.html").read_text(encoding="utf-8")


def source_of(text: str) -> str:
    """Return the hash of a script or style, in the form that a Content-Security-Policy needs."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source_of(element: str) -> str:
    return source_of(PAGE.partition(f"<{element}>")[2].partition(f"</{element}>")[0])


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_source_of('script')}; style-src {_source_of('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font: 600 1rem ui-monospace, monospace; margin: 2rem 0 .25rem; border-top: 1px solid #8884; padding-top: 1rem; }
p { margin: .25rem 0; white-space: pre-line; }
table { border-collapse: collapse; margin-top: .5rem; }
td { padding: .1rem 1.5rem .1rem 0; vertical-align: top; }
pre { background: #8881; padding: .5rem .75rem; border-radius: 6px; overflow-x: auto; }
code { font-family: ui-monospace, monospace; }
"""
REFERENCE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {source_of(STYLE)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def reference(document: Mapping[str, Any]) -> str:
    """Return an HTML page with the API reference from an OpenAPI document."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>lmkv</title><style>{STYLE}</style>"
    intro = (
        "<h1>lmkv</h1><p>Each call needs the header <code>Authorization: Bearer TOKEN</code>, where the server has a "
    )
    intro += "token: it is in <code>agent_token</code> or the file that <code>agent_token_file</code> names. "
    intro += 'The same as OpenAPI: <a href="/openapi.json">/openapi.json</a></p>'
    return head + intro + "".join(_calls(document))


def _calls(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            yield f"<h2>{escape(f'{method.upper()} {path}')}</h2><p>{_marked(call.get('description', ''))}</p>"
            fields = [
                (each["name"], {"description": "in the address", **each["schema"]})
                for each in call.get("parameters", ())
            ]
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if name := next((each["$ref"] for each in body.get("anyOf", [body]) if "$ref" in each), ""):
                schema = document["components"]["schemas"][name.rpartition("/")[2]]
                yield f"<p>{_marked(schema.get('description', ''))}</p>"
                fields += schema["properties"].items()
            if fields:
                yield f"<table>{''.join(_row(*each) for each in fields)}</table>"
            yield f"<pre>{escape(_curl(method, path))}</pre>"
            if answer := EXAMPLES.get((method, path), ({}, None))[1]:
                yield f"<pre>{escape(json.dumps(answer))}</pre>"


def _marked(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _row(name: str, schema: Mapping[str, Any]) -> str:
    kinds = [each.get("type", "") for each in schema.get("anyOf", [schema])]
    kind = " or ".join(each for each in kinds if each not in ("", "null"))
    default = schema.get("default")
    shown = schema.get("description", "") + ("" if not default else f"; {default} unless given")
    return f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}<td>{_marked(shown)}"


def _curl(method: str, path: str) -> str:
    body = EXAMPLES.get((method, path), ({}, None))[0]
    words = ["curl", *(["-X", "DELETE"] if method == "delete" else []), '-H "Authorization: Bearer $TOKEN"']
    if body:
        words.append(f"--json '{json.dumps(body)}'")
    return " ".join([*words, f"127.0.0.1:8377{re.sub('{.*?}', 'NAME', path)}"])


EXAMPLES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any] | None]] = {
    ("post", "/v1/lookup"): (
        {"text": "You are a helpful assistant."},
        {"total_tokens": 28, "hit_tokens": 27, "sources": {"cpu": 27}},
    ),
    ("post", "/v1/prefetch"): (
        {"text": "You are a helpful assistant.", "wait": 10},
        {"id": "f3a1", "found_tokens": 28, "ready_tokens": 28, "done": True},
    ),
    ("post", "/v1/pin"): (
        {"text": "You are a helpful assistant.", "seconds": 600},
        {"pinned_tokens": 28, "seconds": 600.0},
    ),
    ("post", "/v1/unpin"): ({"text": "You are a helpful assistant."}, {"unpinned_chunks": 1}),
    ("post", "/v1/clear"): ({"text": "You are a helpful assistant."}, {"deleted_chunks": 1}),
}
"""For each call an example of its body and an example of its answer. The keys are `(method, path)`."""


# -- the last hour ----------------------------------------------------------------------------------------


_OF_TIER = ("name", "used_bytes", "chunks", "hits", "evictions")


@define(eq=False, slots=False)
class History:
    """Samples the statistics of all engines every `interval` seconds, and keeps the last `size` samples."""

    _stats: Callable[[], Awaitable[dict[str, Any]]]
    _interval: float = 10.0
    _size: int = 361
    _failed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=self._size)

    async def run(self) -> None:
        while True:
            try:
                stats = await self._stats()
                # A total without an engine would look like a drop.
                if not any("unavailable" in engine for engine in stats.get("engines", ())):
                    self._samples.append(_sample(stats))
            except LmkvError:
                # All engines are shutting down, this one too.
                pass
            except Exception as error:
                if not self._failed:
                    logger.warning(
                        "lmkv: the agent API cannot read its statistics: %s; the history has a gap", safe_repr(error)
                    )
                self._failed = True
            await asyncio.sleep(self._interval)

    def snapshot(self) -> dict[str, Any]:
        return {"interval": self._interval, "samples": list(self._samples)}


def _sample(stats: dict[str, Any]) -> dict[str, Any]:
    tiers = [{name: tier[name] for name in _OF_TIER} for tier in stats["tiers"]]
    return {**{name: stats[name] for name in ("time", "lookup_tokens", "hit_tokens")}, "tiers": tiers}


# -- who may ask, and how much ----------------------------------------------------------------------------


_TOKEN_BYTES = 32
_MIN_BYTES, _MAX_BYTES = 1 << 20, 8 << 20


def max_body_bytes(longest: int) -> int:
    """Return the largest number of bytes of a request body, for prompts of up to `longest` tokens.

    The size is limited because Python threads wait while a body is parsed.
    """
    return min(max(_MIN_BYTES, _TOKEN_BYTES * longest), _MAX_BYTES)


PROTECTED = "/v1/"
_SHOWN_ERRORS = 3


@frozen
class Guard:
    """An ASGI application that forwards requests to `app`, but refuses wrong tokens and too large bodies.

    `token`: the text that requests below `/v1/` must send; None to accept all requests. `most`: largest number of bytes
    of a body.
    """

    _app: ASGIApp
    _token: str | None
    _most: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._admits(scope):
            await self._answer(scope, _bounded(receive, self._most), send)
        elif scope["path"].startswith(PROTECTED):
            refusal = as_json("the token is missing or wrong: send agent_token as Authorization: Bearer TOKEN", 401)
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
            # The server is shutting down, and waits for this answer.
            if begun:
                raise
            await as_json("the engine is shutting down", 503)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, f"Bearer {self._token}".encode())


def _closing(send: Send) -> Send:
    """Return a `send` function that closes the connection after the response.

    Used for callers without the token, which may not keep connections open.
    """

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
            raise HTTPException(413, f"the request's body is too large: the longest prompt needs at most {most} bytes")
        return message

    return receive_at_most


def as_json(detail: str, status: int) -> Response:
    """Return an error response with the reason `detail`. The body is ASCII, because `detail` may have surrogates."""
    return Response(json.dumps({"detail": detail}), status, media_type="application/json")


async def refused(_: Request, error: Any) -> Response:
    """Return an error response that names the wrong fields, but not their values, which may be prompts and salts."""
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(map(str, each['loc']))[:80]}: {each['msg']}" for each in error.errors()[:_SHOWN_ERRORS]]
    return as_json("; ".join(wrong), 422)


# -- the calls --------------------------------------------------------------------------------------------


_BEARER = HTTPBearer(auto_error=False)
_MAX_FIELDS = 256


class _AnyText(PathConvertor):
    """Matches the rest of a URL path, including slashes and line breaks."""

    regex = "(?s:.*)"


register_url_convertor("any_text", _AnyText())


class PromptBody(BaseModel):
    """A prompt: exactly one of `text`, `messages` and `tokens`."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(default=None, description="the prompt as text")
    messages: list[dict[str, Any]] | None = Field(default=None, fail_fast=True, description="as a chat's messages")
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]] | None = Field(
        default=None, fail_fast=True, description="as token ids"
    )
    cache_salt: str | None = Field(default=None, description="as in requests with this prompt")
    tags: dict[str, str] = Field(default={}, description="as in requests with this prompt")
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True, description="as in the chat's request")
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="as in the chat's request")
    engine: int | None = Field(default=None, description="the number of the only engine to ask")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, given: Any) -> Any:
        """Reject a body with too many fields before pydantic validates them, because a million fields take many
        seconds.
        """
        for fields in (given, given.get("tags")) if isinstance(given, dict) else ():
            if isinstance(fields, dict) and len(fields) > _MAX_FIELDS:
                raise ValueError(f"the request has more than {_MAX_FIELDS} fields or tags")
        return given

    def prompt(self) -> Prompt:
        template = self.chat_template_kwargs | ({} if self.tools is None else {"tools": self.tools})
        if template and self.messages is None:
            raise UsageError("tools and chat_template_kwargs need messages, not text or tokens")
        if "chat_template" in template:
            raise UsageError("chat_template is not accepted: the server uses its own")
        return Prompt(self.text, self.messages, self.tokens, self.cache_salt, self.tags, template)


class SessionBody(BaseModel):
    """The salt and tags of a session. Another salt or other tags mean a different session."""

    model_config = ConfigDict(extra="forbid")

    cache_salt: str | None = Field(default=None, description="as in the session's requests")
    tags: dict[str, str] = Field(default={}, max_length=_MAX_FIELDS, description="as in the session's requests")


class PrefetchBody(PromptBody):
    """A prompt to load: exactly one of `text`, `messages` and `tokens`."""

    id: str | None = Field(default=None, pattern=r"^[\w-]{1,64}$", description="a name for the prefetch")
    wait: float = Field(default=0.0, ge=0, le=60, description="longest wait for the end, in seconds")


class PinBody(PromptBody):
    """A prompt to keep in host memory: exactly one of `text`, `messages` and `tokens`."""

    seconds: float | None = Field(default=None, gt=0, le=86_400, description="seconds of the pin, else `pin_ttl`")


class ClearBody(PromptBody):
    """The chunks to delete: those of a prompt, `everything`, or those of a `namespace`.

    `namespace`: the first digits of the namespace's digest, as `lmkv inspect` shows them.
    """

    everything: bool = Field(default=False, description="delete all chunks")
    namespace: str | None = Field(
        default=None, pattern=r"^[0-9a-fA-F]{1,64}$", description="delete the namespace that begins with these digits"
    )


def application(
    service: CacheService,
    token: str | None,
    peers: Peers | None = None,
    longest: int = 1 << 18,
    about: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Return the HTTP application of the agent API for a service.

    `token`: the text that requests below `/v1/` must send as `Authorization: Bearer ...`; None to accept all requests.
    `peers`: the other engines of the server. `longest`: number of tokens of the longest prompt; this number limits the
    size of a request's body. `about`: names and versions of the model, vLLM and lmkv.
    """
    started = time.time()
    peers = peers or Peers()

    async def authorized(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        # The guard has checked already. This declares the token in the OpenAPI document.
        if token is not None and not hmac.compare_digest((given.credentials if given else "").encode(), token.encode()):
            raise HTTPException(401, "the token is missing or wrong: send agent_token as Authorization: Bearer TOKEN")

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
            raise HTTPException(404, f"there is no {kind} {name}, or it has expired")
        return merged(found)

    @v1.post("/lookup")
    async def lookup(body: PromptBody) -> dict[str, Any]:
        """Return how many of a prompt's first tokens are stored, and in which tiers."""
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
        """Return the progress of a prefetch."""
        return await named(_at_once(lambda: service.prefetched(name)), "GET", "prefetch", name)

    @v1.delete("/prefetch/{name}")
    async def cancel(name: str) -> dict[str, Any]:
        """Stop a prefetch, and let its chunks be evicted."""
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
        """Delete a prompt's chunks or all chunks from every tier, or all chunks of another namespace in the folder."""
        if (body.everything or body.namespace) and len(body.model_fields_set - {"engine"}) > 1:
            raise UsageError("salt and tags are only for a prompt, as chunks do not record salts: leave both out")
        return await each(lambda: cleared(body), "/v1/clear", body)

    def cleared(body: ClearBody) -> dict[str, Any]:
        if body.namespace:
            return service.clear_namespace(body.namespace)
        return service.clear(None if body.everything else body.prompt())

    @v1.get("/stats")
    async def stats() -> dict[str, Any]:
        """Return the counters of the tiers, and how many tokens were looked up and found."""
        return await stats_of_all()

    @v1.get("/about")
    async def about_it() -> dict[str, Any]:
        """Return the model, the versions of lmkv and vLLM, and the seconds since the start."""
        return {**(about or {}), "uptime": time.time() - started}

    @v1.get("/history")
    async def samples() -> dict[str, Any]:
        """Return the counters for every ten seconds of the last hour."""
        return history.snapshot()

    @v1.get("/trace")
    async def trace(after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0) -> dict[str, Any]:
        """Return which chunks requests used, from the request with number `after` on, for lmkv record.

        Chunks have names that mean nothing outside this process."""
        return dict(service.trace(after))

    @v1.get("/value")
    async def value() -> dict[str, Any]:
        """Return estimates of how many hits larger or smaller tiers would give, from a sample of requests."""
        return dict(await asyncio.get_running_loop().run_in_executor(None, service.value))

    @v1.get("/requests")
    async def requests(limit: Annotated[int, Query(ge=1, lt=1 << 63)] = 200) -> dict[str, Any]:
        """Return up to 200 reports of the last requests, newest first, with their found and missed tokens."""
        return merged_requests(await peers.ask(_at_once(service.requests), "GET", "/v1/requests"), limit)

    @v1.get("/explain/{request:any_text}")
    async def explain(request: str) -> dict[str, Any]:
        """Return the report of one request, with a sentence that explains which tokens the request missed and why.

        If the request has several prompts or answers, `parts` has the report of each.
        """
        call = _at_once(lambda: service.explain(request))
        found = await peers.ask(call, "GET", f"/v1/explain/{quote(request, safe='')}")
        parts = [{"engine": n, **part} for n, one in answering(found).items() for part in one.pop("parts", [one])]
        if not parts:
            raise HTTPException(404, f"request {request} is unknown or too old: /v1/requests lists the last requests")
        return {**parts[0], "parts": parts} if len(parts) > 1 else parts[0]

    @v1.post("/engines", include_in_schema=False)
    async def announced(engine: Annotated[int, Body(embed=True)]) -> dict[str, Any]:
        """Note that the engine with this number runs."""
        peers.announced(engine)
        return {}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference(app.openapi()), headers=REFERENCE_HEADERS)

    app.include_router(v1)
    return app


def _at_once(call: Callable[[], dict[str, Any] | None]) -> Call:
    """Return a call that runs in the event loop's thread, for short work that must not wait for other prompts."""

    async def made() -> dict[str, Any] | None:
        return call()

    return made


async def _as_answer(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, PeerError) else 400 if isinstance(error, UsageError) else 503
    return as_json(str(error), status)
