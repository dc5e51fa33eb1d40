"""Arbitrary answers of another engine, through real sockets: engine 0 answers for itself, and counts no nonsense."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import frozen
from hypothesis import given, strategies as st

import lmkv.agent.server
from lmkv.agent.client import Client
from lmkv.agent.http import _sample
from tests.agent.rude import RudePeer, as_http, as_json
from tests.agent.serving import TOKEN, one_of, put, service_of, short_socket, store_over
from tests.agent.test_fuzz_http import ANSWERS, texts, values

TEXT = "the 24 bytes of a prompt"
TIER = {
    "hits": 1, "reads": 1, "read_bytes": 1, "read_failures": 0, "lost": 0, "writes": 1, "written_bytes": 1,
    "write_rejects": 0, "write_failures": 0, "evictions": 0, "dropped": 0, "prefetched": 0, "prefetch_hits": 0,
    "prefetch_expired": 0, "name": "cpu", "chunks": 1, "used_bytes": 4096, "capacity_bytes": 8192, "states": 0,
    "breaker": "closed", "write_breaker": "closed", "hung_reads": 0, "hung_writes": 0,
}  # fmt: skip
STATS = {
    "time": 1.5, "tiers": [TIER, TIER | {"name": "disk", "capacity_bytes": None}], "leased": 0, "pinned": 0,
    "writing": 0, "loading": 0, "pending_io": 0, "tenants": {"cpu": {"": 4096}}, "loads_off": False,
    "lookup_tokens": 5, "hit_tokens": 4,
}  # fmt: skip
REPORT = {
    "request": "cmpl-1", "time": 1.5, "running": False, "tokens": 9, "vllm_tokens": 0, "hit_tokens": 8,
    "sources": {"cpu": 8}, "wait_seconds": 0.1, "load_bytes": 1, "load_seconds": 0.1,
    "missed": {"reason": "evicted", "tokens": 1, "tier": "disk", "seconds_ago": 3.0}, "explanation": "It was.",
}  # fmt: skip
LOOKED_UP = {"total_tokens": 24, "hit_tokens": 8, "sources": {"cpu": 8}}
ALIKE: list[dict[str, Any]] = [
    *(STATS, LOOKED_UP, {"lookup_tokens": 5, "hit_tokens": 4, "requests": [REPORT]}, REPORT | {"parts": [REPORT]}),
    *({"id": "mine", "done": True, "found_tokens": 1, "ready_tokens": 1}, {"pinned_tokens": 4, "seconds": 5}),
]
CALLS = [
    *(("GET", "/v1/stats"), ("GET", "/v1/requests"), ("POST", "/v1/lookup"), ("POST", "/v1/pin")),
    *(("GET", "/v1/prefetch/mine"), ("GET", "/v1/explain/cmpl-1"), ("DELETE", "/v1/session/mine")),
]
odd = values | st.sampled_from([2**63, -1, 10**4000, 1e308, "\x1b]0;owned\x07", "[/b]", "[bold]"])


@st.composite
def nearly(draw: st.DrawFn, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer with something else in some place, or without that, or with more."""
    answer: dict[str, Any] = json.loads(json.dumps(like or draw(st.sampled_from(ALIKE))))
    for _ in range(draw(st.integers(0, 2))):
        at: Any = answer
        while True:
            places = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            if isinstance(at[place], dict | list) and draw(st.booleans()):
                at = at[place]
                continue
            if draw(st.booleans()):
                # Drawn objects are not to be changed.
                at[place] = copy.deepcopy(draw(odd))
            else:
                del at[place]
            break
        if isinstance(at, dict):
            at |= draw(
                st.dictionaries(texts | st.sampled_from(["engine", "engines", "unavailable", "parts"]), odd, max_size=1)
            )
    return answer


bodies = st.one_of(
    nearly().map(json.dumps).map(str.encode),
    values.map(json.dumps).map(str.encode),
    st.binary(max_size=100),
    # Made of short parts: Hypothesis shows what it draws from.
    st.sampled_from([(b"[", 100_000), (b'{"a":', 20_000)]).map(lambda part: part[0] * part[1]),
    st.sampled_from([b'{"time": NaN}', b'{"time": ' + b"9" * 9000 + b"}"]),
)
headers = st.sampled_from(["", "", "", "Content-Encoding: gzip\r\n", "Content-Type: \x1b[2J\r\n", "Location: /\r\n"])
answers = st.one_of(
    st.builds(as_http, bodies, st.sampled_from([200] * 8 + [400, 404, 422, 500, 503, 301, 999]), headers),
    nearly().map(as_json),
    st.binary(max_size=200),
    bodies.map(lambda body: as_http(body)[:-1]),
    st.sampled_from(
        [b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}", b"HTTP/1.1 200 \x1b[2J\r\n\r\n{}", b"\0" * 9000]
    ),
)


@frozen
class Engine:
    """Engine 0 with another one that answers anything."""

    client: Client
    other: RudePeer


@contextmanager
def beside_another(folder: Path) -> Iterator[Engine]:
    first = short_socket()
    with pytest.MonkeyPatch.context() as patch, store_over(folder) as store, ExitStack() as stack:
        # Or the search would wait most of the time.
        patch.setattr(lmkv.agent.server, "_SHARE", 10.0)
        put(store, TEXT)
        server = stack.enter_context(one_of(service_of(store), first))
        other = stack.enter_context(RudePeer(first.private(1)))
        yield Engine(stack.enter_context(Client(server.url, TOKEN)), other)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with beside_another(tmp_path_factory.mktemp("peers") / "kv") as engine:
        yield engine


def sent(engine: Engine, method: str, path: str, answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and answer of engine 0, while the other one answers so."""
    engine.other.bytes = answer
    engine.client.announce(1)
    try:
        return 200, engine.client.send(method, path, {"text": TEXT} if method == "POST" else None)
    except httpx.HTTPStatusError as error:
        return error.response.status_code, json.loads(error.response.text)


def answered(engine: Engine, method: str, path: str, answer: bytes) -> None:
    status, found = sent(engine, method, path, answer)
    assert TOKEN not in json.dumps(found)
    assert status in ANSWERS
    if status != 200:
        assert found["detail"].isprintable()
        return
    if path == "/v1/stats":
        assert _sample(found)["tiers"][0]["name"] == "cpu"
    if path == "/v1/lookup":
        assert found.get("engines", [found])[0]["hit_tokens"] == 23
    for other in found.get("engines", ()):
        assert other["engine"] in (0, 1)
        assert len(other.get("unavailable", "")) <= 200
        assert other.get("unavailable", "").isprintable()


@given(st.sampled_from(CALLS), answers)
def test_any_answer_of_another_engine(engine: Engine, call: tuple[str, str], answer: bytes) -> None:
    errors: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    try:
        answered(engine, *call, answer)
    finally:
        logging.getLogger("uvicorn.error").removeHandler(handler)
    assert errors == []


@pytest.mark.parametrize("call", CALLS)
def test_the_answers_that_are_like_one_are_taken(engine: Engine, call: tuple[str, str]) -> None:
    """Or the search would find nothing but refusals."""
    taken = 0
    for alike in ALIKE:
        status, found = sent(engine, *call, as_json(alike))
        taken += status == 200 and not any("unavailable" in each for each in found.get("engines", [found]))
    assert taken == (call[1] != "/v1/session/mine")
