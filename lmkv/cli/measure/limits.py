"""lmkv's copies, in CPU time, and its disk tier, in wall time, beside the limits of this machine. Without vLLM."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import secrets
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmkv import Config, Engine
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.build import io_threads
from lmkv.cli.measure.pages import Pages, wait_until_populated
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import interleaved
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk, ChunkKey

BLOCK, CHUNK, CHUNKS = 16, 256, 8
MIB = 1 << 20
NAMESPACE = bytes(32)
COPY, PAGES, LAYERS = "contiguous copy", "the same pages one by one, by numpy", "the same pages layer by layer"
PAGES_TARGET, WRITE_TARGET, READ_TARGET = 0.95, 0.9, 1.0
"""Least share of the speed of numpy's copy, and of plain files read and written by one thread."""
ONE, SEVERAL = "plain files, one thread", "plain files, as many threads"

Cases = Mapping[str, Callable[[], Any]]


def check(right: bool) -> None:
    if not right:
        raise RuntimeError("a transfer failed, so that its time means nothing; try again")


def measure_copies(*, quick: bool) -> Iterator[Comparison]:
    """`Engine.store` and `retrieve`, between scattered blocks and host memory, in one thread."""
    # 256, 128 and 32 MiB: the last fits many processors' caches.
    for layers, chunks in ((4, 4 * CHUNKS),) if quick else ((32, CHUNKS), (4, 4 * CHUNKS), (4, CHUNKS)):
        yield from _measure_copies(layers, chunks, 7 if quick else 21)


def _measure_copies(layers: int, chunks: int, rounds: int) -> Iterator[Comparison]:
    blocks = chunks * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(torch.bfloat16) for _ in range(layers)]
    # One MiB per layer and chunk, and as much again so that nothing is evicted.
    config = Config.load(max_local_cpu_size=2 * chunks * layers / 1024, chunk_size=CHUNK, env={})
    scattered = random.Random(0).sample(range(2 * blocks), blocks)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * chunks)
    nbytes = chunks * layers * MIB
    source, target = np.ones(nbytes // 8, np.int64), np.zeros(nbytes // 8, np.int64)
    with Engine.open(tensors, block_size=BLOCK, model="bench", config=config) as engine:
        transfers: dict[str, Callable[[list[int], list[int]], int]]
        transfers = {"store": engine.store, "retrieve": engine.retrieve}

        def forget() -> None:
            engine.clear()

        cases: dict[str, Callable[[], Any]] = {
            COPY: lambda: np.copyto(target, source),
            **Pages.of(tensors, scattered).ways(),
            **{f"lmkv {name}": partial(call, tokens, scattered) for name, call in transfers.items()},
        }
        wait_until_populated()
        times = interleaved(cases, rounds, before=lambda name: forget() if name == "lmkv store" else None)
    for name in transfers:
        times[PAGES], times[LAYERS] = (times[f"{way}, {name}"] for way in ("one by one", "by layers"))
        ours = f"lmkv {name}"
        speeds = {case: [nbytes / each / 1e9 for each in times[case]] for case in (COPY, PAGES, LAYERS, ours)}
        title = f"{name.capitalize()} {chunks} chunks of {layers} MiB in host memory"
        yield Comparison.of_rounds(title, "GB/s", speeds, PAGES, {ours: PAGES_TARGET})


def bare_chain(tokens: Sequence[int], chunk: int = CHUNK) -> list[bytes]:
    """The least that a chain of sha256 costs: one array conversion, one hash, one digest per chunk."""
    data = memoryview(array("I", tokens)).cast("B")
    chain, keys = hashlib.sha256(NAMESPACE), []
    for start in range(0, len(data), 4 * chunk):
        chain.update(data[start : start + 4 * chunk])
        keys.append(chain.digest())
    return keys


# -- disk -------------------------------------------------------------------------------------------------


class Disk:
    """The same chunks as plain files and in lmkv's disk tier, which uses the threads of `pool`."""

    def __init__(self, folder: Path, chunks: int, nbytes: int, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._folder = folder
        self.backend = LocalDiskBackend(folder / "lmkv", NAMESPACE)
        memory = memoryview(mmap.mmap(-1, chunks * nbytes))
        for at in range(0, len(memory), MIB):
            memory[at : at + MIB] = secrets.token_bytes(MIB)
        self._slots = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
        self._keys: list[ChunkKey] = [number.to_bytes(32, "big") for number in range(chunks)]
        self._flags = os.O_DIRECT if self.backend.direct_io else 0
        self.nbytes = chunks * nbytes

    def _each(self, work: Callable[[int], object], *, alone: bool = False) -> None:
        """Every chunk; `alone`: by one thread."""
        numbers = range(len(self._slots))
        check(all(map(work, numbers) if alone else self._pool.map(work, numbers)))

    def raw_write(self, *, alone: bool = False) -> None:
        def one(index: int) -> bool:
            fd = os.open(self._folder / str(index), os.O_CREAT | os.O_WRONLY | self._flags, 0o600)
            try:
                return os.pwrite(fd, self._slots[index], 0) == len(self._slots[index])
            finally:
                os.close(fd)

        self._each(one, alone=alone)

    def raw_read(self, *, alone: bool = False) -> None:
        def one(index: int) -> bool:
            fd = os.open(self._folder / str(index), os.O_RDONLY | self._flags)
            try:
                return os.preadv(fd, [self._slots[index]], 0) == len(self._slots[index])
            finally:
                os.close(fd)

        self._each(one, alone=alone)

    def write(self) -> None:
        def one(index: int) -> bool:
            return self.backend.write(Chunk(self._keys[index], self._slots[index])).status is WriteStatus.STORED

        self._each(one)

    def read(self) -> None:
        def one(index: int) -> bool:
            return self.backend.read(self._keys[index], self._slots[index]).status is ReadStatus.HIT

        self._each(one)

    def forget(self) -> None:
        """Delete the files of both ways."""
        self.backend.delete(self._keys)
        for index in range(len(self._slots)):
            (self._folder / str(index)).unlink(missing_ok=True)

    def cool(self) -> None:
        """Take the files out of the page cache."""
        for path in self._folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def measure_disk(parent: Path, *, quick: bool) -> list[Comparison]:
    """Writes without fsync, as the disk tier does by default, and cold reads."""
    mib = 4 if quick else 32
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=parent) as folder,
        ThreadPoolExecutor(io_threads(Config(), ["disk"])) as pool,
    ):
        disk = Disk(Path(folder), 8, mib * MIB, pool)
        how = "past the page cache" if disk.backend.direct_io else "through the page cache"
        rounds = 3 if quick else 9
        writes: Cases = {ONE: partial(disk.raw_write, alone=True), SEVERAL: disk.raw_write, "lmkv": disk.write}
        reads: Cases = {ONE: partial(disk.raw_read, alone=True), SEVERAL: disk.raw_read, "lmkv": disk.read}
        clock = time.perf_counter
        written = interleaved(writes, rounds, clock=clock, before=lambda name: disk.forget())
        disk.forget()
        disk.raw_write()
        disk.write()
        read = interleaved(reads, rounds, clock=clock, before=lambda name: disk.cool())
        disk.backend.close()
    comparisons = []
    for kind, times, target in (("writes", written, WRITE_TARGET), ("cold reads", read, READ_TARGET)):
        speeds = {name: [disk.nbytes / each / 1e9 for each in found] for name, found in times.items()}
        title, targets = f"Disk {kind}, {mib} MiB chunks", {"lmkv": target}
        comparisons.append(Comparison.of_rounds(title, "GB/s", speeds, ONE, targets, note=how))
    return comparisons
