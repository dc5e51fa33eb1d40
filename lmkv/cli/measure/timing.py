"""Timing cases side by side: each round runs all of them, and ratios are taken within a round."""

from __future__ import annotations

import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

PAUSE = 1.5
"""Seconds: vLLM's processes go on polling for a second after a request, at the cost of the next engine."""
WRITES_ENDED = 0.5
"""Seconds without a new chunk after which a tier counts as written."""
SURE = 6
"""Rounds that an interval of 95 % takes at least."""


@frozen
class Row:
    """One result: `value` in `unit`. `ratio`: to the reference `of`. `met`: whether `target` was reached."""

    name: str
    value: float
    unit: str
    of: str | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None


def interleaved(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    before: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each case in each round; a round runs every case once, in shuffled order.

    CPU time by default, so that other programs do not count. `before` is not timed.
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


def median_ratio(times: Mapping[str, Sequence[float]], case: str, of: str) -> float:
    """Median over the rounds of the time of `case` divided by that of `of` in the same round."""
    return statistics.median(one / other for one, other in zip(times[case], times[of], strict=True))


def turns(engines: Collection[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Number of the round and engine to ask: all engines in each round, in shuffled order."""
    for number in range(rounds):
        for name in random.sample(list(engines), len(engines)):
            time.sleep(PAUSE)
            yield number, name


def wait_until_settled(
    count: Callable[[], int],
    timeout: float = 60.0,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no chunk has been written for a while: writes in the background are not measured."""
    begun = since = clock()
    found = count()
    while clock() < min(begun + timeout, since + WRITES_ENDED):
        sleep(0.05)
        if (now := count()) != found:
            found, since = now, clock()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Interval that has the median with 95 % confidence at least, by order statistics; below six values their range."""
    values, count = sorted(values), len(values)
    # The chance that so many values or fewer are below the median, which is that of as many coins.
    rank, beyond = 0, 1 + count
    while beyond <= 0.025 * 2**count:
        rank += 1
        beyond += math.comb(count, rank + 1)
    return values[rank], values[count - 1 - rank]


def within(values: Sequence[float], digits: int = 2) -> str:
    """The interval, with so many digits behind the point; empty for less than two values."""
    if len(values) < 2:
        return ""
    low, high = interval(values)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def machine() -> str:
    """Processor, cores and system, in words."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        cores = sum(line.startswith("processor") for line in lines)
    except (OSError, StopIteration):
        cores = 0
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {cores} cores, {system}, Python {platform.python_version()}"


def finish(rows: Sequence[Row], as_json: bool) -> int:
    """Print the rows, with `as_json` also as one JSON object on the last line. Returns exit code 0."""
    print(machine())
    for row in rows:
        of = f"   {row.ratio:.3f} of {row.of}" if row.ratio is not None else ""
        goal = "" if row.target is None else f"   target {row.target:g}: {'met' if row.met else 'MISSED'}"
        print(f"{row.name:<55} {row.value:>12.5g} {row.unit}{of}{goal}")
    if as_json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
    return 0
