"""vLLM's own words for what a request may ask: how much is loaded, how much is stored, and hints of agents."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.policies import MinTokens
from lmkv.vllm.plan.options import AgentHint, RequestOptions
from tests.kit import LIMIT
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM, state_of
from tests.vllm.scheduler.test_explain import CHUNK, OTHERS, PROMPT, asks, engine_of, in_memory, serve

LAST = len(PROMPT) - 1


def offered(tiered: SimulatedVLLM, computed: int = 0, **params: Any) -> int | None:
    request = asks(tiered, PROMPT, **params)
    assert tiered.store.drain(LIMIT)
    found, _ = tiered.scheduler.get_num_new_matched_tokens(request, computed)
    tiered.scheduler.request_finished(request)
    tiered.step()
    return found


@pytest.mark.parametrize(
    ("computed", "limit", "loaded"),
    [
        (0, 0, 0),
        (0, CHUNK - 1, 0),
        (0, CHUNK, CHUNK),
        (0, 2 * CHUNK + 3, 2 * CHUNK),
        (0, LAST - 1, 3 * CHUNK),
        (0, LAST, LAST),
        (0, 10**6, LAST),
        (CHUNK, CHUNK, CHUNK),
        (4, CHUNK, CHUNK - 4),
        (2 * CHUNK, 0, 0),
    ],
)
def test_no_more_is_loaded_than_the_request_wants(
    tiered: SimulatedVLLM, computed: int, limit: int, loaded: int
) -> None:
    serve(tiered, PROMPT)
    assert offered(tiered, computed, max_load_tokens=limit) == loaded


def test_the_lower_tier_takes_requests_with_enough_tokens() -> None:
    with closing(engine_of(ram_chunks=10, lower_chunks=60, admission=MinTokens(len(PROMPT)))) as tiered:
        serve(tiered, PROMPT, *OTHERS)
        assert tiered.store.drain(LIMIT)
        host, lower = tiered.store.stats().tiers
        assert host.chunks == 10
        # Whole chunks and the tail, which the generated token ended.
        assert lower.chunks == len(PROMPT) // CHUNK + 1
        assert offered(tiered) == LAST


def test_what_is_loaded_of_a_limited_request_is_right(tiered: SimulatedVLLM) -> None:
    """The engine compares every byte that is read."""
    serve(tiered, PROMPT, *OTHERS)
    serve(tiered, PROMPT, max_load_tokens=2 * CHUNK + 1)
    assert tiered.total("lmkv_hit_tokens") == {("cpu",): 0, ("lower",): 2 * CHUNK}
    assert tiered.total("lmkv_missed_tokens")[("limited",)] == LAST - 2 * CHUNK


def test_nothing_is_promoted_for_a_request_that_loads_nothing(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    before = tiered.store.stats().tiers[1].reads
    assert offered(tiered, max_load_tokens=0) == 0
    assert tiered.store.stats().tiers[1].reads == before


@pytest.mark.parametrize(
    ("limit", "stored"),
    [(0, 0), (CHUNK - 1, 0), (2 * CHUNK + 3, 2 * CHUNK), (3 * CHUNK, 3 * CHUNK), (len(PROMPT), len(PROMPT))],
)
def test_no_more_is_stored_than_the_request_wants(tiered: SimulatedVLLM, limit: int, stored: int) -> None:
    serve(tiered, PROMPT, max_offload_tokens=limit)
    assert tiered.total("lmkv_stored_tokens").get((), 0) == stored
    assert offered(tiered) == min(stored, LAST)


@pytest.mark.parametrize("value", [-1, True, "16", 1.5, None, [16]])
def test_what_is_no_number_is_ignored(value: object) -> None:
    params = {"max_load_tokens": value, "max_offload_tokens": value}
    options = RequestOptions.of(SimpleNamespace(kv_transfer_params=params))
    assert (options.max_load_tokens, options.max_offload_tokens) == (None, None)


def hint(ttl: float | None = None, *edits: str) -> dict[str, Any]:
    control = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    return {"cache_control": control, "context_management": {"edits": [{"type": edit} for edit in edits]}}


def test_an_agents_hint_has_a_request_evicted_last_for_a_while(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, agent_hint=hint(30.0))
    assert tiered.store.stats().pinned == 0
    serve(tiered, *OTHERS)
    assert in_memory(tiered, PROMPT) == len(PROMPT) // CHUNK + 1
    tiered.now += 31.0
    serve(tiered, *OTHERS)
    assert in_memory(tiered, PROMPT) == 0


def test_an_agents_hint_prefetches(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    request = asks(tiered, PROMPT, agent_hint=hint(None, "offload", "prefetch"), **{"lmkv.skip_load": True})
    assert tiered.store.drain(LIMIT)
    tiered.scheduler.request_finished(request)
    assert tiered.store.catalog.count_prefix(state_of(tiered.scheduler, request).keys(3)) == (3, 3)


def test_hints_come_as_a_field_of_the_request_too() -> None:
    edits = [SimpleNamespace(type="prefetch", block_start=None, block_end=None)]
    field = SimpleNamespace(
        session_id="a",
        cache_control=SimpleNamespace(type="ephemeral", ttl=60.0),
        context_management=SimpleNamespace(manage_request=False, edits=edits),
    )
    options = RequestOptions.of(SimpleNamespace(kv_transfer_params=None, agent_hint=field))
    assert (options.hint.ttl, options.pin_seconds, options.prefetch) == (60.0, 0.0, True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, AgentHint()),
        ("keep", AgentHint()),
        ([], AgentHint()),
        ({"session_id": "a"}, AgentHint(session="a")),
        ({"session_id": 5, "priority": "high", "waits_seconds": -1}, AgentHint()),
        ({"priority": 99, "waits_seconds": 20}, AgentHint(priority=9, waits=20.0)),
        ({"session_ended": True}, AgentHint(ended=True)),
        ({"cache_control": {}}, AgentHint(ttl=300.0)),
        ({"cache_control": {"ttl": 0}}, AgentHint()),
        ({"cache_control": {"ttl": "long"}}, AgentHint()),
        ({"context_management": {"edits": "prefetch"}}, AgentHint()),
        ({"context_management": {"edits": [None, {"type": "evict"}]}}, AgentHint(ended=True)),
        ({"context_management": {"edits": [{"type": 10**5000}, {"type": []}]}}, AgentHint()),
        ({"context_management": {"edits": [{"type": "evict"}] * 1000}}, AgentHint()),
        ({"session_id": "a" * 2000, "priority": 10**5000}, AgentHint(priority=9)),
    ],
)
def test_a_hint_that_cannot_be_read_is_none(value: object, expected: AgentHint) -> None:
    assert AgentHint.of(value) == expected
