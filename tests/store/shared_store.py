"""A store with a disk tier, and programs that use one in processes of their own. Not a test itself.

It stores random chunks of a common pool and loads others, and checks every byte it is given.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from threading import Barrier
from typing import Any

import pytest

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend, folder as usage
from lmkv.policies import make_policy
from lmkv.protocols import Clock, Tier
from lmkv.store import catalog
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.forked import Tell
from tests.kit import LIMIT, NEVER, listing_every

CHUNK = 128 << 10
THREADS = 4
KEYS = [number.to_bytes(32, "big") for number in range(400)]


def payload(key: bytes) -> bytes:
    return key * (CHUNK // len(key))


def open_store(
    folder: str, namespace: int, capacity: int, clock: Clock | None = None, interval: float = NEVER, min_free: int = 0
) -> TieredStore:
    """A store that has listed the folder once, and does so again each `interval` seconds. Its clock stands still."""
    clock = clock or ManualClock()
    disk = LocalDiskBackend(folder, bytes([namespace]) * 32, shared=True, min_free=min_free, clock=clock)
    tier = Tier(disk, make_policy("LRU"), capacity_bytes=capacity)
    with listing_every(interval):
        host = Tier(CPUPinnedBackend(16 * CHUNK, CHUNK), make_policy("LRU"))
        store = TieredStore(host, [tier], io_threads=THREADS, clock=clock)
    # A listing may count twice what is written meanwhile.
    assert store.wait_indexed(LIMIT)
    return store


def put(store: TieredStore, keys: list[bytes]) -> None:
    with store.reserve(keys) as reservation:
        for key, slot in reservation.slots.items():
            store.slab.view(slot)[:] = payload(key)
        reservation.commit()


def get(store: TieredStore, keys: list[bytes]) -> int:
    """Load the leading chunks that there are; returns how many."""
    promotion = store.promote(keys)
    assert promotion.wait(LIMIT)
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
            # The latest chunks are likely to be there still, others hardly ever.
            first = chooser.choice([first, latest])
            keys = KEYS[first : first + 4]
            hits += get(store, keys)
        assert store.drain(LIMIT)
        store.drop(keys)
    return hits


def live(tell: Tell, folder: str, namespace: int, seed: int, capacity: int) -> None:
    """Store, tell that, then store and load until somebody ends it."""
    store = open_store(folder, namespace, capacity)
    put(store, KEYS[:4])
    assert store.drain(LIMIT)
    tell("stored")
    while True:
        work(store, seed, 1000)


def stop_halfway(tell: Tell, folder: str, namespace: int, seed: int, capacity: int) -> None:
    """Store and load, stop for ever in the middle of two writes or more, and tell that."""
    store, stopped = open_store(folder, namespace, capacity), itertools.count(1)
    work(store, seed, 50)

    def stop(source: str, path: str, **options: Any) -> None:
        if next(stopped) == 2:
            tell("halfway")
        threading.Event().wait()

    pytest.MonkeyPatch().setattr(os, "link", stop)
    put(store, [(1000 + 4 * seed + number).to_bytes(32, "big") for number in range(4)])
    threading.Event().wait()


def take_part(tell: Tell, folder: str, namespace: int, seed: int, capacity: int, listing: bool, start: Barrier) -> None:
    """Store and load for a second or so, and tell the counts. `listing`: half of the time, not just once."""
    patch = pytest.MonkeyPatch()
    # A process that does not get the lock on the count in this time does without the count.
    patch.setattr(usage, "_PATIENCE", LIMIT)
    patch.setattr(catalog, "_SHARE", 0.5)
    listings = itertools.count()
    list_all = LocalDiskBackend.list_all
    patch.setattr(LocalDiskBackend, "list_all", lambda disk: (next(listings), list_all(disk))[1])
    store = open_store(folder, namespace, capacity, interval=0.0 if listing else NEVER)
    start.wait(LIMIT)
    hits = work(store, seed, 300)
    disk = store.stats().tiers[1]
    store.close(LIMIT)
    tell({"hits": hits, "writes": disk.writes, "evictions": disk.evictions, "listings": next(listings)})
