"""The live estimate of a tier's value, beside a replay of every request with the sizes really changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.policies import LRU, make_policy
from lmkv.policies.adaptive import Shadow
from lmkv.protocols import ChunkKey, Policy, Tier
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from lmkv.vllm.scheduler.value import KEPT, SIZES, MemoryValue
from tests.kit import LIMIT, SLOT, chain

TOKENS = 16
"""Tokens of a chunk."""
TWO_POINTS = 0.02
SLOTS = 16_384


@contextmanager
def store_of(slots: int, policy: Policy | None = None, disk: Path | None = None, disk_slots: int = 0) -> Iterator[Any]:
    tiers = []
    if disk is not None:
        tiers = [Tier(LocalDiskBackend(disk, bytes(32)), LRU(), capacity_bytes=disk_slots * SLOT)]
    store = TieredStore(Tier(CPUPinnedBackend(slots * SLOT, SLOT), policy or LRU()), tiers)
    assert store.wait_indexed(LIMIT)
    yield store
    store.close()


def requests(seed: int, count: int, at_once: int, systems: int) -> list[list[ChunkKey]]:
    """Turns of growing conversations, each of which begins with one of a few system prompts."""
    chance = random.Random(seed)
    heads = [chain(f"system {number}", 2) for number in range(systems)]
    going: list[list[ChunkKey]] = []
    made = []
    for number in range(count):
        if len(going) < at_once or chance.random() < 0.25:
            going = [*going[1 - at_once :], [*chance.choice(heads), *chain(f"{seed} {number}", 2)]]
            turn = going[-1]
        else:
            turn = going[int(len(going) * chance.random() ** 0.5)]
            turn += chain(f"{seed} {number}", chance.randrange(1, 4))
        made.append(list(turn))
    return made


def replayed(asked: list[list[ChunkKey]], policy: Policy, slots: float, share: float = 1.0) -> float:
    """The share of tokens that a tier of this size finds, each request counting a little less than the next one."""
    tier = Shadow(policy, slots * SLOT)
    found = whole = 0.0
    for keys in asked:
        found = found * KEPT**share + tier.request(keys, SLOT)
        whole = whole * KEPT**share + len(keys)
    return found / whole


def finish(value: MemoryValue, keys: list[ChunkKey]) -> None:
    value.finished(keys, len(keys) * TOKENS)
    while value.step():
        pass


def estimated(value: MemoryValue, asked: list[list[ChunkKey]]) -> list[dict[str, Any]]:
    for keys in asked:
        finish(value, keys)
    tiers: list[dict[str, Any]] = value.report(prefill_speed=1000.0)["tiers"]
    return tiers


@given(seed=st.integers(0, 1 << 16), at_once=st.sampled_from([30, 60]), name=st.sampled_from(["LRU", "SLRU", "ARC"]))
@settings(max_examples=5, deadline=None)
def test_all_requests_are_sampled_where_memory_is_small(seed: int, at_once: int, name: str) -> None:
    asked = requests(seed, 600, at_once, systems=3)
    with store_of(256, make_policy(name)) as store:
        [tier] = estimated(MemoryValue(store, TOKENS, ManualClock()), asked)
    for size, point in zip(SIZES, tier["points"], strict=True):
        assert point["bytes"] == int(size * 256 * SLOT)
        assert point["hit_ratio"] == pytest.approx(replayed(asked, make_policy(name), size * 256), abs=TWO_POINTS)
    assert tier["without"]["hit_ratio"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_agrees_with_all_requests(seed: int) -> None:
    asked = requests(seed, 20_000, at_once=3000, systems=20)
    with store_of(SLOTS) as store:
        value = MemoryValue(store, TOKENS, ManualClock())
        [tier] = estimated(value, asked)
        report = value.report()
    assert report["sampled_share"] == 1 / 4
    assert report["sampled_requests"] == pytest.approx(len(asked) / 4, rel=0.1)
    ratios = [point["hit_ratio"] for point in tier["points"]]
    assert ratios == pytest.approx([replayed(asked, LRU(), size * SLOTS, 1 / 4) for size in SIZES], abs=TWO_POINTS)
    assert ratios[-1] - ratios[0] > 3 * TWO_POINTS, "the sizes must differ, or the estimate says nothing"


def test_a_disk_is_worth_what_it_finds_beyond_memory(tmp_path: Path) -> None:
    asked = requests(7, 1200, at_once=100, systems=3)
    with store_of(128, disk=tmp_path / "large", disk_slots=512) as store:
        host, disk = estimated(MemoryValue(store, TOKENS, ManualClock()), asked)
    alone = [replayed(asked, LRU(), slots) for slots in (128, 512, 1024)]
    assert alone[0] + 3 * TWO_POINTS < alone[1]
    assert disk["without"]["hit_ratio"] == pytest.approx(alone[0], abs=TWO_POINTS)
    assert [point["hit_ratio"] for point in disk["points"][1:3]] == pytest.approx(alone[1:], abs=TWO_POINTS)
    # More memory would find nothing that the disk has not.
    assert host["points"][2]["hit_ratio"] == host["points"][1]["hit_ratio"]
    assert host["without"]["hit_ratio"] == disk["points"][1]["hit_ratio"]
    with store_of(512, disk=tmp_path / "small", disk_slots=128) as store:
        _, disk = estimated(MemoryValue(store, TOKENS, ManualClock()), asked)
    assert disk["without"]["hit_ratio"] == disk["points"][1]["hit_ratio"]


def test_seconds_follow_from_the_tokens_of_a_day() -> None:
    clock = ManualClock()
    asked = [chain(f"{number % 3}", 4) for number in range(60)]
    with store_of(8) as store:
        value = MemoryValue(store, TOKENS, clock)
        for keys in asked:
            clock.advance(10.0)
            finish(value, keys)
        [tier] = value.report(prefill_speed=500.0)["tiers"]
    _, now, twice, _ = tier["points"]
    a_day = 6 * 60 * 24 * 4 * TOKENS
    assert now["hit_ratio"] == 0 < twice["hit_ratio"]
    assert twice["saved_seconds"] == pytest.approx(twice["hit_ratio"] * a_day / 500.0, rel=0.01)
    assert tier["without"]["saved_seconds"] == 0


def test_where_it_takes_too_long_fewer_are_sampled() -> None:
    class Slow(ManualClock):
        def __call__(self) -> float:
            return self.advance(0.01)

    with store_of(4096) as store:
        value = MemoryValue(store, TOKENS, Slow())
        estimated(value, requests(1, 1000, at_once=50, systems=3))
    assert value.report()["sampled_share"] == 1 / 8


def test_a_step_replays_one_request_with_one_size() -> None:
    with store_of(8) as store:
        value = MemoryValue(store, TOKENS, ManualClock())
        value.finished(chain("one", 4), 4 * TOKENS)
        steps = [value.step() for _ in range(len(SIZES) + 1)]
        assert steps == [True] * len(SIZES) + [False]
        assert value.report()["sampled_requests"] == 1


@pytest.mark.parametrize("finished", [1, 4])
def test_estimates_keep_up_with_requests_that_finish_in_each_step(finished: int) -> None:
    asked = requests(3, 1200, at_once=40, systems=3)
    with store_of(256) as store:
        value = MemoryValue(store, TOKENS, ManualClock())
        for number, keys in enumerate(asked):
            value.finished(keys, len(keys) * TOKENS)
            if number % finished == 0:
                value.step()
        [tier] = value.report()["tiers"]
        assert value.report()["sampled_requests"] > len(asked) - 200
    for size, point in zip(SIZES, tier["points"], strict=True):
        assert point["hit_ratio"] == pytest.approx(replayed(asked, LRU(), size * 256), abs=2 * TWO_POINTS)


def test_a_policy_that_raises_in_a_replay_ends_that_replay_only(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(LRU):
        def use(self, keys: Sequence[ChunkKey]) -> None:
            if chain("bad", 4)[0] in keys:
                raise ValueError("bad")
            super().use(keys)

    with store_of(8, Raises()) as store:
        value = MemoryValue(store, TOKENS, ManualClock())
        for name in ("bad", "good"):
            value.finished(chain(name, 4), 4 * TOKENS)
        while value.step():
            pass
        assert value.report()["sampled_requests"] == 1
    assert "ValueError" in caplog.text
