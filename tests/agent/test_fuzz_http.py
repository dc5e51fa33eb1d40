"""Arbitrary requests to the agent API: a documented answer, within bounds, that tells nobody a secret."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from attrs import frozen
from hypothesis import example, given, strategies as st
from pydantic import ValidationError

from lmkv.agent.client import Client
from lmkv.agent.http import PromptBody, application, max_body_bytes
from lmkv.agent.server import AgentServer
from lmkv.agent.service import CacheService
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.policies import LRU
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from lmkv.vllm.scheduler.observer import TraceRecorder
from tests.agent.serving import SIZE, TOKEN, at_port, connections, keys_of, tokenize
from tests.kit import LIMIT, eventually

Receive = Callable[[], Awaitable[dict[str, Any]]]
SALT = "the-salt-of-a-tenant"
ANSWERS = {200, 400, 401, 404, 405, 413, 422, 503}
OWN = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")]
POSTS = [f"/v1/{verb}" for verb in ("lookup", "prefetch", "pin", "unpin", "clear", "engines")]


@pytest.fixture(scope="module")
def service() -> Iterator[CacheService]:
    store = TieredStore(Tier(CPUPinnedBackend(64 << 12, 4096), LRU()))
    trace = TraceRecorder(SIZE, 4096, ManualClock()).since
    yield CacheService(store, keys_of, tokenize, chunk_size=SIZE, pin_ttl=60.0, trace=trace)
    store.close()


@frozen
class Asked:
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def answer(service: CacheService, asked: Asked, receive: Receive | None = None) -> tuple[int, bytes]:
    """Status and body, from the application itself: what it raises is raised here. `receive`: instead of the body."""
    sent: list[dict[str, Any]] = []
    path, _, query = asked.path.partition("?")
    raw_path, query_string = (part.encode("utf-8", "surrogatepass") for part in (path, query))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "server": ("127.0.0.1", 8377), "client": ("127.0.0.1", 9), "method": asked.method, "path": path,
        "raw_path": raw_path, "query_string": query_string, "headers": asked.headers,
    }  # fmt: skip
    parts = [asked.body[:100], asked.body[100:]]

    async def receive_parts() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(LIMIT)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app: Any = application(service, TOKEN)
    asyncio.run(asyncio.wait_for(app(scope, receive or receive_parts, send), LIMIT))
    start, *rest = sent
    assert start["type"] == "http.response.start"
    assert not rest[-1].get("more_body", False)
    return start["status"], b"".join(message["body"] for message in rest)


# -- what is asked ---------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.floats(), st.integers(10**400, 10**401), st.sampled_from([2**32, -1, 1e308]))
texts = st.one_of(st.text(max_size=20), st.text(st.characters(categories=["Cs", "Cc", "Ll"]), max_size=5))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content", "tools"]), values, max_size=3), max_size=3)
FIELDS = {
    "text": texts | values, "messages": messages | values, "tokens": st.lists(numbers, max_size=20) | values,
    "cache_salt": st.just(SALT) | values, "tags": st.dictionaries(texts, texts, max_size=2) | values,
    "wait": st.just(0) | st.floats(61) | values, "seconds": st.floats() | values,
    "everything": st.booleans() | values, "id": texts | values, "engine": st.integers() | values, "other": values,
    "tools": st.lists(st.dictionaries(texts, values, max_size=2), max_size=2) | values,
    "chat_template_kwargs": st.dictionaries(texts | st.just("chat_template"), values, max_size=2) | values,
}  # fmt: skip
fields = st.fixed_dictionaries({}, optional=FIELDS)


def quick(body: dict[str, Any]) -> bool:
    """It asks for no wait that is granted: those are no hangs."""
    wait = body.get("wait")
    return not isinstance(wait, int | float | str)


bodies = st.one_of(
    fields.filter(quick).map(json.dumps).map(str.encode),
    values.map(json.dumps).map(str.encode),
    st.binary(max_size=200),
    st.sampled_from([b"[" * 100_000, b'{"text":' * 10_000, b'{"tokens": [' + b"9" * 5000 + b"]}", b"\xef\xbb\xbf{}"]),
    st.sampled_from(
        [b'{"text": "\\ud800"}', b'{"tokens": [NaN]}', b'{"tokens": [1e999]}', b'{"text": "a", "text": 1}']
    ),
)
authorizations = st.one_of(
    st.just(f"Bearer {TOKEN}".encode()),
    st.just(f"Bearer {TOKEN}".encode()),
    st.binary(max_size=20),
    st.sampled_from([b"Bearer", b"Bearer ", f"bearer {TOKEN}".encode(), TOKEN.encode(), b"Bearer \xff\xfe"]),
)
headers = st.tuples(
    authorizations.map(lambda value: (b"authorization", value)),
    st.one_of(
        st.just((b"content-type", b"application/json")),
        st.tuples(
            st.sampled_from([b"content-type", b"content-length", b"transfer-encoding", b"host", b"accept", b"x"]),
            st.binary(max_size=30) | st.sampled_from([b"-1", b"1e9", b"99999999999999999999", b"multipart/form-data"]),
        ),
    ),
).map(list)
paths = st.one_of(
    st.sampled_from(POSTS),
    st.sampled_from(POSTS),
    st.sampled_from(["/v1/stats", "/", "/docs", "/openapi.json", "/v1/history", "//"]),
    st.sampled_from(["x", "-1", "5", "9" * 5000]).map(lambda limit: f"/v1/requests?limit={limit}"),
    st.integers().map(lambda after: f"/v1/trace?after={after}"),
    st.tuples(st.sampled_from(["prefetch", "explain", "session"]), st.text(max_size=20)).map(
        lambda each: f"/v1/{each[0]}/{each[1]}"
    ),
    st.text(max_size=20).map(lambda name: f"/{name}"),
)
methods = st.one_of(st.just("POST"), st.sampled_from(["GET", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "\u017f"]))
requests = st.builds(Asked, methods, paths, headers, bodies)


def refused_or_answered(service: CacheService, asked: Asked) -> int:
    status, body = answer(service, asked)
    assert status in ANSWERS
    if status >= 400 and asked.method != "HEAD":
        assert json.loads(body)["detail"]
    assert TOKEN.encode() not in body
    assert SALT.encode() not in body
    authorized = (b"authorization", f"Bearer {TOKEN}".encode()) in asked.headers
    if asked.path.startswith("/v1/") and not authorized:
        assert status in {401, 404, 405}
    return status


@given(requests)
@example(Asked("POST", "/v1/lookup", [(b"content-type", b"application/json")], b"{"))
@example(Asked("GET", f"/v1/trace?after={1 << 63}", OWN, b""))
@example(Asked("DELETE", "/v1/session/\n", OWN, b""))
def test_any_request_is_answered_as_documented(service: CacheService, asked: Asked) -> None:
    refused_or_answered(service, asked)


@given(st.sampled_from(POSTS), bodies)
@example("/v1/lookup", b'{"tokens": [NaN]}')
@example("/v1/lookup", b'{"tokens": [1e999]}')
@example("/v1/lookup", b'{"text": "\\ud800"}')
@example("/v1/lookup", b'{"text": "a", "cache_salt": "\\ud800"}')
@example("/v1/lookup", b'{"messages": [{"role": 5}]}')
@example("/v1/pin", b'{"text": "a", "seconds": 1e-320}')
@example("/v1/lookup", b'{"\\ud800": 1}')
def test_any_body_is_answered_as_documented(service: CacheService, path: str, body: bytes) -> None:
    assert refused_or_answered(service, Asked("POST", path, OWN, body)) in {200, 400, 404, 413, 422}


def test_who_has_no_token_makes_it_read_nothing(service: CacheService) -> None:
    """Or anybody on this machine fills the engine's memory."""

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    assert answer(service, Asked("POST", "/v1/lookup", [], b""), receive)[0] == 401


