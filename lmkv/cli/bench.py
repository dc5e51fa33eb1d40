"""`lmkv bench`: compares lmkv with the limits of this machine, and measures how much time a hit saves."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from attrs import asdict, evolve
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmkv import Config, Engine
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.build import io_threads
from lmkv.chunks.hashing import chunk_keys
from lmkv.cli.engines import SEVERAL_PROCESSES, SHARED_DEVICE, Answer, EngineProcess, EngineSpec, wait_until_settled
from lmkv.cli.report import LESS_IS_BETTER, Row, compared, interleaved, measured_on, speeds
from lmkv.cli.small_model import SmallModel
from lmkv.policies import make_policy
from lmkv.protocols import Chunk, ReadStatus, Tier, WriteStatus
from lmkv.store.tiered import TieredStore

BLOCK, CHUNK, MIB = 16, 256, 1 << 20
NAMESPACE = bytes(32)
PAGES, PAGES_TARGET = "the same pages one by one, by numpy", 0.95
HASHING, LOOKUP_TARGET, LONGEST = "bare sha256", 1.8, 131_072
PLAIN, WRITE_TARGET, READ_TARGET = "plain files, one thread", 0.9, 1.0
ALONE, OWN, RAM, DISK = "vLLM alone, computed", "vLLM's prefix cache", "lmkv, host memory", "lmkv, disk"
RAM_TARGET = 1.05


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model that vLLM runs to measure first tokens.", show_default="a small one with random weights"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompt for vLLM, in tokens.")] = 8000,
    host_gib: Annotated[
        float, typer.Option(help="lmkv's host memory in runs with vLLM, in GiB; at most 1 without --model.")
    ] = 4.0,
    engine: Annotated[
        bool, typer.Option("--engine/--no-engine", help="Measure first tokens with vLLM, if it is installed.")
    ] = True,
    disk: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder on the disk to measure.", show_default="TMPDIR")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure roughly, in a fraction of the time.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON as well, in the last line.")
    ] = False,
) -> None:
    """Compare lmkv's copies, lookups and disk with the limits of this machine, and time a hit on real vLLM.

    lmkv's settings in the environment and in files are ignored.
    """
    for name in [name for name in os.environ if name.startswith(("LMKV_", "LMCACHE_"))]:
        echo(f"lmkv bench ignores {name}")
        del os.environ[name]
    parent = disk or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    length = min(tokens, 2048) if quick else tokens
    rows: list[Row] = []
    try:
        rows.extend(measured(model, length, host_gib, engine, parent, quick))
    finally:
        # An error later on must not lose them.
        if rows:
            show(rows)
        if as_json:
            typer.echo(json.dumps({**measured_on(), "rows": [asdict(row) for row in rows]}))


def measured(model: str | None, tokens: int, host_gib: float, engine: bool, parent: Path, quick: bool) -> Iterator[Row]:
    echo("copies in host memory")
    yield from copies(4, 8 if quick else 32, 7 if quick else 21)
    echo("a lookup")
    yield from lookup(11 if quick else 101)
    echo(f"disk, in {parent}")
    yield from disk_rows(parent, 4 if quick else 32, 3 if quick else 9)
    if engine and find_spec("vllm") is None:
        echo("vLLM is not installed, so lmkv bench does not measure the time to the first token")
    elif engine:
        yield from first_tokens(tokens, model, parent, host_gib, 3 if quick else 9)


def echo(text: str) -> None:
    typer.echo(text, err=True)


def check(right: bool) -> None:
    if not right:
        raise RuntimeError("a copy failed, so the measured time is useless: try again")


def copies(layers: int, chunks: int, rounds: int) -> Iterator[Row]:
    """Measure `Engine.store` and `retrieve` of scattered blocks, compared with numpy copies of the same blocks."""
    blocks = chunks * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(torch.bfloat16) for _ in range(layers)]
    # One MiB per layer and chunk, and as much again so that nothing is evicted.
    config = Config.load(max_local_cpu_size=2 * chunks * layers / 1024, chunk_size=CHUNK, env={})
    scattered = random.Random(0).sample(range(2 * blocks), blocks)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * chunks)
    gather, scatter = pages(tensors, scattered)
    with Engine.open(tensors, block_size=BLOCK, model="bench", config=config) as engine:
        cases: dict[str, Callable[[], Any]] = {
            "pages out": gather,
            "pages in": scatter,
            "store": lambda: check(engine.store(tokens, scattered) == len(tokens)),
            "retrieve": lambda: check(engine.retrieve(tokens, scattered) == len(tokens)),
        }

        def before(name: str) -> None:
            if name == "store":
                engine.clear()

        wait_until_populated()
        times = interleaved(cases, rounds, before=before)
    for ours, plain in (("store", "pages out"), ("retrieve", "pages in")):
        found = speeds({PAGES: times[plain], "lmkv": times[ours]}, chunks * layers * MIB)
        yield from compared(f"{ours} {chunks} chunks of {layers} MiB", "GB/s", found, PAGES, {"lmkv": PAGES_TARGET})


def wait_until_populated() -> None:
    """Wait for the threads that map the pages of host memory, because their CPU time would count in measurements."""
    for thread in threading.enumerate():
        if thread.name == "lmkv-populate":
            thread.join()


def pages(tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two functions that copy these blocks without lmkv, for comparison.

    The first function copies the blocks into an array, layer after layer. The second function copies the blocks back.
    """
    rows = [tensor.view(torch.int64).flatten(1).numpy() for tensor in tensors]
    # Pages of 4 KiB, as slots have: numpy's own arrays have huge ones.
    memory = mmap.mmap(-1, len(rows) * len(blocks) * rows[0][0].nbytes)
    slots = np.frombuffer(memory, np.int64).reshape(len(rows), len(blocks), -1)
    slots[:] = 1
    both = [(row[block], slots[layer, n]) for layer, row in enumerate(rows) for n, block in enumerate(blocks)]

    def gather() -> None:
        for page, slot in both:
            np.copyto(slot, page)

    def scatter() -> None:
        for page, slot in both:
            np.copyto(page, slot)

    return gather, scatter


