"""Beside the hits of models with recurrent layers: the agent API, KV events, prefetches, prefill and decode apart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import frozen
from redis import Redis

from lmkv.agent.service import CacheService, Prompt
from lmkv.chunks.hashing import state_keys
from lmkv.testing import ManualClock
from lmkv.vllm.plan.options import check_states
from tests.kit import LIMIT, NEVER, eventually, listing_every, raised
from tests.servers import redis_server
from tests.vllm import mamba_cpu
from tests.vllm.answers import answers_of, ask, off
from tests.vllm.families import Family, nemotron_h
from tests.vllm.harness import Engine, engine, external_hits, over_disk, prompt
from tests.vllm.test_kv_events import publishing

IDS = prompt(1, 1000)
UNIT = 64
WHOLE = 999 // UNIT * UNIT
OPTIONS = {"max_num_batched_tokens": 480, "kv_cache_memory_bytes": 64 << 20}


@frozen
class Case:
    folder: Path
    expected: list[Any]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = Family(nemotron_h).write(tmp_path_factory.mktemp("nemotron"))
    with mamba_cpu.exported():
        with engine(folder, connector=None, **OPTIONS) as plain:
            expected = answers_of(ask(plain, [IDS]))
        yield Case(folder, expected)


def over(case: Case, folder: Path, **options: Any) -> AbstractContextManager[Engine]:
    return over_disk(case.folder, folder, extra={"load_or_recompute": False}, **OPTIONS, **options)


def service_of(running: Engine) -> CacheService:
    scheduler, model = running.connector.sides.scheduler, running.connector.sides.model
    return CacheService(
        scheduler.store,
        scheduler.keys_of,
        lambda text, template: [],
        chunk_size=model.block_map.chunk_size,
        pin_ttl=60.0,
        deleted=scheduler.observer.explainer.evictions.forget,
        states=model.block_map.states,
    )


def test_the_agent_api_tells_what_a_request_would_load(case: Case, tmp_path: Path) -> None:
    asked = Prompt(tokens=IDS)
    with over(case, tmp_path) as running:
        service = service_of(running)
        assert service.lookup(asked)["hit_tokens"] == 0
        ask(running, [IDS])
        ask(running, [prompt(2, 5)])
        assert service.lookup(asked) == {"total_tokens": 1000, "hit_tokens": WHOLE, "sources": {"cpu": WHOLE}}
        assert service.pin(asked)["pinned_tokens"] == WHOLE
        service.unpin(asked)
        assert running.store.stats().pinned == 0
        eventually(lambda: not running.store.stats().pending_io)
        keys = running.connector.sides.scheduler.keys_of(IDS, None, {})
        states = [state for key in keys for state in state_keys(key, 2)]
        running.store.drop([*keys, *states])
        assert service.lookup(asked)["sources"] == {"disk": WHOLE}
        progress, _ = service.prefetch(asked, "again")
        eventually(lambda: progress()["done"])
        assert progress()["ready_tokens"] == WHOLE
        service.cancel("again")
        assert service.lookup(asked)["sources"] == {"cpu": WHOLE}
        running.store.delete(states[-8:])
        running.store.delete(states)
        assert service.lookup(asked)["hit_tokens"] == 0, "chunks alone are no hit"
        running.forget_local()
        (output,) = ask(running, [IDS])
        assert external_hits(output) == 0
        assert service.clear(asked)["deleted_chunks"] == len(keys)
        assert running.store.stats().primary.states == 0


def test_a_prefetch_brings_the_states_too(case: Case, tmp_path: Path) -> None:
    for turn in range(2):
        with over(case, tmp_path) as running:
            if turn:
                running.run([prompt(2, 5)], params={"lmkv.prefetch_tokens": IDS})
                eventually(lambda running=running: running.store.stats().primary.chunks >= WHOLE // UNIT)
                eventually(lambda running=running: running.store.stats().primary.states == 2)
            (output,) = ask(running, [IDS])
            assert external_hits(output) == turn * WHOLE
            assert off([output], case.expected) < 1e-3


def test_prefill_and_decode_on_servers_of_their_own(case: Case, tmp_path: Path) -> None:
    """Over a disk that both share; what is handed over ends where a state is."""
    with over(case, tmp_path, kv_role="kv_producer") as running:
        (prefilled,) = running.run([IDS], max_tokens=1, params={"do_remote_decode": True})
        answer = dict(prefilled.kv_transfer_params)
        assert answer["lmkv.wait_for"] == WHOLE
    with over(case, tmp_path, kv_role="kv_consumer") as running:
        answer.pop("lmkv", None)
        (output,) = running.run([IDS], params=answer, logprobs=3)
        assert external_hits(output) == WHOLE
        assert off([output], case.expected) < 1e-3
        running.assert_nothing_leaked()


def test_without_vllms_prefix_cache_nothing_is_cached(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM then keeps one state for each request, at no boundary."""
    options = {"enable_prefix_caching": False, **OPTIONS}
    with caplog.at_level(logging.WARNING, logger="lmkv"), engine(case.folder, **options) as running:
        outputs = [ask(running, [IDS])[0] for _ in range(2)]
    assert "the KV of this model is not cached: vLLM keeps no states at the ends of blocks" in caplog.text
    assert off(outputs, case.expected * 2) < 1e-3
    assert not any(output.num_cached_tokens for output in outputs)