def test_a_body_without_end_is_refused(service: CacheService) -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1 << 20
        assert read < 20 << 20, "it reads on and on"
        return {"type": "http.request", "body": b" " * (1 << 20), "more_body": True}

    assert answer(service, Asked("POST", "/v1/lookup", OWN, b""), receive)[0] == 413


def test_a_body_is_as_large_as_the_longest_prompt_makes_it() -> None:
    """Each token as an id, with what JSON has around it; but never as much as takes long to parse."""
    assert [max_body_bytes(longest) for longest in (1, 131_072, 10_000_000)] == [1 << 20, 4 << 20, 8 << 20]
    assert len(json.dumps({"tokens": [1_000_000] * 131_072})) < max_body_bytes(131_072)


def test_of_a_million_wrong_values_one_is_looked_at() -> None:
    many = {f"{number}": 1 for number in range(100_000)}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tokens": [""] * 100_000}, "tokens.0"),
        ({"messages": [1] * 100_000}, "messages.0"),
        ({"messages": [], "tools": [1] * 100_000}, "tools.0"),
        ({"text": "a", "tags": many}, "more than 256 fields"),
        (many, "more than 256 fields"),
    ]
    for body, wrong in bodies:
        with pytest.raises(ValidationError, match=wrong) as caught:
            PromptBody.model_validate(body)
        assert caught.value.error_count() == 1


