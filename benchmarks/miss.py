"""What a connector costs where nothing ever repeats: throughput and inter-token latency, on and off.

    python benchmarks/miss.py [--pairs 6] [--quick] [--json]

Pairs of engines, with and without the connector, each in a process of its own, in alternating order. The
ratio is given with a 95 % confidence interval over the pairs, of CPU seconds and of wall time.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import random
import statistics
import tempfile
import threading
import time
from typing import Any

from benchmarks._rounds import Row, arguments_of, finish
from lmkv.cli.arms import answer, arms, in_child, start

TARGET = 1.01
REQUESTS, PROMPT, ANSWER = 12, 1500, 48
HOST_GB = 0.25
"""Small, so that stores evict, as in a server that has run for a while."""
STUDENT = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 12: 2.20}


def run_arm(folder: Path, name: str) -> tuple[dict[str, Any], Any]:
    from vllm import SamplingParams

    llm = start(folder, arms(folder, HOST_GB)[name], PROMPT + ANSWER, requests=REQUESTS)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)

    def batch(seed: int) -> list[Any]:
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": rng.choices(range(1000), k=PROMPT)} for _ in range(REQUESTS)]
        outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        return outputs

    batch(0)
    for thread in threading.enumerate():
        # Touching memory for the first time is a matter of the start.
        if thread.name == "lmkv-populate":
            thread.join()
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = batch(1) + batch(2)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    gaps = [
        (output.metrics.last_token_ts - output.metrics.first_token_ts) / (ANSWER - 1) for output in outputs
    ]
    assert not any(output.num_cached_tokens for output in outputs), "something was reused"
    return {"cpu": cpu, "wall": wall, "itl": statistics.median(gaps)}, llm


def interval(ratios: list[float]) -> tuple[float, float]:
    """Mean ratio and half the width of its 95 % interval, by Student's t over logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = STUDENT.get(len(logs), 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean + half) - math.exp(mean)


def main() -> int:
    parser = arguments_of(__doc__, quick="two pairs")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        answer(*run_arm(options.folder, options.arm))
    found: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="lmkv-miss-") as folder:
        for number in range(2 if options.quick else options.pairs):
            names = ["nothing", "lmkv ram"] if number % 2 else ["lmkv ram", "nothing"]
            found.append({name: in_child([__file__], Path(folder), name) for name in names})
            print(f"pair {number + 1}: {found[-1]}", flush=True)
    return finish(rows(found), options.json)


def rows(found: list[dict[str, dict[str, Any]]]) -> list[Row]:
    made = []
    for what, unit in (("cpu", "s"), ("wall", "s"), ("itl", "s")):
        ratio, half = interval([pair["lmkv ram"][what] / pair["nothing"][what] for pair in found])
        value = statistics.median(pair["lmkv ram"][what] for pair in found)
        target = TARGET if what == "cpu" else None
        name = f"{what} on prompts that never repeat, ratio +- {half:.4f}"
        made.append(
            Row(name, value, unit, "no connector", ratio, target, None if target is None else ratio <= target)
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
