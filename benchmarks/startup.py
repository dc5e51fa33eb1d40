"""The cost of a start: import, and time to the first store with a 4 GiB tier.

    python benchmarks/startup.py [--quick] [--json]

Each sample is a fresh process; torch and numpy are imported before the clock starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import statistics
import subprocess

ROOT = Path(__file__).resolve().parents[1]

from benchmarks._timing import Row, arguments_of, finish

IMPORT = """
import gc, json, sys, time
import numpy, torch
gc.freeze()  # a collection over all of torch's objects, which may or may not come now, costs more than lmkv
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
modules, memory, cpu = len(sys.modules), rss(), time.process_time()
import lmkv
print(json.dumps([time.process_time() - cpu, (rss() - memory) / 2**20, len(sys.modules) - modules]))
"""
READY = """
import json, time
import torch
from lmkv import Config, Engine
tensors = [torch.zeros((64, 2, 16, 64)) for _ in range(4)]
config = Config.load(max_local_cpu_size=4.0, chunk_size=256, env={})
start = time.perf_counter()
engine = Engine.open(tensors, block_size=16, model="startup", config=config)
ready = time.perf_counter() - start
stored = engine.store(list(range(256)), list(range(16)))
first = time.perf_counter() - start
assert stored == 256
print(json.dumps([ready, first]))
engine.close()
"""


def sample(script: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    values: list[float] = json.loads(done.stdout.splitlines()[-1])
    return values


def main() -> int:
    parser = arguments_of(__doc__, quick="three samples instead of nine")
    options = parser.parse_args()
    count = 3 if options.quick else 9
    cpu, memory, modules = (
        statistics.median(column) for column in zip(*(sample(IMPORT) for _ in range(count)), strict=True)
    )
    ready, first = (statistics.median(column) for column in zip(*(sample(READY) for _ in range(count)), strict=True))
    limits = [
        ("import after torch and numpy, CPU", cpu, "s", 0.08),
        ("import after torch and numpy, memory", memory, "MiB", 12.0),
        ("import after torch and numpy, modules", modules, "", 120.0),
        ("ready to serve with a 4 GiB tier", ready, "s", 0.05),
        ("first chunk stored after the start", first, "s", None),
    ]
    rows = [
        Row(name, value, unit, None, None, target, None if target is None else value <= target)
        for name, value, unit, target in limits
    ]
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
