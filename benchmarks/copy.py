"""`Engine.store` and `Engine.retrieve`, compared with copies of the same pages by numpy, and with a contiguous copy.

    python -m benchmarks.copy [--lmcache PYTHON] [--device cuda] [--quick] [--json] [--write FILE]
    ATEN_CPU_CAPABILITY=avx2 GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL python -m benchmarks.copy

The rows show the CPU seconds of store and retrieve for requests of 8 or 32 chunks, in paged tensors of 16-token blocks.
For comparison numpy copies the same pages between the same tensors and an array in place of the slots. It copies page
by page, which is the reference of lmkv's calls, and layer by layer. A contiguous copy of the same number of bytes is
shown, too, but pages are too short to be that fast on every processor. The second command leaves AVX-512 out.

A call of the engine has two parts, which are timed separately: its copies, and all its other work (the control path).
`--lmcache` takes the interpreter of an environment that has torch and lmcache. LMCache then copies the same pages in
every round (see lmcache_copies.py).

With `--device cuda` the tensors are on the GPU, and the time ends when the device has ended its work. The reference is
one copy of the same number of bytes from pinned memory. `--device simulated` runs this without a GPU, and its figures
mean nothing.
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
"""For each label, the numbers of layers and of chunks of a request. A chunk has 1 MiB in each layer. Processor caches
can hold a whole request with the last label.
"""
PEER_TARGET, PINNED_TARGET = 3.0, 0.9
CONTIGUOUS, BY_LAYERS, PINNED = (
    "a contiguous copy",
    "the same pages layer by layer, by numpy",
    "one copy of pinned memory",
)
HOST_GB = 2.5
WAYS = {"store": "gather", "retrieve": "scatter"}


class LMCache:
    """LMCache in a child process that does one thing at a time. Its times are CPU seconds of the child."""

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
    """A copier that notes the CPU seconds of each copy."""

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
    """Return functions of numpy that copy these pages with one call for each layer. Some processors are faster this
    way, others page by page.
    """
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
    """Return an engine, its bf16 tensors of 8 KV heads of 128, and scattered blocks and token ids of one request."""
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
