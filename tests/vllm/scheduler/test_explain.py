"""Why the rest of a request was not loaded, as its report, the log and the metrics say."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest

from lmkv.testing import ManualClock
from lmkv.vllm.scheduler.observer import EvictionLog
from tests.kit import LIMIT, chain
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, request_for, state_of

CHUNK = 8
PROMPT = [token % 50 for token in range(3 * CHUNK + 5)]
OTHERS = [[(7 * token + start) % 50 for token in range(2 * CHUNK)] for start in range(1, 9)]


def engine_of(**options: Any) -> SimulatedVLLM:
    """An engine whose own prefix cache is empty."""
    return SimulatedVLLM(**{"load_or_recompute": True, "local_hits": 0.0, **options})


def serve(engine: SimulatedVLLM, *prompts: list[int], salt: str = "a", **params: Any) -> None:
    for tokens in prompts:
        engine.serve(f"r{random.random()}", tokens, 1, salt, **params)


def asks(engine: SimulatedVLLM, tokens: list[int], salt: str = "a", **params: Any) -> SimulatedRequest:
    request = request_for("asks", tokens, 1, salt, **{"lmkv.report": True, **params})
    engine.scheduler.on_new_request(request)
    return request


def in_memory(engine: SimulatedVLLM, tokens: list[int], salt: str = "a") -> int:
    """How many leading chunks are in host memory."""
    return engine.store.catalog.count_prefix(engine.scheduler.keys_of(tokens, salt, {}))[0]


def missed(engine: SimulatedVLLM, tokens: list[int], salt: str = "a", **params: Any) -> Any:
    """What the request's report says of what it missed."""
    request = asks(engine, tokens, salt, **params)
    assert engine.store.drain(LIMIT)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is not None
    return report(engine, request)


def report(engine: SimulatedVLLM, request: SimulatedRequest) -> Any:
    answer = engine.scheduler.request_finished(request)
    engine.step()
    assert answer is not None
    return answer["lmkv"].get("missed")


def test_what_was_never_stored(engine: SimulatedVLLM) -> None:
    assert missed(engine, PROMPT) == {"reason": "not_stored", "tokens": len(PROMPT) - 1}
    serve(engine, PROMPT)
    assert missed(engine, PROMPT) is None
    assert missed(engine, [*PROMPT[: 2 * CHUNK], *OTHERS[0]]) == {"reason": "not_stored", "tokens": 2 * CHUNK - 1}


