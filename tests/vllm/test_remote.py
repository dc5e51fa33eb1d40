"""A remote tier under real vLLM: what another engine has stored, and a server that dies, is deaf or comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from redis import Redis

from lmkv.testing import ManualClock
from tests.kit import LIMIT, NEVER, listing_every
from tests.servers import Proxy, RedisServer, redis_server
from tests.vllm.harness import CHUNK_BYTES, Engine, engine, external_hits, generated, prompt
from tests.vllm.test_failures import DEADLINE, ask

PROMPTS = [prompt(700 + number, 1500) for number in range(6)]
FAR = 0.1
"""Seconds each way: an answer takes 200 ms."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server("valkey", tmp_path_factory.mktemp("valkey")) as server:
        yield server


def over_remote(
    model: Path, url: str, clock: ManualClock, *, ram_chunks: int = 16, **settings: Any
) -> AbstractContextManager[Engine]:
    """An engine for which no time passes, whose host memory holds two of the prompts."""
    extra = {
        "remote_url": url,
        "remote_timeout": LIMIT,
        "max_local_cpu_size": ram_chunks * CHUNK_BYTES / 2**30,
        **settings,
    }
    return engine(model, clock=clock, extra=extra)


def drained(running: Engine) -> None:
    assert running.store.drain(LIMIT)


def test_another_engine_hits_what_one_has_stored(model: Path, server: RedisServer) -> None:
    ids = prompt(690, 1500)
    with over_remote(model, server.url, ManualClock()) as first:
        cold = first.run([ids])[0]
        drained(first)
    with over_remote(model, server.url, ManualClock()) as second:
        warm = second.run([ids])[0]
        assert external_hits(warm) == 1499
        assert warm.kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "redis": 1499}
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        second.assert_nothing_leaked()
    with over_remote(model, server.url, ManualClock(), chunk_size=128) as third:
        assert external_hits(third.run([ids])[0]) == 0, "chunks of another size are other chunks"


def test_a_neighbours_chunk_is_found_by_the_next_request(model: Path, server: RedisServer) -> None:
    """The server is not listed again: what is stored behind the engine's back is found by asking for it."""
    ids, at = prompt(691, 1500), f"{server.url}/1"
    with Redis.from_url(at) as client:
        with over_remote(model, at, ManualClock()) as first:
            cold = first.run([ids])[0]
            drained(first)
        stored = {name: client.get(name) for name in client.scan_iter()}
        client.flushdb()
        with listing_every(NEVER), over_remote(model, at, ManualClock()) as second:
            assert second.store.wait_indexed(LIMIT)
            client.mset(stored)
            warm = second.run([ids])[0]
            assert warm.kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "redis": 1499}
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
            second.assert_nothing_leaked()


@pytest.fixture(scope="module")
def filled(model: Path, server: RedisServer) -> list[list[int]]:
    """Database 2 of the server has the prompts; the answers to them."""
    with over_remote(model, f"{server.url}/2", ManualClock(), ram_chunks=64) as running:
        answers = running.ids(PROMPTS)
        drained(running)
        assert running.store.stats().tiers[1].chunks == 6 * len(PROMPTS)
    return answers


def answered(running: Engine, *names: str) -> dict[str, Any]:
    """The answers of these requests; others may still wait."""
    found: dict[str, Any] = {}
    while not set(names) <= found.keys():
        found |= {output.request_id: output for output in running.llm.llm_engine.step() if output.finished}
    return found


def ask_for(running: Engine, name: str, ids: list[int], **params: Any) -> None:
    ask(running, name, ids, 8, **{"lmkv.report": True, "lmkv.skip_save": True, **params})


def ids_of(answers: dict[str, Any], *names: str) -> list[list[int]]:
    return [list(answers[name].outputs[0].token_ids) for name in names]


