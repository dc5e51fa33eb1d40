"""The primary tier's bookkeeping a key: evicting and inserting, pinning, and slots. No bytes move.

    python benchmarks/evict.py [--quick] [--json]

CPU time over 32,768 chunks, beside that of a bare OrderedDict with as many keys, whose oldest is replaced by a new
one, in the same rounds. "evict and insert" is what a store does for each chunk once the tier is full:
reserve, which evicts and takes the slot, and commit, which publishes; 64 chunks at a time, under each policy,
with nothing pinned and with 4,096 of the oldest chunks pinned.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.cli.measure.calls import BATCH, EVICT_TARGET, SLOT_BYTES, full_store, replacing, storing
from lmkv.memory.slab import Slab
from lmkv.policies import POLICIES
from lmkv.store.tiered import TieredStore

SLOTS, PINNED = 32_768, 4096
PIN_TARGET, SLOT_TARGET, NOISE = 2.5, 1.0, 1.2
BARE = "a bare OrderedDict"


def beside_bare(name: str, times: Mapping[str, Sequence[float]], case: str, count: int, target: float) -> Row:
    """Microseconds of one of `count` keys, and the ratio to a bare OrderedDict in the same rounds."""
    micros, ratio = statistics.median(times[case]) / count * 1e6, median_ratio(times, case, BARE)
    return Row(name, micros, "us", BARE, ratio, target, ratio <= target)


def eviction(rounds: int) -> Iterator[Row]:
    for policy in POLICIES:
        stores = {f"{pinned:,} pinned": full_store(policy, SLOTS, pinned)[0] for pinned in (0, PINNED)}
        cases = {name: storing(store) for name, store in stores.items()} | {BARE: replacing(SLOTS)}
        runs = {name: run for name, (run, _) in cases.items()}
        times = interleaved(runs, rounds, before=lambda name, cases=cases: cases[name][1]())
        for name in stores:
            yield beside_bare(f"evict and insert a chunk, {policy}, {name}", times, name, BATCH, EVICT_TARGET)
        nothing, many = stores
        ratio = median_ratio(times, many, nothing)
        name = f"evict and insert, {policy}, what pins cost"
        yield Row(name, ratio, "x", nothing, ratio, NOISE, ratio <= NOISE)
        for store in stores.values():
            store.close()


def pins(rounds: int) -> Iterator[Row]:
    bare, next_keys = replacing(SLOTS, 8 * BATCH)
    for policy in POLICIES:
        store, keys = full_store(policy, SLOTS)
        batches = [keys[start : start + 8 * BATCH] for start in range(0, SLOTS, 8 * BATCH)]
        turn = itertools.cycle(batches)
        wanted = [next(turn)]

        def pin(store: TieredStore = store, wanted: list[list[bytes]] = wanted) -> None:
            store.pin(wanted[0], 3600.0)

        def unpin(store: TieredStore = store, wanted: list[list[bytes]] = wanted) -> None:
            store.unpin(wanted[0])

        def before(
            name: str, store: TieredStore = store, wanted: list[list[bytes]] = wanted, turn: Iterator = turn
        ) -> None:
            next_keys()
            store.unpin(wanted[0])
            wanted[0] = next(turn)
            if name == "unpin":
                store.pin(wanted[0], 3600.0)

        times = interleaved({"pin": pin, "unpin": unpin, BARE: bare}, rounds, before=before)
        for name in ("pin", "unpin"):
            yield beside_bare(f"{name} a chunk, {policy}", times, name, 8 * BATCH, PIN_TARGET)
        store.close()


def slots(rounds: int) -> Row:
    slab = Slab(SLOT_BYTES, SLOTS * SLOT_BYTES)
    count = 8 * BATCH

    def take_and_give_back() -> None:
        for slot in [slab.allocate() for _ in range(count)]:
            slab.free(slot)

    bare, prepare = replacing(SLOTS, count)
    times = interleaved({"slots": take_and_give_back, BARE: bare}, rounds, before=lambda name: prepare())
    slab.close()
    return beside_bare("take and free a slot", times, "slots", count, SLOT_TARGET)


def main() -> int:
    options = arguments_of(__doc__).parse_args()
    rounds = 50 if options.quick else 500
    return finish([*eviction(rounds), *pins(rounds), slots(rounds)], options.json)


if __name__ == "__main__":
    sys.exit(main())
