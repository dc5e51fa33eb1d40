"""`lmkv demo`: shows and measures hits on real vLLM."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict, field, frozen
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from lmkv.cli.engines import Answer, ChildFailedError, EngineProcess, EngineSpec
from lmkv.cli.server import give
from lmkv.cli.small_model import SmallModel, whole_heads
from lmkv.cli.stores import FolderFacts, refusals, remedy, try_folder
from lmkv.config import Config
from lmkv.errors import LmkvError, NoSpaceError, UsageError, how_to_install, mask_secrets

CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
PROMPTS = 3
KV_ROOM = 1.1
"""Size of vLLM's KV cache in prompts. The two prompts between a prompt and its repetition evict all KV of that
prompt.
"""
LARGEST_BLOCK = 128
"""Number of tokens in a block of vLLM's KV space: 128 on a CPU, fewer on a GPU."""
WRITE_TIMEOUT = 120.0
PATIENCE = 5.0

Progress = Callable[[str], None]


class Medium(StrEnum):
    """The tier from which the repeated prompts are loaded."""

    RAM = "ram"
    DISK = "disk"
    REMOTE = "remote"


def demo(
    tokens: Annotated[int, typer.Option(min=512, help="Length of the prompts, in tokens.")] = 8000,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers of the model.")] = 8,
    hidden: Annotated[
        int, typer.Option(callback=whole_heads, help="Hidden size of the model, a multiple of 64.")
    ] = 512,
    tier: Annotated[
        Medium,
        typer.Option(
            help="ram: repeat the prompts; disk: kill and restart vLLM before the repetition; remote: stop vLLM, "
            "and start another vLLM with the store that --url names."
        ),
    ] = Medium.RAM,
    url: Annotated[
        str | None, typer.Option(help="URL of the remote store, in the form of remote_url.", envvar="LMKV_REMOTE_URL")
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder in which to put a temporary disk tier.", show_default="TMPDIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the model, the disk tier and vLLM's log.")] = False,
) -> None:
    """Send long prompts to real vLLM twice: vLLM computes them, evicts them, and then loads them with lmkv."""
    if find_spec("vllm") is None:
        sys.exit(f"lmkv demo runs real vLLM, which is not installed: {how_to_install('vllm')}")
    if tier is Medium.REMOTE and not url:
        raise typer.BadParameter("give the URL of the store, for example redis://localhost", param_hint="--url")
    model = SmallModel(layers=layers, hidden=hidden, max_position=2 * tokens)
    try:
        measured = measure(Plan(tokens=tokens, model=model), tier, disk, url, keep=keep)
    except (LmkvError, ChildFailedError) as error:
        sys.exit(f"lmkv demo: {error}")
    give(asdict(measured), lambda: show(measured), as_json=as_json)
    sys.exit(0 if measured.passed else 1)


# -- measuring --------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Plan:
    """The plan of the demo: prompts of `tokens` tokens, for engines with the model `model`.

    vLLM's KV cache has space for little more than one prompt, so each prompt evicts the previous one.
    """

    tokens: int = 8000
    model: SmallModel = field(factory=SmallModel)

    @property
    def max_tokens(self) -> int:
        return self.tokens + ANSWER_TOKENS

    def gib(self, prompts: int) -> float:
        """Return how many GiB of memory the KV of `prompts` prompts needs, plus a tenth in reserve."""
        return KV_ROOM * prompts * self.max_tokens * self.model.kv_bytes_per_token / 2**30

    def spec(self, settings: dict[str, Any]) -> EngineSpec:
        """Return the engine to start. Its host memory has space for every prompt, so that lmkv evicts nothing."""
        blocks = int(self.max_tokens * KV_ROOM) // LARGEST_BLOCK + 2
        host = {"chunk_size": CHUNK_TOKENS, "local_cpu": True, "max_local_cpu_size": self.gib(PROMPTS + 1)}
        return EngineSpec(
            model=self.model,
            max_tokens=self.max_tokens,
            kv_bytes=blocks * LARGEST_BLOCK * self.model.kv_bytes_per_token,
            prefix_caching=True,
            settings={**host, **settings},
        )

    @property
    def expected_hit(self) -> float:
        """Smallest number of tokens that count as a full hit. vLLM always computes the last token, and a lower tier may
        have only full chunks.
        """
        return min(0.98 * (self.tokens - 1), (self.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)


@frozen(kw_only=True)
class Measurement:
    """The results of the demo. `speedup`: the time of new prompts divided by the time of their last repetition.

    `hit_tier`: the tier that delivered most hit tokens. `warm_ttft_s`, `disk_ttft_s`, `remote_ttft_s`: seconds to
    the first token with chunks in host memory, on disk or in a remote store. `direct_io`: whether the disk was read
    with O_DIRECT.
    """

    prompt_tokens: int
    hit_tokens: int
    hit_tier: str
    cold_ttft_s: float
    warm_ttft_s: float
    disk_ttft_s: float | None
    remote_ttft_s: float | None
    speedup: float
    outputs_equal: bool
    load_gb_s: float | None
    direct_io: bool | None
    engine: str
    device: str
    layers: int
    dtype: str
    hit_as_expected: bool

    @property
    def passed(self) -> bool:
        return self.hit_as_expected and self.outputs_equal


def measure(plan: Plan, tier: Medium, disk: Path | None, url: str | None, *, keep: bool) -> Measurement:
    """Measure new prompts and their repetition. With a lower tier, repeat the prompts once more in another engine.

    `disk`, `url`: the folder or the remote store of the lower tier. `keep`: whether to keep the folder of the demo.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(demo_folder(None, keep=keep))
        echo = stack.enter_context(progress())
        settings: dict[str, Any] = {}
        facts: FolderFacts | None = None
        if tier is Medium.DISK:
            chunks = stack.enter_context(demo_folder(disk, keep=keep))
            settings, facts = disk_settings(plan, chunks)
        elif tier is Medium.REMOTE and url:
            settings = {"remote_url": answering(url), "remote_timeout": 10.0}
        if settings:
            # A lower tier is measured even where it is slower than computing.
            settings |= {"prefetch_deadline": 60.0, "load_or_recompute": False}
        title = "starting vLLM on a small model with random weights"
        with started(plan, settings, folder, title, PROMPTS, echo) as engine:
            cold = ask_in_turn("cold", plan, engine, echo)
            loaded = warm = ask_in_turn("from memory" if settings else "warm", plan, engine, echo)
            if facts is not None:
                wait_for_files(chunks, (PROMPTS + 1) * (plan.tokens // CHUNK_TOKENS), echo)
                echo("killing vLLM")
                engine.kill()
            elif settings:
                echo("ending vLLM, which finishes its writes")
                engine.leave()
        if settings:
            with started(plan, settings, folder, "starting vLLM again", PROMPTS + 1, echo) as engine:
                loaded = ask_in_turn("from disk" if facts else "from the remote store", plan, engine, echo)
        return summarize(plan, cold, warm, loaded, engine=(engine.engine, engine.device), tier=tier, facts=facts)


def disk_settings(plan: Plan, folder: Path) -> tuple[dict[str, Any], FolderFacts]:
    """Return the settings of a disk tier with space for every prompt, and the facts about its folder. May raise
    NoSpaceError.
    """
    facts = try_folder(folder)
    size = plan.gib(PROMPTS + 2) + 0.1
    found = {"local_disk": str(folder), "max_local_disk_size": size, "disk_min_free": 1.0}
    needed = size + 1.0
    if facts.free_bytes < needed * 2**30:
        free = facts.free_bytes / 2**30
        reason = f"{folder} has {free:.1f} GiB free, but the demo needs {needed:.1f} GiB: give another --disk"
        raise NoSpaceError("disk", "demo", reason=reason)
    return found, facts


def answering(url: str) -> str:
    """Return `url` after a test of its store, because a start of vLLM takes minutes. Raises LmkvError if the test
    fails.
    """
    config = Config.load(extra={"remote_url": url, "remote_timeout": PATIENCE})
    for verb, reason in refusals(config, config.remote_url[0]).items():
        raise UsageError(f"{mask_secrets(url)}: {verb} fail: {reason}; {remedy(verb, reason)}")
    return url


@contextmanager
def started(
    plan: Plan, settings: dict[str, Any], folder: Path, title: str, number: int, echo: Progress
) -> Iterator[EngineProcess]:
    """Start an engine for a `with` block, and stop the engine at the end of the block.

    The engine has already computed a prompt (with the seed `number`), because the first long prompt also waits for
    buffers and kernels.
    """
    echo(title)
    with closing(EngineProcess(plan.spec(settings), folder)) as engine:
        echo(f"warm-up: {plan.tokens:,} tokens")
        engine.send(number, plan.tokens)
        yield engine


def ask_in_turn(how: str, plan: Plan, engine: EngineProcess, echo: Progress) -> list[Answer]:
    answers = []
    for number in range(PROMPTS):
        echo(f"{how}: prompt {number + 1} of {PROMPTS}, {plan.tokens:,} tokens")
        answers.append(engine.send(number, plan.tokens, ANSWER_TOKENS))
    return answers


def wait_for_files(disk: Path, wanted: int, echo: Progress) -> None:
    """Wait until `wanted` chunks are on disk, for at most WRITE_TIMEOUT seconds. Does not fail if chunks are
    missing.
    """
    echo(f"waiting for {wanted} chunks to be on disk")
    deadline = time.monotonic() + WRITE_TIMEOUT
    while (found := sum(1 for _ in disk.rglob("*.kv1"))) < wanted:
        if time.monotonic() > deadline:
            echo(f"only {found} of {wanted} chunks are on disk after {WRITE_TIMEOUT:.0f} s")
            return
        time.sleep(0.05)


def summarize(
    plan: Plan,
    cold: Sequence[Answer],
    warm: Sequence[Answer],
    loaded: Sequence[Answer],
    *,
    engine: tuple[str, str],
    tier: Medium,
    facts: FolderFacts | None = None,
) -> Measurement:
    """Return the results of the demo. Times are the shortest ones, because disturbances only lengthen times.

    `cold`: the results of new prompts. `warm`: those of prompts in host memory. `loaded`: those of the last repetition.
    """
    below = tier is not Medium.RAM
    cold_ttft_s, loaded_ttft_s = fastest(cold), fastest(loaded)
    hit_tokens = min(answer.hit_tokens for answer in loaded)
    counted = [answer.hit_tokens - (answer.sources.get("cpu", 0) if below else 0) for answer in loaded]
    tiers = Counter[str]()
    for answer in loaded:
        tiers.update(answer.sources)
    return Measurement(
        prompt_tokens=plan.tokens,
        hit_tokens=hit_tokens,
        hit_tier=max(tiers, key=lambda name: tiers[name], default="vllm") if hit_tokens else "none",
        cold_ttft_s=cold_ttft_s,
        warm_ttft_s=fastest(warm),
        disk_ttft_s=loaded_ttft_s if tier is Medium.DISK else None,
        remote_ttft_s=loaded_ttft_s if tier is Medium.REMOTE else None,
        speedup=cold_ttft_s / loaded_ttft_s,
        outputs_equal=same_outputs(cold, warm, loaded),
        load_gb_s=max((answer.load_gb_s for answer in loaded if answer.load_gb_s), default=None),
        direct_io=facts.direct_io if facts else None,
        engine=engine[0],
        device=engine[1],
        layers=plan.model.layers,
        dtype=plan.model.dtype,
        hit_as_expected=min(hit_tokens, *counted) >= plan.expected_hit,
    )


def fastest(answers: Sequence[Answer]) -> float:
    return min(answer.ttft_s for answer in answers)


def same_outputs(*runs: Sequence[Answer]) -> bool:
    """Return whether all runs generated the same tokens."""
    return len({tuple(answer.token_ids for answer in run) for run in runs}) == 1


# -- showing ----------------------------------------------------------------------------------------------


@contextmanager
def demo_folder(parent: Path | None, *, keep: bool) -> Iterator[Path]:
    """Create a temporary folder for a `with` block, below `parent` if given. `keep`: whether the folder remains."""
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
    """Yield a function that shows progress: in one changing line on a terminal, or in a line per step elsewhere."""
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
        console.print("[red]An output with loaded KV differs from the output with computed KV.")


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
