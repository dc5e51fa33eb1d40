"""Tails in simulated schedules: what is hit, what gives way, and what share of host memory they take."""

from __future__ import annotations

import random

import pytest

from lmkv.chunks.hashing import TailKey
from lmkv.vllm.plan.block_map import Group
from tests.kit import LIMIT
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM, next_token, request_for


def serve(engine: SimulatedVLLM, tokens: list[int], *, salt: str = "a", max_tokens: int = 1) -> None:
    engine.serve(f"r{random.random()}", tokens, max_tokens, salt)


def hit(engine: SimulatedVLLM, tokens: list[int], *, salt: str = "a", computed: int = 0) -> int:
    request = request_for("asks", tokens, 1, salt)
    engine.scheduler.on_new_request(request)
    assert engine.store.drain(LIMIT)
    found, _ = engine.scheduler.get_num_new_matched_tokens(request, computed)
    engine.scheduler.request_finished(request)
    engine.step()
    return found or 0


def tails(engine: SimulatedVLLM) -> list[TailKey]:
    return [key for key in engine.store.snapshot().held if isinstance(key, TailKey)]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 33])
def test_a_repeated_prompt_computes_its_last_token_only(length: int) -> None:
    with SimulatedVLLM() as engine:
        tokens = list(range(length))
        serve(engine, tokens)
        assert hit(engine, tokens) == length - 1
        assert hit(engine, tokens, salt="b") == 0


def test_a_prompt_is_hit_as_far_as_it_goes_on_as_another_one_did() -> None:
    with SimulatedVLLM() as engine:
        serve(engine, list(range(14)))
        assert hit(engine, [*range(12), 49, 48, 47]) == 12
        assert hit(engine, [*range(5), 49]) == 5, "within a whole chunk, too"
        assert hit(engine, [*range(8), 49, 48, 47]) == 8
        assert hit(engine, [*range(3), 49, 48, 47]) == 0, "less than a block is sooner computed"
        assert hit(engine, list(range(30))) == 14
        assert hit(engine, list(range(30)), computed=12) == 2


def test_a_tail_gives_way_when_its_chunk_is_complete() -> None:
    with SimulatedVLLM() as engine:
        serve(engine, list(range(10)))
        assert [key.tokens for key in tails(engine)] == [2]
        serve(engine, list(range(13)))
        assert [key.tokens for key in tails(engine)] == [5], "a longer tail takes the place of a shorter one"
        serve(engine, list(range(16)))
        assert tails(engine) == []
        assert hit(engine, list(range(13))) == 12, "it is found in the chunk"


def test_generated_tokens_complete_the_chunk() -> None:
    with SimulatedVLLM() as engine:
        serve(engine, list(range(10)), max_tokens=12)
        assert tails(engine) == []
        assert hit(engine, list(range(10))) == 9


def test_tails_take_a_share_of_host_memory_at_most_and_the_latest_stay() -> None:
    with SimulatedVLLM(ram_chunks=24) as engine:
        for first in range(12):
            serve(engine, [first, 1, 2])
        assert len(tails(engine)) == 3
        assert [hit(engine, [first, 1, 2]) for first in (8, 9, 10, 11)] == [0, 2, 2, 2]


def test_a_tail_never_evicts_the_chunks_before_it() -> None:
    with SimulatedVLLM(ram_chunks=3) as engine:
        serve(engine, list(range(28)))
        assert hit(engine, list(range(28))) == 24


@pytest.mark.parametrize("groups", [[Group(4)], [Group(4), Group(4, window=8)], [Group(2), Group(8, window=5)]])
def test_a_tail_is_found_on_a_lower_tier_by_its_prompt(groups: list[Group]) -> None:
    with SimulatedVLLM(groups=groups, lower_chunks=40, ranks=2) as engine:
        tokens = list(range(22))
        serve(engine, tokens, salt="a")
        sizes = sorted(engine.store.snapshot().tiers[0].sizes.values())
        assert sizes[0] < sizes[1] == sizes[2], "only its own pages"
        engine.store.drop(list(engine.store.snapshot().held))
        serve(engine, tokens, salt="a")
        assert engine.counts["hits"] == 1
        assert engine.store.stats().tiers[1].hits == 3
        assert engine.counts["partial_hits"] == 1


