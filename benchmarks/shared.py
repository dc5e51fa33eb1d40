"""The least cost of a hit in shared memory: files are read, checked and mapped, beside a copy of as many bytes.

    python benchmarks/shared.py [--folder /dev/shm] [--rounds 15] [--quick] [--json]

31 chunks of 2 MiB, the KV of a prompt of `benchmarks/ttft.py`, in seconds of CPU time. On a CPU the worker reads the
files into vLLM's blocks, which is the first row; a hit in host memory is a copy from slots into blocks. Both also with
scattered blocks and small pages. Before that the scheduler looks whether the files are there. For a device the tier is
read into slots first. The next rows are what its parts cost alone, and what it would cost to map the files and check
them there. The last ones are wall time: those of the worker, and the tier read by several threads, alone and while
another process polls, as vLLM's processes do while they wait for each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import mmap
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.backends.disk.shared_memory import SharedMemoryBackend
from lmkv.chunks.codec import DEFAULT_SEGMENT_BYTES, segment_checksums
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk, Place
from lmkv.store.leases import IN_PLACE
from lmkv.vllm.block_reader import BlockReader
from lmkv.vllm.metadata import CopyOrder

CHUNKS, NBYTES = 31, 2 << 20
READER, COPIER = "lmkv's worker: read into blocks and checked", "lmkv's worker: copied from slots into blocks"
SCATTERED, SMALL = "scattered blocks", "scattered pages of 4 KiB"
COPY, TIER = "a copy within the process", "lmkv's tier: read into slots and checked"
CHUNK_TOKENS = 256
THREADS = (1, 2, 4, 16)


def main() -> int:
    parser = arguments_of(__doc__, quick="five rounds")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="lmkv-shared-", dir=options.folder) as folder:
        actions, worker = parts(Path(folder))
        runs = worker | {name: partial(for_each, part) for name, part in actions.items()}
        seconds = interleaved(runs, rounds)
        of_threads = {f"{TIER}, {count} threads": threaded(actions[TIER], count) for count in THREADS} | worker
        waits = interleaved(of_threads, rounds, clock=time.perf_counter)
        with polling():
            polled = interleaved(of_threads, rounds, clock=time.perf_counter)
        waits |= {f"{name}, while a process polls": times for name, times in polled.items()}
    found = [
        Row(name, statistics.median(times), "s", COPY, median_ratio(seconds, name, COPY))
        for name, times in seconds.items()
    ]
    found += [Row(f"wall time: {name}", statistics.median(times), "s") for name, times in waits.items()]
    return finish(found, options.json)


def threaded(part: Callable[[int], object], count: int) -> Callable[[], object]:
    pool = ThreadPoolExecutor(count)
    return lambda: list(pool.map(part, range(CHUNKS)))


@contextmanager
def polling() -> Iterator[None]:
    """Another process asks again and again whether there is work, as those of vLLM do for a second after the last."""
    child = subprocess.Popen([sys.executable, "-c", "import os\nwhile True: os.sched_yield()"])
    try:
        time.sleep(0.5)
        yield
    finally:
        child.kill()
        child.wait()


def for_each(part: Callable[[int], object]) -> None:
    for index in range(CHUNKS):
        part(index)


def parts(folder: Path) -> tuple[dict[str, Callable[[int], object]], dict[str, Callable[[], object]]]:
    """The measured actions by name: on one chunk, and those of a worker on all."""
    backend = SharedMemoryBackend(folder / "kv", bytes(32))
    # Aligned to pages, as those of an engine are.
    slab = Slab(NBYTES, CHUNKS * NBYTES)
    slots = slab.array
    source = np.frombuffer(mmap.mmap(-1, CHUNKS * NBYTES), np.uint8).reshape(CHUNKS, NBYTES)
    source[:] = np.random.default_rng(0).integers(0, 256, source.shape, np.uint8)
    keys = [bytes([index]) * 32 for index in range(CHUNKS)]
    for key, row in zip(keys, source, strict=True):
        assert backend.write(Chunk(key, row.data)).status is WriteStatus.STORED
    plain = [folder / str(index) for index in range(CHUNKS)]
    for path, row in zip(plain, source, strict=True):
        path.write_bytes(row.data)

    def tier(index: int) -> None:
        assert backend.read(keys[index], slots[index].data).status is ReadStatus.HIT

    def read(index: int) -> None:
        fd = os.open(plain[index], os.O_RDONLY)
        assert os.preadv(fd, [slots[index].data], 0) == NBYTES
        os.close(fd)

    def check(index: int) -> None:
        segment_checksums(slots[index].data, DEFAULT_SEGMENT_BYTES)

    def mapped(index: int, *, checked: bool) -> None:
        fd = os.open(plain[index], os.O_RDONLY)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(fd, NBYTES, flags=flags, prot=mmap.PROT_READ) as found, memoryview(found) as view:
            os.close(fd)
            if checked:
                segment_checksums(view, DEFAULT_SEGMENT_BYTES)

    def copy(index: int) -> None:
        slots[index] = source[index]

    worker = of_worker(slab, keys, backend.place, "", layers=4, block=64, scattered=False)
    worker |= of_worker(slab, keys, backend.place, f", {SCATTERED}", layers=4, block=64, scattered=True)
    worker |= of_worker(slab, keys, backend.place, f", {SMALL}", layers=32, block=16, scattered=True)
    worker["lmkv's scheduler: looks for the files"] = partial(backend.contains, keys)
    actions = {
        TIER: tier,
        "read": read,
        "checksums of bytes in the process": check,
        "mapped": partial(mapped, checked=False),
        "mapped and checked": partial(mapped, checked=True),
        COPY: copy,
    }
    return actions, worker


def of_worker(
    slab: Slab, keys: list[bytes], place: Place | None, of: str, *, layers: int, block: int, scattered: bool
) -> dict[str, Callable[[], object]]:
    """Both loads of a worker, with blocks of so many tokens in so many layers."""
    pages = CHUNK_TOKENS // block
    tensors = [torch.zeros(((CHUNKS + 1) * pages, NBYTES // pages // layers), dtype=torch.uint8) for _ in range(layers)]
    memory = PagedMemory.of(tensors)
    layout = memory.layout(CHUNK_TOKENS, [block])
    copier, reader = CPUCopier(memory, layout, slab), BlockReader(memory, layout)
    blocks = list(range(pages, (CHUNKS + 1) * pages))
    if scattered:
        random.Random(0).shuffle(blocks)
    copies = [ChunkCopy(n, (Run(0, blocks[n * pages : (n + 1) * pages]),)) for n in range(CHUNKS)]
    order = CopyOrder(1, [copy._replace(slot=IN_PLACE) for copy in copies], files=keys, place=place)

    def read() -> None:
        assert reader.read(order).count == CHUNKS

    return {READER + of: read, COPIER + of: partial(copier.load, copies)}


if __name__ == "__main__":
    sys.exit(main())
