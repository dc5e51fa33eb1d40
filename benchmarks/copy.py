"""`Engine.store` and `Engine.retrieve` beside their limits: copies of the same pages by numpy, and a contiguous one.

    python -m benchmarks.copy [--lmcache PYTHON] [--device cuda] [--quick] [--json] [--write FILE]
    ATEN_CPU_CAPABILITY=avx2 GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL python -m benchmarks.copy

CPU seconds of store and retrieve of 8 or 32 chunks a request, paged tensors of 16-token blocks. Beside them numpy
copies the same pages between the same tensors and an array in the place of the slots: one by one, which is the
reference of lmkv's calls, and layer by layer. A contiguous copy of as many bytes is shown, too, but pages are too short
to reach it on every processor. The second command leaves AVX-512 out. Each call of the engine divides into its copies,
which are timed within it, and the rest, its control path. With --lmcache, the interpreter of an environment that has
torch and lmcache, LMCache does the same in every round (see lmcache_copies.py).

With `--device cuda` tensors are on the GPU, and seconds those until the device is done. The reference is one copy of
pinned memory of as many bytes. `--device simulated` runs that without a GPU: its figures mean nothing.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import ENVIRONMENT
from benchmarks.rounds import Row, arguments, compared, finish, interleaved, speeds
from lmkv import Config, Engine
from lmkv.cli.bench import BLOCK, CHUNK, MIB, PAGES, PAGES_TARGET, check, pages, wait_until_populated
from lmkv.cli.engines import ChildProcess
from lmkv.memory.copier import ChunkCopy, Copier, Event

SHAPES = {"32 MiB chunks": (32, 8), "4 MiB chunks, 32 a request": (4, 32), "4 MiB chunks": (4, 8)}
"""Layers and chunks of a request, by label. Each layer has 1 MiB of a chunk. Many caches hold a request of the last."""
PEER_TARGET, PINNED_TARGET = 3.0, 0.9
CONTIGUOUS, BY_LAYERS, PINNED = (
    "a contiguous copy",
    "the same pages layer by layer, by numpy",
    "one copy of pinned memory",
)
HOST_GB = 2.5
WAYS = {"store": "gather", "retrieve": "scatter"}


class LMCache:
    """The peer in a child process that does one thing at a time; its times are its own CPU seconds."""

    def __init__(self, python: str, layers: int, blocks: list[int], tokens: list[int], folder: Path) -> None:
        script = str(Path(__file__).with_name("lmcache_copies.py"))
        self._child = ChildProcess([python, "-P", script], folder, ENVIRONMENT)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._child.ask({"layers": layers, "blocks": blocks, "tokens": tokens, "gb": HOST_GB})
        self._child.ask({"do": "check"})

    def do(self, what: str) -> None:
        self.seconds[what].append(self._child.ask({"do": what}))

    def close(self) -> None:
        self._child.kill()
        self._child.close()


class TimedCopier:
    """Copies, and notes the CPU seconds of each call."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._copies = {"store": copier.store, "retrieve": copier.load}
        self.seconds: dict[str, list[float]] = {name: [] for name in self._copies}

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        return self._timed("store", copies)

    def load(self, copies: Sequence[ChunkCopy]) -> Event:
        return self._timed("retrieve", copies)

    def _timed(self, name: str, copies: Sequence[ChunkCopy]) -> Event:
        start = time.process_time()
        event = self._copies[name](copies)
        self.seconds[name].append(time.process_time() - start)
        return event


def by_layers(tensors: Sequence[torch.Tensor], blocks: list[int]) -> dict[str, Callable[[], None]]:
    """numpy copies these pages with one call a layer. Some processors are faster so, others page by page."""
    rows = [tensor.view(torch.int64).flatten(1).numpy() for tensor in tensors]
    slots = np.ones((len(rows), len(blocks), rows[0].shape[1]), np.int64)

    def take() -> None:
        for row, part in zip(rows, slots, strict=True):
            np.take(row, blocks, axis=0, out=part, mode="clip")

    def put() -> None:
        for row, part in zip(rows, slots, strict=True):
            row[blocks] = part

    return {"by layers, gather": take, "by layers, scatter": put}


def engine_of(layers: int, chunks: int, device: str) -> tuple[Engine, list[torch.Tensor], list[int], list[int]]:
    """An engine, its bf16 tensors of 8 KV heads of 128, and scattered blocks and tokens of one request."""
    blocks = chunks * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(device, torch.bfloat16) for _ in range(layers)]
    config = Config.load(max_local_cpu_size=HOST_GB, chunk_size=CHUNK, env={})
    engine = Engine.open(tensors, block_size=BLOCK, model="copy", config=config)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * chunks)
    return engine, tensors, random.Random(0).sample(range(2 * blocks), blocks), tokens


