"""The disk backend beside raw O_DIRECT, vLLM's file tier and aiofiles, interleaved in one run.

    python benchmarks/disk.py [--path FOLDER] [--quick] [--json]

Every case moves the same bytes once a round, each round is shuffled, and a ratio is the median over the
rounds of a case against its reference in the same round: a disk's mood changes from minute to minute, and
only neighbours compare. Reads are cold: the page cache drops the files first. lmkv's threads also compute
checksums, so at equal numbers fewer of them wait for the disk: its default number is there, too, of which
only some write. A prompt's chunks are read while a process and a thread poll, too, as vLLM's do. With --json the last
line is the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import asyncio
import contextlib
import hashlib
import mmap
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiofiles
from attrs import frozen

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.build import io_threads
from lmkv.cli.measure.limits import Disk
from lmkv.config import Config
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.policies import make_policy
from lmkv.protocols import Chunk, Tier
from lmkv.store.tiered import TieredStore

MIB = 1 << 20
NAMESPACE = bytes(32)
LIST_TARGET, SUBMIT_TARGET = 4.0, 4.0
PROMPT_CHUNKS, PROMPT_MIB, SETTLED = 31, 2, 0.05
QUIETLY, POLLED = "", ", while a process and a thread poll"
THREADS, READERS = 4, io_threads(Config(), ["disk"])
WRITERS = READERS - READERS // 4  # the others are kept for loads
RAW1, RAW4 = "raw O_DIRECT, 1 thread", "raw O_DIRECT, 4 threads"
LMKV, LMKV4 = "lmkv, as by default", "lmkv, 4 threads"
LMKV_CACHED = "lmkv through the page cache, 4 threads"
VLLM, AIO = "vLLM's file tier, 4 threads", "aiofiles, 4 at a time"

Sync = Any
Move = Callable[[Any, Sequence[memoryview]], None]
Times = dict[str, list[float]]


@frozen
class Way:
    """One way to store and load a list of equal buffers as files of a folder.

    `prepare` makes of the folder what the others are given, once and not on the clock.
    """

    name: str
    store: Move
    load: Move
    prepare: Callable[[Path], Any] = lambda folder: folder


def slots(count: int, nbytes: int) -> list[memoryview]:
    """Page-aligned, touched, different memory, as a slab has it."""
    memory = memoryview(mmap.mmap(-1, count * nbytes))
    for at in range(0, count * nbytes, MIB):
        memory[at : at + MIB] = secrets.token_bytes(MIB)
    return [memory[at : at + nbytes] for at in range(0, count * nbytes, nbytes)]


def key_of(index: int) -> bytes:
    return hashlib.sha256(index.to_bytes(8, "big")).digest()


def check(right: object) -> None:
    if not right:
        raise RuntimeError("a transfer failed: the figures would be worthless")


# -- the ways ---------------------------------------------------------------------------------------------


def raw(name: str, pool: ThreadPoolExecutor | None, sync: Sync) -> Way:
    """Plain files: the disk alone, without header, checksum or rename."""

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
        results = list(pool.map(backend.write, chunks))
        check(all(result.status is WriteStatus.STORED for result in results))

    def load(backend: LocalDiskBackend, buffers: Sequence[memoryview]) -> None:
        results = list(pool.map(backend.read, map(key_of, range(len(buffers))), buffers))
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
    """vLLM's own file names, functions and C extension, in our threads; it syncs nothing and checks nothing."""
    try:
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.file_mapper import FileMapper
        from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
    except ImportError:
        return None

    def mapper(folder: Path) -> Any:
        return FileMapper(str(folder), "model", 16, 16, 1, 1, 1, 1, 0, "bfloat16")

    def each(work: Callable[..., None]) -> Move:
        def one(names: Any, index: int, buffer: memoryview) -> None:
            work([names.get_file_name(make_offload_key(key_of(index), 0))], buffer, [0], len(buffer))

        def run(names: Any, buffers: Sequence[memoryview]) -> None:
            list(pool.map(partial(one, names), range(len(buffers)), buffers))

        return run

    return Way(VLLM, each(batch_store_block), each(batch_load_block), mapper)


def ways_of(pool: ThreadPoolExecutor, default: ThreadPoolExecutor, sync: Sync) -> list[Way]:
    peer = vllm_tier(pool) if sync == "none" else None
    return [
        raw(RAW1, None, sync),
        raw(RAW4, pool, sync),
        lmkv(LMKV, default, sync),
        lmkv(LMKV4, pool, sync),
        lmkv(LMKV_CACHED, pool, sync, "off"),
        with_aiofiles(sync),
        *([peer] if peer else []),
    ]


