"""Chunks that another process stored in a shared tier after the last listing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lmkv import Config, Engine
from lmkv.backends.adapters import WrapperBackend
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.policies import LRU
from lmkv.protocols import Chunk, ChunkKey, Tier
from lmkv.store.catalog import TierScanner
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.store.tiered import TieredStore
from tests.kit import (
    LIMIT,
    NEVER,
    SLOT,
    Gated,
    Persistent,
    chain,
    eventually,
    get,
    listing_every,
    lower,
    memory,
    payload,
    small_store,
)

KEYS = chain("others", 40)


def shared_medium(*, shared: bool = True) -> tuple[Gated, CPUPinnedBackend]:
    """A shared tier whose calls are counted and can be stopped, and what another process writes to."""
    medium = memory(64, "remote")
    return Gated(Persistent(medium, shared=shared)), medium


def others_store(medium: CPUPinnedBackend, keys: list[ChunkKey]) -> None:
    for key in keys:
        medium.write(Chunk(key, memoryview(payload(key))))


def store_over(gated: Gated, slots: int = 48, capacity: int | None = None) -> TieredStore:
    """It has listed the tier, which was empty, and will not do so again."""
    with listing_every(NEVER):
        store = small_store(slots, lower(gated, capacity))
    assert store.wait_indexed(LIMIT)
    return store


def beside_others(keys: list[ChunkKey], capacity: int | None = None) -> tuple[Gated, CPUPinnedBackend, TieredStore]:
    """A store, and a tier in which others have stored since it was listed."""
    gated, medium = shared_medium()
    store = store_over(gated, capacity=capacity)
    others_store(medium, keys)
    return gated, medium, store


def asked(gated: Gated) -> int:
    return sum(verb == "contains" for verb, _ in gated.calls)


def found_in_all(store: TieredStore, keys: list[ChunkKey]) -> int:
    shared_lookup = store.look_up_shared(keys)
    assert shared_lookup is None or shared_lookup.wait(LIMIT)
    return store.catalog.count_prefix(keys)[1]


def test_what_another_process_stored_is_found_and_read() -> None:
    _gated, _medium, store = beside_others(KEYS)
    assert store.catalog.count_prefix(KEYS) == (0, 0)
    assert found_in_all(store, KEYS) == 40
    assert get(store, KEYS[:20]) == [0] * 20
    assert store.stats().tiers[1].used_bytes == 40 * SLOT
    assert store.look_up_shared(KEYS) is None, "all is known"


def test_a_prompt_that_nobody_stored_costs_one_question_of_few_keys() -> None:
    gated, medium = shared_medium()
    store = store_over(gated)
    questions: list[int] = []
    contains = medium.contains
    medium.contains = lambda keys: questions.append(len(keys)) or contains(keys)  # type: ignore[method-assign,func-returns-value]
    assert found_in_all(store, KEYS) == 0
    others_store(medium, KEYS[:6])
    assert found_in_all(store, KEYS) == 6
    assert questions == [4, 4, 32]


def test_a_slower_tier_is_asked_only_for_what_a_faster_one_does_not_have() -> None:
    near, near_medium = shared_medium()
    far_medium = memory(64, "far")
    far = Gated(Persistent(far_medium, shared=True))
    store = small_store(48, lower(near), lower(far))
    assert store.wait_indexed(LIMIT)
    others_store(near_medium, KEYS[:20])
    far.shut("contains")
    shared_lookup = store.look_up_shared(KEYS[:20])
    assert shared_lookup is not None
    assert shared_lookup.wait(LIMIT), "it waits for nobody who is not needed"
    assert (store.catalog.count_prefix(KEYS)[1], asked(far)) == (20, 0)
    far.open()
    others_store(far_medium, KEYS)
    assert found_in_all(store, KEYS) == 40
    assert asked(far) > 0
    assert store.catalog.tier_of(KEYS[19]) != store.catalog.tier_of(KEYS[20])


def test_a_tier_of_ones_own_is_not_asked() -> None:
    gated, medium = shared_medium(shared=False)
    store = store_over(gated)
    others_store(medium, KEYS)
    assert store.look_up_shared(KEYS) is None
    assert asked(gated) == 0


def test_what_is_cleared_while_it_is_being_asked_for_is_not_served() -> None:
    gated, medium, store = beside_others(KEYS)
    gated.shut("delete")
    late = gated.inner.contains

    def answer_late(keys: list[ChunkKey]) -> list[bool]:
        answer = late(keys)
        store.clear()
        return answer

    gated.inner.contains = answer_late  # type: ignore[method-assign]
    assert found_in_all(store, KEYS) == 0
    gated.open()
    assert store.drain(LIMIT)
    assert medium.contains(KEYS) == [False] * 40


def test_deleting_reaches_what_the_index_does_not_know() -> None:
    _gated, medium, store = beside_others(KEYS[:4])
    store.delete(KEYS[:2])
    assert store.drain(LIMIT)
    assert medium.contains(KEYS[:4]) == [False, False, True, True]
    assert found_in_all(store, KEYS[2:4]) == 2
    assert store.stats().tiers[1].used_bytes == 2 * SLOT


def test_no_more_is_indexed_than_the_capacity_takes() -> None:
    _, _, store = beside_others(KEYS, 10)
    found_in_all(store, KEYS)
    assert store.drain(LIMIT)
    disk = store.stats().tiers[1]
    assert disk.chunks <= 10
    assert disk.used_bytes == disk.chunks * SLOT


def waiting_for_an_answer() -> tuple[Gated, TieredStore, Promotion]:
    """A prefetch of 8 chunks that others have stored, while the tier is being asked and does not answer."""
    gated, _medium, store = beside_others(KEYS[:8])
    gated.shut("contains")
    promotion = store.promote(KEYS, look_up_shared=True)
    gated.waiting("contains")
    return gated, store, promotion


def test_a_prefetch_goes_on_once_the_tier_has_answered() -> None:
    gated, _, promotion = waiting_for_an_answer()
    assert not promotion.done
    gated.open()
    assert promotion.wait(LIMIT)
    assert (len(promotion), promotion.ready) == (8, 8)
    promotion.release()


def test_a_store_that_closes_tells_those_who_wait_for_an_answer() -> None:
    gated, store, promotion = waiting_for_an_answer()
    store.close(timeout=0.01)
    assert promotion.wait(LIMIT)
    assert promotion.ready == 0
    gated.open()


def test_a_tier_that_fails_to_answer_is_a_miss() -> None:
    gated, _medium, store = beside_others(KEYS)

    def fail(keys: list[ChunkKey]) -> list[bool]:
        raise OSError("unreachable")

    gated.inner.contains = fail  # type: ignore[method-assign]
    assert found_in_all(store, KEYS) == 0
    assert isinstance(store.look_up_shared(KEYS), SharedLookup), "it is asked again"


@pytest.fixture
def two(tmp_path: Path) -> tuple[Engine, Engine]:
    """Two engines over one folder, as two servers have them, neither of which lists it again."""
    engines = []
    with listing_every(NEVER):
        for _ in range(2):
            below = {"local_disk": str(tmp_path), "max_local_disk_size": 0.1, "disk_min_free": 0}
            config = Config(chunk_size=16, max_local_cpu_size=0.001, **below)  # type: ignore[arg-type]
            tensors = [torch.randn(16, 4, 2, 4)]
            engines.append(Engine.open(tensors, block_size=4, model="m", config=config))
    assert all(engine.wait_indexed(LIMIT) for engine in engines)
    return engines[0], engines[1]


@pytest.mark.parametrize("verb", ["lookup", "retrieve", "retrieve_layers", "prefetch"])
def test_an_engine_finds_what_another_one_stored(two: tuple[Engine, Engine], verb: str) -> None:
    one, other = two
    with one, other:
        assert one.store(range(64), range(16), wait=LIMIT) == 64
        assert one.drain(LIMIT)
        if verb == "lookup":
            assert other.lookup(range(64), timeout=LIMIT) == 64
        elif verb == "retrieve":
            assert other.retrieve(range(64), range(16)) == 64
        elif verb == "prefetch":
            prefetch = other.prefetch(range(64))
            assert prefetch.wait(LIMIT)
            assert prefetch.tokens == 64
        else:
            with other.retrieve_layers(range(64), range(16)) as reader:
                assert reader.tokens == 64


class Unlisted(WrapperBackend):
    """A shared medium that cannot be listed, and that outlives its stores."""

    shared = True

    def close(self) -> None: ...


def test_what_cannot_be_listed_is_forgotten_after_a_while_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait = list[float](), TierScanner._wait
    monkeypatch.setattr(TierScanner, "_wait", lambda scanner, seconds: (waits.append(seconds), wait(scanner, seconds)))
    medium = memory(64, "remote")
    others_store(medium, KEYS[:8])
    with listing_every(0.02):
        store = TieredStore(Tier(memory(48), LRU()), [lower(Unlisted(medium))])
    assert store.wait_indexed(LIMIT)
    eventually(lambda: found_in_all(store, KEYS[:8]) == 8, "found")
    eventually(lambda: store.catalog.count_prefix(KEYS[:8])[1] == 0, "forgotten")
    medium.delete(KEYS[4:5])
    eventually(lambda: found_in_all(store, KEYS[:8]) == 4, "the one that was deleted is promised no more")
    eventually(lambda: found_in_all(store, KEYS[:4]) == 4 and get(store, KEYS[:4]) == [0] * 4, "found again")
    eventually(lambda: len(waits) > 9, "forgotten again and again")
    store.close()
    assert max(waits) <= 0.02 * 1.2, "a wait is no work, after which to wait a hundred times as long"


def test_a_first_listing_that_was_slow_does_not_put_off_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.store.catalog._SHARE", 1e-4)
    medium = Gated(Persistent(memory(64, "remote"), shared=True))
    others_store(medium.inner, KEYS[:8])
    medium.shut("list_keys")
    with listing_every(0.02):
        store = TieredStore(Tier(memory(48), LRU()), [lower(medium)])
    medium.waiting("list_keys")
    time.sleep(0.05)
    medium.open()
    eventually(lambda: store.catalog.count_prefix(KEYS[:8])[1] == 8, "found")
    medium.inner.delete(KEYS)
    eventually(lambda: store.catalog.count_prefix(KEYS[:8])[1] == 0, "the next listing comes soon, not after minutes")
    store.close()
