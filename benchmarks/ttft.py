"""Time to first token of a repeated prompt: vLLM's own prefix cache beside lmkv's RAM and disk tiers.

    python benchmarks/ttft.py [--tokens 8000] [--rounds 3] [--one-process] [--quick] [--json]

Each arm of each round is an engine in processes of its own, in shuffled order: one cold prompt, then the same
again and again. The engine core runs in a process of its own, as vLLM does by default, or with --one-process
in that of the API. With --json the last line is the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
import statistics
import tempfile

from benchmarks._rounds import Row, finish
from lmkv.cli.ttft import NAMES, ONE, OWN, SEVERAL, Timed, run_in_child

RAM_TARGET = 1.10


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, list[Timed]] = {name: [] for name in NAMES}
    for number in range(1 if options.quick else options.rounds):
        for name in random.sample(NAMES, len(NAMES)):
            print(f"round {number + 1}: {name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="lmkv-ttft-") as folder:
                env = ONE if options.one_process else SEVERAL
                timed = run_in_child(Path(folder), name, options.tokens, env=env)
            results[name].append(timed)
            print(f"    cold {timed.cold:.3f} s, warm {timed.warm:.4f} s, hit {timed.hit}", flush=True)
    return finish(rows(results, "one process" if options.one_process else "as by default"), options.json)


def rows(results: dict[str, list[Timed]], how: str) -> list[Row]:
    median = statistics.median
    found = []
    for name, rounds in results.items():
        warm = median(one.warm for one in rounds)
        ratio = median(one.warm / other.warm for one, other in zip(rounds, results[OWN], strict=True))
        target = RAM_TARGET if name == "lmkv ram" else None
        met = None if target is None else ratio <= target
        found.append(Row(f"warm TTFT, {name}, {how}", warm, "s", OWN, ratio, target, met))
        cold = median(one.cold for one in rounds)
        found.append(Row(f"speed-up over cold, {name}, {how}", cold / warm, "x"))
    return found


if __name__ == "__main__":
    sys.exit(main())