@pytest.mark.parametrize(
    ("changes", "recurrent", "reason"),
    [
        ({}, (True, True), "only recurrent layers"),
        ({"speculative_config": object()}, (True, False), "speculative decoding"),
        ({"pipeline_parallel_size": 2}, (True, False), "pipeline_parallel_size > 1"),
        ({"decode_context_parallel_size": 2}, (True, False), "decode_context_parallel_size > 1"),
        ({"use_replayssm": True}, (True, False), "use-replayssm"),
        ({"replayed": True}, (True, False), "cannot go back"),
        ({"mamba_cache_mode": "none"}, (True, False), "enable-prefix-caching"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], recurrent: tuple[bool, ...], reason: str) -> None:
    cache = SimpleNamespace(mamba_cache_mode="align", use_replayssm=False)
    config = SimpleNamespace(cache_config=cache, parallel_config=SimpleNamespace(), speculative_config=None)
    given = dict(changes)
    replayed = bool(given.pop("replayed", False))
    for name, value in given.items():
        of = config if name == "speculative_config" else config.parallel_config if "parallel" in name else cache
        setattr(of, name, value)
    check_states(config, [False, False], replayed=replayed)
    raised(ValueError, reason, check_states, config, recurrent, replayed=replayed)
    if "speculative_config" in given:
        config.use_v2_model_runner = True
        check_states(config, recurrent, replayed=replayed)


def test_states_in_a_shared_tier_are_found_by_asking(case: Case, tmp_path: Path) -> None:
    """Stored behind the engine's back, which lists nothing again: also of a prompt that parts from the stored one."""
    parts = [*IDS[:700], *prompt(4, 200)]
    with redis_server("redis", tmp_path) as server, Redis.from_url(server.url) as client:
        extra = {"remote_url": server.url, "remote_timeout": LIMIT}
        with engine(case.folder, clock=ManualClock(), extra=extra, **OPTIONS) as first:
            ask(first, [IDS])
            assert first.store.drain(LIMIT)
        stored = {name: client.get(name) for name in client.scan_iter()}
        client.flushdb()
        with listing_every(NEVER), engine(case.folder, clock=ManualClock(), extra=extra, **OPTIONS) as second:
            assert external_hits(ask(second, [prompt(5, 300)])[0]) == 0
            client.mset(stored)
            (other,) = ask(second, [parts])
            second.forget_local()
            (output,) = ask(second, [IDS])
            assert external_hits(output) == WHOLE
            assert output.kv_transfer_params["lmkv"]["sources"]["redis"] > 0
            assert off([output], case.expected) < 1e-3
            # The step of 480 tokens that began the stored prompt ended at 448.
            assert external_hits(other) == 448
            second.assert_nothing_leaked()


def test_kv_events_tell_where_states_are(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(case.folder, **publishing(tmp_path), **OPTIONS) as running:
        told: list[Any] = []
        take = running.connector.take_events

        def noted() -> list[Any]:
            told.extend(found := list(take()))
            return found

        monkeypatch.setattr(running.connector, "take_events", noted)
        ask(running, [IDS])
        ask(running, [prompt(2, 5)])
        groups = running.connector.sides.model.block_map.groups
        stored = [event for event in told if hasattr(event, "token_ids")]
        kinds = {event.group_idx: event.kv_cache_spec_kind for event in stored}
        assert {kinds[group.table] for group in groups if group.state} == {"mamba"}
        blocks = {group.table: set[Any]() for group in groups}
        for event in stored:
            blocks[event.group_idx].update(event.block_hashes)
        (attention,) = [group.table for group in groups if not group.state]
        assert len(blocks.pop(attention)) == 1000 // UNIT
        assert len({frozenset(hashes) for hashes in blocks.values()}) == 1
        kept = next(iter(blocks.values()))
        assert 1 <= len(kept) < 1000 // UNIT
        told.clear()
        running.connector.sides.scheduler.store.drop(
            [state for key in running.connector.sides.scheduler.keys_of(IDS, None, {}) for state in state_keys(key, 2)]
        )
        ask(running, [prompt(3, 5)])
        removed = [event for event in told if not hasattr(event, "token_ids")]
        assert {event.group_idx for event in removed} == set(blocks)
        assert {block for event in removed for block in event.block_hashes} == kept