def test_only_who_wants_chunks_from_far_away_waits_for_them(
    model: Path, server: RedisServer, filled: list[list[int]]
) -> None:
    """No answer of the server arrives until the others are through; then each takes 200 ms."""
    proxy = Proxy(server.port)
    with over_remote(model, f"redis://127.0.0.1:{proxy.port}/2", ManualClock(), ram_chunks=64) as running:
        assert running.store.wait_indexed(LIMIT)
        assert running.ids(PROMPTS[:1]) == filled[:1]
        running.forget_local()
        proxy.latency = NEVER
        ask_for(running, "far", PROMPTS[1])
        ask_for(running, "near", PROMPTS[0])
        ask_for(running, "not to be loaded", PROMPTS[2], **{"lmkv.skip_load": True})
        others = answered(running, "near", "not to be loaded")
        assert ids_of(others, "near", "not to be loaded") == [filled[0], filled[2]]
        assert [external_hits(others[name]) for name in ("near", "not to be loaded")] == [1499, 0]
        assert "far" not in others
        assert not running.scheduler.running
        proxy.latency = FAR
        far = answered(running, "far")
        assert far["far"].kv_transfer_params["lmkv"]["sources"] == {"cpu": 0, "redis": 1499}
        assert ids_of(far, "far") == [filled[1]]
        drained(running)
        assert {tier.breaker for tier in running.store.stats().tiers} == {"closed"}, "200 ms are no failure"
        running.assert_nothing_leaked()
    proxy.close()


def test_the_wait_for_what_is_far_away_ends_with_the_deadline(
    model: Path, server: RedisServer, filled: list[list[int]]
) -> None:
    proxy, clock = Proxy(server.port), ManualClock()
    at = f"redis://127.0.0.1:{proxy.port}/2"
    with over_remote(model, at, clock, prefetch_deadline=DEADLINE, ram_chunks=64) as running:
        assert running.store.wait_indexed(LIMIT)
        proxy.latency = NEVER
        ask_for(running, "late", PROMPTS[3])
        for _ in range(50):
            running.llm.llm_engine.step()
            assert not running.scheduler.running
        clock.advance(DEADLINE + 0.01)
        late = answered(running, "late")
        assert ids_of(late, "late") == [filled[3]]
        assert external_hits(late["late"]) == 0
        assert late["late"].kv_transfer_params["lmkv"]["missed"]["reason"] == "deadline"
        proxy.latency = FAR
        for number in (3, 4):
            running.forget_local()
            ask_for(running, "again", PROMPTS[number])
            again = answered(running, "again")
            told = again["again"].kv_transfer_params["lmkv"]
            assert told["hit_tokens"] == 1499, told
            assert ids_of(again, "again") == [filled[number]]
        drained(running)
        running.assert_nothing_leaked()
    proxy.close()


@pytest.mark.parametrize("fault", ["killed", "deaf", "late"])
def test_a_server_that_fails_under_load_costs_no_request_and_is_used_again(
    model: Path, tmp_path: Path, fault: str
) -> None:
    """Host memory is too small, so that every hit is a read of the server."""
    with redis_server("valkey", tmp_path) as server:
        proxy, clock = Proxy(server.port), ManualClock()
        with over_remote(model, f"redis://127.0.0.1:{proxy.port}", clock, remote_timeout=2.0) as running:
            cold = running.ids(PROMPTS)
            until_hits(running, cold, clock)
            if fault == "killed":
                server.kill()
            proxy.deaf, proxy.latency = fault == "deaf", FAR * (fault == "late")
            for _ in range(3):
                running.forget_local()
                assert running.ids(PROMPTS) == cold
            if fault != "late":
                assert running.store.stats().tiers[1].breaker != "closed"
            if fault == "killed":
                server.start()
            proxy.deaf, proxy.latency = False, 0.0
            until_hits(running, cold, clock)
            running.assert_nothing_leaked()
        proxy.close()


def until_hits(running: Engine, expected: list[list[int]], clock: ManualClock) -> None:
    """Each round closes the breakers, if the server answers, and stores what it does not have."""
    drained(running)
    while not hits(running, expected):
        clock.advance(120.0)
        drained(running)


def hits(running: Engine, expected: list[list[int]]) -> int:
    """Tokens that the prompts hit in the remote tier."""
    outputs = running.again(PROMPTS)
    assert generated(outputs) == expected
    drained(running)
    return sum(output.kv_transfer_params["lmkv"]["sources"].get("redis", 0) for output in outputs)