def measure(label: str, layers: int, chunks: int, rounds: int, lmcache: str | None, folder: Path) -> Iterator[Row]:
    engine, tensors, blocks, tokens = engine_of(layers, chunks, "cpu")
    nbytes = chunks * layers * MIB
    source, target = np.ones(nbytes // 8, np.int64), np.zeros(nbytes // 8, np.int64)
    with ExitStack() as stack:
        stack.enter_context(closing(engine))
        peer = stack.enter_context(closing(LMCache(lmcache, layers, blocks, tokens, folder))) if lmcache else None

        def before(name: str) -> None:
            if name == "store":
                engine.clear()
            elif name == "peer store" and peer is not None:
                peer.do("clear")

        gather, scatter = pages(tensors, blocks)
        cases: dict[str, Callable[[], Any]] = {
            CONTIGUOUS: lambda: np.copyto(target, source),
            "pages, gather": gather,
            "pages, scatter": scatter,
            **by_layers(tensors, blocks),
            "store": lambda: check(engine.store(tokens, blocks) == len(tokens)),
            "retrieve": lambda: check(engine.retrieve(tokens, blocks) == len(tokens)),
        }
        for name in WAYS if peer is not None else ():
            cases[f"peer {name}"] = lambda name=name: peer.do(name)
        wait_until_populated()
        copier = engine._copier
        engine._copier = timed = TimedCopier(copier)
        times = interleaved(cases, rounds, before=before)
        engine._copier = copier
        theirs = dict(peer.seconds) if peer is not None else {}
    for name, way in WAYS.items():
        # The first call was the warm-up.
        within = timed.seconds[name][1:]
        seconds = {
            PAGES: times[f"pages, {way}"],
            BY_LAYERS: times[f"by layers, {way}"],
            CONTIGUOUS: times[CONTIGUOUS],
            "lmkv": times[name],
            "lmkv's copies": within,
        }
        title = f"{name}, {label}"
        yield from compared(title, "GB/s of CPU", speeds(seconds, nbytes), PAGES, {"lmkv": PAGES_TARGET})
        rest = [1e6 * (whole - copied) / chunks for whole, copied in zip(times[name], within, strict=True)]
        yield Row(f"{title}: lmkv's control path", statistics.median(rest), "us a chunk")
        if name in theirs:
            both = speeds({"LMCache": theirs[name][1:], "lmkv": times[name]}, nbytes)
            yield from compared(title, "GB/s of CPU", both, "LMCache", {"lmkv": PEER_TARGET})


def on_a_device(label: str, layers: int, chunks: int, rounds: int, device: str) -> Iterator[Row]:
    real = "cuda" if device == "cuda" else "cpu"
    engine, _, blocks, tokens = engine_of(layers, chunks, real)
    host, there = (
        torch.empty(chunks * layers * MIB, dtype=torch.uint8),
        torch.empty(chunks * layers * MIB, dtype=torch.uint8),
    )
    if real == "cuda":
        host, there = host.pin_memory(), there.to(real)

    def done(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            if real == "cuda":
                torch.cuda.synchronize()

        return run

    cases = {
        "pinned, store": done(lambda: host.copy_(there, non_blocking=True)),
        "pinned, retrieve": done(lambda: there.copy_(host, non_blocking=True)),
        "store": done(lambda: check(engine.store(tokens, blocks) == len(tokens))),
        "retrieve": done(lambda: check(engine.retrieve(tokens, blocks) == len(tokens))),
    }
    with closing(engine):
        forget = lambda name: engine.clear() if name == "store" else None  # noqa: E731
        times = interleaved(cases, rounds, clock=time.perf_counter, before=forget)
    for name in WAYS:
        found = speeds({PINNED: times[f"pinned, {name}"], "lmkv": times[name]}, host.nbytes)
        yield from compared(f"{name}, {label}, {device}", "GB/s", found, PINNED, {"lmkv": PINNED_TARGET})


def main() -> int:
    parser = arguments(__doc__, quick="seven rounds instead of 31")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has torch and lmcache")
    parser.add_argument("--device", choices=("cpu", "cuda", "simulated"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; try --device simulated")
    rounds = 7 if options.quick else 31

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="lmkv-copy-") as folder:
            for label, (layers, chunks) in SHAPES.items():
                if options.device == "cpu":
                    yield from measure(label, layers, chunks, rounds, options.lmcache, Path(folder))
                else:
                    yield from on_a_device(label, layers, chunks, rounds, options.device)

    return finish(rows(), options)


if __name__ == "__main__":
    sys.exit(main())