# -- measuring --------------------------------------------------------------------------------------------


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


class Folders:
    """A folder for each of the ways, prepared by it."""

    def __init__(self, top: Path, ways: Sequence[Way]) -> None:
        self._ways = {way.name: way for way in ways}
        self._folders = {name: top / str(index) for index, name in enumerate(self._ways)}
        self.prepared: dict[str, Any] = {}

    def renew(self, name: str) -> None:
        """An empty one. What the last way left in the page cache is written first, off the clock."""
        for folder in self._folders.values():
            drop_caches(folder)
        shutil.rmtree(self._folders[name], ignore_errors=True)
        self._folders[name].mkdir()
        self.prepared[name] = self._ways[name].prepare(self._folders[name])

    def cool(self, name: str) -> None:
        drop_caches(self._folders[name])


def measure_writes(root: Path, ways: Sequence[Way], buffers: list[memoryview], rounds: int) -> Times:
    with new_folder(root) as top:
        folders = Folders(top, ways)
        for way in ways:
            folders.renew(way.name)
        cases = {way.name: partial(_move, folders, way.name, way.store, buffers) for way in ways}
        return interleaved(cases, rounds, clock=time.perf_counter, before=folders.renew)


def measure_reads(root: Path, ways: Sequence[Way], buffers: list[memoryview], rounds: int) -> Times:
    with new_folder(root) as top:
        folders = Folders(top, ways)
        for way in ways:
            folders.renew(way.name)
            way.store(folders.prepared[way.name], buffers)
        cases = {way.name: partial(_move, folders, way.name, way.load, buffers) for way in ways}
        return interleaved(cases, rounds, clock=time.perf_counter, before=folders.cool)


def _move(folders: Folders, name: str, move: Move, buffers: Sequence[memoryview]) -> None:
    move(folders.prepared[name], buffers)


def rows_of(what: str, times: Times, nbytes: int, targets: Mapping[tuple[str, str], float]) -> Iterator[Row]:
    """The targets first, then every way against one raw thread."""
    others = {(name, RAW1): None for name in times if (name, RAW1) not in targets}
    for (name, of), target in {**targets, **others}.items():
        if of not in times:
            continue
        speed = nbytes / statistics.median(times[name]) / 1e9
        share = median_ratio(times, of, name)
        met = None if target is None else share >= target
        yield Row(f"{what}: {name}", round(speed, 3), "GB/s", of, round(share, 3), target, met)


def listing(root: Path) -> Row:
    """Ten thousand chunks found again, without reading one."""
    with new_folder(root) as folder:
        backend = LocalDiskBackend(folder, NAMESPACE, direct="off")
        payload = memoryview(b"x")
        for _ in range(10_000):
            backend.write(Chunk(secrets.token_bytes(32), payload))
        bare = "os.scandir and a stat of each"
        cases = {
            "list": lambda: check(sum(map(len, backend.list_keys())) == 10_000),
            bare: lambda: check(files_below(folder) >= 10_000),
        }
        times = interleaved(cases, 9, clock=time.perf_counter)
    seconds, ratio = statistics.median(times["list"]), median_ratio(times, "list", bare)
    return Row("list 10,000 chunks, warm", round(seconds, 4), "s", bare, ratio, LIST_TARGET, ratio <= LIST_TARGET)


def files_below(folder: Path | os.DirEntry[str]) -> int:
    """Files and their sizes, as any listing of a folder has to find them."""
    count = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                count += files_below(entry)
            else:
                count += entry.stat(follow_symlinks=False).st_size > 0
    return count


# -- what the caller waits for ----------------------------------------------------------------------------


@contextlib.contextmanager
def new_store(root: Path, *, disk: bool) -> Iterator[TieredStore]:
    """A store of 1 MiB chunks, with twice as many slots as the largest batch, so that nothing is refused."""
    with new_folder(root) as folder:
        below = [Tier(LocalDiskBackend(folder, NAMESPACE), make_policy("LRU"))] if disk else []
        host = CPUPinnedBackend(128 * MIB, MIB, populate=True)
        store = TieredStore(Tier(host, make_policy("LRU")), below)
        try:
            store.wait_indexed(10)
            yield store
        finally:
            store.close(30)


def submit(store: TieredStore, count: int, parent: bytes) -> None:
    keys = [secrets.token_bytes(32) for _ in range(count)]
    with store.reserve(keys, parent=parent) as reservation:
        check(len(reservation) == count)
        reservation.commit()


