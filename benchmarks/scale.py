"""An index of ten thousand to three million chunks: its memory, the time until all chunks are found, and later calls.

    python -m benchmarks.scale [--rounds 9] [--only sizes,calls,files] [--files FOLDER] [--quick] [--write FILE]

In each round every size runs in a separate process, and the rows show medians. A simulated medium lists random keys as
fast as it can make keys, so that only lmkv is measured. With --files, up to 300,000 real files of a local disk tier are
listed as well, and then inspected and deleted by `lmkv inspect` and `lmkv prune`. The reference of these commands is
the removal of the same number of plain files. Times are CPU time. Only calls while chunks are being found are in wall
time, because a scheduler would wait for this time. The last tier is as large as its content, so each new chunk evicts
another.

calls: the scheduler's calls while a million chunks are being found below a full host memory. After each step, the
program waits for the writes of the lower tier. For comparison, the same calls run while no chunk is being found. All
calls are also shown without the time of garbage collections. The reference, bare hashing of 32k tokens, is timed
between requests.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.calls import BARE, BEYOND, HASHING, LIMIT, LONG, P99_TARGET, Recorder, Request, Side, beyond, size
from benchmarks.rounds import ROOT, Row, arguments, compared, finish, percentile, reached
from lmkv.backends.adapters import NullBackend
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.cli.bench import CHUNK
from lmkv.cli.report import interval
from lmkv.policies import make_policy
from lmkv.protocols import STORED, Chunk, ChunkKey, Listed, Tier, Written
from lmkv.store.tiered import TieredStore
from lmkv.vllm.scheduler.telemetry import Telemetry

SIZES, FILES = (10_000, 100_000, 1_000_000, 3_000_000), (10_000, 100_000, 300_000)
MANY, QUICK = 1_000_000, 100_000
SLOT_BYTES, CHAIN, LISTED = 4096, 64, 32
FLAT = 1.5
"""Largest accepted time of a chunk in a large index, as a multiple of its time in a small index."""
REQUESTS = 300
"""Number of requests of each length while no chunk is being found. While chunks are being found there may be more,
but not fewer.
"""
DURING, ALONE = "while chunks are found", "while nothing is found"
UNCOLLECTED = ", without collections of garbage"
CONTENT = b"x" * 64
Sizes = dict[int, dict[str, float]]
"""The figures, by the number of chunks in the index."""


def key_of(number: int) -> ChunkKey:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


class MadeUp(NullBackend):
    """A medium that has the keys of the first `count` numbers, and takes every chunk. Its listing waits until
    `begin` is called.
    """

    def __init__(self, count: int) -> None:
        super().__init__("disk")
        self.count = count
        self.begin = threading.Event()

    def list_keys(self) -> Iterator[list[Listed]]:
        self.begin.wait()
        for start in range(0, self.count, LISTED):
            yield [Listed(key_of(number), SLOT_BYTES, float(number)) for number in range(start, start + LISTED)]

    def write(self, chunk: Chunk) -> Written:
        return STORED


# -- sizes ------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_of(call: Callable[[], object], rounds: int, items: int) -> float:
    """Return the median CPU time of one item, in microseconds. `items`: number of items of a call."""
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return statistics.median(found) / items * 1e6


def measured(count: int, folder: str | None) -> dict[str, float]:
    """Return all figures of one size, measured in this process. The last tier of the store is indexed, and as large
    as its content.
    """
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
        store.catalog.lookup(some[len(waits) % len(some)])
        waits.append(time.perf_counter() - asked)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    gc.collect()
    chunks = store.stats().tiers[1].chunks
    if chunks != count:
        raise RuntimeError(f"{chunks:,} chunks were found instead of {count:,}")
    found = {
        "memory a chunk, bytes": (resident_bytes() - before) / count,
        "found a chunk, us": cpu / count * 1e6,
        "all found, s": wall,
        "lookup of 64 chunks meanwhile, p99, ms": percentile(waits, 0.99) * 1e3 if waits else 0.0,
        "lookup a chunk, us": cpu_of(lambda: [store.catalog.lookup(keys) for keys in some], 30, 64 * CHAIN),
        "metrics of a second, us": cpu_of(Telemetry(store, itertools.count().__next__).take, 200, 1),
    }
    if folder is None:
        found["evict and index a chunk, us"] = evicting(store)
    store.close()
    return found


def evicting(store: TieredStore) -> float:
    """Return the CPU time of storing one chunk in a full tier. The time of I/O threads is included."""
    fresh = itertools.count(1 << 40)
    times = []
    for _ in range(40):
        keys = [key_of(next(fresh)) for _ in range(CHAIN)]
        start = time.process_time()
        with store.reserve(keys) as reservation:
            reservation.commit()
        store.drain(60)
        times.append(time.process_time() - start)
    return statistics.median(times) / CHAIN * 1e6


def size_rows(kind: str, found: Sequence[Sizes]) -> Iterator[Row]:
    """Yield a row for each size, compared with the smallest size in the same round."""
    for name in found[0][min(found[0])] if found else ():
        title, _, unit = name.rpartition(", ")
        rounds = {f"{count:,} chunks": [sizes[count][name] for sizes in found] for count in found[0]}
        smallest, *others = rounds
        # The time until all is found grows with the number, and a lookup meanwhile waits for the interpreter.
        targets = dict.fromkeys(others, FLAT) if unit in ("us", "bytes") else {}
        yield from compared(f"{kind}, {title}", unit, rounds, smallest, targets)


# -- files ------------------------------------------------------------------------------------------------


def fill(folder: Path, count: int) -> None:
    """Write `count` small chunks into the folder."""
    folder.mkdir()
    payload = memoryview(CONTENT)
    with closing(LocalDiskBackend(folder, bytes(32), direct="off", min_free=0)) as backend:
        written = [backend.write(Chunk(key_of(number), payload)) for number in range(count)]
    if any(each != STORED for each in written):
        raise RuntimeError(f"a file was not written: {next(each for each in written if each != STORED)}")


def removing(folder: Path, count: int) -> float:
    """Return the CPU seconds of removing `count` plain files from folders like those of a disk tier."""
    names = [str(folder / f"{number % 256:02x}" / key_of(number).hex()) for number in range(count)]
    for number in range(256):
        folder.joinpath(f"{number:02x}").mkdir(parents=True)
    try:
        for name in names:
            Path(name).write_bytes(CONTENT)
        os.sync()
        start = time.process_time()
        for name in names:
            os.unlink(name)
        return time.process_time() - start
    finally:
        shutil.rmtree(folder)


def of_files(folder: Path, filled: Path, count: int) -> dict[str, float]:
    """Return all figures of a folder. It gets `count` small files, which are copies of `filled`, and is emptied
    again.
    """
    subprocess.run(["cp", "-a", f"{filled}/.", folder], check=True)
    os.sync()
    found: dict[str, float] = in_a_process("--one", count, "--folder", folder)
    start = command("--help")
    for name, what in {"inspect": ["--json"], "prune": ["--max-size", "0"]}.items():
        found[f"lmkv {name} a chunk, us"] = (command(name, str(folder), *what) - start) / count * 1e6
    found["remove a plain file, us"] = removing(folder / "plain", count) / count * 1e6
    return found


def command(*arguments: str) -> float:
    """Return the CPU seconds of an `lmkv` command."""
    before = os.times()
    program = [sys.executable, "-c", "from lmkv.cli import main; main()", *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lmkv {' '.join(arguments)}: {done.stderr}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# -- calls while chunks are found -------------------------------------------------------------------------


def calls_meanwhile(count: int, requests: int) -> dict[str, list[float]]:
    """Return the 99th percentiles by call, length, kind and time, and their reference: the one of `LIMIT` while no
    chunk is being found.
    """
    below = MadeUp(count)
    side = Side.make(Tier(below, make_policy("LRU")))
    store = side.store
    store.drain(600)

    def serve(make: Callable[[int], Request], numbers: Iterable[int]) -> dict[int, Recorder]:
        found = {length: Recorder() for length in (LONG, CHUNK)}
        for _ in numbers:
            for length, timed in found.items():
                side.record(make, length, timed)
        return found

    def until(ended: Callable[[], bool]) -> Iterator[int]:
        served = 0
        while not ended():
            yield served
            served += 1
        if served < requests:
            raise RuntimeError(f"{served} requests ended before {count:,} chunks were found: take more")

    quiet = serve(side.known, range(requests))
    below.begin.set()
    hits = serve(side.known, until(lambda: store.stats().tiers[1].chunks >= count // 2))
    stores = serve(side.unknown, until(lambda: store.wait_indexed(0)))
    quiet_later = serve(side.unknown, range(requests))
    side.scheduler.close()
    bare = [each for other in (quiet, quiet_later) for timed in other.values() for each in timed.calls[LIMIT]]
    limit, found = percentile(bare, 0.99), dict[str, list[float]]()
    for kind, when in (("hit", {DURING: hits, ALONE: quiet}), ("stored", {DURING: stores, ALONE: quiet_later})):
        for moment, by_length in when.items():
            for length, timed in by_length.items():
                own = percentile(when[ALONE][length].calls[BARE], 0.99)
                for call in timed.calls.keys() - {LIMIT, BARE}:
                    name = f"{BEYOND if call == HASHING else call}, {size(length)}, {kind}: p99 {moment}"
                    less = own if call == HASHING else 0.0
                    found[name] = [beyond(timed.calls[call], less), limit]
                    found[name + UNCOLLECTED] = [beyond(timed.without[call], less), limit]
    return dict(sorted(found.items()))


def call_rows(found: Sequence[dict[str, list[float]]]) -> Iterator[Row]:
    """Yield a row for each 99th percentile, compared with the reference in the same round."""
    for name in found[0] if found else ():
        values = [each[name][0] for each in found]
        ratios = [each[name][0] / each[name][1] for each in found]
        target = None if name.endswith(UNCOLLECTED) else P99_TARGET
        met = None if target is None else reached(ratios, target, less=True)
        value, ratio = statistics.median(values), statistics.median(ratios)
        yield Row(name, value, "ms", f"{LIMIT}, p99", ratio, interval(ratios), target, met)


def in_a_process(*words: object) -> Any:
    """Return the JSON value in the last line that a new process of this program prints. Raises RuntimeError with the
    program's errors if it fails.
    """
    program = [sys.executable, "-m", "benchmarks.scale", *map(str, words)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def rows(options: argparse.Namespace, only: set[str]) -> Iterator[Row]:
    most = QUICK if options.quick else max(SIZES)
    made: list[Sizes] = []
    files: list[Sizes] = []
    calls: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory(prefix="lmkv-scale-", dir="/dev/shm") as memory:
        counts = [count for count in FILES if count <= most] if "files" in only and options.files else []
        # In memory, since a disk takes many times as long to make a file as to copy one.
        filled = {count: Path(memory, str(count)) for count in counts}
        for count, folder in filled.items():
            fill(folder, count)
        try:
            for number in range(options.rounds):
                if "sizes" in only:
                    made.append({count: in_a_process("--one", count) for count in SIZES if count <= most})
                if "calls" in only:
                    calls.append(in_a_process("--calls", min(MANY, most)))
                if filled:
                    files.append({count: of_files(options.files, folder, count) for count, folder in filled.items()})
                print(f"round {number}", file=sys.stderr, flush=True)
        finally:
            # An error in a late round must not lose the others.
            yield from size_rows("made up", made)
            yield from call_rows(calls)
            yield from size_rows("files", files)


def main() -> int:
    parser = arguments(__doc__, quick="up to 100,000 chunks")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="sizes,calls,files", help="what is measured; files with --files")
    parser.add_argument("--files", type=Path, help="an empty folder, to be filled with up to 300,000 small files")
    parser.add_argument("--one", type=int, help="measure one size alone")
    parser.add_argument("--calls", type=int, help="measure the calls alone while so many chunks are found")
    parser.add_argument("--folder", help="of a local disk tier, for --one")
    options = parser.parse_args()
    if options.one or options.calls:
        few = 30 if options.calls and options.calls <= QUICK else REQUESTS
        print(json.dumps(measured(options.one, options.folder) if options.one else calls_meanwhile(options.calls, few)))
        return 0
    return finish(rows(options, set(options.only.split(","))), options)


if __name__ == "__main__":
    sys.exit(main())
