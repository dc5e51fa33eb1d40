"""Many requests in too little memory: preemption, eviction in vLLM and in lmkv, and no output changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.memory.copier import ChunkCopy, Event
from lmkv.memory.copiers import CPUCopier
from tests.vllm.alone import Alone
from tests.vllm.harness import Engine, engine, external_hits, generated, prompt
from tests.vllm.kv_oracle import KVOracle

REQUESTS, PREFIXES = 64, 20
TIGHT = {"max_model_len": 1024, "kv_cache_memory_bytes": 9 << 20, "max_num_batched_tokens": 330, "max_num_seqs": 16}


def _prompts() -> list[list[int]]:
    """64 prompts over 20 prefixes of different lengths, each with a tail of its own."""
    return [
        prompt(100 + index % PREFIXES, 300 + 23 * (index % PREFIXES)) + prompt(500 + index, 20 + index % 7)
        for index in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def without(model: Path, alone: Alone) -> list[list[int]]:
    return alone(model, TIGHT, lambda plain: plain.ids(_prompts(), max_tokens=24))


@pytest.fixture(scope="module", params=["roomy", "evicting"])
def tight(model: Path, request: pytest.FixtureRequest, without: list[list[int]]) -> Iterator[Engine]:
    """An engine whose KV space takes two to three requests; with room for all chunks here, or for few."""
    assert without, "the engine without a connector comes first: only one can live at a time"
    gigabytes = 0.25 if request.param == "roomy" else 24 * (1 << 20) / 2**30
    with engine(model, extra={"max_local_cpu_size": gigabytes}, **TIGHT) as running:
        yield running


def two_rounds(tight: Engine, without: list[list[int]]) -> int:
    """All answers are those of an engine without a connector; the tokens that were loaded for them."""
    hits, prompts = 0, _prompts()
    for round_ in range(2):
        # In another order each time: going round and round through too small a cache never hits.
        order = random.Random(round_).sample(range(REQUESTS), REQUESTS)
        outputs = tight.run([prompts[index] for index in order], max_tokens=24)
        assert generated(outputs) == [without[index] for index in order]
        hits += sum(map(external_hits, outputs))
        tight.assert_nothing_leaked()
    return hits


def test_64_requests_under_preemption_and_eviction(tight: Engine, without: list[list[int]]) -> None:
    with KVOracle(tight) as oracle, tight.preemptions() as preempted:
        hits = two_rounds(tight, without)
    assert oracle.compared > REQUESTS, "few blocks were used twice"
    assert oracle.wrong == []
    stats = tight.store.stats().primary
    assert preempted, "the KV space was not tight enough to preempt"
    assert hits > 0, "nothing was ever loaded"
    if stats.capacity_bytes < 64 << 20:
        assert stats.evictions > 0, "the tier was not small enough to evict"


def test_copies_that_fail_half_done_leave_no_wrong_kv(
    tight: Engine, without: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, failed = random.Random(0), Counter[str]()

    def failing(copy: Callable[..., Event]) -> Callable[..., Event]:
        def attempt(self: CPUCopier, copies: Sequence[ChunkCopy], **how: Any) -> Event:
            if chance.random() < 0.1:
                failed[copy.__name__] += 1
                copy(self, copies[: len(copies) // 2], **how)
                raise OSError("a copy that fails")
            return copy(self, copies, **how)

        return attempt

    monkeypatch.setattr(CPUCopier, "store", failing(CPUCopier.store))
    monkeypatch.setattr(CPUCopier, "load", failing(CPUCopier.load))
    with KVOracle(tight) as oracle:
        two_rounds(tight, without)
    assert min(failed["store"], failed["load"]) > 0
    assert oracle.compared > REQUESTS
    assert oracle.wrong == []


def test_the_comparison_finds_a_wrong_value(tight: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    load = CPUCopier.load

    def damaging(self: CPUCopier, copies: Sequence[ChunkCopy], **how: Any) -> Event:
        event = load(self, copies, **how)
        self._planes[-1].pages[copies[0].runs[0].blocks[0]][:2] = 0
        return event

    ask = prompt(900, 500)
    with KVOracle(tight) as oracle:
        tight.run([ask], max_tokens=1)
        tight.forget_local()
        monkeypatch.setattr(CPUCopier, "load", damaging)
        [output] = tight.run([ask], max_tokens=1)
    assert external_hits(output) > 0
    assert [index for _, index in oracle.wrong] == [0]
    tight.connector.sides.scheduler.reset()
    tight.forget_local()


@pytest.mark.parametrize("quotas", ["alice=50", None])
def test_a_flood_by_one_leaves_another_its_quota(model: Path, quotas: str | None) -> None:
    extra = {"max_local_cpu_size": 12 / 1024, "chunk_size": 256, "save_unfull_chunk": False, "quotas": quotas}
    length = 1000
    with engine(model, extra={**extra, "save_decode_cache": False, "load_or_recompute": False}, **TIGHT) as running:
        slots = running.store.slab.num_slots
        count = slots // 2 // (length // 256)
        mine = [prompt(100 + number, length) for number in range(count)]
        running.run(mine, max_tokens=1, salts=["alice"] * count)
        flood = [prompt(500 + number, length) for number in range(3 * count)]
        running.run(flood, max_tokens=1, salts=["mallory"] * len(flood))
        found = [external_hits(output) for output in running.again(mine, max_tokens=1, salts=["alice"] * count)]
        assert running.store.stats().primary.evictions >= slots // 2
        assert found == [768 if quotas else 0] * count