def lookup(rounds: int) -> Iterator[Row]:
    """Measure how long lmkv takes to find a long prompt's chunks in host memory, compared with hashing its tokens."""
    slot_bytes = 4096
    store = TieredStore(Tier(CPUPinnedBackend(1024 * slot_bytes, slot_bytes, populate=False), make_policy("LRU")))
    tokens = random.Random(0).choices(range(150_000), k=LONGEST)
    with closing(store):
        store.reserve(chunk_keys(tokens, NAMESPACE, CHUNK)).commit()
        cases: dict[str, Callable[[], Any]] = {
            HASHING: lambda: bare_chain(tokens),
            "lmkv": lambda: store.lease(chunk_keys(tokens, NAMESPACE, CHUNK)).release(),
        }
        times = interleaved(cases, rounds)
    found = {name: [1e3 * each for each in seconds] for name, seconds in times.items()}
    yield from compared(f"keys, lookup and lease of {LONGEST:,} tokens", "ms", found, HASHING, {"lmkv": LOOKUP_TARGET})


def bare_chain(tokens: Sequence[int], chunk: int = CHUNK) -> list[bytes]:
    """Return chunk keys with the least possible work: one array conversion, one hash, and one digest per chunk."""
    data = memoryview(array("I", tokens)).cast("B")
    chain, keys = hashlib.sha256(NAMESPACE), []
    for start in range(0, len(data), 4 * chunk):
        chain.update(data[start : start + 4 * chunk])
        keys.append(chain.digest())
    return keys


def disk_rows(parent: Path, mib: int, rounds: int) -> Iterator[Row]:
    """Measure the disk tier's writes (without fsync, as by default) and uncached reads, compared with plain files."""
    nbytes, count = mib * MIB, 8
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    for at in range(0, len(memory), MIB):
        memory[at : at + MIB] = secrets.token_bytes(MIB)
    slots = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
    keys = [number.to_bytes(32, "big") for number in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=parent) as name,
        ThreadPoolExecutor(io_threads(Config(), ["disk"])) as pool,
        closing(LocalDiskBackend(Path(name) / "lmkv", NAMESPACE)) as backend,
    ):
        folder, flags = Path(name), os.O_DIRECT if backend.direct_io else 0

        def plainly(*, writes: bool) -> None:
            for index, slot in enumerate(slots):
                fd = os.open(folder / str(index), flags | (os.O_CREAT | os.O_WRONLY if writes else os.O_RDONLY), 0o600)
                check((os.pwrite(fd, slot, 0) if writes else os.preadv(fd, [slot], 0)) == nbytes)
                os.close(fd)

        def write() -> None:
            found = pool.map(backend.write, map(Chunk, keys, slots))
            check(all(each.status is WriteStatus.STORED for each in found))

        def read() -> None:
            check(all(each.status is ReadStatus.HIT for each in pool.map(backend.read, keys, slots)))

        def forget(_: str) -> None:
            backend.delete(keys)
            for index in range(count):
                (folder / str(index)).unlink(missing_ok=True)

        clock, kind = time.perf_counter, "past the page cache" if flags else "through the page cache"
        writes = interleaved({PLAIN: partial(plainly, writes=True), "lmkv": write}, rounds, clock=clock, before=forget)
        forget("")
        plainly(writes=True)
        write()
        cold: dict[str, Callable[[], None]] = {PLAIN: partial(plainly, writes=False), "lmkv": read}
        reads = interleaved(cold, rounds, clock=clock, before=lambda _: drop_caches(folder))
    for what, times, target in (("writes", writes, WRITE_TARGET), ("cold reads", reads, READ_TARGET)):
        title, found = f"disk {what} of {mib} MiB, {kind}", speeds(times, count * nbytes)
        yield from compared(title, "GB/s", found, PLAIN, {"lmkv": target})


