"""A process with a disk tier of its own: `python shared_store.py FOLDER NAMESPACE SEED ROUNDS CAPACITY`.

It stores random chunks of a common pool and loads others, checks every byte it is given, and prints its
counts as JSON. Not a test itself.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial

from lmkv import tiered
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.memory import CPUPinnedBackend
from lmkv.listing import Lister
from lmkv.policies import make_policy
from lmkv.tier import Tier
from lmkv.tiered import TieredStore

CHUNK = 128 << 10
THREADS = 4
KEYS = [number.to_bytes(32, "big") for number in range(400)]


def payload(key: bytes) -> bytes:
    return key * (CHUNK // len(key))


def open_store(folder: str, namespace: int, capacity: int) -> TieredStore:
    disk = LocalDiskBackend(folder, bytes([namespace]) * 32, shared=True)
    tier = Tier(disk, make_policy("LRU"), capacity_bytes=capacity)
    return TieredStore(
        Tier(CPUPinnedBackend(16 * CHUNK, CHUNK), make_policy("LRU")), [tier], io_threads=THREADS
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


def live(folder: str, namespace: int, seed: int, capacity: int) -> None:
    """Store and load until somebody ends it."""
    store = open_store(folder, namespace, capacity)
    assert store.wait_indexed(20)
    while True:
        work(store, seed, 1000)


def main(folder: str, namespace: str, seed: str, rounds: str, capacity: str) -> None:
    # Ten listings where a server has one, so that the few seconds of a test show what they do.
    tiered.Lister = partial(Lister, interval=1.0)  # type: ignore[assignment, misc]
    store = open_store(folder, int(namespace), int(capacity))
    hits = work(store, int(seed), int(rounds))
    disk = store.stats().tiers[1]
    store.close()
    print(json.dumps({"hits": hits, "writes": disk.writes, "evictions": disk.evictions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
