"""A remote tier under real vLLM: what another engine has stored, and a server that dies, is deaf or comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis")

from lmkv.testing.clocks import ManualClock
from tests.kit import LIMIT
from tests.servers import Proxy, RedisServer, redis_server
from tests.vllm.harness import Engine, engine, external_hits, prompt

CHUNK_BYTES = 256 * 4096
PROMPTS = [prompt(700 + number, 1500) for number in range(6)]


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
            proxy.deaf, proxy.delay = fault == "deaf", 0.02 * (fault == "late")
            for _ in range(3):
                running.forget_local()
                assert running.ids(PROMPTS) == cold
            if fault != "late":
                assert running.store.stats().tiers[1].breaker != "closed"
            if fault == "killed":
                server.start()
            proxy.deaf, proxy.delay = False, 0.0
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
    running.forget_local()
    outputs = running.run(PROMPTS)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    drained(running)
    return sum(output.kv_transfer_params["lmkv"]["sources"].get("redis", 0) for output in outputs)
