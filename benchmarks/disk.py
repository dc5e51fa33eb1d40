"""The disk backend beside raw O_DIRECT, vLLM's file tier and aiofiles, interleaved in one run.

    python benchmarks/disk.py [--path FOLDER] [--quick] [--json]

Every case moves the same bytes once a round, each round is shuffled, and a ratio is the median over the
rounds of a case against its reference in the same round: a disk's mood changes from minute to minute, and
only neighbours compare. Reads are cold: the page cache drops the files first. With --json the last line is
the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import platform
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiofiles
from attrs import asdict, define, frozen

from lmkv.backends.disk import LocalDiskBackend
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk

MIB = 1 << 20
NAMESPACE = bytes(32)
THREADS = 4
RAW1, RAW4 = "raw O_DIRECT, 1 thread", "raw O_DIRECT, 4 threads"
LMKV, LMKV_CACHED = "lmkv, 4 threads", "lmkv through the page cache, 4 threads"
VLLM, AIO = "vLLM's file tier, 4 threads", "aiofiles, 4 at a time"

Sync = Any
Move = Callable[[Any, Sequence[memoryview]], None]


@frozen
class Way:
    """One way to store and load a list of equal buffers as files of a folder.

    `prepare` makes of the folder what the others are given, once and not on the clock.
    """

    name: str
    store: Move
    load: Move
    prepare: Callable[[Path], Any] = lambda folder: folder


@frozen
class Row:
    """One line of the result."""

    name: str
    value: float
    unit: str
    of: str | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None


@define
class Measured:
    """GB/s and CPU seconds per GB of one case, one item a round."""

    speeds: list[float]
    cpu: list[float]


def slots(count: int, nbytes: int) -> list[memoryview]:
    """Page-aligned, touched, different memory, as a slab has it."""
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    for at in range(0, count * nbytes, MIB):
        memory[at : at + MIB] = secrets.token_bytes(MIB)
    return [memory[at : at + nbytes] for at in range(0, count * nbytes, nbytes)]


def key_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


def check(right: object) -> None:
    if not right:
        raise RuntimeError("a transfer failed: the figures would be worthless")


# -- the ways ---------------------------------------------------------------------------------------------


def raw(name: str, pool: ThreadPoolExecutor | None, sync: Sync) -> Way:
    """What the disk does for anyone who asks for nothing else: no header, no checksum, no rename."""

    def store_one(path: Path, buffer: memoryview) -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        check(os.pwrite(fd, buffer, 0) == len(buffer))
        if sync == "data":
            os.fdatasync(fd)
        os.close(fd)

    def load_one(path: Path, buffer: memoryview) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        check(os.preadv(fd, [buffer], 0) == len(buffer))
        os.close(fd)

    def each(work: Callable[[Path, memoryview], None]) -> Move:
        def run(folder: Path, buffers: Sequence[memoryview]) -> None:
            paths = [folder / str(index) for index in range(len(buffers))]
            list((pool.map if pool else map)(work, paths, buffers))

        return run

    return Way(name, each(store_one), each(load_one))


def lmkv(name: str, pool: ThreadPoolExecutor, sync: Sync, direct: Any = "auto") -> Way:
    def store(backend: LocalDiskBackend, buffers: Sequence[memoryview]) -> None:
        chunks = [Chunk(key_of(index), buffer) for index, buffer in enumerate(buffers)]
        results = list(pool.map(lambda chunk: backend.write([chunk])[0], chunks))
        check(all(result.status is WriteStatus.STORED for result in results))

    def load(backend: LocalDiskBackend, buffers: Sequence[memoryview]) -> None:
        items = [(key_of(index), buffer) for index, buffer in enumerate(buffers)]
        results = list(pool.map(lambda item: backend.read([item])[0], items))
        check(all(result.status is ReadStatus.HIT for result in results))

    return Way(name, store, load, partial(LocalDiskBackend, namespace=NAMESPACE, sync=sync, direct=direct))


def with_aiofiles(sync: Sync) -> Way:
    async def store_one(path: Path, buffer: memoryview, gate: asyncio.Semaphore) -> None:
        async with gate, aiofiles.open(path, "wb", buffering=0) as file:
            check(await file.write(buffer) == len(buffer))
            if sync == "data":
                await asyncio.to_thread(os.fdatasync, file.fileno())

    async def load_one(path: Path, buffer: memoryview, gate: asyncio.Semaphore) -> None:
        async with gate, aiofiles.open(path, "rb", buffering=0) as file:
            check(await file.readinto(buffer) == len(buffer))

    async def all_of(work: Callable[..., Any], folder: Path, buffers: Sequence[memoryview]) -> None:
        gate = asyncio.Semaphore(THREADS)
        await asyncio.gather(*(work(folder / str(index), b, gate) for index, b in enumerate(buffers)))

    return Way(
        AIO,
        lambda folder, buffers: asyncio.run(all_of(store_one, folder, buffers)),
        lambda folder, buffers: asyncio.run(all_of(load_one, folder, buffers)),
    )


def vllm_tier(pool: ThreadPoolExecutor) -> Way | None:
    """Its own functions and C extension, in our threads; it syncs nothing and checks nothing."""
    try:
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
    except ImportError:
        return None

    def store(folder: Path, buffers: Sequence[memoryview]) -> None:
        nbytes = len(buffers[0])
        list(
            pool.map(
                lambda i: batch_store_block([f"{folder}/{i}"], buffers[i], [0], nbytes), range(len(buffers))
            )
        )

    def load(folder: Path, buffers: Sequence[memoryview]) -> None:
        nbytes = len(buffers[0])
        list(
            pool.map(
                lambda i: batch_load_block([f"{folder}/{i}"], buffers[i], [0], nbytes), range(len(buffers))
            )
        )

    return Way(VLLM, store, load)


def ways_of(pool: ThreadPoolExecutor, sync: Sync) -> list[Way]:
    peer = vllm_tier(pool) if sync == "none" else None
    return [
        raw(RAW1, None, sync),
        raw(RAW4, pool, sync),
        lmkv(LMKV, pool, sync),
        lmkv(LMKV_CACHED, pool, sync, "off"),
        with_aiofiles(sync),
        *([peer] if peer else []),
    ]


# -- measuring --------------------------------------------------------------------------------------------


def timed(work: Callable[[], None], nbytes: int) -> tuple[float, float]:
    """GB/s, and CPU seconds of the process per GB."""
    cpu, started = time.process_time(), time.perf_counter()
    work()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return nbytes / seconds / 1e9, cpu / nbytes * 1e9


def drop_caches(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextlib.contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def measure_writes(
    root: Path, ways: Sequence[Way], buffers: list[memoryview], rounds: int
) -> dict[str, Measured]:
    found = {way.name: Measured([], []) for way in ways}
    nbytes = sum(map(len, buffers))
    for _ in range(rounds):
        for way in random.sample(ways, len(ways)):
            with new_folder(root) as folder:
                prepared = way.prepare(folder)
                speed, cpu = timed(partial(way.store, prepared, buffers), nbytes)
                found[way.name].speeds.append(speed)
                found[way.name].cpu.append(cpu)
                # What a way left in the page cache is its own business, not the next one's.
                drop_caches(folder)
    return found


def measure_reads(
    root: Path, ways: Sequence[Way], buffers: list[memoryview], rounds: int
) -> dict[str, Measured]:
    found = {way.name: Measured([], []) for way in ways}
    nbytes = sum(map(len, buffers))
    with new_folder(root) as top:
        folders = {way.name: top / str(index) for index, way in enumerate(ways)}
        prepared = {}
        for way in ways:
            folders[way.name].mkdir()
            prepared[way.name] = way.prepare(folders[way.name])
            way.store(prepared[way.name], buffers)
        for _ in range(rounds):
            for way in random.sample(ways, len(ways)):
                drop_caches(folders[way.name])
                speed, cpu = timed(partial(way.load, prepared[way.name], buffers), nbytes)
                found[way.name].speeds.append(speed)
                found[way.name].cpu.append(cpu)
    return found


def ratio(found: dict[str, Measured], name: str, of: str) -> float:
    pairs = zip(found[name].speeds, found[of].speeds, strict=True)
    return statistics.median(mine / its for mine, its in pairs)


def rows_of(what: str, found: dict[str, Measured], targets: dict[tuple[str, str], float]) -> Iterator[Row]:
    """The targets first, then every way against one raw thread."""
    pairs = {**targets, **{(name, RAW1): None for name in found if (name, RAW1) not in targets}}
    for (name, of), target in pairs.items():
        if name not in found or of not in found:
            continue
        value = round(statistics.median(found[name].speeds), 3)
        share = ratio(found, name, of)
        met = None if target is None else share >= target
        yield Row(f"{what}: {name}", value, "GB/s", of, round(share, 3), target, met)
    for name, measured in found.items():
        yield Row(f"{what}: {name}: CPU", round(statistics.median(measured.cpu), 3), "s/GB")


def listing(root: Path) -> Row:
    """Ten thousand chunks found again, without reading one."""
    with new_folder(root) as folder:
        backend = LocalDiskBackend(folder, NAMESPACE, direct="off")
        payload = memoryview(b"x")
        for _ in range(10_000):
            backend.write([Chunk(secrets.token_bytes(32), payload)])
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            check(sum(map(len, backend.list_keys())) == 10_000)
            seconds.append(time.perf_counter() - started)
    best = statistics.median(seconds)
    return Row("list 10,000 chunks, warm", round(best, 4), "s", target=0.3, met=best <= 0.3)


def machine(root: Path) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        "direct_io": LocalDiskBackend(root, NAMESPACE).direct_io,
    }


def run(root: Path, quick: bool) -> Iterator[Row]:
    rounds = 5 if quick else 11
    with ThreadPoolExecutor(THREADS) as pool:
        for mib, count in ((32, 6), (4, 32)) if quick else ((32, 16), (4, 128)):
            buffers = slots(count, mib * MIB)
            for sync in ("none", "data"):
                found = measure_writes(root, ways_of(pool, sync), buffers, rounds)
                yield from rows_of(
                    f"write {mib} MiB, sync {sync}",
                    found,
                    {(LMKV, RAW1): 0.9, (LMKV, RAW4): 0.9, (LMKV, VLLM): 1.0},
                )
            found = measure_reads(root, ways_of(pool, "none"), buffers, rounds)
            yield from rows_of(f"cold read {mib} MiB", found, {(LMKV, RAW1): 1.0, (LMKV, VLLM): 1.0})
    yield listing(root)


def printed(row: Row) -> str:
    against = f"{row.ratio:6.2f} of {row.of}" if row.ratio is not None else ""
    verdict = "" if row.met is None else f"  (target {row.target}: {'met' if row.met else 'MISSED'})"
    return f"{row.name:70} {row.value:8.3f} {row.unit:5} {against}{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with new_folder(arguments.path) as root:
        about = machine(root)
        for row in run(root, arguments.quick):
            rows.append(row)
            print(printed(row), flush=True)
    if arguments.json:
        print(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
