"""`lmkv simulate`: replays request traces over lmkv's eviction policies, and compares the policies with the optimum."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict, frozen
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lmkv.cli.server import give
from lmkv.cli.sizing import kv_size
from lmkv.errors import LmkvError, UsageError, how_to_install, outside, short_repr
from lmkv.policies import Shadow, make_admission, make_policy
from lmkv.simulation import EndHints, clairvoyant, replay, replay_tiers
from lmkv.simulation.trace import Trace, read_trace

DEFAULT_TOKEN_BYTES = 131_072
"""Bytes of KV per token of an 8B model: 32 layers, 8 KV heads of 128, two bytes per value."""
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s{0,9}(%|[KMGT]?I?B)?", re.IGNORECASE | re.ASCII)
UNBOUNDED, CLAIRVOYANT = "Unbounded", "Clairvoyant"


@frozen
class Row:
    """The result of one replay.

    `capacity_bytes`: size of the simulated cache; None for no limit. `accesses_per_second`: chunk accesses per second
    of CPU time.
    """

    trace: str
    policy: str
    capacity: str
    capacity_bytes: int | None
    hit_ratio: float
    hit_tokens: int
    tokens: int
    written_chunks: int
    accesses_per_second: float


def simulate(
    traces: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="TRACE...",
            help="Traces of Mooncake, RAGPulse, sessions or lmkv record.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A policy, or package.module:Class; may be repeated. [default: LRU, ADAPTIVE]"
        ),
    ] = None,
    capacity: Annotated[
        str,
        typer.Option(help="Cache sizes, separated by commas: 5% (of all chunks), 64GiB, 64GB, or a number of chunks."),
    ] = "1%,5%,10%,25%",
    ram: Annotated[str, typer.Option(help="Size of each engine's host memory, with --disk below it.")] = "",
    disk: Annotated[str, typer.Option(help="Size of the disk that all engines share.")] = "",
    disk_admission: Annotated[str, typer.Option(help="Which chunks the disk stores, as in disk_admission.")] = "all",
    engines: Annotated[int, typer.Option(min=1, help="Number of engines, each with separate host memory.")] = 1,
    router: Annotated[
        str, typer.Option(help="How requests reach engines: prefix, round-robin or least-loaded.")
    ] = "prefix",
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Tokens per chunk. [default: the trace's]")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model that says how many bytes a token takes.")
    ] = None,
    told_ends: Annotated[
        float, typer.Option(min=0, max=1, help="Share of sessions that send their id and report their end to lmkv.")
    ] = 0.0,
    spread: Annotated[
        float, typer.Option(min=0, help="Start the sessions at random times within this number of seconds.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the random times.")] = 1,
    memory: Annotated[str, typer.Option(help="Largest memory that one trace may take.")] = "4GiB",
    plot: Annotated[Path | None, typer.Option(help="File for a plot of hit ratios over capacity.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay request traces, and compare how many tokens each eviction policy finds with the best possible policy."""
    console = Console(highlight=False)
    names = policy or ["LRU", "ADAPTIVE"]
    try:
        token_bytes = DEFAULT_TOKEN_BYTES if model is None else kv_size(model).token_bytes
        rows: list[Row] = []
        gc.disable()
        with Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress:
            for path in traces:
                task = progress.add_task(f"reading {path.name}", total=None)
                trace = read_trace(path, chunk_size, spread=spread, seed=seed, memory=size_of(memory, 1, 0))
                runner = Runner(trace, token_bytes * trace.chunk_tokens, progress, told_ends)
                progress.remove_task(task)
                if ram or disk:
                    rows += runner.tiers(names, ram, disk, engines, router, disk_admission)
                else:
                    rows += runner.curves(names, [part.strip() for part in capacity.split(",")])
    except (LmkvError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        gc.enable()
    answer = {"token_bytes": token_bytes, "rows": [asdict(row) for row in rows]}

    def show() -> None:
        for table in tables(rows, token_bytes, assumed=model is None):
            console.print(table)

    give(answer, show, as_json=as_json)
    if plot is not None:
        try:
            draw(rows, plot)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"the plot {plot} cannot be drawn: {outside(str(error))}") from error