def test_without_save_unfull_chunk_there_are_whole_chunks_only() -> None:
    with SimulatedVLLM(save_unfull_chunk=False) as engine:
        serve(engine, list(range(14)))
        assert hit(engine, list(range(14))) == 8
        assert tails(engine) == []


WINDOWED = [Group(4), Group(4, window=8)]


def test_with_windows_a_tail_is_found_by_its_prompt_whatever_came_after_it() -> None:
    with SimulatedVLLM(groups=WINDOWED) as engine:
        serve(engine, list(range(12)), max_tokens=12)
        assert hit(engine, list(range(12))) == 11
        serve(engine, list(range(15)))
        assert hit(engine, list(range(12))) == 11
        serve(engine, list(range(16)))
        serve(engine, list(range(13)))
        assert hit(engine, list(range(13))) == 12


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("length", [12, 16])
def test_with_windows_a_hit_reads_stored_pages_only(length: int, layerwise: bool) -> None:
    for seed in range(20):
        with SimulatedVLLM(seed, groups=WINDOWED, chunk_size=16, layerwise=layerwise) as engine:
            for name in "ab":
                engine.serve(name, range(length))


def test_with_a_window_alone_a_failed_load_is_recomputed_from_the_start() -> None:
    """The blocks before the window are null: the middle of it cannot be computed again."""
    recomputed = 0
    for seed in range(20):
        with SimulatedVLLM(seed, groups=[Group(4, window=8)], load_faults=1.0) as engine:
            for name in "ab":
                engine.serve(name, range(40))
            recomputed += engine.counts["recomputed"]
    assert recomputed > 10


def test_a_tail_on_a_lower_tier_does_not_cost_the_chunk_in_host_memory() -> None:
    """As a preempted request asks, which has generated tokens after its prompt."""
    with SimulatedVLLM(lower_chunks=40) as engine:
        prompt = list(range(10))
        serve(engine, prompt, max_tokens=12)
        request = request_for("again", prompt, 9)
        engine.scheduler.on_new_request(request)
        for _ in range(5):
            request.all_token_ids.append(next_token("a", request.all_token_ids))
        found = None
        while found is None:
            found, _ = engine.scheduler.get_num_new_matched_tokens(request, 0)
            assert engine.store.drain(LIMIT)
            engine.step()
        engine.scheduler.request_finished(request)
        engine.step()
        assert found == 14


def test_a_tail_is_stored_once_there_are_slots_for_what_comes_before_it() -> None:
    with SimulatedVLLM(ram_chunks=8) as engine:
        others = engine.store.reserve([bytes([n]) * 32 for n in range(8)])
        engine.begin("a", range(12), 4)
        while engine.scheduler.requests["a"].num_tokens < 13:
            engine.step()
        others.abort()
        engine.finish()
        assert hit(engine, list(range(12))) == 11


def test_a_tail_is_stored_after_chunks_that_only_a_lower_tier_has() -> None:
    """Host memory is smaller than the prompt: its chunks pass through it, and are not stored there again."""
    with SimulatedVLLM(ram_chunks=4, lower_chunks=40) as engine:
        while engine.store.stats().tiers[1].chunks < 9:
            serve(engine, list(range(72)))
            assert engine.store.drain(LIMIT)
        writes = engine.store.stats().tiers[0].writes
        serve(engine, list(range(75)))
        assert engine.counts["hits"] > 0
        assert engine.store.stats().tiers[0].writes == writes + 1, "the tail alone"
        assert hit(engine, list(range(75))) == 74
