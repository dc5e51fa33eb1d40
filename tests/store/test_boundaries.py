"""Where a hit of a model with recurrent layers may end, in any tier; and states evicted before what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.hashing import StateKey, state_keys
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.policies import POLICIES, make_policy
from lmkv.protocols import Chunk, Tier
from lmkv.store.catalog import HitFinder
from lmkv.store.tiered import TieredStore
from tests.kit import LIMIT, NEVER, Persistent, chain, listing_every, lower, memory, payload, small_store

STATES = 2


def put(store: TieredStore, keys: list[bytes], parent: bytes = b"", protect: tuple[bytes, ...] = ()) -> int:
    with store.reserve(keys, parent=parent, protect=protect) as reservation:
        count = len(reservation)
        for slot in reservation.slots.values():
            store.slab.view(slot)[:4] = b"full"
        reservation.commit()
    return count


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with closing(small_store(12)) as made:
        yield made


def test_a_hit_ends_at_the_last_boundary_with_all_states(store: TieredStore) -> None:
    keys, boundaries = chain("a", 6), HitFinder(store.catalog, STATES)
    put(store, keys[:5])
    assert boundaries.stored_hit(keys) == []
    put(store, list(state_keys(keys[1], STATES)), keys[1])
    put(store, list(state_keys(keys[3], STATES))[:1], keys[3])
    assert boundaries.stored_hit(keys) == boundaries.ready_hit(keys) == [*keys[:2], *state_keys(keys[1], STATES)]
    assert boundaries.stored_hit(keys, first=2) == []
    put(store, list(state_keys(keys[3], STATES))[1:], keys[3])
    assert boundaries.last_with_states(keys[:5]) == 4
    store.drop([keys[2]])
    assert boundaries.stored_hit(keys)[:2] == keys[:2]
    assert boundaries.without_states(len(boundaries.stored_hit(keys))) == 2


def test_without_recurrent_layers_a_hit_ends_with_any_chunk(store: TieredStore) -> None:
    keys, boundaries = chain("a", 4), HitFinder(store.catalog, 0)
    put(store, keys[:3])
    assert boundaries.stored_hit(keys) == boundaries.ready_hit(keys) == keys[:3]
    assert (boundaries.without_states(3), boundaries.keys_to_promote(keys)) == (3, keys)


def test_keys_of_states_are_their_own() -> None:
    one, other = chain("a", 2)
    keys = [*state_keys(one, 3), *state_keys(other, 3)]
    assert len({one, other, *keys}) == 8
    assert [key.number for key in keys] == [1, 2, 3, 1, 2, 3]
    assert StateKey.of(one, 2) == state_keys(one, 3)[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_states_are_evicted_before_the_chunks_that_they_need(policy: str) -> None:
    with closing(small_store(12, policy=policy)) as store:
        keys = chain("a", 4)
        put(store, keys)
        for end in (2, 4):
            put(store, list(state_keys(keys[end - 1], STATES)), keys[end - 1])
            store.touch([*keys[:end], *state_keys(keys[end - 1], STATES)])
        boundaries = HitFinder(store.catalog, STATES)
        for number in range(12):
            put(store, chain(f"other {number}", 1))
            found = boundaries.stored_hit(keys)
            there = store.catalog.count_prefix(keys)[1]
            for end in (2, 4):
                states = state_keys(keys[end - 1], STATES)
                assert there >= end or store.catalog.count_prefix(states)[1] == 0, (
                    "a state outlives a chunk that it needs"
                )
            assert boundaries.without_states(len(found)) <= there


def test_states_have_two_thirds_of_the_slots_at_most(store: TieredStore) -> None:
    keys = chain("a", 6)
    put(store, keys[:1])
    for key in keys:
        put(store, list(state_keys(key, STATES)), key)
    assert store.stats().primary.states == 8
    assert store.catalog.count_prefix(state_keys(keys[5], STATES)) == (2, 2)
    assert store.catalog.count_prefix(state_keys(keys[0], STATES)) == (0, 0), "the oldest give way"


def test_lower_tiers_get_the_bytes_of_a_state_alone() -> None:
    layers = (LayerPages(3 * 4096, 1), LayerPages(4096, 1, 1, 1), LayerPages(4000, 1, 2, 2))
    layout = KVLayout(16, layers)
    assert (layout.slot_bytes, layout.sizes) == (3 * 4096, (3 * 4096, 4096, 4000))
    disk = CPUPinnedBackend(64 * layout.slot_bytes, layout.slot_bytes, populate=False)
    disk.name = "disk"
    host = CPUPinnedBackend(8 * layout.slot_bytes, layout.slot_bytes, populate=False)
    lower = Tier(disk, make_policy("LRU"), capacity_bytes=1 << 20)
    with closing(TieredStore(Tier(host, make_policy("LRU")), [lower], sizes=layout.sizes)) as store:
        keys = chain("a", 1)
        put(store, keys)
        put(store, list(state_keys(keys[0], STATES)), keys[0])
        assert store.drain(LIMIT)
        assert store.stats().tiers[1].used_bytes == 5 * 4096
        store.drop([*keys, *state_keys(keys[0], STATES)])
        promotion = store.promote(HitFinder(store.catalog, STATES).stored_hit(keys))
        assert promotion.wait(LIMIT)
        assert promotion.ready == 3
        with store.lease(promotion.keys) as lease:
            assert [bytes(store.slab.view(slot)[:4]) for slot in lease.slots] == [b"full"] * 3
        promotion.release()


def test_states_that_another_process_has_stored_are_asked_for() -> None:
    """Which of the boundaries have states, only a question to each tells."""
    medium, keys = memory(64, "remote"), chain("others", 5)
    with closing(small_store(20, lower(Persistent(medium, shared=True)))) as store, listing_every(NEVER):
        assert store.wait_indexed(LIMIT)
        theirs = [*keys[:4], *state_keys(keys[1], STATES), state_keys(keys[2], STATES)[0]]
        for key in theirs:
            medium.write(Chunk(key, memoryview(payload(key))))
        lookup = store.look_up_shared(keys, STATES)
        assert lookup is not None
        assert lookup.wait(LIMIT)
        boundaries = HitFinder(store.catalog, STATES)
        assert boundaries.stored_hit(keys) == [*keys[:2], *state_keys(keys[1], STATES)]
        promotion = store.promote(boundaries.keys_to_promote(keys))
        assert promotion.wait(LIMIT)
        assert promotion.ready == 4
        promotion.release()
        again = store.look_up_shared(keys[:2], STATES)
        assert again is None, "all of it is known"