def drop_caches(folder: Path) -> None:
    """Remove the files below `folder` from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# -- a hit on real vLLM -----------------------------------------------------------------------------------


def first_tokens(tokens: int, model: str | None, parent: Path, host_gib: float, rounds: int) -> Iterator[Row]:
    """Measure new and repeated prompts on vLLM alone and on vLLM with lmkv.

    Engines with the small default model run at the same time. Engines with a `model` of the user, which may fill the
    device, run one after the other.
    """
    with tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=parent) as name:
        folder = Path(name)
        specs = hit_specs(folder, tokens + 16, model, host_gib)
        found: dict[str, list[float]] = {name: [] for name in (ALONE, *specs)}
        outputs: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for group in [[each] for each in specs] if model else [list(specs)]:
            with ExitStack() as stack:
                engines: dict[str, EngineProcess] = {}
                for each in group:
                    echo(f"vLLM: {each}, prompts of {tokens:,} tokens")
                    engine = EngineProcess(specs[each], folder / str(len(engines)), SEVERAL_PROCESSES)
                    engines[each] = stack.enter_context(closing(engine))
                    engine.send(0, tokens, 2)
                for number in range(1, rounds + 1):
                    for each in random.sample(group, len(group)):
                        new = engines[each].send(number, tokens, 2)
                        wait_until_settled(lambda: sum(1 for _ in (folder / "kv").rglob("*")))
                        repeated = engines[each].send(number, tokens, 2)
                        hit_in(each, repeated, tokens)
                        outputs[number] |= {new.token_ids, repeated.token_ids}
                        found[each].append(repeated.ttft_s)
                        if each == OWN:
                            found[ALONE].append(new.ttft_s)
                for engine in engines.values():
                    engine.leave()
        if any(len(each) > 1 for each in outputs.values()):
            echo(
                "answers with and without lmkv DIFFER: bfloat16 may round differently; in float32 they should be equal"
            )
    in_turn = "" if not model else ", one engine after the other"
    targets = {} if model else {RAM: RAM_TARGET}
    yield from compared(f"first token of {tokens:,} tokens{in_turn}", "s", found, OWN, targets)


def hit_specs(folder: Path, tokens: int, model: str | None, host_gib: float) -> dict[str, EngineSpec]:
    small = SmallModel(max_position=max(32_768, 2 * tokens))
    host = {"max_local_cpu_size": host_gib if model else min(host_gib, 1.0)}
    plain = EngineSpec(
        model=model or small,
        max_tokens=tokens,
        kv_bytes=None if model else 3 * (tokens + 256) * small.kv_bytes_per_token,
        options={} if model else SHARED_DEVICE,
    )
    # Always loaded from, however slow it is.
    below = {"local_cpu": False, "prefetch_deadline": 30.0, "load_or_recompute": False}
    disk = {"local_disk": str(folder / "kv"), "max_local_disk_size": 2 * host_gib, "disk_min_free": 0.0}
    return {
        OWN: evolve(plain, prefix_caching=True),
        RAM: evolve(plain, settings=host),
        DISK: evolve(plain, settings={**host, **below, **disk}),
    }


def hit_in(name: str, answer: Answer, tokens: int) -> None:
    """Raise RuntimeError unless a repeated prompt hit more than half of its `tokens` tokens, all in the tier `name`."""
    below = sum(count for tier, count in answer.sources.items() if tier != "cpu")
    mixed = below and answer.sources.get("cpu")
    if answer.hit_tokens <= tokens // 2 or (name == DISK) != bool(below) or mixed:
        raise RuntimeError(
            f"{name}: a repeated prompt hit {answer.hit_tokens:,} tokens, but must hit more than half of {tokens:,}, "
            f"all in this tier: {dict(answer.sources)}"
        )


# -- the table --------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    table = Table(title=escape(f"lmkv on {measured_on()['machine']}"))
    for name in ("", "value", "ratio", "95 % within *", "target"):
        table.add_column(name, justify="right" if name in ("value", "ratio") else "left")
    for row in rows:
        around = "" if row.within is None else f"{row.within[0]:.2f} to {row.within[1]:.2f}"
        beside = "1" if row.ratio is None else f"{row.ratio:.2f} x"
        table.add_row(row.name, f"{rounded(row.value)} {row.unit}", beside, around, goal(row))
    table.caption = "* of the ratios of rounds, or with fewer than six their range"
    # A pipe has no width; a table that is wrapped at 80 columns could not be read.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def goal(row: Row) -> str:
    if row.target is None:
        return ""
    bound = "at most" if row.unit in LESS_IS_BETTER else "at least"
    verdict = {True: ": [green]met", False: ": [red]missed", None: ": few rounds"}[row.met]
    return f"{bound} {row.target:.3g}{verdict}"
