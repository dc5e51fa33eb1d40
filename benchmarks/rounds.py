"""The code that the benchmarks share: options, turns of engines, and rows that are written with the machine and the
versions.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from attrs import asdict

from lmkv.cli.report import LESS_IS_BETTER, Row, compared, interleaved, interval, measured_on, reached, speeds

__all__ = ["Row", "compared", "interleaved", "interval", "reached", "speeds"]

ROOT = Path(__file__).resolve().parents[1]
PAUSE = 1.5
"""Seconds between two engines. vLLM's processes poll for a second after a request, which would slow the next engine."""


def arguments(page: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for the program that `page` describes. `quick`: the meaning of the option `--quick`."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="one JSON object in the last line")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the same object into a file")
    return parser


def finish(rows: Iterable[Row], options: argparse.Namespace) -> int:
    """Print each row as soon as it is measured. At the end, write all rows with the command, the date, the machine and
    the versions.

    After an error in a late row, the earlier rows are still written. Returns exit code 0.
    """
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
            print(line(row), flush=True)
    finally:
        whole = json.dumps({**where(), "rows": [asdict(row) for row in found]})
        if options.write:
            options.write.write_text(whole + "\n")
        if options.json:
            print(whole)
    return 0


def where() -> dict[str, object]:
    """Return the command without the file that it writes, the commit, and the result of `measured_on`."""
    spec, given = sys.modules["__main__"].__spec__, list(sys.argv[1:])
    if "--write" in given:
        at = given.index("--write")
        del given[at : at + 2]
    command = ["python -m", spec.name.removesuffix(".__main__") if spec else sys.argv[0], *given]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"command": " ".join(command), "commit": commit, **measured_on()}


def line(row: Row) -> str:
    around = f" ({row.within[0]:.3f} to {row.within[1]:.3f})" if row.within else ""
    of = f"   {row.ratio:.3f}{around} of {row.of}" if row.ratio is not None else ""
    verdict = {True: "met", False: "MISSED", None: "few rounds"}[row.met]
    goal = "" if row.target is None else f"   target {row.target:g}: {verdict}"
    return f"{row.name:<60} {row.value:>12.5g} {row.unit}{of}{goal}"


def beside(name: str, value: float, unit: str, of: str, other: float, target: float | None = None) -> Row:
    """Return a row for a figure without rounds, such as a percentile, with its ratio to the figure `other` of the
    case `of`.
    """
    ratio = value / other if other else None
    met = None
    if target is not None and ratio is not None:
        met = ratio <= target if unit in LESS_IS_BETTER else ratio >= target
    return Row(name, value, unit, of, ratio, None, target, met)


def turns(engines: Collection[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield `(round, engine)`: in each round every engine, in shuffled order."""
    for number in range(rounds):
        for name in random.sample(list(engines), len(engines)):
            time.sleep(PAUSE)
            yield number, name


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
