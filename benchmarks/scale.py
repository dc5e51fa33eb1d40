"""Measures an index of ten thousand to three million chunks: memory, time until all are found, and each call then.

    python benchmarks/scale.py [--rounds 9] [--only sizes,calls,files] [--files FOLDER] [--plot docs/scale.svg]
                               [--quick] [--json]

In each round every size has a process of its own; medians count. A made-up medium lists random keys as fast as they
can be made, so that only lmkv is measured; with --files, real files of a local disk tier are listed beside it, up to
300,000, and then inspected and deleted by `lmkv inspect` and `lmkv prune`, beside the removal of as many plain files.
Times are CPU time, but for those of calls while chunks are being found, which are what a scheduler would wait. The last
tier is as large as its content, so that each new chunk evicts one. The scheduler's calls are those of
lmkv/cli/measure/scheduler.py while a million chunks are being found. Their reference, bare hashing of 32k tokens, is
timed between requests while nothing is found.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from benchmarks._timing import Row, arguments_of, finish
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.chunks.namespace import Namespace
from lmkv.cli.measure.scale import CHAIN, EVICT, FLAT, MANY, MadeUp, cpu_of, evicting, indexed, key_of, run
from lmkv.cli.measure.scheduler import (
    ALONE,
    COLLECTION,
    DURING,
    HASHED,
    LIMIT,
    TARGET,
    Calls,
    Request,
    calls_in_a_process,
    size,
)
from lmkv.outcomes import STORED
from lmkv.protocols import Chunk, ChunkKey, Listed
from lmkv.store.tiered import TieredStore
from lmkv.vllm.identity import Adapters
from lmkv.vllm.media import Media
from lmkv.vllm.observe.explain import Explainer
from lmkv.vllm.observe.telemetry import Telemetry
from lmkv.vllm.requests.miss import Miss
from lmkv.vllm.requests.patience import Patience
from lmkv.vllm.requests.request import RequestState

SIZES = (10_000, 100_000, 1_000_000, 3_000_000)
FILES = (10_000, 100_000, 300_000)
PARTS = {"sizes", "calls", "files"}
TOKENS = 256
CONTENT = b"x" * 64
COLUMNS = 4
"""Plots in a row."""
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
    if folder is None:
        figures["make a key and put it into a dict, us"] = bare_indexing(count)
    return figures


def bare_indexing(count: int) -> float:
    """CPU time that each chunk takes where a listing fills a dict, without collections of garbage."""
    medium, index = MadeUp(count), dict[ChunkKey, Listed]()
    medium.begin.set()
    gc.collect()
    gc.disable()
    start = time.thread_time()
    for batch in medium.list_keys():
        index.update((each.key, each) for each in batch)
    took = time.thread_time() - start
    gc.enable()
    return took / count * 1e6


def explaining(explainer: Explainer, store: TieredStore) -> float:
    """CPU time of a request of 64 chunks, the first of which was evicted."""
    gone = [number for number in range(100_000) if explainer.evictions.find(key_of(number)) is not None][:64]
    if not gone:
        raise RuntimeError("no eviction is remembered")
    namespace = Namespace(model="scale", dtype="bfloat16", chunk_size=TOKENS, block_size=16)
    prompts = [Request(str(number), list(range(CHAIN * TOKENS))) for number in gone]
    engine = {"media": Media(), "adapters": Adapters(lambda lora: None), "save_tails": False}
    states = [RequestState.of(prompt, namespace, "", TOKENS, Patience(1.0), **engine) for prompt in prompts]
    chains = [[key_of(number), *(key_of(number + more << 40) for more in range(1, CHAIN))] for number in gone]

    def explain() -> list[Miss | None]:
        each = zip(states, chains, strict=True)
        return [explainer.explain(state, keys, 0, 0, few=False, late=False) for state, keys in each]

    if {miss and miss.reason for miss in explain()} != {"evicted"}:
        raise RuntimeError("an eviction is not the reason of a miss")
    return cpu_of(explain, 30, len(gone))


def in_a_process(*arguments: object) -> dict[str, float]:
    figures: dict[str, float] = run([sys.executable, __file__, *map(str, arguments)])
    return figures


def fill(folder: Path, count: int) -> None:
    """A folder with so many small chunks."""
    payload = memoryview(CONTENT)
    with closing(LocalDiskBackend(folder, bytes(32), direct="off", min_free=0)) as backend:
        written = [backend.write(Chunk(key_of(number), payload)) for number in range(count)]
    if any(each != STORED for each in written):
        raise RuntimeError(f"a file was not written: {next(each for each in written if each != STORED)}")


def removing(folder: Path, count: int) -> float:
    """CPU seconds that the removal of so many plain files takes, from folders like those of a disk tier."""
    paths = [folder / f"{number % 256:02x}" / key_of(number).hex() for number in range(count)]
    try:
        for number, path in enumerate(paths):
            if number < 256:
                path.parent.mkdir(parents=True)
            path.write_bytes(CONTENT)
        names = [*map(str, paths)]
        os.sync()
        start = time.process_time()
        for name in names:
            os.unlink(name)
        return time.process_time() - start
    finally:
        shutil.rmtree(folder)


def of_files(folder: Path, filled: Path, count: int) -> dict[str, float]:
    """All figures of a folder that gets so many small files, copies of `filled`, and is emptied again."""
    subprocess.run(["cp", "-a", f"{filled}/.", folder], check=True)
    os.sync()
    found = in_a_process("--one", count, "--folder", folder)
    start = command("--help")
    for name, what in {"inspect": ["--json"], "prune": ["--max-size", "0"]}.items():
        found[f"lmkv {name} a chunk, us"] = (command(name, str(folder), *what) - start) / count * 1e6
    found["remove a plain file, us"] = removing(folder / "plain", count) / count * 1e6
    found["lmkv prune beside that, x"] = found["lmkv prune a chunk, us"] / found["remove a plain file, us"]
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
    if not found:
        return
    smallest = min(found[0])
    of = f"{smallest:,} chunks"
    for name in found[0][smallest]:
        title, _, unit = name.rpartition(", ")
        least = [sizes[smallest][name] for sizes in found]
        for count in found[0]:
            values = [sizes[count][name] for sizes in found]
            row, value = f"{kind}, {len(found)} rounds, {count:,}: {title}", statistics.median(values)
            # The time until all is found grows with the number, and a lookup meanwhile waits for the interpreter.
            if count == smallest or unit not in ("us", "bytes") or min(least) <= 0:
                yield Row(row, value, unit)
                continue
            ratios = [value / other for value, other in zip(values, least, strict=True)]
            ratio = statistics.median(ratios)
            row += f", {min(ratios):.2f} to {max(ratios):.2f}"
            yield Row(row, value, unit, of, ratio, FLAT, ratio <= FLAT)


def call_rows(found: Sequence[Calls]) -> Iterator[Row]:
    """Medians of all rounds; a p99 beside that of the reference in the same round."""
    if not found:
        return
    bare = [each.bare for each in found]
    yield Row(f"{LIMIT}, p99, {ALONE}, {len(found)} rounds", statistics.median(bare), "ms")
    collection = [each.collection / each.bare for each in found]
    title = f"{COLLECTION}, p99, {min(collection):.2f} to {max(collection):.2f}"
    value = statistics.median(each.collection for each in found)
    yield Row(title, value, "ms", f"{LIMIT}, p99", statistics.median(collection))
    for rounds in zip(*(each.calls for each in found), strict=True):
        call = rounds[0]
        name = f"{call.name}, {size(call.length)}, {call.kind}"
        yield Row(f"{name}: p50 {DURING}", statistics.median(each.p50 for each in rounds), "ms")
        p99 = {when: [each.p99[when] for each in rounds] for when in call.p99}
        for when in (DURING, ALONE):
            p99[f"{when}, without collections of garbage"] = [each.uncollected[when] for each in rounds]
        for when, values in p99.items():
            ratios = [value / other for value, other in zip(values, bare, strict=True)]
            ratio = statistics.median(ratios)
            row = f"{name}: p99 {when}, {min(ratios):.2f} to {max(ratios):.2f}"
            goal = (TARGET, ratio <= TARGET) if when in (DURING, ALONE) and call.name != HASHED else (None, None)
            yield Row(row, statistics.median(values), "ms", f"{LIMIT}, p99", ratio, *goal)


def draw(kinds: Mapping[str, Sequence[Sizes]], path: Path) -> None:
    """One plot for each figure, over the number of chunks: medians, and the range of all rounds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    plots = [(kind, name, found) for kind, found in kinds.items() for name in found[0][min(found[0])]]
    lines = -(-len(plots) // COLUMNS)
    figure, parts = pyplot.subplots(lines, COLUMNS, figsize=(16, 3 * lines), layout="constrained")
    for axes, (kind, name, found) in zip(parts.flat, plots, strict=False):
        counts = list(found[0])
        each = [[sizes[count][name] for sizes in found] for count in counts]
        axes.plot(counts, [statistics.median(values) for values in each], marker="o")
        axes.fill_between(counts, [min(values) for values in each], [max(values) for values in each], alpha=0.2)
        axes.set(xlabel="chunks", xscale="log", ylim=(0, 1.2 * max(map(max, each))))
        axes.set_title(f"{kind}: {name}", fontsize=9)
        axes.grid(alpha=0.3)
    for axes in parts.flat[len(plots) :]:
        axes.remove()
    figure.savefig(path)


def main() -> int:
    parser = arguments_of(__doc__, quick="up to 100,000 chunks")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="after them no round begins")
    parser.add_argument("--only", default="sizes,calls,files", help="what is measured; files with --files")
    parser.add_argument("--files", type=Path, help="an empty folder, to be filled with up to 300,000 small files")
    parser.add_argument("--plot", type=Path, help="draw the made-up sizes to this file")
    parser.add_argument("--one", type=int, help="measure one size alone")
    parser.add_argument("--folder", help="of a local disk tier, for --one")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one, options.folder)))
        return 0
    most = 100_000 if options.quick else max(SIZES)
    only = set(options.only.split(","))
    if not only <= PARTS or (only == {"files"} and not options.files):
        parser.error(f"--only takes some of {', '.join(sorted(PARTS))}, and files with --files FOLDER: {options.only}")
    made: list[Sizes] = []
    files: list[Sizes] = []
    calls: list[Calls] = []
    with tempfile.TemporaryDirectory(prefix="lmkv-scale-", dir="/dev/shm") as memory:
        sizes = FILES if "files" in only and options.files else ()
        filled = {count: Path(memory, str(count)) for count in sizes if count <= most}
        # In memory, since a disk takes many times as long to make a file as to copy one.
        for count, folder in filled.items():
            folder.mkdir()
            fill(folder, count)
        started = time.monotonic()
        try:
            for number in range(options.rounds):
                if time.monotonic() - started > 60 * options.minutes:
                    break
                if "sizes" in only:
                    made.append({count: in_a_process("--one", count) for count in SIZES if count <= most})
                if "calls" in only:
                    calls.append(calls_in_a_process(min(MANY, most)))
                if filled:
                    files.append({count: of_files(options.files, folder, count) for count, folder in filled.items()})
                print(f"round {number}", flush=True)
        finally:
            # An error in a late round must not lose the others.
            finish([*rows("made up", made), *call_rows(calls), *rows("files", files)], options.json)
    kinds = {kind: found for kind, found in {"made up": made, "files": files}.items() if found}
    if options.plot and kinds:
        draw(kinds, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
