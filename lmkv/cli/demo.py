"""`lmkv demo`: see a hit happen on real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from lmkv.cli.measure.hit import CONNECTOR, PROMPTS, Measurement, Plan, Progress, measure
from lmkv.cli.measure.restart import RestartMeasurement, measure_restart
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.model import whole_heads
from lmkv.errors import LmkvError

LOG_LINES = 60

Measured = Measurement | RestartMeasurement


class Tier(StrEnum):
    RAM = "ram"
    DISK = "disk"


def demo(
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompt.")] = 8000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(callback=whole_heads, help="Its hidden size, in heads of 64.")] = 512,
    tier: Annotated[
        Tier, typer.Option(help="ram: send the prompts again; disk: kill vLLM and start it again before.")
    ] = Tier.RAM,
    disk: Annotated[
        Path | None,
        typer.Option(help="Where to put the disk tier's temporary folder.", show_default="TMPDIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the model, the disk tier and vLLM's log.")
    ] = False,
    connector: Annotated[str, typer.Option(hidden=True)] = CONNECTOR,
) -> None:
    """Send long prompts to real vLLM cold, then again once its own cache has forgotten them."""
    if find_spec("vllm") is None:
        sys.exit('lmkv demo runs real vLLM, which is not installed: pip install "lmkv[vllm]"')
    model = SmallModel(layers=layers, hidden=hidden, max_position=2 * tokens)
    plan = Plan(tokens=tokens, model=model, connector=None if connector == "none" else connector)
    with ExitStack() as stack:
        folder = stack.enter_context(demo_folder(None, keep=keep))
        if tier is Tier.DISK:
            kv = stack.enter_context(demo_folder(disk, keep=keep))
            measured: Measured = quietly(lambda say: measure_restart(plan, folder / "model", kv, say), folder)
        else:
            measured = quietly(lambda say: measure(plan, folder / "model", say), folder)
    if as_json:
        typer.echo(json.dumps(measured.as_dict()))
    else:
        show(measured)
    sys.exit(0 if measured.passed else 1)


@contextmanager
def demo_folder(parent: Path | None, *, keep: bool) -> Iterator[Path]:
    """A temporary folder, in `parent` if given."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="lmkv-demo-", dir=parent))
    try:
        yield folder
    finally:
        if keep:
            typer.echo(f"kept: {folder}", err=True)
        else:
            shutil.rmtree(folder)


def quietly(run: Callable[[Progress], Measured], folder: Path) -> Measured:
    """Run with vLLM's output in a log, whose end is shown if something fails."""
    log = folder / "vllm.log"
    try:
        with diverted_output(log) as terminal, progress_on(terminal) as say:
            return run(say)
    except LmkvError as error:
        sys.exit(f"lmkv demo: {error}")
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


def show(measured: Measured) -> None:
    table = Table(title=f"{measured.engine} on {measured.device}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("prompt", f"{measured.prompt_tokens:,} tokens")
    rows = disk_rows(measured) if isinstance(measured, RestartMeasurement) else ram_rows(measured)
    for name, value in rows.items():
        table.add_row(name, value)
    table.add_row("outputs equal", "yes" if measured.outputs_equal else "NO")
    console = Console()
    console.print(table)
    if not measured.hit_as_expected:
        console.print("[red]A repeated prompt did not hit what its first request left.")
    if not measured.outputs_equal:
        console.print("[red]A warm output differs from its cold one.")


def ram_rows(measured: Measurement) -> dict[str, str]:
    return {
        "hit": f"{measured.hit_tokens:,} tokens",
        ttft("cold"): f"{measured.cold_ttft_s:.3f} s",
        ttft("warm"): f"{measured.warm_ttft_s:.3f} s",
        "speed-up": f"{measured.speedup:.1f} x",
        "load": "" if measured.load_gb_s is None else f"{measured.load_gb_s:.1f} GB/s",
    }


def disk_rows(measured: RestartMeasurement) -> dict[str, str]:
    return {
        "hit after SIGKILL and restart": f"{measured.hit_tokens:,} tokens",
        "hit where": measured.hit_tier,
        ttft("cold"): f"{measured.cold_ttft_s:.3f} s",
        ttft("from memory"): f"{measured.ram_ttft_s:.3f} s",
        ttft("from disk"): f"{measured.disk_ttft_s:.3f} s",
        "speed-up, disk": f"{measured.speedup:.1f} x",
        "read past the page cache": "yes" if measured.direct_io else "no",
    }


def ttft(how: str) -> str:
    return f"time to first token, {how} (best of {PROMPTS})"
