"""Time to first token of a repeated prompt: vLLM's own prefix cache beside lmkv's RAM and disk tiers.

    python benchmarks/ttft.py [--tokens 8000] [--rounds 3] [--quick] [--json]

Each arm of each round is an engine in a process of its own, in shuffled order: one cold prompt, then the same
again and again. With --json the last line is the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
from typing import Any

from benchmarks._engines import answer, arms, in_child, median, scratch, settle, start
from benchmarks._rounds import Row, finish

RAM_TARGET = 1.10
REPEATS = 7


def run_arm(folder: Path, name: str, tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams

    llm = start(folder, arms(folder)[name], tokens + 16)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(seed: int) -> tuple[float, int]:
        ids = random.Random(seed).choices(range(1000), k=tokens)
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        settle(llm)
        return output.metrics.first_token_latency, output.num_cached_tokens or 0

    ask(1)  # what only the first long prompt pays: buffers, kernels
    cold, _ = ask(2)
    warm = [ask(2) for _ in range(REPEATS)]
    return {"cold": cold, "warm": median(seconds for seconds, _ in warm), "hit": min(hit for _, hit in warm)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        answer(run_arm(options.folder, options.arm, options.tokens))
    names = [name for name in arms(Path()) if name != "nothing"]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with scratch(prefix="lmkv-ttft-") as folder:
        for number in range(1 if options.quick else options.rounds):
            for name in random.sample(names, len(names)):
                print(f"round {number + 1}: {name}", flush=True)
                result = in_child(__file__, Path(folder), name, "--tokens", str(options.tokens))
                results[name].append(result)
                print(f"    cold {result['cold']:.3f} s, warm {result['warm']:.4f} s, hit {result['hit']}")
    return finish(rows(results), options.json)


def rows(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    own = "vllm prefix cache"
    found = []
    for name, rounds in results.items():
        warm = median(one["warm"] for one in rounds)
        ratio = median(one["warm"] / other["warm"] for one, other in zip(rounds, results[own], strict=True))
        target = RAM_TARGET if name == "lmkv ram" else None
        met = None if target is None else ratio <= target
        found.append(Row(f"warm TTFT, {name}", warm, "s", own, ratio, target, met))
        cold = median(one["cold"] for one in rounds)
        found.append(Row(f"speed-up over cold, {name}", cold / warm, "x"))
    return found


if __name__ == "__main__":
    sys.exit(main())