def submitting(root: Path, rounds: int) -> Iterator[Row]:
    """How long `reserve` and `commit` keep the caller, while the disk's threads write the chunks."""
    with new_store(root, disk=True) as with_disk, new_store(root, disk=False) as without:
        for count in (8, 64):
            check(with_disk.drain(60))
            name, alone = f"submit {count} chunks of 1 MiB, with a disk tier", "without a disk tier"
            times = interleaved(
                {name: partial(submit, with_disk, count, NAMESPACE), alone: partial(submit, without, count, NAMESPACE)},
                rounds,
                clock=time.perf_counter,
                before=lambda name: check(with_disk.drain(60)),
            )
            check(with_disk.stats().tiers[1].dropped == 0)
            each = statistics.median(times[name]) / count * 1e3
            share = round(median_ratio(times, name, alone), 2)
            yield Row(name, round(each, 4), "ms/chunk", alone, share, SUBMIT_TARGET, share <= SUBMIT_TARGET)


# -- a prompt's chunks while vLLM's processes poll ---------------------------------------------------------


class Polling:
    """A process and a thread of this one that poll, as vLLM's worker and its engine core do while a request waits."""

    def __init__(self) -> None:
        self._going, self._ended = threading.Event(), False
        self._process = subprocess.Popen([sys.executable, "-c", "import os\nwhile True: os.sched_yield()"])
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        self.switch(on=False)

    def _poll(self) -> None:
        while self._going.wait() and not self._ended:
            os.sched_yield()

    def switch(self, *, on: bool) -> None:
        self._process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        if on:
            self._going.set()
        else:
            self._going.clear()
        time.sleep(SETTLED)

    def close(self) -> None:
        self._ended = True
        self._going.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()


def reading_a_prompt(root: Path, readers: ThreadPoolExecutor, rounds: int) -> Iterator[Row]:
    """The chunks of a prompt: the bound of a hit on disk."""
    ways = {f"{how}{when}": when for how in (RAW1, LMKV) for when in (QUIETLY, POLLED)}
    with new_folder(root) as folder, contextlib.closing(Polling()) as polling:
        disk = Disk(folder, PROMPT_CHUNKS, PROMPT_MIB * MIB, readers)
        disk.raw_write()
        disk.write()
        disk.cool()
        reads = {RAW1: partial(disk.raw_read, alone=True), LMKV: disk.read}
        cases = {name: reads[name.removesuffix(when)] for name, when in ways.items()}

        def before(name: str) -> None:
            polling.switch(on=name.endswith(POLLED))

        times = interleaved(cases, rounds, clock=time.perf_counter, before=before)
        disk.backend.close()
    for name in ways:
        title = f"read {PROMPT_CHUNKS} chunks of {PROMPT_MIB} MiB: {name}"
        yield Row(title, statistics.median(times[name]), "s", RAW1, median_ratio(times, name, RAW1))


def run(root: Path, quick: bool) -> Iterator[Row]:
    rounds = 5 if quick else 9
    with (
        ThreadPoolExecutor(THREADS) as pool,
        ThreadPoolExecutor(READERS) as readers,
        ThreadPoolExecutor(WRITERS) as writers,
    ):
        for mib, count in ((32, 8), (4, 64)) if quick else ((32, 16), (4, 128)):
            buffers, nbytes = slots(count, mib * MIB), count * mib * MIB
            for sync in ("none", "data"):
                times = measure_writes(root, ways_of(pool, writers, sync), buffers, rounds)
                goals = {(LMKV, RAW1): 0.9, (LMKV, RAW4): 0.9, (LMKV, VLLM): 1.0, (LMKV4, VLLM): 1.0}
                yield from rows_of(f"write {mib} MiB, sync {sync}", times, nbytes, goals)
            times = measure_reads(root, ways_of(pool, readers, "none"), buffers, rounds)
            goals = {(LMKV, RAW1): 1.0, (LMKV, VLLM): 1.0, (LMKV4, VLLM): 1.0}
            yield from rows_of(f"cold read {mib} MiB", times, nbytes, goals)
        yield from reading_a_prompt(root, readers, 3 * rounds)
    yield from submitting(root, 4 * rounds)
    yield listing(root)


def main() -> int:
    parser = arguments_of(__doc__, quick="five rounds of 256 MiB instead of nine of 512")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    with new_folder(arguments.path) as root:
        return finish(list(run(root, arguments.quick)), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
