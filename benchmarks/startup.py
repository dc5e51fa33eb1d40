"""The cost of a start: import, and time to the first store with a 4 GiB tier.

    python benchmarks/startup.py [--quick] [--json]

Each sample is a fresh process; torch and numpy are imported before the clock starts. Times are beside those of numpy's
import in the same process.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import statistics
import subprocess
from collections.abc import Sequence

from benchmarks._timing import Row, arguments_of, finish

ROOT = Path(__file__).resolve().parents[1]
IMPORT_TARGET, READY_TARGET = 1.0, 0.5
IMPORT = """
import gc, json, sys, time
cpu = time.process_time()
import numpy
bare = time.process_time() - cpu
import torch
gc.freeze()  # a collection over all of torch's objects, which may or may not come now, costs more than lmkv
def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
modules, memory, cpu = len(sys.modules), rss(), time.process_time()
from lmkv import Config, Engine
print(json.dumps([bare, time.process_time() - cpu, (rss() - memory) / 2**20, len(sys.modules) - modules]))
"""
READY = """
import json, time
start = time.perf_counter()
import numpy
bare = time.perf_counter() - start
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
print(json.dumps([bare, ready, first]))
engine.close()
"""


def sample(script: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    values: list[float] = json.loads(done.stdout.splitlines()[-1])
    return values


def beside_numpy(name: str, samples: Sequence[Sequence[float]], target: float | None) -> Row:
    """`samples`: seconds of numpy's import, and of what is measured."""
    ratio = statistics.median(seconds / bare for bare, seconds in samples)
    met = None if target is None else ratio <= target
    return Row(name, statistics.median(seconds for _, seconds in samples), "s", "numpy's import", ratio, target, met)


def main() -> int:
    parser = arguments_of(__doc__, quick="three samples instead of nine")
    options = parser.parse_args()
    count = 3 if options.quick else 9
    imports = [sample(IMPORT) for _ in range(count)]
    starts = [sample(READY) for _ in range(count)]
    memory, modules = (statistics.median(column) for column in list(zip(*imports, strict=True))[2:])
    rows = [
        beside_numpy("import after torch and numpy, CPU", [found[:2] for found in imports], IMPORT_TARGET),
        Row("import after torch and numpy, memory", memory, "MiB", target=12.0, met=memory <= 12.0),
        Row("import after torch and numpy, modules", modules, "", target=120.0, met=modules <= 120.0),
        beside_numpy("ready to serve with a 4 GiB tier", [found[:2] for found in starts], READY_TARGET),
        beside_numpy("first chunk stored after the start", [[found[0], found[2]] for found in starts], None),
    ]
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
