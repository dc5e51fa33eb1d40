"""`Engine.store` and `Engine.retrieve` beside a contiguous copy of the same bytes.

    python benchmarks/copy.py [--lmcache PYTHON] [--quick] [--json]

CPU seconds of store and retrieve of 8 chunks a request, paged tensors of 16-token blocks, against numpy
copying as many bytes between two plain arrays; the control path alone is the same with the copies left out,
also for requests of 1 and 2 chunks. With --lmcache, the interpreter of an environment that has torch and
lmcache, LMCache does the same in every round (see _lmcache.py).
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
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks._lmcache_server import ENVIRONMENT
from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv import Config, Engine
from lmkv.memory.copier import DONE

BLOCK, CHUNK, CHUNKS = 16, 256, 8
SHAPES = {"32 MiB chunks": (32, 0.92, 0.90), "4 MiB chunks": (4, 0.90, 0.87)}
CONTROL = {"store": 15.0, "retrieve": 8.0}
PEER_TARGET = 3.0
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


def engine_of(layers: int) -> tuple[Engine, list[int]]:
    """An engine over bf16 tensors of 8 KV heads of 128, and scattered blocks for one request."""
    blocks = CHUNKS * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(torch.bfloat16) for _ in range(layers)]
    config = Config.load(max_local_cpu_size=HOST_GB, chunk_size=CHUNK, env={})
    engine = Engine.open(tensors, block_size=BLOCK, model="copy", config=config)
    return engine, random.Random(0).sample(range(2 * blocks), blocks)


def measure(label: str, layers: int, rounds: int, lmcache: str | None) -> list[Row]:
    engine, blocks = engine_of(layers)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * CHUNKS)
    nbytes = CHUNKS * layers * 2**20
    source, target = np.ones(nbytes // 8, np.int64), np.zeros(nbytes // 8, np.int64)

    with ExitStack() as stack:
        peer = stack.enter_context(closing(LMCache(lmcache, layers, blocks, tokens))) if lmcache else None

        def before(name: str) -> None:
            if name.startswith("store"):
                engine.clear()
            elif name == "peer store" and peer is not None:
                peer.do("clear")

        cases: dict[str, Callable[[], Any]] = {
            "limit": lambda: np.copyto(target, source),
            "store": lambda: engine.store(tokens, blocks),
            "retrieve": lambda: engine.retrieve(tokens, blocks),
            "store by layers": lambda: by_layers(engine.store_layers(tokens, blocks), "save", layers),
            "retrieve by layers": lambda: by_layers(engine.retrieve_layers(tokens, blocks), "wait", layers),
        }
        if peer is not None:
            cases |= {f"peer {name}": partial(peer.do, name) for name in ("store", "retrieve")}
        for _ in range(3):  # every slot that will be used has been touched
            engine.clear()
            engine.store(tokens, blocks)
        times = interleaved(cases, rounds, before=before)
        if peer is not None:
            # Its own seconds, not those of waiting for it; the first call was the warm-up.
            times |= {f"peer {name}": found[1:] for name, found in peer.seconds.items() if name != "clear"}
    _, store_target, retrieve_target = SHAPES[label]
    rows = []
    for name, goal in (("store", store_target), ("retrieve", retrieve_target)):
        ratio = 1 / median_ratio(times, name, "limit")
        speed = nbytes / sorted(times[name])[rounds // 2] / 1e9
        rows.append(Row(f"{name}, {label}", speed, "GB/s of CPU", "contiguous copy", ratio, goal, ratio >= goal))
        if peer is not None:
            theirs = f"peer {name}"
            speed = nbytes / statistics.median(times[theirs]) / 1e9
            ratio = 1 / median_ratio(times, theirs, "limit")
            rows.append(Row(f"{name}, {label}, LMCache", speed, "GB/s of CPU", "contiguous copy", ratio))
            gain = median_ratio(times, theirs, name)
            title = f"{name}, {label}, lmkv beside LMCache"
            rows.append(Row(title, gain, "x", target=PEER_TARGET, met=gain >= PEER_TARGET))
    for name in ("store by layers", "retrieve by layers"):
        speed = nbytes / statistics.median(times[name]) / 1e9
        ratio = 1 / median_ratio(times, name, "limit")
        rows.append(Row(f"{name}, {label}", speed, "GB/s of CPU", "contiguous copy", ratio))
    if label == "4 MiB chunks":
        for chunks in (1, 2, CHUNKS):
            rows += control(engine, tokens[: chunks * CHUNK], blocks[: chunks * CHUNK // BLOCK], rounds)
    engine.close()
    return rows


def by_layers(pipeline: AbstractContextManager[Any], step: str, layers: int) -> None:
    """Call the pipeline layer by layer as a model does, without the model."""
    with pipeline as opened:
        for layer in range(layers):
            getattr(opened, step)(layer)


class _NoCopies:
    """Stands for the copier and copies nothing, so that only the control path is left."""

    def store(self, copies: Any) -> Any:
        return DONE

    load = store

    def close(self) -> None:
        return


def control(engine: Engine, tokens: list[int], blocks: list[int], rounds: int) -> list[Row]:
    engine._copier = _NoCopies()
    chunks = len(tokens) // CHUNK
    cases = {"store": lambda: engine.store(tokens, blocks), "retrieve": lambda: engine.retrieve(tokens, blocks)}
    times = interleaved(cases, 10 * rounds, before=lambda name: engine.clear() and None if name == "store" else None)
    rows = []
    for name, goal in CONTROL.items():
        micros = statistics.median(times[name]) / chunks * 1e6
        wanted = goal if chunks == CHUNKS else None
        met = None if wanted is None else micros <= wanted
        title = f"control path a chunk, {name}, {chunks} chunk{'s'[: chunks > 1]}"
        rows.append(Row(title, micros, "us", None, None, wanted, met))
    return rows


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has torch and lmcache")
    options = parser.parse_args()
    rows = []
    for label, (layers, _, _) in SHAPES.items():
        rows += measure(label, layers, 7 if options.quick else 31, options.lmcache)
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
