"""`lmkv demo`: see a hit happen on real vLLM."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from lmkv.cli.checkpoint import whole_heads
from lmkv.cli.measure.hit import PROMPTS, Measurement, Plan, Progress, measure_hit
from lmkv.cli.measure.probe import try_remote
from lmkv.cli.measure.process import ChildFailedError
from lmkv.cli.measure.remote import measure_remote
from lmkv.cli.measure.restart import measure_restart
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import CONNECTOR
from lmkv.errors import LmkvError, UsageError, mask_secrets


class Medium(StrEnum):
    """Where the repeated prompts are loaded from."""

    RAM = "ram"
    DISK = "disk"
    REDIS = "redis"
    VALKEY = "valkey"
    S3 = "s3"
    MOONCAKE = "mooncake"
    INFINISTORE = "infinistore"


LOCAL = {
    Medium.REDIS: "redis://localhost",
    Medium.VALKEY: "valkey://localhost",
    Medium.S3: "s3://lmkv?endpoint=http://localhost:9000&region=us-east-1",
    Medium.MOONCAKE: "mooncake://localhost:50051",
    Medium.INFINISTORE: "infinistore://localhost:22345",
}
"""Default URL of each remote store."""

STARTS = {
    Medium.REDIS: 'redis-server --save "" --appendonly no',
    Medium.VALKEY: 'valkey-server --save "" --appendonly no',
    Medium.S3: "mkdir -p /tmp/objects/lmkv; rclone serve s3 --addr 127.0.0.1:9000 --auth-key lmkv,secret /tmp/objects "
    "(and here LMKV_REMOTE_USERNAME=lmkv LMKV_REMOTE_PASSWORD=secret)",
    Medium.MOONCAKE: "mooncake_master --rpc_port=50051 --default_kv_lease_ttl=5000 (and a mooncake_client)",
    Medium.INFINISTORE: "infinistore --service-port 22345 --manage-port 18080 --prealloc-size 8",
}
"""Command that starts a local store of each kind."""


def demo(
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompt.")] = 8000,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 8,
    hidden: Annotated[int, typer.Option(callback=whole_heads, help="Its hidden size, in heads of 64.")] = 512,
    tier: Annotated[
        Medium,
        typer.Option(
            help="ram: send the prompts again; disk: kill vLLM and start it again in between; a remote store: "
            "end vLLM and start another one."
        ),
    ] = Medium.RAM,
    url: Annotated[
        str | None, typer.Option(help="URL of the remote store.", envvar="LMKV_REMOTE_URL", show_default="on localhost")
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where to put the disk tier's temporary folder.", show_default="TMPDIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model, the disk tier and vLLM's log.")] = False,
    connector: Annotated[str, typer.Option(hidden=True)] = CONNECTOR,
) -> None:
    """Send long prompts to real vLLM cold, then again once its own cache has evicted them."""
    if find_spec("vllm") is None:
        sys.exit('lmkv demo runs real vLLM, which is not installed: pip install "lmkv[vllm]"')
    model = SmallModel(layers=layers, hidden=hidden, max_position=2 * tokens)
    plan = Plan(tokens=tokens, model=model, connector=None if connector == "none" else connector)
    try:
        measured = run(plan, tier, disk, url, keep=keep)
    except (LmkvError, ChildFailedError) as error:
        sys.exit(f"lmkv demo: {error}")
    if as_json:
        typer.echo(json.dumps(asdict(measured)))
    else:
        show(measured)
    sys.exit(0 if measured.passed else 1)


def run(plan: Plan, tier: Medium, disk: Path | None, url: str | None, *, keep: bool) -> Measurement:
    with ExitStack() as stack:
        folder = stack.enter_context(demo_folder(None, keep=keep))
        say = stack.enter_context(progress())
        if tier is Medium.RAM:
            return measure_hit(plan, folder, say)
        if tier in LOCAL:
            answers(tier, url := url or LOCAL[tier])
            return measure_remote(plan, folder, url, say)
        return measure_restart(plan, folder, stack.enter_context(demo_folder(disk, keep=keep)), say)


def answers(tier: Medium, url: str) -> None:
    """Test the store first, because vLLM takes minutes to start. Raises LmkvError with the remedy."""
    try:
        try_remote(url)
    except LmkvError as error:
        start = f"start one with: {STARTS[tier]}; or give its --url. See docs/remote.md"
        raise UsageError(f"{mask_secrets(url)} cannot be used: {error}\n{start}") from error


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


@contextmanager
def progress() -> Iterator[Progress]:
    """On a terminal one line that changes, elsewhere one line per step."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        spinner = Spinner("dots")
        with Live(spinner, console=console, transient=True):
            yield lambda text: spinner.update(text=escape(f"{text} ..."))
    else:
        yield lambda text: console.print(escape(text), soft_wrap=True)


def show(measured: Measurement) -> None:
    table = Table(title=escape(f"{measured.engine} on {measured.device}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows(measured).items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    if not measured.hit_as_expected:
        console.print("[red]A repeated prompt hit fewer tokens than its first request stored.")
    if not measured.outputs_equal:
        console.print("[red]A warm output differs from its cold one.")


def rows(measured: Measurement) -> dict[str, str]:
    restarted, speed = measured.disk_ttft_s is not None, measured.load_gb_s
    hit = "hit after SIGKILL and restart" if restarted else "hit in another vLLM" if measured.remote_ttft_s else "hit"
    found = {
        "prompt": f"{measured.prompt_tokens:,} tokens",
        hit: f"{measured.hit_tokens:,} tokens",
        "hit from": measured.hit_tier,
        ttft("cold"): f"{measured.cold_ttft_s:.3f} s",
        ttft("from memory"): f"{measured.warm_ttft_s:.3f} s",
    }
    if restarted:
        found[ttft("from disk")] = f"{measured.disk_ttft_s:.3f} s"
        found["read past the page cache"] = "yes" if measured.direct_io else "no"
    if measured.remote_ttft_s is not None:
        found[ttft("from the remote store")] = f"{measured.remote_ttft_s:.3f} s"
    return found | {
        "speed-up": f"{measured.speedup:.1f} x",
        "load from host memory": "" if speed is None else f"{speed:.1f} GB/s",
        "outputs equal": "yes" if measured.outputs_equal else "NO",
    }


def ttft(how: str) -> str:
    return f"time to first token, {how} (best of {PROMPTS})"
