"""`Engine.store` and `Engine.retrieve` beside two limits: numpy's copies of the same pages, and a contiguous one.

    python benchmarks/copy.py [--lmcache PYTHON] [--quick] [--json]
    ATEN_CPU_CAPABILITY=avx2 GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL python benchmarks/copy.py

CPU seconds of store and retrieve of 8 or 32 chunks a request, paged tensors of 16-token blocks. Beside them numpy
copies the same pages between the same tensors and an array in the place of the slots: one by one, which is the
reference of lmkv's calls, and layer by layer. The faster of both is the limit of its copies. A contiguous copy of as
many bytes is shown, too, but pages are too short to reach it on every processor. The second command leaves AVX-512
out. Each call of the engine divides into its copies, which are timed within it, and the rest, its control path. The
control path alone is the same with the copies left out, also for requests of 1 and 2 chunks, beside hashing the keys
of the chunks and putting each into a dict and taking it out; in cold caches, as copies leave them, both take several
times as long. With --lmcache, the interpreter of an environment that has torch and lmcache, LMCache does the same in
every round (see _lmcache.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import os
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks._lmcache_server import ENVIRONMENT
from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv import Config, Engine
from lmkv.cli.measure.limits import PAGES_TARGET, bare_chain, check
from lmkv.cli.measure.pages import Array, Pages, mapped, wait_until_populated
from lmkv.memory.copier import DONE, ChunkCopy, Copier, Event, Run

BLOCK, CHUNK, CHUNKS = 16, 256, 8
SHAPES = {"32 MiB chunks": (32, CHUNKS), "4 MiB chunks, 32 a request": (4, 32), "4 MiB chunks": (4, CHUNKS)}
"""Layers and chunks of a request, by label. Each layer has 1 MiB of a chunk. Many caches hold a request of the last."""
PEER_TARGET = 3.0
CONTIGUOUS, PAGES = "a contiguous copy", "the same pages by numpy, the faster of two ways"
ONE_BY_ONE = "the same pages copied one by one"
CONTROL = {"store": 5.0, "retrieve": 3.0}
"""Largest multiple of `bare_control`, at 8 chunks a request."""
HOST_GB = 2.5


class LMCache:
    """The peer in a child process that does one thing at a time; its times are its own CPU seconds."""

    def __init__(self, python: str, layers: int, blocks: list[int], tokens: list[int]) -> None:
        script = Path(__file__).with_name("_lmcache.py")
        self._child = subprocess.Popen(
            [python, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._ask({"layers": layers, "blocks": blocks, "tokens": tokens, "gb": HOST_GB})
        self._ask({"do": "check"})

    def _ask(self, request: dict[str, Any]) -> dict[str, float]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps(request), file=self._child.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._child.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(f"LMCache: {answer['error']}")
        return answer

    def do(self, what: str) -> None:
        self.seconds[what].append(self._ask({"do": what})["cpu"])

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def engine_of(layers: int, chunks: int) -> tuple[Engine, list[torch.Tensor], list[int]]:
    """An engine, its bf16 tensors of 8 KV heads of 128, and scattered blocks for one request."""
    blocks = chunks * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(torch.bfloat16) for _ in range(layers)]
    config = Config.load(max_local_cpu_size=HOST_GB, chunk_size=CHUNK, env={})
    engine = Engine.open(tensors, block_size=BLOCK, model="copy", config=config)
    return engine, tensors, random.Random(0).sample(range(2 * blocks), blocks)


def measure(label: str, layers: int, chunks: int, rounds: int, lmcache: str | None) -> list[Row]:
    engine, tensors, blocks = engine_of(layers, chunks)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * chunks)
    nbytes = chunks * layers * 2**20
    source, target = np.ones(nbytes // 8, np.int64), np.zeros(nbytes // 8, np.int64)
    copier, pages, per_chunk = engine._copier, Pages.of(tensors, blocks), CHUNK // BLOCK
    # Slots behind those of the request.
    copies = [ChunkCopy(chunks + n, (Run(0, blocks[n * per_chunk : (n + 1) * per_chunk]),)) for n in range(chunks)]

    with ExitStack() as stack:
        peer = stack.enter_context(closing(LMCache(lmcache, layers, blocks, tokens))) if lmcache else None

        def before(name: str) -> None:
            if name.startswith("store"):
                engine.clear()
            elif name == "peer store" and peer is not None:
                peer.do("clear")

        cases: dict[str, Callable[[], Any]] = {
            CONTIGUOUS: lambda: np.copyto(target, source),
            **pages.ways(),
            "store": lambda: check(engine.store(tokens, blocks) == len(tokens)),
            "retrieve": lambda: check(engine.retrieve(tokens, blocks) == len(tokens)),
            "copies alone: store": lambda: copier.store(copies),
            "copies alone: retrieve": lambda: copier.load(copies),
            **chunk_by_chunk(pages.rows, copies),
        }
        # In rounds of their own: they use the same slots as the others, whose bytes would stay in the caches.
        by_layer: dict[str, Callable[[], Any]] = {
            CONTIGUOUS: cases[CONTIGUOUS],
            "store by layers": lambda: by_layers(engine.store_layers(tokens, blocks), "save", layers),
            "retrieve by layers": lambda: by_layers(engine.retrieve_layers(tokens, blocks), "wait", layers),
        }
        if peer is not None:
            cases |= {f"peer {name}": partial(peer.do, name) for name in ("store", "retrieve")}
        wait_until_populated()
        engine._copier = timed = _TimedCopier(copier)
        times = interleaved(cases, rounds, before=before)
        engine._copier = copier
        for name, copying in timed.seconds.items():
            # The first call was the warm-up.
            times[f"copies within: {name}"] = copying[1:]
            parts = zip(times[name], copying[1:], strict=True)
            times[f"control path within: {name}"] = [whole - copied for whole, copied in parts]
        layered = interleaved(by_layer, rounds, before=before)
        if peer is not None:
            # Its own seconds, not those of waiting for it; the first call was the warm-up.
            times |= {f"peer {name}": found[1:] for name, found in peer.seconds.items() if name != "clear"}
    rows = []
    for name in ("store", "retrieve"):
        speed = nbytes / statistics.median(times[name]) / 1e9
        ways = (f"one by one, {name}", f"by layers, {name}")
        # Some processors are faster page by page, others layer by layer.
        times[PAGES] = min((times[way] for way in ways), key=statistics.median)
        ratio = 1 / median_ratio(times, name, ways[0])
        met = ratio >= PAGES_TARGET
        rows.append(Row(f"{name}, {label}", speed, "GB/s of CPU", ONE_BY_ONE, ratio, PAGES_TARGET, met))
        rows.append(beside(times, name, f"{name}, {label}", nbytes, PAGES))
        for kind in ("copies within", "copies alone", "chunk by chunk"):
            title = f"{'numpy, ' if kind == 'chunk by chunk' else ''}{kind}: {name}, {label}"
            rows.append(beside(times, f"{kind}: {name}", title, nbytes, PAGES))
        within = f"control path within: {name}"
        micros = statistics.median(times[within]) / chunks * 1e6
        rows.append(Row(f"{within}, {label}", micros, "us a chunk", "the call", median_ratio(times, within, name)))
        for case, title in ((name, name), *((way, f"numpy, pages {way}") for way in ways)):
            rows.append(beside(times, case, f"{title}, {label}", nbytes))
        rows.append(beside(layered, f"{name} by layers", f"{name} by layers, {label}", nbytes))
        if peer is not None:
            theirs = f"peer {name}"
            rows.append(beside(times, theirs, f"{name}, {label}, LMCache", nbytes))
            gain = median_ratio(times, theirs, name)
            title = f"{name}, {label}, lmkv beside LMCache"
            rows.append(Row(title, gain, "x", target=PEER_TARGET, met=gain >= PEER_TARGET))
    if layers == 4:
        for few in (1, 2, CHUNKS) if chunks == CHUNKS else ():
            rows += control(engine, tokens[: few * CHUNK], blocks[: few * CHUNK // BLOCK], rounds)
        rows += control(engine, tokens, blocks, rounds, evict=lambda: np.copyto(target, source))
    engine.close()
    return rows


def chunk_by_chunk(rows: Sequence[Array], copies: Sequence[ChunkCopy]) -> dict[str, Callable[[], None]]:
    """numpy copies each layer of each chunk with one call, as lmkv's copier does: the bound of `copies alone`.

    `rows`: of each layer, [block, word].
    """
    runs = [np.array(copy.runs[0].blocks, np.intp) for copy in copies]
    chunks = mapped((len(runs), len(rows), len(runs[0]), rows[0].shape[1]))

    def take() -> None:
        for layer, row in enumerate(rows):
            for chunk, blocks in zip(chunks, runs, strict=True):
                row.take(blocks, 0, chunk[layer], "clip")

    def put() -> None:
        for layer, row in enumerate(rows):
            for chunk, blocks in zip(chunks, runs, strict=True):
                row[blocks] = chunk[layer]

    return {"chunk by chunk: store": take, "chunk by chunk: retrieve": put}


def beside(times: Mapping[str, Sequence[float]], case: str, title: str, nbytes: int, of: str = CONTIGUOUS) -> Row:
    speed = nbytes / statistics.median(times[case]) / 1e9
    return Row(title, speed, "GB/s of CPU", of, 1 / median_ratio(times, case, of))


def by_layers(pipeline: AbstractContextManager[Any], step: str, layers: int) -> None:
    """Call the pipeline layer by layer as a model does, without the model."""
    with pipeline as opened:
        for layer in range(layers):
            getattr(opened, step)(layer)


class _TimedCopier:
    """Copies, and notes the CPU seconds of each call."""

    def __init__(self, copier: Copier) -> None:
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


class _NoCopies:
    """Stands for the copier and copies nothing, so that only the control path is left."""

    def store(self, copies: Any) -> Any:
        return DONE

    load = store

    def close(self) -> None:
        return


def bare_control(tokens: list[int], table: dict[bytes, int]) -> Callable[[], None]:
    """The least that a control path does: it hashes the keys, puts each into a dict, and takes it out."""

    def run() -> None:
        keys = bare_chain(tokens, CHUNK)
        for key in keys:
            table[key] = 0
        for key in keys:
            del table[key]

    return run


def control(
    engine: Engine, tokens: list[int], blocks: list[int], rounds: int, evict: Callable[[], None] | None = None
) -> list[Row]:
    """`evict`: takes the processor's caches from the control path before each call, as copies do."""
    engine._copier = _NoCopies()
    chunks = len(tokens) // CHUNK
    of = "hashing, and an entry of a dict in and out"
    cases = {
        "store": lambda: engine.store(tokens, blocks),
        "retrieve": lambda: engine.retrieve(tokens, blocks),
        of: bare_control(tokens, {}),
    }

    def before(name: str) -> None:
        if name == "store":
            engine.clear()
        if evict is not None:
            evict()

    times = interleaved(cases, (1 if evict else 10) * rounds, before=before)
    rows = []
    for name, goal in CONTROL.items():
        micros, ratio = statistics.median(times[name]) / chunks * 1e6, median_ratio(times, name, of)
        wanted = goal if chunks == CHUNKS and evict is None else None
        met = None if wanted is None else ratio <= wanted
        title = f"control path a chunk, {name}, {chunks} chunk{'s'[: chunks > 1]}{', caches cold' if evict else ''}"
        rows.append(Row(title, micros, "us", of, ratio, wanted, met))
    return rows


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has torch and lmcache")
    options = parser.parse_args()
    rows = []
    for label, (layers, chunks) in SHAPES.items():
        rows += measure(label, layers, chunks, 7 if options.quick else 31, options.lmcache)
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
