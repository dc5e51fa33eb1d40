"""Time to first token of a repeated prompt: computed, from vLLM's own prefix cache, from lmkv's tiers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.vllm_engines import (
    SEVERAL_PROCESSES,
    Answer,
    EngineProcess,
    engine_specs,
    fastest,
    wait_until_written,
)

REPEATS = 15
PAUSE = 0.25
"""Seconds between repetitions, so that one disturbance does not hit two of them."""
OWN = "vllm prefix cache"
NAMES = (OWN, "lmkv ram", "lmkv shared memory", "lmkv disk")
MEMORY = Path("/dev/shm")
COMPUTED = "computed"
OTHER_PROMPT, PROMPT = 1, 2


def measure_ttft(
    tokens: int, model: str | None, parent: Path, host_gib: float, redis: str | None, say: Callable[[str], None]
) -> Comparison:
    """Measure one engine after the other, as vLLM runs by default. `redis`: URL of a database that may be used.

    The best of `REPEATS` repetitions counts, because disturbances only add.
    """
    cold: dict[str, float] = {}
    warm: dict[str, list[Answer]] = {}
    for name in (*NAMES, *(["lmkv redis"] if redis else [])):
        say(f"vLLM: {name}, a prompt of {tokens:,} tokens")
        place = MEMORY if name == "lmkv shared memory" else parent
        with tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=place) as temporary:
            folder = Path(temporary)
            spec = engine_specs(folder, tokens + 16, model=model, host_gib=host_gib, remote_url=redis)[name]
            with closing(EngineProcess(spec, folder, SEVERAL_PROCESSES)) as engine:
                cold[name] = first_time(engine, folder, tokens).ttft_s
                warm[name] = [send(engine, folder, tokens) for _ in range(REPEATS)]
    missed = [name for name, found in warm.items() if min(each.hit_tokens for each in found) < tokens // 2]
    bars = {COMPUTED: cold[OWN], **{name: fastest(found) for name, found in warm.items()}}
    note = f"no hits: {', '.join(missed)}" if missed else f"best of {REPEATS} repetitions"
    return Comparison(f"First token, {tokens:,} tokens", "s", bars, OWN, log=True, note=note)


def first_time(engine: EngineProcess, folder: Path, tokens: int) -> Answer:
    """The cold prompt, after another one: only the first long prompt allocates buffers and loads kernels."""
    send(engine, folder, tokens, OTHER_PROMPT)
    return send(engine, folder, tokens)


def send(engine: EngineProcess, folder: Path, tokens: int, seed: int = PROMPT) -> Answer:
    """Send a prompt after a pause; returns once the disk tier has written its chunks."""
    time.sleep(PAUSE)
    answer = engine.send(seed, tokens)
    wait_until_written(folder)
    return answer
