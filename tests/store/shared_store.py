"""A store with a disk tier, and what a process of its own does with one. Not a test itself.

It stores random chunks of a common pool and loads others, and checks every byte it is given.
"""

from __future__ import annotations

import random
import time
from functools import partial
from threading import Barrier

import pytest

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.policies import make_policy
from lmkv.protocols import Clock, Tier
from lmkv.store import tiered
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.scanner import TierScanner
from tests.forked import Tell

CHUNK = 128 << 10
THREADS = 4
KEYS = [number.to_bytes(32, "big") for number in range(400)]


def payload(key: bytes) -> bytes:
    return key * (CHUNK // len(key))


def open_store(folder: str, namespace: int, capacity: int, clock: Clock = time.monotonic) -> TieredStore:
    disk = LocalDiskBackend(folder, bytes([namespace]) * 32, shared=True)
    tier = Tier(disk, make_policy("LRU"), capacity_bytes=capacity)
    return TieredStore(
        Tier(CPUPinnedBackend(16 * CHUNK, CHUNK), make_policy("LRU")),
        [tier],
        io_threads=THREADS,
        clock=clock,
    )


def put(store: TieredStore, keys: list[bytes]) -> None:
    with store.reserve(keys) as reservation:
        for key, slot in reservation.slots.items():
            store.slab.view(slot)[:] = payload(key)
        reservation.commit()


def get(store: TieredStore, keys: list[bytes]) -> int:
    """Load the leading chunks that there are; returns how many."""
    promotion = store.promote(keys)
    promotion.wait(20)
    with store.lease(promotion.keys) as lease:
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            assert store.slab.view(slot) == payload(key), "wrong bytes"
        found = len(lease)
    promotion.release()
    return found


def work(store: TieredStore, seed: int, rounds: int) -> int:
    chooser = random.Random(seed)
    hits, latest = 0, 0
    for _ in range(rounds):
        first = chooser.randrange(len(KEYS) - 4)
        if chooser.random() < 0.7:
            keys = KEYS[first : first + 4]
            put(store, keys)
            latest = first
        else:
            # What came last is likely to be there still, anything else hardly ever.
            first = chooser.choice([first, latest])
            keys = KEYS[first : first + 4]
            hits += get(store, keys)
        assert store.drain(20)
        store.drop(keys)
    return hits


def live(_: Tell, folder: str, namespace: int, seed: int, capacity: int) -> None:
    """Store and load until somebody ends it."""
    store = open_store(folder, namespace, capacity)
    assert store.wait_indexed(20)
    while True:
        work(store, seed, 1000)


def take_part(
    tell: Tell, folder: str, namespace: int, seed: int, capacity: int, interval: float, start: Barrier
) -> None:
    """Store and load for a second or so, and tell the counts. `interval`: from one listing to the next."""
    pytest.MonkeyPatch().setattr(tiered, "TierScanner", partial(TierScanner, interval=interval))
    store = open_store(folder, namespace, capacity)
    assert store.wait_indexed(20)
    start.wait(20)
    hits = work(store, seed, 300)
    disk = store.stats().tiers[1]
    store.close()
    tell({"hits": hits, "writes": disk.writes, "evictions": disk.evictions})
