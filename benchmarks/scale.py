"""Measures an index of ten thousand to three million chunks: memory, time until all are found, and each call then.

    python benchmarks/scale.py [--rounds 9] [--files FOLDER] [--plot docs/scale.svg] [--quick] [--json]

In each round every size has a process of its own; medians count. A made-up medium lists random keys as fast as they
can be made, so that only lmkv is measured; with --files, real files of a local disk tier are listed beside it, up to
300,000, and then inspected and deleted by `lmkv inspect` and `lmkv prune`. Times are CPU time, but for those of calls
while chunks are being found, which are what a scheduler would wait. The last tier is as large as its content, so that
each new chunk evicts one. The scheduler's calls are those of benchmarks/lookup.py, over a full host memory with a
million chunks below that are being found: first requests that hit, then others that store by evicting, of 32k tokens
and of one chunk in turn. Their reference, bare hashing of 32k tokens, is timed before that. Between two steps the I/O
threads write what was stored, so that their share of the interpreter is in the call that hands it to them alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import itertools
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks._timing import Row, arguments_of, finish, percentile
from benchmarks.lookup import CHUNK, HASHING, LIMIT, LONG, P99_TARGET, Bench, Recorder, Request, size, tokens_of
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.chunks.namespace import Namespace
from lmkv.cli.measure.limits import bare_chain
from lmkv.cli.measure.scale import CHAIN, EVICT, MadeUp, cpu_of, evicting, indexed, key_of, run
from lmkv.policies import make_policy
from lmkv.protocols import Chunk, Tier
from lmkv.store.tiered import TieredStore
from lmkv.vllm.observe.explain import Explainer
from lmkv.vllm.observe.telemetry import Telemetry
from lmkv.vllm.requests.miss import Miss
from lmkv.vllm.requests.patience import Patience
from lmkv.vllm.requests.request import RequestState

SIZES = (10_000, 100_000, 1_000_000, 3_000_000)
FILES = (10_000, 100_000, 300_000)
TOKENS = 256
MEANWHILE = 1_000_000
ALONE, KEYS = "while nothing is found", "beside a thread that only makes keys"
PAUSE = 5e-5
"""Seconds between its batches, as in a listing."""
QUIET, BESIDE, FEWEST = 300, 100, 30
"""Requests of a kind while nothing is being found, beside other keys, and at least while something is found."""
FLAT = 1.5
"""A chunk of the largest index may take so many times what one of the smallest takes."""
Sizes = dict[int, dict[str, float]]
"""Figures, by the number of chunks."""


def measured(count: int, folder: str | None) -> dict[str, float]:
    """All figures of one size, in this process."""
    store, figures = indexed(count, folder)
    figures["metrics of a second, us"] = cpu_of(Telemetry(store, iter(range(10**6)).__next__).take, 200, 1)
    if folder is None:
        explainer = Explainer(store, TOKENS, time.monotonic)
        figures[EVICT] = evicting(store)
        figures["explain a request, us"] = explaining(explainer, store)
    store.close()
    return figures


def explaining(explainer: Explainer, store: TieredStore) -> float:
    """CPU time of a request of 64 chunks, the first of which was evicted."""
    gone = [number for number in range(100_000) if explainer.evictions.find(key_of(number)) is not None][:64]
    if not gone:
        raise RuntimeError("no eviction is remembered")
    namespace = Namespace(model="scale", dtype="bfloat16", chunk_size=TOKENS, block_size=16)
    prompts = [Request(str(number), list(range(CHAIN * TOKENS))) for number in gone]
    states = [RequestState.of(prompt, namespace, "", TOKENS, Patience(1.0), save_tails=False) for prompt in prompts]
    chains = [[key_of(number), *(key_of(number + more << 40) for more in range(1, CHAIN))] for number in gone]

    def explain() -> list[Miss | None]:
        each = zip(states, chains, strict=True)
        return [explainer.explain(state, keys, 0, 0, few=False, late=False) for state, keys in each]

    if {miss and miss.reason for miss in explain()} != {"evicted"}:
        raise RuntimeError("an eviction is not the reason of a miss")
    return cpu_of(explain, 30, len(gone))


def in_a_process(*arguments: object) -> dict[str, float]:
    return run([sys.executable, __file__, *map(str, arguments)])


def calls_meanwhile(count: int) -> dict[str, float]:
    """p50 and p99 of the scheduler's calls while so many chunks are being found, in milliseconds.

    Beside the p99 of `LIMIT`, of the calls without Python's collections of garbage, while nothing is being found, and
    beside a thread that only makes keys: it takes the interpreter as a listing does that costs nothing.
    """
    medium = MadeUp(count)
    bench = Bench.make(Tier(medium, make_policy("LRU")))
    bench.store.drain(600)
    hashing = {length: Recorder() for length in (LONG, CHUNK)}
    for length, timed in [*hashing.items()] * QUIET:
        timed(LIMIT, bare_chain, tokens_of(length, None))
    bare = {length: percentile(timed.calls[LIMIT], 0.99) for length, timed in hashing.items()}
    found = {LIMIT: bare[LONG]}

    def serve(make: Callable[[int], Request], until: Callable[[int], bool]) -> dict[int, Recorder]:
        during = {length: Recorder() for length in bare}
        for number in itertools.count():
            if number >= FEWEST and until(number):
                return during
            for length, timed in during.items():
                gc.callbacks.append(timed.on_collection)
                bench.serve(make(length), timed)
                gc.callbacks.remove(timed.on_collection)
        raise AssertionError

    def note(kind: str, during: dict[int, Recorder], others: dict[str, dict[int, Recorder]]) -> None:
        for length, timed in during.items():
            for call, times in timed.calls.items():
                own = bare[length] if call == HASHING else 0.0
                name = f"{call}{' without its hashing' if own else ''}, {size(length)}, {kind}, "
                found[f"{name}p50"] = statistics.median(times)
                found[f"{name}p99"] = percentile(times, 0.99) - own
                found[f"{name}p99 without collections of garbage"] = percentile(timed.without[call], 0.99) - own
                for when, other in others.items():
                    found[f"{name}p99 {when}"] = percentile(other[length].calls[call], 0.99) - own

    def chunks_found() -> int:
        return bench.store.stats().tiers[1].chunks

    def beside_keys(make: Callable[[int], Request]) -> dict[int, Recorder]:
        """The same beside a thread that makes keys as the listing does, and has none indexed."""
        ended, other = threading.Event(), MadeUp(count)
        other.begin.set()

        def make_keys() -> None:
            while not ended.is_set():
                for _ in other.list_keys():
                    time.sleep(PAUSE)
                    if ended.is_set():
                        return

        thread = threading.Thread(target=make_keys)
        thread.start()
        try:
            return serve(make, lambda number: number == BESIDE)
        finally:
            ended.set()
            thread.join()

    quiet = {ALONE: serve(bench.known, lambda number: number == QUIET), KEYS: beside_keys(bench.known)}
    medium.begin.set()
    hits = serve(bench.known, lambda number: chunks_found() >= count // 2)
    stores = serve(bench.unknown, lambda number: bench.store.wait_indexed(0))
    note("hit", hits, quiet)
    later = {ALONE: serve(bench.unknown, lambda number: number == QUIET), KEYS: beside_keys(bench.unknown)}
    note("stored by evicting", stores, later)
    bench.scheduler.close()
    return found


def fill(folder: Path, count: int) -> None:
    """A folder with so many small chunks."""
    backend = LocalDiskBackend(folder, bytes(32), direct="off", min_free=0)
    payload = memoryview(b"x" * 64)
    for number in range(count):
        backend.write(Chunk(key_of(number), payload))
    backend.close()


def of_files(folder: Path, count: int) -> dict[str, float]:
    """All figures of a folder that is filled with so many small files, and emptied again."""
    fill(folder, count)
    found = in_a_process("--one", count, "--folder", folder)
    start = command("--help")
    for name, what in {"inspect": ["--json"], "prune": ["--max-size", "0"]}.items():
        found[f"lmkv {name} a chunk, us"] = (command(name, str(folder), *what) - start) / count * 1e6
    return found


def command(*arguments: str) -> float:
    """CPU seconds of an `lmkv` command."""
    before = os.times()
    program = [sys.executable, "-c", "from lmkv.cli import main; main()", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lmkv {' '.join(arguments)}: {done.stderr}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def rows(kind: str, found: Sequence[Sizes]) -> Iterator[Row]:
    """Medians of all rounds; ratios are taken within a round, beside the smallest size."""
    smallest = min(found[0])
    of = f"{smallest:,} chunks"
    for name in found[0][smallest]:
        title, _, unit = name.rpartition(", ")
        least = [sizes[smallest][name] for sizes in found]
        for count in found[0]:
            values = [sizes[count][name] for sizes in found]
            row, value = f"{kind}, {count:,}: {title}", statistics.median(values)
            # The time until all is found grows with the number, and a lookup meanwhile waits for the interpreter.
            if count == smallest or unit not in ("us", "bytes") or min(least) <= 0:
                yield Row(row, value, unit)
                continue
            ratios = [value / other for value, other in zip(values, least, strict=True)]
            ratio = statistics.median(ratios)
            row += f", {min(ratios):.2f} to {max(ratios):.2f}"
            yield Row(row, value, unit, of, ratio, FLAT, ratio <= FLAT)


def call_rows(found: Sequence[dict[str, float]]) -> Iterator[Row]:
    """Medians of all rounds; a p99 beside that of the reference in the same round."""
    for name in found[0]:
        value = statistics.median(each[name] for each in found)
        if name == LIMIT:
            yield Row(f"{LIMIT}, p99, before chunks are found", value, "ms")
            continue
        title = f"while chunks are being found: {name}"
        if "p99" not in name:
            yield Row(title, value, "ms")
            continue
        ratios = [each[name] / each[LIMIT] for each in found]
        ratio = statistics.median(ratios)
        target = P99_TARGET if name.endswith("p99") else None
        met = None if target is None else ratio <= target
        row = f"{title}, {min(ratios):.2f} to {max(ratios):.2f}"
        yield Row(row, value, "ms", f"{LIMIT}, p99", ratio, target, met)


def draw(found: Sequence[Sizes], path: Path) -> None:
    """One plot for each figure, over the number of chunks: medians, and the range of all rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    counts = list(found[0])
    names = list(found[0][counts[0]])
    figure, parts = pyplot.subplots(2, -(-len(names) // 2), figsize=(14, 6), layout="constrained")
    for axes, name in zip(parts.flat, names, strict=False):
        each = [[sizes[count][name] for sizes in found] for count in counts]
        axes.plot(counts, [statistics.median(values) for values in each], marker="o")
        axes.fill_between(counts, [min(values) for values in each], [max(values) for values in each], alpha=0.2)
        axes.set(xlabel="chunks", xscale="log", ylim=(0, 1.2 * max(map(max, each))))
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in parts.flat[len(names) :]:
        axes.remove()
    figure.savefig(path)


def main() -> int:
    parser = arguments_of(__doc__, quick="up to 100,000 chunks")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="after them no round begins")
    parser.add_argument("--files", type=Path, help="an empty folder, to be filled with up to 300,000 small files")
    parser.add_argument("--plot", type=Path, help="draw the made-up sizes to this file")
    parser.add_argument("--one", type=int, help="measure one size alone")
    parser.add_argument("--folder", help="of a local disk tier, for --one")
    parser.add_argument("--calls", type=int, help="measure the scheduler's calls alone, while so many chunks are found")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.folder)))
        return 0
    if options.calls:
        print(json.dumps(calls_meanwhile(options.calls)))
        return 0
    most = 100_000 if options.quick else max(SIZES)
    made: list[Sizes] = []
    files: list[Sizes] = []
    calls: list[dict[str, float]] = []
    started = time.monotonic()
    for number in range(options.rounds):
        if time.monotonic() - started > 60 * options.minutes:
            break
        made.append({count: in_a_process("--one", count) for count in SIZES if count <= most})
        calls.append(in_a_process("--calls", min(MEANWHILE, most)))
        if options.files:
            files.append({count: of_files(options.files, count) for count in FILES if count <= most})
        print(f"round {number}", flush=True)
    if options.plot:
        draw(made, options.plot)
    return finish([*rows("made up", made), *call_rows(calls), *(rows("files", files) if files else ())], options.json)


if __name__ == "__main__":
    sys.exit(main())
