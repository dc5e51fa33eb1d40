"""`lmkv bench`: how near lmkv comes to the limits of this machine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmkv.cli.measure.calls import measure_calls
from lmkv.cli.measure.limits import measure_copies, measure_disk
from lmkv.cli.measure.load import measure_load
from lmkv.cli.measure.plain import whole_database
from lmkv.cli.measure.report import Comparison, rounded
from lmkv.cli.measure.scale import measure_scale
from lmkv.cli.measure.scheduler import measure_scheduler
from lmkv.cli.measure.timing import Row, machine, within
from lmkv.cli.measure.ttft import measure_ttft
from lmkv.cli.measure.vllm_manager import measure_vllm_manager


def bench(
    model: Annotated[
        str | None, typer.Option(help="Model for vLLM's first tokens.", show_default="a small one with random weights")
    ] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompt for vLLM.")] = 8000,
    host_gib: Annotated[
        float, typer.Option(help="Host memory of lmkv's tier then, in GiB; at most 1 without --model.")
    ] = 4.0,
    engine: Annotated[bool, typer.Option("--engine/--no-engine", help="Whether to measure vLLM, if installed.")] = True,
    disk: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder on the disk to measure.", show_default="TMPDIR")
    ] = None,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Redis to measure, whose database is used.")] = None,
    report: Annotated[Path, typer.Option(help="Where to draw the comparisons.")] = Path("lmkv-bench.png"),
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures in a fraction of the time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON too, in the last line.")] = False,
) -> None:
    """Measure lmkv's copies, calls, index and disk beside their limits, and vLLM with it and without.

    Its settings in the environment and in a file do not count.
    """
    for name in [name for name in os.environ if name.startswith(("LMKV_", "LMCACHE_"))]:
        say(f"{name} does not count here")
        del os.environ[name]
    parent = disk or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    length = min(tokens, 2048) if quick else tokens
    comparisons: list[Comparison] = []
    try:
        with whole_database(redis if engine else None):
            comparisons.extend(measured(model, length, host_gib, engine, parent, redis, quick))
    finally:
        # An error later on must not lose them.
        if comparisons:
            show(comparisons)
            drawn(comparisons, report)
        if as_json:
            rows = [asdict(row) for comparison in comparisons for row in comparison.rows()]
            typer.echo(json.dumps({"machine": machine(), "rows": rows}))


def measured(
    model: str | None, tokens: int, host_gib: float, engine: bool, parent: Path, redis: str | None, quick: bool
) -> Iterator[Comparison]:
    say("copies in host memory")
    yield from measure_copies(quick=quick)
    say("calls that a scheduler waits for")
    yield from measure_calls(quick=quick)
    say("an index of many chunks")
    yield from measure_scale(quick=quick)
    if engine and find_spec("vllm") is not None:
        say("evictions beside vLLM's own manager of host memory")
        yield from measure_vllm_manager(quick=quick)
    say("calls of vLLM's scheduler while an index grows")
    yield from measure_scheduler(quick=quick)
    say(f"disk, in {parent}")
    yield from measure_disk(parent, quick=quick)
    if engine and find_spec("vllm") is None:
        say("vLLM is not installed: no first tokens and no conversations")
    elif engine:
        yield from measure_ttft(tokens, model, parent, host_gib, redis, say, quick=quick)
        yield from measure_load(quick=quick, say=say)


def say(text: str) -> None:
    typer.echo(text, err=True)


def show(comparisons: Sequence[Comparison]) -> None:
    table = Table(title=escape(f"lmkv on {machine()}"))
    for name in ("", "value", "ratio", "95 % within *", "target"):
        table.add_column(name, justify="right" if name in ("value", "ratio") else "left")
    for each in comparisons:
        table.add_row(f"[bold]{each.title}", "", f"[dim]{each.better}")
        for (name, value), row in zip(each.bars.items(), each.rows(), strict=True):
            beside = "1" if row.ratio is None else f"{row.ratio:.2f} x"
            unit = "" if each.unit == "s" else f" {each.unit}"
            around = within(each.ratios.get(name, ()))
            table.add_row(f"  {name}", rounded(value, each.unit) + unit, beside, around, goal(row, each))
        if each.note:
            table.add_row(f"  [dim]{each.note}")
    table.caption = "* of the ratios of rounds, or with fewer than six their range; empty for ratios without rounds"
    # A pipe has no width; a table that is wrapped at 80 columns could not be read.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def goal(row: Row, comparison: Comparison) -> str:
    if row.target is None:
        return ""
    verdict = {True: ": [green]met", False: ": [red]missed", None: ": few rounds"}[row.met]
    return f"{comparison.bound} {row.target:.3g}{verdict}"


def drawn(comparisons: Sequence[Comparison], path: Path) -> None:
    if find_spec("matplotlib") is None:
        say('no picture is drawn without matplotlib: pip install "lmkv[plot]"')
        return
    from lmkv.cli.measure.report import draw

    draw(comparisons, machine(), path)
    say(f"drawn: {path}")
