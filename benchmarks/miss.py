"""The cost of a connector where nothing ever repeats: throughput and inter-token latency, on and off.

    python benchmarks/miss.py [--rounds 40] [--dtype float32] [--cheap] [--quick] [--json]

Two engines run at once, with and without the connector, each in a process of its own, and get the same new
prompts in turn, in shuffled order. The ratio is the median over the rounds, of CPU seconds and of wall time,
with a 95 % confidence interval that assumes nothing about their distribution.

That interval does not cover what is constant within a process, such as the addresses of its memory, and two
engines without any connector differ by more than a connector costs. So the time within the connector's
methods is measured, too: its share of the same engine's wall time is the cost of a miss. A quarter to a half of it are
copies of what is stored, which are measured alone, too. So is the time that metrics take on vLLM's thread: to count, to
aggregate, and to hand over to Prometheus, which is in the same process here. Without AVX-512 vLLM computes bfloat16
so slowly that float32 says more. `--cheap` has the model of multiturn.py in float32, which computes a token in a third
of the time: the cost that its `--new` and `--pairs` look for in throughput, measured within the engine.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import functools
import inspect
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from attrs import evolve

from benchmarks._timing import Row, arguments_of, finish, interval, turns
from lmkv.cli.measure.conversations import MODEL
from lmkv.cli.measure.pages import wait_until_populated
from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.vllm_engines import ONE_PROCESS, engine_specs, leave, open_engine

TARGET, METRICS_TARGET = 0.01, 0.002
OFF, ON = "nothing", "lmkv ram"
REQUESTS, PROMPT, ANSWER = 4, 1500, 24
HOST_GIB = 0.25
"""Small, so that stores evict, as in a server that has run for a while."""
WARM = 13
"""Rounds that are not counted: after them the tier is full."""


class Clock:
    """Seconds of the thread that made it within the methods of classes; one that another one calls counts once."""

    def __init__(self, *owners: type) -> None:
        self.seconds = 0.0
        self._within = False
        self._thread = threading.get_ident()
        for owner in owners:
            for name, method in list(vars(owner).items()):
                if inspect.isfunction(method):
                    setattr(owner, name, self._clocked(method))

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._within or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._within, started = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._within = False

        return call


def run_engine(folder: Path, name: str, dtype: str, *, cheap: bool) -> None:
    """In the child: answer each seed with the times of its prompts."""
    questions = Questions()  # before vLLM prints anything
    from vllm import SamplingParams

    from lmkv.memory.cpu_copier import CPUCopier
    from lmkv.vllm.connector import LMKVConnector
    from lmkv.vllm.observe.metrics import Samples
    from lmkv.vllm.observe.telemetry import Telemetry
    from lmkv.vllm.prometheus import LMKVPromMetrics, LMKVStats

    clocks = {
        "connector": Clock(LMKVConnector),
        "copies": Clock(CPUCopier),
        "metrics": Clock(Samples, Telemetry, LMKVStats, LMKVPromMetrics),
    }
    specs = engine_specs(folder, PROMPT + ANSWER, host_gib=HOST_GIB, requests=REQUESTS, dtype=dtype)
    llm = open_engine(evolve(specs[name], model=MODEL) if cheap else specs[name], folder)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)

    def measure(seed: int) -> dict[str, float]:
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": rng.choices(range(1000), k=PROMPT)} for _ in range(REQUESTS)]
        for clock in clocks.values():
            clock.seconds = 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        assert not any(output.num_cached_tokens for output in outputs), "something was reused"
        metrics = [output.metrics for output in outputs]
        gaps = [(each.last_token_ts - each.first_token_ts) / (ANSWER - 1) for each in metrics]
        within = {part: clock.seconds for part, clock in clocks.items()}
        return {"cpu": cpu, "wall": wall, "itl": statistics.median(gaps), **within}

    wait_until_populated()
    for seed in questions:
        questions.answer(measure(seed))
    leave(llm)


def main() -> int:
    parser = arguments_of(__doc__, quick="eight rounds")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cheap", action="store_true", help="the model of multiturn.py")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cheap and options.dtype != parser.get_default("dtype"):
        parser.error("the model of --cheap computes in float32")
    if options.engine:
        run_engine(options.folder, options.engine, options.dtype, cheap=options.cheap)
    found: dict[str, list[dict[str, float]]] = {OFF: [], ON: []}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-miss-")))
        engines: dict[str, ChildProcess] = {}
        for name in found:
            folder = root / name.replace(" ", "-")
            command = [sys.executable, __file__, "--engine", name, "--folder", str(folder), "--dtype", options.dtype]
            command += ["--cheap"] if options.cheap else []
            engines[name] = stack.enter_context(closing(ChildProcess(command, folder, ONE_PROCESS)))
            engines[name].ask(2**32)
        for number, name in turns(engines, WARM + (8 if options.quick else options.rounds)):
            found[name].append(engines[name].ask(number))
        for engine in engines.values():
            engine.leave()
    return finish(rows(found[OFF][WARM:], found[ON][WARM:]), options.json)


def rows(off: list[dict[str, float]], on: list[dict[str, float]]) -> list[Row]:
    made = []
    for what in ("cpu", "wall", "itl"):
        ratios = [with_it[what] / without[what] for without, with_it in zip(off, on, strict=True)]
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        name = f"{what} on prompts that never repeat, 95 % within {low:.4f} to {high:.4f}"
        value = statistics.median(one[what] for one in on)
        made.append(Row(name, value, "s", "no connector", ratio))
    for part, target in (("connector", TARGET), ("copies", None), ("metrics", METRICS_TARGET)):
        shares = [one[part] / one["wall"] for one in on]
        share, (low, high) = statistics.median(shares), interval(shares)
        name = f"within the {part}, 95 % within {low:.5f} to {high:.5f} of the wall time"
        seconds = statistics.median(one[part] for one in on)
        made.append(Row(name, seconds, "s", "wall", share, target, None if target is None else share <= target))
    return made


if __name__ == "__main__":
    sys.exit(main())
