"""Listings keep the order of eviction and a right index, and the garbage collector leaves a large index alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from lmkv.policies import LRU
from lmkv.protocols import ChunkKey, Listed
from lmkv.store.guards import Freezer
from lmkv.store.index import TierIndex
from tests.tables import chain

CHUNK = 10


def listed(index: TierIndex, *batches: Sequence[Listed]) -> None:
    assert index.begin_listing()
    for batch in batches:
        assert index.adopt(batch)
    while index.forget_unseen(100):
        pass
    index.end_listing()


def of(keys: Sequence[ChunkKey], last_used: float, nbytes: int = CHUNK) -> list[Listed]:
    return [Listed(key, nbytes, last_used) for key in keys]


def order(index: TierIndex) -> list[ChunkKey]:
    """All chunks, next victim first."""
    return index.policy.evict(index.used) or []


def test_new_chunks_and_used_ones_stay_in_the_order_of_their_last_use() -> None:
    head, tail, new = chain("head", 4), chain("tail", 4), chain("new", 2)
    index = TierIndex(LRU(), None)
    listed(index, of(head, 100.0))
    # Another process has used the head since, and stored a tail behind it, which is to be evicted first.
    listed(index, [*of(tail[::-1], 150.0), *of(head[::-1], 160.0), *of(new, 170.0)])
    assert order(index) == [*tail[::-1], *head[::-1], *new]


def test_a_chunk_that_is_listed_twice_counts_once() -> None:
    one, two = chain("one", 2)
    index = TierIndex(LRU(), None)
    listed(index, [*of([one, two], 1.0), *of([one], 2.0)])
    assert (len(index), index.used) == (2, 2 * CHUNK)
    assert index.policy.evict(CHUNK) is not None


def test_sizes_that_differ_within_a_batch() -> None:
    one, two, three = chain("sizes", 3)
    index = TierIndex(LRU(), None)
    listed(index, [*of([one], 1.0, 10), *of([two], 2.0, 20), *of([three], 3.0, 10)])
    assert index.sizes() == {one: 10, two: 20, three: 10}
    assert order(index) == [one, two, three]


def test_chunks_beyond_the_capacity_evict_the_oldest() -> None:
    keys, index = chain("many", 8), TierIndex(LRU(), 5 * CHUNK)
    listed(index, of(keys, 1.0))
    assert sorted(index.sizes()) == sorted(keys[3:])
    assert set(index.take_tombstones()) == set(keys[:3])


def test_another_policy_takes_the_place_of_one_that_raises_in_a_listing() -> None:
    class RaisesOnce(LRU):
        left = 1

        def extend(self, keys: Sequence[ChunkKey]) -> None:
            super().extend(keys)
            if type(self).left:
                type(self).left -= 1
                raise RuntimeError("once")

    keys = chain("raises", 4)
    index = TierIndex(RaisesOnce(), None)
    listed(index, of(keys, 1.0))
    assert list(index.sizes()) == list(keys)
    assert index.order.evict(1) == keys[:1]


def test_full_collections_leave_a_large_index_alone_and_keep_no_garbage() -> None:
    class Node:
        other: Node

    gc.collect()
    before = gc.get_freeze_count()
    try:
        freezer = Freezer()
        freezer.added(100, 100)
        gc.collect()
        assert gc.get_freeze_count() == before
        garbage, kept = Node(), [[number] for number in range(1000)]
        garbage.other = garbage
        gone = weakref.ref(garbage)
        del garbage
        freezer.added(20_000, 20_100)
        gc.collect()
        assert gc.get_freeze_count() >= before + len(kept)
        assert gone() is None
        frozen = gc.get_freeze_count()
        freezer.added(100, 20_200)
        gc.collect()
        assert gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
