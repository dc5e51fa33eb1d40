"""The calls that a scheduler waits for, beside the least that each could take. CPU time, and no bytes move."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping

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

_numbers = itertools.count()

Case = tuple[Callable[[], None], Callable[[], None]]
"""`(run, prepare)`: a call to be measured, and one that goes before each, which is not."""


def new_keys(count: int) -> list[ChunkKey]:
    return [next(_numbers).to_bytes(32, "little") for _ in range(count)]


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
    hashing, keys = "bare sha256", "lmkv keys"
    try:
        store.reserve(chunk_keys(tokens, NAMESPACE, CHUNK)).commit()
        looking = {
            hashing: lambda: bare_chain(tokens),
            keys: lambda: chunk_keys(tokens, NAMESPACE, CHUNK),
            "lmkv keys, lookup and lease": lambda: store.lease(chunk_keys(tokens, NAMESPACE, CHUNK)).release(),
        }
        rounds = 11 if quick else 101
        found = compared(f"A prompt of {LENGTH:,} tokens", "million tokens/s", LENGTH, looking, rounds)
        while store.slab.free_slots:
            store.reserve(new_keys(BATCH)).commit()
        cases = {"a bare OrderedDict": replacing(SLOTS), "lmkv": storing(store)}
        runs = {name: run for name, (run, _) in cases.items()}
        title = "Evicting and inserting chunks"
        evicting = compared(title, "million chunks/s", BATCH, runs, 10 * rounds, lambda name: cases[name][1]())
        return [found, evicting]
    finally:
        store.close()


def compared(
    title: str,
    unit: str,
    count: int,
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Millions of things a second, beside the first case."""
    times = interleaved(cases, rounds, before=before)
    speeds = {name: count / statistics.median(seconds) / 1e6 for name, seconds in times.items()}
    return Comparison(title, unit, speeds, next(iter(cases)))
