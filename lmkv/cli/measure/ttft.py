"""Time to first token of a repeated prompt: computed, from vLLM's own prefix cache, from lmkv's tiers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

from lmkv.cli.measure.plain import MARGIN, files_of, seconds_of, values_of
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.vllm_engines import (
    SEVERAL_PROCESSES,
    Answer,
    EngineProcess,
    EngineSpec,
    engine_specs,
    fastest,
    wait_until_written,
)

REPEATS = 15
PAUSE = 0.25
"""Seconds between repetitions, so that one disturbance does not hit two of them."""
OWN = "vllm prefix cache"
RAM, SHARED, DISK, REDIS = "lmkv ram", "lmkv shared memory", "lmkv disk", "lmkv redis"
NAMES = (OWN, RAM, SHARED, DISK)
BOUND = f"host memory, and {MARGIN} times a plain read"
MEMORY = Path("/dev/shm")
COMPUTED = "computed"
RAM_TARGET, SHARED_TARGET = 1.05, 1.3
"""Times that host memory may take of vLLM's prefix cache, and shared memory of host memory."""
OTHER_PROMPT, PROMPT = 1, 2


def measure_ttft(
    tokens: int, model: str | None, parent: Path, host_gib: float, redis: str | None, say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Measure one engine after the other, as vLLM runs by default. `redis`: URL of a database that may be used.

    Shared memory has what another engine stored. Each lower tier is shown beside its bound, too: host memory's time and
    `plain.MARGIN` times a plain read's. The best of `REPEATS` repetitions counts, because disturbances only add.
    """
    cold: dict[str, float] = {}
    warm: dict[str, list[Answer]] = {}
    reads: dict[str, list[float]] = {}
    for name in (*NAMES, *([REDIS] if redis else [])):
        say(f"vLLM: {name}, a prompt of {tokens:,} tokens")
        place = MEMORY if name == SHARED else parent
        with tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=place) as temporary:
            folder = Path(temporary)
            spec = engine_specs(folder, tokens + 16, model=model, host_gib=host_gib, remote_url=redis)[name]
            if name == SHARED:
                store_and_end(spec, folder, tokens, SEVERAL_PROCESSES)
            with closing(EngineProcess(spec, folder, SEVERAL_PROCESSES)) as engine:
                cold[name] = first_time(engine, folder, tokens).ttft_s
                read = _plain_read(name, folder, redis)
                warm[name] = []
                for _ in range(REPEATS):
                    warm[name].append(send(engine, folder, tokens))
                    if read is not None:
                        reads.setdefault(name, []).append(seconds_of(read))
    missed = [name for name, found in warm.items() if min(each.hit_tokens for each in found) < tokens // 2]
    best = {name: fastest(found) for name, found in warm.items()}
    note = f"no hits: {', '.join(missed)}" if missed else f"best of {REPEATS} repetitions"
    title = f"First token, {tokens:,} tokens"
    bars = {COMPUTED: cold[OWN], **best}
    yield Comparison(title, "s", bars, OWN, log=True, note=note, targets={RAM: RAM_TARGET})
    for name, seconds in reads.items():
        bars = {BOUND: best[RAM] + MARGIN * min(seconds), name: best[name]}
        yield Comparison(f"{title}, {name.removeprefix('lmkv ')}", "s", bars, BOUND, targets={name: 1.0})
    beside = {name: best[name] for name in (RAM, SHARED)}
    yield Comparison(f"{title}, shared memory beside host memory", "s", beside, RAM, targets={SHARED: SHARED_TARGET})


def store_and_end(spec: EngineSpec, folder: Path, tokens: int, env: Mapping[str, str]) -> None:
    """An engine stores the prompts and ends, so that another one finds them."""
    with closing(EngineProcess(spec, folder, env)) as other:
        first_time(other, folder, tokens)
        other.leave()


def _plain_read(name: str, folder: Path, redis: str | None) -> Callable[[], None] | None:
    """A plain read of as much as the tier has of a prompt; None without a lower tier, or if it has nothing."""
    with suppress(LookupError):
        if name == REDIS and redis:
            return values_of(redis)
        if name in (SHARED, DISK):
            return files_of(folder, in_memory=name == SHARED)
    return None


def first_time(engine: EngineProcess, folder: Path, tokens: int) -> Answer:
    """The cold prompt, after another one: only the first long prompt allocates buffers and loads kernels."""
    send(engine, folder, tokens, OTHER_PROMPT)
    return send(engine, folder, tokens)


def send(engine: EngineProcess, folder: Path, tokens: int, seed: int = PROMPT) -> Answer:
    """Send a prompt after a pause; returns once the disk tier has written its chunks."""
    time.sleep(PAUSE)
    # A second token, since vLLM wants the report of a request that ends before it tells of its copy.
    answer = engine.send(seed, tokens, 2)
    wait_until_written(folder)
    return answer