def test_what_was_evicted_from_host_memory(engine: SimulatedVLLM, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(ram_chunks=6) as small:
        serve(small, PROMPT, *OTHERS)
        evicted = small.now
        small.now += 100.0
        found = missed(small, PROMPT)
        assert 100.0 <= found.pop("seconds_ago") <= 100.0 + evicted
        assert found == {"reason": "evicted", "tokens": len(PROMPT) - 1, "tier": "cpu"}
        with caplog.at_level(logging.INFO, logger="lmkv"):
            missed(small, PROMPT)
        assert f"loads 0 ({len(PROMPT) - 1} tokens missed: evicted from cpu 10" in caplog.text
        serve(small, PROMPT)
        assert missed(small, PROMPT) is None


def test_what_was_evicted_from_the_last_tier() -> None:
    with engine_of(ram_chunks=6, lower_chunks=8) as small:
        serve(small, PROMPT, *OTHERS)
        assert missed(small, PROMPT)["tier"] == "lower"


def test_what_was_reset_was_not_evicted(engine: SimulatedVLLM) -> None:
    serve(engine, PROMPT)
    engine.scheduler.reset()
    assert missed(engine, PROMPT)["reason"] == "not_stored"


def test_another_salt_is_for_the_operators_eyes_only(engine: SimulatedVLLM, caplog: pytest.LogCaptureFixture) -> None:
    serve(engine, PROMPT)
    with caplog.at_level(logging.INFO, logger="lmkv"):
        assert missed(engine, PROMPT, salt="b")["reason"] == "not_stored"
    assert "missed: other salt" in caplog.text
    assert missed(engine, PROMPT, **{"lmkv.tag.team": "x"})["reason"] == "not_stored"
    serve(engine, PROMPT, salt="b")
    assert engine.total("lmkv_missed_requests") == {("not_stored",): 2}, "whoever reads metrics may be a stranger"


def test_what_is_too_short() -> None:
    with engine_of(save_unfull_chunk=False) as whole_chunks:
        assert missed(whole_chunks, PROMPT[: CHUNK - 1]) == {"reason": "too_short", "tokens": CHUNK - 2}
        serve(whole_chunks, PROMPT)
        assert missed(whole_chunks, PROMPT) == {"reason": "too_short", "tokens": 4}


def test_what_is_less_than_the_least_that_is_loaded() -> None:
    with engine_of(min_retrieve_tokens=len(PROMPT)) as engine:
        serve(engine, PROMPT)
        assert missed(engine, PROMPT) == {"reason": "too_short", "tokens": len(PROMPT) - 1}


def test_what_a_request_does_not_want(engine: SimulatedVLLM) -> None:
    serve(engine, PROMPT)
    assert missed(engine, PROMPT, **{"lmkv.skip_load": True})["reason"] == "skip_load"
    assert missed(engine, PROMPT, max_load_tokens=CHUNK + 1) == {"reason": "limited", "tokens": len(PROMPT) - 1 - CHUNK}


def test_what_vllm_or_another_connector_did_not_take(engine: SimulatedVLLM) -> None:
    serve(engine, PROMPT)
    request = asks(engine, PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == len(PROMPT) - 1
    engine.scheduler.update_state_after_alloc(request, [[]], 0)
    assert report(engine, request) == {"reason": "not_taken", "tokens": len(PROMPT) - 1}


def test_what_is_just_being_stored(engine: SimulatedVLLM) -> None:
    keys = state_of(engine.scheduler, asks(engine, PROMPT)).keys(1)
    with engine.store.reserve(keys):
        request = asks(engine, PROMPT)
        while engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
            engine.now += 0.1
        assert report(engine, request)["reason"] == "deadline"


def test_a_tier_that_is_away(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    tiered.disks[0].error_rate = 1.0
    serve(tiered, *OTHERS[:4])
    assert tiered.store.stats().tiers[1].breaker == "open"
    assert missed(tiered, PROMPT) == {"reason": "tier_unavailable", "tokens": len(PROMPT) - 1, "tier": "lower"}


def test_a_deadline_that_passed(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    tiered.disks[0].latency = math.inf
    request = asks(tiered, PROMPT)
    assert tiered.scheduler.get_num_new_matched_tokens(request, 0)[0] is None
    tiered.now += 1.0
    assert tiered.scheduler.get_num_new_matched_tokens(request, 0)[0] == 0
    assert report(tiered, request) == {"reason": "deadline", "tokens": len(PROMPT) - 1, "tier": "lower"}
    tiered.disks[0].latency = 0.0
    assert tiered.store.drain(LIMIT)


def test_a_tier_that_is_slower_than_the_model(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    cost = tiered.scheduler.timing.cost
    cost.note_step(1_000_000, 0.001)
    cost.note_load("lower", 1, 1.0)
    assert missed(tiered, PROMPT) == {"reason": "slower", "tokens": len(PROMPT) - 1, "tier": "lower"}


def test_the_log_of_evictions_is_bounded() -> None:
    clock = ManualClock()
    log, keys = EvictionLog(clock, size=3), chain("a", 5)
    for key in keys:
        log.removed("cpu", key)
        clock.advance(1.0)
    assert [log.find(key) for key in keys] == [None, None, ("cpu", 3.0), ("cpu", 2.0), ("cpu", 1.0)]
    log.stored("disk", keys[2])
    log.removed("disk", keys[3])
    assert [log.find(key) for key in keys[2:]] == [None, ("disk", 0.0), ("cpu", 1.0)]
    log.removed("disk", keys[0] * 2)
    assert log.find(keys[0]) is None, "chunks of other namespaces are of no interest"
