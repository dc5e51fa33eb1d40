"""Storing and retrieving through the engine beside a contiguous copy of the same bytes.

    python benchmarks/copy.py [--quick] [--json]

CPU seconds of store and retrieve of 8 chunks a request, paged tensors of 16-token blocks, against numpy
copying as many bytes between two plain arrays; the control path alone is the same with the copies left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
from typing import Any

import numpy as np
import torch

from benchmarks._rounds import Row, finish, interleaved, median_ratio
from lmkv import Config, Engine
from lmkv.copier import DONE

BLOCK, CHUNK, CHUNKS = 16, 256, 8
SHAPES = {"32 MiB chunks": (32, 0.92, 0.90), "4 MiB chunks": (4, 0.90, 0.87)}
CONTROL = {"store": 15.0, "retrieve": 8.0}


def engine_of(layers: int) -> tuple[Engine, list[int]]:
    """An engine over bf16 tensors of 8 KV heads of 128, and scattered blocks for one request."""
    blocks = CHUNKS * CHUNK // BLOCK
    tensors = [torch.randn((2 * blocks, 8, BLOCK, 256)).to(torch.bfloat16) for _ in range(layers)]
    config = Config.load(max_local_cpu_size=2.5, chunk_size=CHUNK, env={})
    engine = Engine.open(tensors, block_size=BLOCK, model="copy", config=config)
    return engine, random.Random(0).sample(range(2 * blocks), blocks)


def measure(label: str, layers: int, rounds: int) -> list[Row]:
    engine, blocks = engine_of(layers)
    tokens = random.Random(1).choices(range(50_000), k=CHUNK * CHUNKS)
    nbytes = CHUNKS * layers * 2**20
    source, target = np.ones(nbytes // 8, np.int64), np.zeros(nbytes // 8, np.int64)

    def before(name: str) -> None:
        if name == "store":
            engine.clear()

    cases = {
        "limit": lambda: np.copyto(target, source),
        "store": lambda: engine.store(tokens, blocks),
        "retrieve": lambda: engine.retrieve(tokens, blocks),
    }
    for _ in range(3):  # every slot that will be used has been touched
        engine.clear()
        engine.store(tokens, blocks)
    times = interleaved(cases, rounds, before=before)
    _, store_target, retrieve_target = SHAPES[label]
    rows = []
    for name, goal in (("store", store_target), ("retrieve", retrieve_target)):
        ratio = 1 / median_ratio(times, name, "limit")
        speed = nbytes / sorted(times[name])[rounds // 2] / 1e9
        rows.append(
            Row(f"{name}, {label}", speed, "GB/s of CPU", "contiguous copy", ratio, goal, ratio >= goal)
        )
    if label == "4 MiB chunks":
        rows += control(engine, tokens, blocks, rounds)
    engine.close()
    return rows


class _NoCopies:
    """In place of the copier: what is left is the control path."""

    def store(self, copies: Any) -> Any:
        return DONE

    load = store

    def close(self) -> None:
        return


def control(engine: Engine, tokens: list[int], blocks: list[int], rounds: int) -> list[Row]:
    engine._copier = _NoCopies()
    cases = {
        "store": lambda: engine.store(tokens, blocks),
        "retrieve": lambda: engine.retrieve(tokens, blocks),
    }
    times = interleaved(
        cases, 10 * rounds, before=lambda name: engine.clear() and None if name == "store" else None
    )
    rows = []
    for name, goal in CONTROL.items():
        micros = sorted(times[name])[len(times[name]) // 2] / CHUNKS * 1e6
        rows.append(Row(f"control path a chunk, {name}", micros, "us", None, None, goal, micros <= goal))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for label, (layers, _, _) in SHAPES.items():
        rows += measure(label, layers, 7 if options.quick else 31)
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
