"""Store and load between a CUDA device and the slab, beside one large copy of pinned memory.

    python benchmarks/gpu.py [--quick] [--json] [--simulate]

Seconds on the device and of the calling thread; pages of several sizes, staged or loaded directly, which
is what decides `DIRECT_BYTES` in lmkv/memory/device_copier.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks._accelerator import Accelerator, copy, host_memory
from benchmarks._timing import Row, arguments_of, finish
from lmkv.memory.copier import ChunkCopy, Event, Run
from lmkv.memory.device import Device, Staging
from lmkv.memory.device_copier import DeviceCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.pinned import PinnedSlab
from lmkv.memory.slab import Slab

LAYERS, PAGES = 16, 16
PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10)
CHUNKS = 16
TARGET = 0.9
LIMIT_BYTES = 1 << 28


class Case:
    """Paged memory of one page size, a pinned slab, and a copier for each way to load."""

    def __init__(self, accelerator: Accelerator, page_bytes: int, *, fused: bool, layers: int, chunks: int) -> None:
        blocks = 2 * chunks * PAGES
        width = page_bytes // 8
        shape = (blocks, layers, width) if fused else (layers, blocks, width)
        self.whole = accelerator.to_device(torch.randint(-(2**62), 2**62, shape, device=accelerator.torch))
        memory = PagedMemory.of(list(self.whole.unbind(1 if fused else 0)))
        layout = memory.layout(256, [256 // PAGES])
        self.slab = Slab(layout.slot_bytes, chunks * layout.slot_bytes)
        self.nbytes = chunks * layout.chunk_bytes
        self.device = accelerator.open()
        staging = Staging(self.device, memory, 2 * self.nbytes)
        self.pins = PinnedSlab(self.device, self.slab)
        self.pins.wait()
        ways = {"staged": 1 << 40, "direct": 1}
        self.staged, self.direct = (
            DeviceCopier(staging, memory, layout, self.slab, direct_bytes=least, pins=self.pins)
            for least in ways.values()
        )
        ids = random.Random(0).sample(range(blocks), chunks * PAGES)
        self.copies = [ChunkCopy(at, (Run(0, ids[at * PAGES : (at + 1) * PAGES]),)) for at in range(chunks)]

    def close(self) -> None:
        self.staged.close()
        self.slab.close()


def timed(device: Device, work: Callable[[], Event], rounds: int) -> tuple[float, float]:
    """Median seconds until the device is done, and until the caller goes on."""
    found = []
    for _ in range(rounds + 1):
        device.synchronize()
        started = time.perf_counter()
        event = work()
        called = time.perf_counter() - started
        event.wait()
        found.append((time.perf_counter() - started, called))
    return statistics.median(total for total, _ in found[1:]), statistics.median(call for _, call in found[1:])


def limits(device: Device, rounds: int, nbytes: int = LIMIT_BYTES) -> dict[str, float]:
    """Bytes a second of one large copy of pinned memory in either direction."""
    host, (there, _owner), stream = host_memory(nbytes), device.allocate(nbytes), device.stream()
    undo = device.register(host.address, nbytes)
    ways = {"store": (there, host.address), "load": (host.address, there)}
    found = {}
    for direction, (source, target) in ways.items():
        once = partial(copy, device, stream, [source], [target], nbytes, pinned=True)
        seconds, _ = timed(device, once, rounds)
        found[direction] = nbytes / seconds
    undo()
    host.close()
    return found


def rows_of(case: Case, kind: str, limit: dict[str, float], rounds: int) -> list[Row]:
    ways: dict[str, tuple[str, Callable[[], Event]]] = {
        "store": ("store", lambda: case.staged.store(case.copies)),
        "load, staged": ("load", lambda: case.staged.load(case.copies)),
        "load, direct": ("load", lambda: case.direct.load(case.copies)),
        "load by layers": ("load", lambda: list(case.staged.load_layers(case.copies))[-1]),
        "store by layers": ("store", lambda: list(case.staged.store_layers(case.copies))[-1]),
    }
    rows = []
    for name, (direction, work) in ways.items():
        total, called = timed(case.device, work, rounds)
        speed = case.nbytes / total
        ratio = speed / limit[direction]
        target = TARGET if name in ("store", "load, staged") else None
        met = None if target is None else ratio >= target
        rows.append(Row(f"{name}, {kind}", speed / 1e9, "GB/s", "one pinned copy", ratio, target, met))
        rows.append(Row(f"{name}, {kind}: the caller", called * 1e6 / len(case.copies), "us per chunk"))
    return rows


def measure(accelerator: Accelerator, rounds: int, *, layers: int = LAYERS, chunks: int = CHUNKS) -> list[Row]:
    rows = []
    limit = limits(accelerator.open(), rounds, LIMIT_BYTES if layers == LAYERS else 1 << 20)
    for page_bytes in PAGE_BYTES if layers == LAYERS else (4096,):
        for fused in (False, True):
            case = Case(accelerator, page_bytes, fused=fused, layers=layers, chunks=chunks)
            kind = f"{page_bytes >> 10} KiB pages{', all layers of a block together' if fused else ''}"
            rows += rows_of(case, kind, limit, rounds)
            case.close()
    return rows


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--simulate", action="store_true", help="a small run without a GPU, whose figures mean nothing")
    options = parser.parse_args()
    if not (options.simulate or torch.cuda.is_available()):
        print("benchmarks/gpu.py needs a CUDA device, and there is none; try --simulate")
        return 1
    accelerator = Accelerator(simulate=options.simulate)
    print(accelerator.name)
    if options.simulate:
        return finish(measure(accelerator, 1, layers=2, chunks=2), options.json)
    return finish(measure(accelerator, 3 if options.quick else 15), options.json)


if __name__ == "__main__":
    sys.exit(main())