def size_of(text: str, chunk_bytes: int, unique: int) -> int:
    """Return a size in bytes. `text`: `5%` (of the trace's chunks), `64GiB`, `64GB`, or a number of chunks.

    `chunk_bytes`: bytes of a chunk. `unique`: number of different chunks in the trace.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{short_repr(text)} is not a size: give 5%, 64GiB, 64GB or a number of chunks")
    number, unit = float(found[1]), (found[2] or "").upper()
    if unit == "%":
        return int(unique * number / 100) * chunk_bytes
    return int(number * UNITS[unit.removesuffix("B")]) if unit else int(number) * chunk_bytes


@frozen
class Runner:
    """Replays one trace with several policies. `chunk_bytes`: number of bytes of a full chunk."""

    trace: Trace
    chunk_bytes: int
    progress: Progress
    told_ends: float = 0.0

    def curves(self, names: Sequence[str], sizes: Sequence[str]) -> Iterator[Row]:
        trace, chunk = self.trace, self.chunk_bytes
        yield self._one(UNBOUNDED, "", None)
        for text in sizes:
            nbytes = size_of(text, chunk, trace.unique)
            yield self._one(CLAIRVOYANT, text, nbytes)
            for name in names:
                yield self._one(name, text, nbytes)

    def _one(self, name: str, text: str, nbytes: int | None) -> Row:
        trace, chunk = self.trace, self.chunk_bytes

        def run(seen: Callable[[int], None]) -> tuple[int, int]:
            if name == CLAIRVOYANT:
                return clairvoyant(trace, (nbytes or 0) // chunk)[0], 0
            made = make_policy("LRU" if name == UNBOUNDED else name)
            ended = EndHints(trace, made, self.told_ends) if self.told_ends else None
            found = replay(trace, made, 1 << 80 if nbytes is None else nbytes, chunk, seen, ended)
            return found.hit_tokens, found.written_chunks

        (hit, written), speed = self._timed(f"{trace.name} {name} {text}", run)
        return self._row(name, text, nbytes, hit, written, speed)

    def _row(self, label: str, text: str, nbytes: int | None, hit: int, written: int, speed: float) -> Row:
        tokens = self.trace.tokens
        return Row(self.trace.name, label, text, nbytes, hit / max(1, tokens), hit, tokens, written, speed)

    def _timed(self, title: str, run: Callable[[Callable[[int], None]], Any]) -> tuple[Any, float]:
        task = self.progress.add_task(title, total=len(self.trace.requests))
        started = time.process_time()
        answer = run(lambda number: self.progress.update(task, completed=number))
        seconds = time.process_time() - started
        self.progress.remove_task(task)
        return answer, round(self.trace.accesses / max(seconds, 1e-9))

    def tiers(
        self, names: Sequence[str], ram: str, disk: str, engines: int, router: str, admission: str
    ) -> Iterator[Row]:
        trace, chunk = self.trace, self.chunk_bytes
        near, far = (size_of(text, chunk, trace.unique) if text else 0 for text in (ram, disk))
        for name in names:

            def run(seen: Callable[[int], None], name: str = name) -> Any:
                memories = [Shadow(make_policy(name), near) for _ in range(engines)]
                below = Shadow(make_policy(name), far) if disk else None
                taken = make_admission(admission)
                return replay_tiers(trace, memories, below, chunk, router=router, admission=taken, progress=seen)

            results, speed = self._timed(f"{trace.name} {name}", run)
            for result in results:
                nbytes, text = (near * engines, ram) if result.name == "ram" else (far, disk)
                label = f"{name}, {result.name} of {engines}" if engines > 1 else f"{name}, {result.name}"
                yield self._row(label, text, nbytes, result.hit_tokens, result.written_chunks, speed)
        yield self._one(UNBOUNDED, "", None)
        yield self._one(CLAIRVOYANT, "all tiers", near * engines + far)


def tables(rows: Sequence[Row], token_bytes: int, *, assumed: bool) -> Iterator[Table | str]:
    for trace in dict.fromkeys(row.trace for row in rows):
        own = [row for row in rows if row.trace == trace]
        sizes = list(dict.fromkeys((row.capacity, row.capacity_bytes) for row in own if row.capacity))
        table = Table(title=f"{trace}: share of {own[0].tokens:,} tokens found", title_justify="left", box=None)
        table.add_column("policy")
        for text, nbytes in sizes:
            table.add_column(f"{text}\n{(nbytes or 0) / 1e9:,.1f} GB", justify="right")
        for name in dict.fromkeys(row.policy for row in own):
            ratios = {row.capacity: f"{row.hit_ratio:.4f}" for row in own if row.policy == name}
            table.add_row(name, *(ratios.get(text) or ratios.get("", "") for text, _ in sizes))
        yield table
        yield ""
    speeds = [row.accesses_per_second for row in rows if row.policy not in (UNBOUNDED, CLAIRVOYANT)]
    limits = dict.fromkeys(f"{speed:,.0f}" for speed in (min(speeds), max(speeds)))
    note = " (an 8B model's; --model names another)" if assumed else ""
    yield f"{token_bytes:,} bytes a token{note}; {' to '.join(limits)} chunk accesses a CPU second"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the hit ratio over the capacity for each trace, into the file `path`.

    Raises BadParameter if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise typer.BadParameter(f"--plot needs matplotlib: {how_to_install('plot')}") from error
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure(figsize=(5.5 * len(traces), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, trace in enumerate(traces):
        axes = figure.add_subplot(1, len(traces), place + 1)
        own = [row for row in rows if row.trace == trace]
        for name in dict.fromkeys(row.policy for row in own if row.policy != UNBOUNDED):
            mine = [row for row in own if row.policy == name]
            points = [(row.capacity_bytes / 1e9, row.hit_ratio) for row in mine if row.capacity_bytes]
            style = {"color": "black", "linestyle": "--"} if name == CLAIRVOYANT else {}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
        unbounded = next(row.hit_ratio for row in own if row.policy == UNBOUNDED)
        axes.axhline(unbounded, color="grey", linestyle=":", label=UNBOUNDED)
        axes.set(title=trace, xlabel="capacity, GB", xscale="log", ylabel="share of tokens found", ylim=(0, None))
        sizes = sorted({row.capacity_bytes / 1e9 for row in own if row.capacity_bytes})
        axes.set_xticks(sizes, [f"{gigabytes:,.0f}" for gigabytes in sizes])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
