"""Store and load between a CUDA device and the slab, beside torch's pinned copies of as many bytes.

    python benchmarks/gpu.py [--quick] [--json]

Seconds on the device and of the calling thread; pages of several sizes, staged or loaded directly, which
is what decides `DIRECT_BYTES` in lmkv/device.py. Needs a CUDA device; not run yet on one.
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
from typing import Any

import torch

from benchmarks._timing import Row, arguments_of, finish
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab

LAYERS, PAGES = 16, 16
PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10)
CHUNKS = 16
TARGET = 0.9


class Case:
    """Paged memory of one page size, a pinned slab, and a copier for each way to load."""

    def __init__(self, page_bytes: int, *, fused: bool) -> None:
        from lmkv.memory.cuda import CUDADevice
        from lmkv.memory.device_copier import DeviceCopier

        blocks = 2 * CHUNKS * PAGES
        width = page_bytes // 8
        shape = (blocks, LAYERS, width) if fused else (LAYERS, blocks, width)
        whole = torch.randint(-(2**62), 2**62, shape, device="cuda")
        memory = PagedMemory.of(list(whole.unbind(1 if fused else 0)))
        layout = memory.layout(256, [256 // PAGES])
        self.slab = Slab(layout.slot_bytes, CHUNKS * layout.slot_bytes)
        self.nbytes = CHUNKS * layout.chunk_bytes
        self.whole = whole
        device = CUDADevice(whole.device, self.slab)
        device._pinned._thread.join()
        self.staged = DeviceCopier(device, memory, layout, self.slab, direct_bytes=1 << 40)
        self.direct = DeviceCopier(device, memory, layout, self.slab, direct_bytes=1)
        ids = random.Random(0).sample(range(blocks), CHUNKS * PAGES)
        self.copies = [ChunkCopy(at, (Run(0, ids[at * PAGES : (at + 1) * PAGES]),)) for at in range(CHUNKS)]

    def close(self) -> None:
        self.staged.close()
        self.slab.close()


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds until the device is done, and until the caller goes on."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        event = work()
        called = time.perf_counter() - started
        if event is not None:
            event.wait()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started, called))
    return statistics.median(total for total, _ in found[1:]), statistics.median(call for _, call in found[1:])


def limits(rounds: int) -> dict[str, float]:
    """Bytes a second of one large copy between the device and torch's own pinned memory."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    store, _ = timed(lambda: host.copy_(device, non_blocking=True) and None, rounds)
    load, _ = timed(lambda: device.copy_(host, non_blocking=True) and None, rounds)
    return {"store": len(host) / store, "load": len(host) / load}


def rows_of(page_bytes: int, fused: bool, rounds: int) -> list[Row]:
    case = Case(page_bytes, fused=fused)
    limit = limits(rounds)
    ways = {
        "store": ("store", lambda: case.staged.store(case.copies)),
        "load, staged": ("load", lambda: case.staged.load(case.copies)),
        "load, direct": ("load", lambda: case.direct.load(case.copies)),
        "load by layers": ("load", lambda: list(case.staged.load_layers(case.copies))[-1]),
        "store by layers": ("store", lambda: list(case.staged.store_layers(case.copies))[-1]),
    }
    kind = f"{page_bytes >> 10} KiB pages{', all layers of a block together' if fused else ''}"
    rows = []
    for name, (direction, work) in ways.items():
        total, called = timed(work, rounds)
        speed = case.nbytes / total
        ratio = speed / limit[direction]
        target = TARGET if name in ("store", "load, staged") else None
        met = None if target is None else ratio >= target
        rows.append(Row(f"{name}, {kind}", speed / 1e9, "GB/s", "torch's pinned copy", ratio, target, met))
        rows.append(Row(f"{name}, {kind}: the caller", called * 1e6 / CHUNKS, "us a chunk"))
    case.close()
    return rows


def main() -> int:
    options = arguments_of(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and there is none")
        return 1
    rounds = 3 if options.quick else 15
    rows = [row for size in PAGE_BYTES for fused in (False, True) for row in rows_of(size, fused, rounds)]
    print(torch.cuda.get_device_name())
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
