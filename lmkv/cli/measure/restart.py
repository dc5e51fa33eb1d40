"""Measures hits after a crash: real vLLM is killed with SIGKILL, started again, and asked the same prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from attrs import evolve

from lmkv.cli.measure.hit import (
    CHUNK_TOKENS,
    KV_ROOM,
    PROMPTS,
    Measurement,
    Plan,
    Progress,
    ask_in_turn,
    started,
    summarize,
    warm_up,
)
from lmkv.cli.measure.probe import try_folder
from lmkv.cli.measure.vllm_engines import Answer
from lmkv.errors import NoSpaceError

WRITE_TIMEOUT = 120.0
FILES = "*.kv1"
"""Names of complete chunks, see docs/format.md."""


def measure_restart(plan: Plan, folder: Path, disk: Path, say: Progress = print) -> Measurement:
    """Run `plan` with a disk tier below `disk`; the model and vLLM's log are written into `folder`."""
    say("trying the disk")
    facts = try_folder(disk)
    plan = evolve(plan, options={**disk_settings(plan, disk), **plan.options})
    needed = plan.settings["max_local_disk_size"] + plan.settings["disk_min_free"]
    if facts.free_bytes < needed * 2**30:
        reason = f"{needed:.1f} GiB are wanted, {facts.free_bytes / 2**30:.1f} GiB are free"
        raise NoSpaceError("disk", "demo", reason=reason)
    cold, warm = run_and_kill(plan, folder, disk, say)
    with started(plan, folder, "starting vLLM again", say) as engine:
        warm_up(engine, plan, PROMPTS + 1, say)
        loaded = ask_in_turn("from disk", plan, engine, say)
        return summarize(
            plan, cold, warm, loaded, engine=engine.engine, device=engine.device, direct_io=facts.direct_io
        )


def disk_settings(plan: Plan, disk: Path) -> dict[str, Any]:
    """Room for every prompt. The disk is measured even where it is slower than computing."""
    prompts_gib = plan.max_tokens * plan.model.kv_bytes_per_token * (PROMPTS + 2) / 2**30
    return {
        "local_disk": str(disk),
        "max_local_disk_size": KV_ROOM * prompts_gib + 0.1,
        "disk_min_free": 1.0,
        "prefetch_deadline": 60.0,
        "load_or_recompute": False,
    }


def run_and_kill(plan: Plan, folder: Path, disk: Path, say: Progress) -> tuple[list[Answer], list[Answer]]:
    """The prompts cold, then from host memory; the engine is killed once their chunks are on disk."""
    with started(plan, folder, "starting vLLM on a small model with random weights", say) as engine:
        warm_up(engine, plan, PROMPTS, say)
        cold = ask_in_turn("cold", plan, engine, say)
        warm = ask_in_turn("from memory", plan, engine, say)
        wait_for_files(disk, (PROMPTS + 1) * (plan.tokens // CHUNK_TOKENS), say)
        say("killing vLLM")
        engine.kill()
    return cold, warm


def wait_for_files(disk: Path, wanted: int, say: Progress) -> None:
    """Wait until `wanted` chunks are on disk, WRITE_TIMEOUT seconds at most. A missing chunk is a miss."""
    say(f"waiting for {wanted} chunks to be on disk")
    deadline = time.monotonic() + WRITE_TIMEOUT
    while (found := sum(1 for _ in disk.rglob(FILES))) < wanted:
        if time.monotonic() > deadline:
            say(f"only {found} of {wanted} chunks are on disk after {WRITE_TIMEOUT:.0f} s")
            return
        time.sleep(0.05)
