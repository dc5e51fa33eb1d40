"""Probes a GPU and its driver for all that lmkv relies on or works around. Takes a minute and 6 GiB of host memory.

    python benchmarks/gpu_probe.py [--json] [--simulate]

One line per fact, and a JSON object on the last line.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import ctypes
import json
import logging
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from attrs import frozen

from benchmarks._accelerator import Accelerator, copy, host_memory
from lmkv.memory.device import DeviceError, Transfers

logger = logging.getLogger(__name__)

MIB = 1 << 20

Fact = tuple[str, Any]

LOCKED_MEMORY = """
import os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setuid(65534)
import torch
from benchmarks._accelerator import Accelerator, host_memory
device, memory = Accelerator().open(), host_memory(1 << 30)
torch.zeros(1, device="cuda")
device.register(memory.address, 1 << 30)
print("registered")
"""


BESIDE = (
    ("alone", 0, 1),
    ("beside copies of 64 MiB", 64, 1),
    ("beside copies of 32 MiB", 32, 1),
    ("beside copies of 4 MiB", 4, 1),
    ("beside copies of 1 MiB", 1, 1),
    ("beside calls of 256 MiB", 4, 64),
    ("beside calls of 32 MiB", 4, 8),
)
"""Large copies beside a small one, by name: MiB of each copy, and how many of them are one call."""


def locked_memory_facts(output: str, errors: str) -> Iterator[Fact]:
    """The facts in the child's output about the limit: only an answer of the driver counts."""
    name, last = "locked memory: not root, limit 64 KiB, 1 GiB registered", (errors.strip().splitlines() or ["?"])[-1]
    if "registered" in output.splitlines():
        yield name, True
        return
    yield name, False if "CUDA error" in last else "not known"
    yield "locked memory: why not", last


