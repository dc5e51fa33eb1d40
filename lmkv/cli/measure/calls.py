"""The calls that a scheduler waits for, beside the least that each could take. CPU time, and no bytes move."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.hashing import chunk_keys
from lmkv.cli.measure.limits import CHUNK, NAMESPACE, bare_chain
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import interleaved
from lmkv.policies import make_policy
from lmkv.protocols import ChunkKey, Tier
from lmkv.store.tiered import TieredStore

SLOT_BYTES, SLOTS, BATCH = 4096, 8192, 64
LENGTH = 131_072
"""Tokens of the prompt that is looked up."""
KEYS_TARGET, LOOKUP_TARGET, EVICT_TARGET = 1.15, 1.8, 10.0
"""Times that keys and lookups may take of bare hashing, and an eviction of an OrderedDict's."""

_numbers = itertools.count()

Case = tuple[Callable[[], None], Callable[[], None]]
"""`(run, prepare)`: a call to be measured, and one that goes before each, which is not."""


def new_keys(count: int) -> list[ChunkKey]:
    return [next(_numbers).to_bytes(32, "little") for _ in range(count)]


def full_store(policy: str, slots: int, pinned: int = 0) -> tuple[TieredStore, list[ChunkKey]]:
    """A store whose slots are all taken and whose oldest chunks are pinned, and the keys of its chunks."""
    host = CPUPinnedBackend(slots * SLOT_BYTES, SLOT_BYTES, populate=False)
    store = TieredStore(Tier(host, make_policy(policy)))
    keys = new_keys(slots)
    for start in range(0, slots, BATCH):
        store.reserve(keys[start : start + BATCH]).commit()
    assert store.slab.free_slots == 0
    assert store.pin(keys[:pinned], 3600.0) == pinned
    return store, keys


def storing(store: TieredStore, batch: int = BATCH) -> Case:
    """Store a request's chunks, with the keys of another request each time."""
    ready = [new_keys(batch)]

    def run() -> None:
        store.reserve(ready[0]).commit()

    def prepare() -> None:
        ready[0] = new_keys(batch)

    return run, prepare


def replacing(size: int, batch: int = BATCH) -> Case:
    """The least that any such bookkeeping does, on a bare OrderedDict of so many keys."""
    table = OrderedDict.fromkeys(new_keys(size))
    ready = [new_keys(batch)]

    def run() -> None:
        for key in ready[0]:
            table.popitem(last=False)
            table[key] = None

    def prepare() -> None:
        ready[0] = new_keys(batch)

    return run, prepare


def measure_calls(*, quick: bool) -> list[Comparison]:
    """Keys and lookup of a long prompt beside bare hashing; evicting and inserting beside a bare OrderedDict."""
    host = CPUPinnedBackend(SLOTS * SLOT_BYTES, SLOT_BYTES, populate=False)
    store = TieredStore(Tier(host, make_policy("LRU")))
    tokens = random.Random(0).choices(range(150_000), k=LENGTH)
    hashing, keys, lookup = "bare sha256", "lmkv keys", "lmkv keys, lookup and lease"
    try:
        store.reserve(chunk_keys(tokens, NAMESPACE, CHUNK)).commit()
        looking = {
            hashing: lambda: bare_chain(tokens),
            keys: lambda: chunk_keys(tokens, NAMESPACE, CHUNK),
            lookup: lambda: store.lease(chunk_keys(tokens, NAMESPACE, CHUNK)).release(),
        }
        rounds, targets = 11 if quick else 101, {keys: KEYS_TARGET, lookup: LOOKUP_TARGET}
        found = compared(f"A prompt of {LENGTH:,} tokens", "ms", 1e3, interleaved(looking, rounds), targets)
        while store.slab.free_slots:
            store.reserve(new_keys(BATCH)).commit()
        cases = {"a bare OrderedDict": replacing(SLOTS), "lmkv": storing(store)}
        runs = {name: run for name, (run, _) in cases.items()}
        times = interleaved(runs, 10 * rounds, before=lambda name: cases[name][1]())
        evicting = compared("Evict a chunk and insert another", "us", 1e6 / BATCH, times, {"lmkv": EVICT_TARGET})
        return [found, evicting]
    finally:
        store.close()


def compared(
    title: str, unit: str, scale: float, times: Mapping[str, Sequence[float]], targets: Mapping[str, float]
) -> Comparison:
    """Times in this unit, beside the first case. `scale`: of a second."""
    found = {name: [scale * each for each in seconds] for name, seconds in times.items()}
    return Comparison.of_rounds(title, unit, found, next(iter(times)), targets)
