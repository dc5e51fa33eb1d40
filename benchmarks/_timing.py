"""Shared by the benchmarks: common options, turns of engines, and the timing and reports of `lmkv bench`."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Collection, Iterator, Sequence

from lmkv.cli.measure.timing import Row, finish, interleaved, machine, median_ratio

__all__ = ["Row", "arguments_of", "finish", "interleaved", "interval", "machine", "median_ratio", "percentile", "turns"]

PAUSE = 1.5
"""Seconds: vLLM's processes go on polling for a second after a request, at the cost of the next engine."""


def arguments_of(page: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, for the program that `page` describes. `quick`: what that means."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser


def turns(engines: Collection[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Number of the round and engine to ask: all engines in each round, in shuffled order."""
    for number in range(rounds):
        for name in random.sample(list(engines), len(engines)):
            time.sleep(PAUSE)
            yield number, name


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval of the median with 95 % confidence: order statistics, whose ranks are binomial."""
    values, count = sorted(values), len(values)
    rank = max(0, int((count - 1.96 * math.sqrt(count)) / 2))
    return values[rank], values[count - 1 - rank]