@frozen
class Probe:
    """A device, and how large memory is: `unit` is 1 MiB, or a page in a simulation."""

    accelerator: Accelerator
    unit: int

    def borders(self) -> Iterator[Fact]:
        """Copies inside one registration, across two, and across registered and other memory."""
        unit, device = self.unit, self.accelerator.open()
        memory, (there, _owner), stream = host_memory(256 * unit), device.allocate(16 * unit), device.stream()
        undo = [device.register(memory.address + at * 64 * unit, 64 * unit) for at in range(3)]
        places = {"inside one": 8, "across two": 56, "across two others": 120, "into pageable": 184, "pageable": 200}
        for name, at in places.items():
            host = memory.address + at * unit
            errors = 0
            for source, target in [(host, there), (there, host)] * 10:
                try:
                    copy(device, stream, [source], [target], 16 * unit, pinned=False).wait()
                except (DeviceError, RuntimeError):
                    errors += 1
            yield f"borders: {name}, failed of 20", errors
        for end in undo:
            end()
        memory.close()

    def batches(self) -> Iterator[Fact]:
        """Whether one call for many copies works, and what it costs the caller."""
        unit, device = self.unit, self.accelerator.open()
        memory, (there, _owner), stream = host_memory(64 * unit), device.allocate(64 * unit), device.stream()
        undo = device.register(memory.address, 64 * unit)
        hosts = [memory.address + at * unit for at in range(64)]
        theirs = [there + at * unit for at in range(64)]
        for way, ends in (("to the device", (hosts, theirs)), ("from the device", (theirs, hosts))):
            for name, pinned in (("in one call", True), ("one by one", False)):
                started = time.perf_counter()
                event = copy(device, stream, *ends, unit, pinned=pinned)
                took = round((time.perf_counter() - started) * 1e6)
                yield f"batches: 64 copies {way} {name}, the caller, us", took
                event.wait()
        if self.accelerator.simulated is None:
            yield from self._statuses(stream, hosts, theirs)
        undo()
        memory.close()

    def _statuses(self, stream: Any, hosts: list[int], theirs: list[int]) -> Iterator[Fact]:
        """The driver's status for many copies in one call, in either direction; 0: it makes them."""
        from lmkv.memory.cuda import batched_copy

        batched = batched_copy(ctypes.CDLL("libcuda.so.1"))
        yield "batches: the driver has cuMemcpyBatchAsync", batched is not None
        sizes = np.full(len(hosts), self.unit, np.int64)
        here, there = np.array(hosts, np.int64), np.array(theirs, np.int64)
        for name, ends in (("loads", (here, there)), ("stores", (there, here))):
            if batched is not None:
                transfers = Transfers(*ends, sizes, pinned=True, stable=name == "loads")
                yield f"batches: status of {name}", batched(transfers, stream.stream.cuda_stream)
        self.accelerator.open().synchronize()

    def locked_memory(self) -> Iterator[Fact]:
        """Whether a process that is not root and may lock 64 KiB can register 1 GiB."""
        if self.accelerator.simulated is not None:
            yield "locked memory: not root, limit 64 KiB, 1 GiB registered", "not tried"
            return
        root = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-c", LOCKED_MEMORY]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
        yield from locked_memory_facts(done.stdout, done.stderr)

    def stalls(self) -> Iterator[Fact]:
        """How long a thread that launches kernels waits for one, while another thread registers memory."""
        unit, device = self.unit, self.accelerator.open()
        values = self.accelerator.to_device(torch.zeros(1024))
        for populated in (True, False):
            for piece in (32, 64, 128, 1024):
                memory, took, undo = host_memory(2048 * unit, populate=populated), list[float](), []
                registering = threading.Thread(
                    target=lambda m=memory, p=piece, t=took, u=undo: u.extend(self._register(m.address, p, t))
                )
                registering.start()
                worst = 0.0
                while registering.is_alive():
                    started = time.perf_counter()
                    self.accelerator.launch(lambda: values.add_(1))
                    device.stream(compute=True).mark().wait()
                    worst = max(worst, time.perf_counter() - started)
                registering.join()
                device.synchronize()
                kind = f"{'populated' if populated else 'not populated'}, pieces of {piece} MiB"
                yield f"stalls: 2 GiB registered, {kind}, seconds", round(sum(took), 3)
                yield f"stalls: {kind}, worst launch, ms", round(worst * 1e3, 2)
                for end in undo:
                    end()
                memory.close()

    def _register(self, address: int, piece: int, took: list[float]) -> list[Callable[[], None]]:
        undo = []
        for at in range(0, 2048, piece):
            started = time.perf_counter()
            undo.append(self.accelerator.open().register(address + at * self.unit, piece * self.unit))
            took.append(time.perf_counter() - started)
        return undo

    def pageable(self) -> Iterator[Fact]:
        """How long the caller waits for a copy behind 100 ms of computation."""
        unit, device = self.unit, self.accelerator.open()
        memory, (there, _owner), stream = host_memory(32 * unit), device.allocate(32 * unit), device.stream()
        compute = device.stream(compute=True)
        for pinned in (False, True):
            undo = device.register(memory.address, 32 * unit) if pinned else None
            self.compute_for(100)
            stream.wait_for(compute.mark())
            started = time.perf_counter()
            copy(device, stream, [there], [memory.address], 32 * unit, pinned=pinned)
            waited = time.perf_counter() - started
            kind = "pinned" if pinned else "pageable"
            yield f"pageable: the caller of a {kind} store waits, ms", round(waited * 1e3, 2)
            device.synchronize()
            if undo:
                undo()
        memory.close()

    def queue(self) -> Iterator[Fact]:
        """After how many single copies behind a busy stream the caller blocks."""
        unit, device = self.unit, self.accelerator.open()
        memory, (there, _owner), stream = host_memory(64 * unit), device.allocate(64 * unit), device.stream()
        undo = device.register(memory.address, 64 * unit)
        self.compute_for(300)
        stream.wait_for(device.stream(compute=True).mark())
        took = []
        for number in range(3000 if self.accelerator.simulated is None else 300):
            at = number % 32 * 2 * unit
            started = time.perf_counter()
            copy(device, stream, [there + at], [memory.address + at], 2 * unit, pinned=True)
            took.append(time.perf_counter() - started)
        device.synchronize()
        slow = [number for number, seconds in enumerate(took) if seconds > 1e-3]
        yield "queue: a single copy, the caller, median us", round(statistics.median(took) * 1e6, 1)
        yield "queue: the first call that blocks", slow[0] if slow else "none"
        undo()
        memory.close()

    def small_beside_large(self) -> Iterator[Fact]:
        """vLLM's own small copies while lmkv's are on their way: inputs beside loads, sampled tokens beside stores."""
        for way in ("to", "from"):
            yield from self._small_beside_large(way)

    def _small_beside_large(self, way: str) -> Iterator[Fact]:
        unit, device = self.unit, self.accelerator.open()
        memory, (there, _owner), stream = host_memory(256 * unit), device.allocate(256 * unit), device.stream()
        undo = device.register(memory.address, 256 * unit)
        small, other, (target, _kept) = host_memory(1 << 14), device.stream(), device.allocate(1 << 14)
        end = device.register(small.address, 1 << 14)
        for beside, size, together in BESIDE:
            for _ in range(4):
                for first in range(0, 256, size * together) if size else ():
                    places = range(first, first + size * together, size)
                    ends = [memory.address + at * unit for at in places], [there + at * unit for at in places]
                    copy(device, stream, *ends[:: 1 if way == "to" else -1], size * unit, pinned=True)
            times = []
            for _ in range(15):
                started = time.perf_counter()
                ends = [small.address], [target]
                copy(device, other, *ends[:: 1 if way == "to" else -1], 1 << 14, pinned=True).wait()
                times.append(time.perf_counter() - started)
            device.synchronize()
            name = f"small copies: 16 KiB {way} the device {beside}"
            yield f"{name}, median us", round(statistics.median(times) * 1e6)
            yield f"{name}, worst us", round(max(times) * 1e6)
        end()
        undo()
        small.close()
        memory.close()

    def compute_for(self, milliseconds: float) -> None:
        """Queue computation of about so long on an H200."""
        if self.accelerator.simulated is not None:
            return
        values = torch.empty(8192, 8192, device=self.accelerator.torch, dtype=torch.bfloat16).normal_()
        for _ in range(max(1, int(milliseconds / 1.5))):
            torch.mm(values, values)


PARTS = ("batches", "locked_memory", "stalls", "pageable", "queue", "small_beside_large", "borders")
"""Parts in the order in which they run: the last one may leave a dead context behind."""


def facts(probe: Probe) -> Iterator[Fact]:
    """The facts of all parts. A failed part is a fact as well, and ends no other."""
    yield "device", probe.accelerator.name
    for part in PARTS:
        try:
            yield from getattr(probe, part)()
        except Exception as error:
            logger.exception("%s failed", part)
            yield f"{part}: FAILED", repr(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--simulate", action="store_true", help="a small run without a GPU, whose figures mean nothing")
    options = parser.parse_args()
    found = {}
    for name, value in facts(Probe(Accelerator(simulate=options.simulate), 4096 if options.simulate else MIB)):
        found[name] = value
        print(f"{name}: {value}", flush=True)
    if options.json:
        print(json.dumps(found))
    return 1 if any(name.endswith("FAILED") for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
