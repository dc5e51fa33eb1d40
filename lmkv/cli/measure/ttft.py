"""Time to first token of a prompt that comes again: cold, from vLLM's own prefix cache, from lmkv's tiers.

`python -m lmkv.cli.measure.ttft --arm NAME ...` is one arm, in its own process; `measure_ttft` runs them all.
With `--stay` it asks once more for each line on its standard input.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from lmkv.cli.measure.engines import MARK, Arm, answer, arms, in_child, settle, start
from lmkv.cli.measure.report import Panel

SCRIPT = ("-m", "lmkv.cli.measure.ttft")
REPEATS = 15
PAUSE = 0.25
"""Seconds between them: what disturbs one need not disturb the next."""
OWN = "vllm prefix cache"
NAMES = (OWN, "lmkv ram", "lmkv disk")
COLD = "computed"
# What vLLM does by default, an engine core in a process of its own, or everything in one process.
SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@frozen
class Timed:
    """Seconds to the first token, cold and (best of `REPEATS`) repeated; the smallest hit in tokens.

    The best: engines that run one after the other do not share what disturbs them, which only ever adds.
    """

    cold: float
    warm: float
    hit: int


Ask = Callable[[int], tuple[float, int]]


def open_arm(folder: Path, arm: Arm, tokens: int, model: str | None) -> tuple[Ask, Any]:
    """What sends the prompt of a seed and returns seconds to the first token, and the hit; and the engine."""
    from vllm import SamplingParams

    llm = start(folder, arm, tokens + 16, model=model)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(seed: int) -> tuple[float, int]:
        ids = random.Random(seed).choices(range(1000), k=tokens)
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        settle(folder)
        return output.metrics.first_token_latency, output.num_cached_tokens or 0

    return ask, llm


def run_arm(ask: Ask) -> Timed:
    ask(1)  # what only the first long prompt pays: buffers, kernels
    cold, _ = ask(2)
    warm = []
    for _ in range(REPEATS):
        time.sleep(PAUSE)
        warm.append(ask(2))
    return Timed(cold, min(seconds for seconds, _ in warm), min(hit for _, hit in warm))


def run_in_child(
    folder: Path,
    name: str,
    tokens: int,
    *,
    model: str | None = None,
    host_gb: float = 4.0,
    env: Mapping[str, str] = SEVERAL,
) -> Timed:
    own = () if model is None else ("--model", model)
    args = ("--tokens", str(tokens), "--host-gb", str(host_gb), *own)
    return Timed(**in_child(SCRIPT, folder, name, *args, env=env))


def measure_ttft(
    tokens: int, model: str | None, parent: Path, host_gb: float, say: Callable[[str], None]
) -> Panel:
    """One engine after the other, as vLLM runs by default."""
    found: dict[str, Timed] = {}
    for name in NAMES:
        say(f"vLLM: {name}, a prompt of {tokens:,} tokens")
        with tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=parent) as folder:
            found[name] = run_in_child(Path(folder), name, tokens, model=model, host_gb=host_gb)
    missed = [name for name, timed in found.items() if timed.hit < tokens // 2]
    bars = {COLD: found[OWN].cold, **{name: timed.warm for name, timed in found.items()}}
    note = f"no hits: {', '.join(missed)}" if missed else f"best of {REPEATS} repetitions"
    return Panel(f"First token, {tokens:,} tokens", "s", bars, OWN, log=True, note=note)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--model")
    parser.add_argument("--host-gb", type=float, default=4.0)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--other", type=json.loads, help="the arm's own fields, where it is none of `arms`")
    options = parser.parse_args()
    arm = Arm(**options.other) if options.other else arms(options.folder, options.host_gb)[options.arm]
    ask, llm = open_arm(options.folder, arm, options.tokens, options.model)
    timed = run_arm(ask)
    if options.stay:
        print(MARK + json.dumps(asdict(timed)), flush=True)
        for _ in sys.stdin:
            seconds, hit = ask(2)
            print(MARK + json.dumps({"warm": seconds, "hit": hit}), flush=True)
    answer(asdict(timed), llm)


if __name__ == "__main__":
    main()