# -- raw bytes -----------------------------------------------------------------------------------------------


def among(*values: bytes) -> st.SearchStrategy[bytes]:
    """One of these, which may be too long for a repr of the strategy."""
    return st.integers(0, len(values) - 1).map(lambda number: values[number])


names = st.sampled_from([b"Host", b"X", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade"])
worths = st.one_of(
    among(b"x", b"", b"5", b"-1", b"99999999999999999999", b"chunked", b"gzip, chunked", b"close", b"keep-alive"),
    among(b"100-continue", b"websocket", b"h2c", b"a" * 20_000, b"\xff\x00"),
    st.binary(max_size=20),
)
lines = st.one_of(
    st.tuples(names, worths).map(lambda each: each[0] + b": " + each[1] + b"\r\n"),
    among(b"Host: x\r\n", f"Authorization: Bearer {TOKEN}\r\n".encode(), b" folded\r\n", b"no colon\r\n", b"a: b\n"),
)
targets = among(b"/", b"*", b"/v1/lookup", b"/v1/stats", b"//", b"/%00", b"http://x/", b"/?" + b"a" * 20_000)
starts = st.tuples(
    among(b"GET", b"POST", b"PRI", b"CONNECT", b"x" * 20_000, b""),
    targets,
    among(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b""),
).map(lambda words: b" ".join(words) + b"\r\n")
chunks = st.one_of(
    st.lists(st.binary(min_size=1, max_size=9).map(lambda data: b"%x\r\n%b\r\n" % (len(data), data)), max_size=5).map(
        b"".join
    ),
    among(
        b"0\r\n\r\n", b"0\r\nX: a\r\n\r\n", b"-1\r\n\r\n", b"fffffffffffffffff\r\n", b"1;x=" + b"a" * 20_000, b"5\r\nab"
    ),
    among(b"1\r\na\r\n" * 2000, b"{}", b'{"text": "a"}'),
)
heads = st.tuples(starts, st.lists(lines, max_size=4).map(b"".join)).map(b"".join)
whole = st.tuples(heads, st.just(b"\r\n"), chunks | st.just(b"")).map(b"".join)
streams = st.one_of(
    st.lists(whole, min_size=1, max_size=4).map(b"".join),
    st.tuples(heads, st.binary(max_size=20)).map(b"".join),
    st.tuples(whole, st.integers(1, 40)).map(lambda each: each[0] * each[1]),
    st.binary(max_size=200),
)
cuts = st.lists(st.integers(0, 300), max_size=6)


@pytest.fixture(scope="module")
def server(service: CacheService) -> Iterator[AgentServer]:
    with at_port(service) as server:
        yield server


def all_answered(server: AgentServer, sent: bytes, cuts: list[int]) -> bytes:
    """Send these bytes in pieces; returns the answer, up to the other side's end. Others are answered, too."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    found = b""
    with socket.create_connection((host, int(port)), LIMIT) as connection, suppress(ConnectionError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):
            for cut in sorted(cuts):
                connection.sendall(sent[:cut])
                sent = sent[cut:]
            connection.sendall(sent)
            with Client(server.url, TOKEN, timeout=LIMIT) as other:
                assert other.stats()["tiers"]
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            found += part
    return found


class Sent(bytes):
    """Its repr is a part of it: hypothesis refuses more."""

    def __repr__(self) -> str:
        return f"{self[:5000]!s} and {max(0, len(self) - 5000)} more"


@given(streams.map(Sent), cuts)
@example(b"POST /v1/lookup HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n", [])
@example(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nno request", [40])
@example(b"\0" * 1000, [])
@example(b"GET / HTTP/9.9\r\n\r\n", [])
@example(b"POST /v1/lookup HTTP/1.1\r\n", [])
@example(b"a: b\n" * 9, [])
def test_any_bytes_are_answered_or_cut_off(server: AgentServer, sent: bytes, cuts: list[int]) -> None:
    errors: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = errors.append  # type: ignore[method-assign,assignment]
    for name in ("asyncio", "uvicorn.error", "lmkv.agent"):
        logging.getLogger(name).addHandler(handler)
    try:
        back = all_answered(server, sent, cuts)
        eventually(lambda: not connections(server), "it is closed")
    finally:
        for name in ("asyncio", "uvicorn.error", "lmkv.agent"):
            logging.getLogger(name).removeHandler(handler)
    statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", back)}
    assert statuses <= ANSWERS | {100, 431}
    assert TOKEN.encode() not in back
    assert [record.getMessage() for record in errors] == []
