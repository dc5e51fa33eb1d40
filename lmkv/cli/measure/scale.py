"""An index of few and of many chunks: its memory, and the time that each call takes. Without vLLM.

`python -m lmkv.cli.measure.scale COUNT` measures one size in a process of its own. A made-up medium lists random keys
as fast as they can be made, so that only lmkv is measured.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.null import NullBackend
from lmkv.cli.measure.process import same_code
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import percentile
from lmkv.outcomes import STORED, Written
from lmkv.policies import make_policy
from lmkv.protocols import Chunk, ChunkKey, Listed, Tier
from lmkv.store.tiered import TieredStore

FEW, MANY, QUICK = 10_000, 1_000_000, 100_000
SLOT_BYTES, CHAIN, BATCH = 4096, 64, 32
MEMORY, FOUND, LOOKUP, EVICT = (
    "memory a chunk, bytes",
    "found a chunk, us",
    "lookup a chunk, us",
    "evict and index a chunk, us",
)
SHOWN = {
    MEMORY: "Host memory of a chunk in the index",
    FOUND: "Index a chunk that is found at the start",
    LOOKUP: "Look up a chunk",
    EVICT: "Evict a chunk and index another",
}
ROUNDS = 3
FLAT = 1.5
"""A chunk of a large index may take so many times what one of a small index takes."""


def key_of(number: int) -> ChunkKey:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class MadeUp(NullBackend):
    """A medium that has the keys of the first `count` numbers, and takes every chunk. Its listing waits for `begin`."""

    def __init__(self, count: int) -> None:
        super().__init__("disk")
        self.count = count
        self.begin = threading.Event()

    def list_keys(self) -> Iterator[list[Listed]]:
        self.begin.wait()
        for start in range(0, self.count, BATCH):
            yield [Listed(key_of(number), SLOT_BYTES, float(number)) for number in range(start, start + BATCH)]

    def write(self, chunk: Chunk) -> Written:
        return STORED


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_of(call: Callable[[], object], rounds: int, items: int) -> float:
    """Median CPU time of an item, in microseconds."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return statistics.median(found) / items * 1e6


def indexed(count: int, folder: str | None = None) -> tuple[TieredStore, dict[str, float]]:
    """A store whose last tier, as large as its content, is indexed; and figures of that. Raises RuntimeError."""
    host = Tier(CPUPinnedBackend(1024 * SLOT_BYTES, SLOT_BYTES, populate=False), make_policy("LRU"))
    made_up = MadeUp(count)
    made_up.begin.set()
    medium = made_up if folder is None else LocalDiskBackend(folder, bytes(32), direct="off", min_free=0)
    capacity = count * SLOT_BYTES if folder is None else None
    gc.collect()
    before, cpu, start = resident_bytes(), time.process_time(), time.perf_counter()
    store = TieredStore(host, [Tier(medium, make_policy("LRU"), capacity)])
    waits: list[float] = []
    some = [[key_of(1_000_000_007 * each % count) for each in range(first, first + CHAIN)] for first in range(64)]
    while not store.wait_indexed(0.005):
        asked = time.perf_counter()
        store.lookup(some[len(waits) % len(some)])
        waits.append(time.perf_counter() - asked)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    gc.collect()
    chunks = store.stats().tiers[1].chunks
    if chunks != count:
        raise RuntimeError(f"{chunks:,} chunks were found instead of {count:,}")
    return store, {
        MEMORY: (resident_bytes() - before) / count,
        FOUND: cpu / count * 1e6,
        "all found, s": wall,
        "lookup of 64 chunks meanwhile, p99, ms": percentile(waits, 0.99) * 1e3 if waits else 0.0,
        LOOKUP: cpu_of(lambda: [store.lookup(keys) for keys in some], 30, 64 * CHAIN),
    }


def evicting(store: TieredStore) -> float:
    """CPU time a chunk that is stored in a full tier, those of I/O threads included."""
    fresh = iter(range(1 << 40, 1 << 41))
    times = []
    for _ in range(40):
        keys = [key_of(next(fresh)) for _ in range(CHAIN)]
        start = time.process_time()
        with store.reserve(keys) as reservation:
            reservation.commit()
        store.drain(60)
        times.append(time.process_time() - start)
    return statistics.median(times) / CHAIN * 1e6


def run(command: list[str]) -> Any:
    """The JSON value in the last line that a command prints. Raises RuntimeError with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **same_code()})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure_scale(*, quick: bool) -> Iterator[Comparison]:
    """Many chunks beside few: CPU time, and memory. Medians of `ROUNDS`."""
    few, many = sizes = (FEW, QUICK if quick else MANY)
    command = [sys.executable, "-P", "-m", __name__]
    rounds = [{count: run([*command, str(count)]) for count in sizes} for _ in range(1 if quick else ROUNDS)]
    for name, title in SHOWN.items():
        small, large = f"lmkv, {few:,} chunks", f"lmkv, {many:,} chunks"
        found = {small: [each[few][name] for each in rounds], large: [each[many][name] for each in rounds]}
        yield Comparison.of_rounds(title, name.rpartition(", ")[2], found, small, {large: FLAT})


def main() -> None:
    store, figures = indexed(int(sys.argv[1]))
    figures[EVICT] = evicting(store)
    store.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
