"""`lmkv demo`: see a hit happen on real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from lmkv.cli.measure import CONNECTOR, PROMPTS, Measurement, Plan, Progress, measure
from lmkv.cli.model import SmallModel, whole_heads

LOG_LINES = 60


class Tier(StrEnum):
    RAM = "ram"


def demo(
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompt.")] = 8000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(callback=whole_heads, help="Its hidden size, in heads of 64.")] = 512,
    tier: Annotated[Tier, typer.Option(help="Where the KV cache of the prompt is kept.")] = Tier.RAM,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model and vLLM's log.")] = False,
    connector: Annotated[str, typer.Option(hidden=True)] = CONNECTOR,
) -> None:
    """Send long prompts to real vLLM cold, then again once its own cache has forgotten them."""
    if find_spec("vllm") is None:
        sys.exit('lmkv demo runs real vLLM, which is not installed: pip install "lmkv[vllm]"')
    model = SmallModel(layers=layers, hidden=hidden, max_position=2 * tokens)
    plan = Plan(tokens=tokens, model=model, connector=None if connector == "none" else connector)
    folder = Path(tempfile.mkdtemp(prefix="lmkv-demo-"))
    try:
        measured = measure_quietly(plan, folder)
    finally:
        if keep:
            typer.echo(f"kept: {folder}", err=True)
        else:
            shutil.rmtree(folder)
    if as_json:
        typer.echo(json.dumps(measured.as_dict()))
    else:
        show(measured)
    sys.exit(0 if measured.passed else 1)


def measure_quietly(plan: Plan, folder: Path) -> Measurement:
    """Measure with vLLM's output in a log, whose end is shown if something fails."""
    log = folder / "vllm.log"
    try:
        with diverted_output(log) as terminal, progress_on(terminal) as say:
            return measure(plan, folder / "model", say)
    except Exception:
        typer.echo("".join(log.read_text(errors="replace").splitlines(keepends=True)[-LOG_LINES:]), err=True)
        raise


@contextmanager
def diverted_output(log: Path) -> Iterator[TextIO]:
    """Send to `log` what this process and its children print; yield the real standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err, log.open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield err
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)


@contextmanager
def progress_on(stream: TextIO) -> Iterator[Progress]:
    """One line that changes on a terminal, one line for each step elsewhere."""
    console = Console(file=stream, highlight=False)
    if console.is_terminal:
        spinner = Spinner("dots")
        # Left to itself, Live would bring back to the terminal what was diverted from it.
        with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
            yield lambda text: spinner.update(text=f"{text} ...")
    else:
        yield lambda text: console.print(text, soft_wrap=True)


def show(measured: Measurement) -> None:
    table = Table(title=f"{measured.engine} on {measured.device}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    load = "" if measured.load_gb_s is None else f"{measured.load_gb_s:.1f} GB/s"
    rows = {
        "prompt": f"{measured.prompt_tokens:,} tokens",
        "hit": f"{measured.hit_tokens:,} tokens",
        f"time to first token, cold (best of {PROMPTS})": f"{measured.cold_ttft_s:.3f} s",
        f"time to first token, warm (best of {PROMPTS})": f"{measured.warm_ttft_s:.3f} s",
        "speed-up": f"{measured.speedup:.1f} x",
        "load": load,
        "outputs equal": "yes" if measured.outputs_equal else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if not measured.hit_as_expected:
        console.print("[red]A repeated prompt did not hit what its first request left.")
    if not measured.outputs_equal:
        console.print("[red]A warm output differs from its cold one.")
