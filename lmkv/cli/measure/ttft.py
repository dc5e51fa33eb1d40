"""Time to first token of a repeated prompt: computed, from vLLM's own prefix cache, from lmkv's tiers."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from attrs import evolve

from lmkv.cli.measure.plain import MARGIN, files_of, seconds_of, values_of
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import turns
from lmkv.cli.measure.vllm_engines import (
    SEVERAL_PROCESSES,
    SHARED_DEVICE,
    Answer,
    EngineProcess,
    EngineSpec,
    engine_specs,
    wait_until_written,
)

ROUNDS, QUICK_ROUNDS, ANSWERS = 9, 3, 3
PAUSE = 0.25
"""Seconds before each prompt."""
SMALL_HOST_GIB = 1.0
"""Host memory of each engine with the small model at most, since all run at once."""
OWN = "vllm prefix cache"
RAM, SHARED, DISK, REDIS = "lmkv ram", "lmkv shared memory", "lmkv disk", "lmkv redis"
BELOW = (SHARED, DISK, REDIS)
NAMES = (OWN, RAM, SHARED, DISK)
BOUND = f"host memory, and {MARGIN} times a plain read"
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 1 << 30
"""Where shared memory is, and the least that must be free there."""
COMPUTED = "computed"
RAM_TARGET = 1.05
"""Times that host memory may take of vLLM's prefix cache, and shared memory of host memory."""
OTHER_PROMPT, PROMPT = 1, 2


def measure_ttft(
    tokens: int,
    model: str | None,
    parent: Path,
    host_gib: float,
    redis: str | None,
    say: Callable[[str], None],
    *,
    quick: bool,
) -> Iterator[Comparison]:
    """Ask engines in turn, each in processes of its own as vLLM runs by default, and compare answers within a round.

    In its turn an engine answers once to wake its processes, then `ANSWERS` times; their median counts. A `model` of
    the user's may fill the device, so that its engines run one after the other. `redis`: URL of a database that may be
    used. Shared memory has what another engine stored. Each lower tier is shown beside its bound, too: the time of
    another prompt, which the same engine keeps in host memory, and `plain.MARGIN` times that of a plain read after
    each answer.
    """
    names = [*NAMES, *([REDIS] if redis else [])]
    if not (MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES):
        say(f"{MEMORY} has less than {MEMORY_BYTES:,} bytes free: no shared memory")
        names.remove(SHARED)
    cold: dict[str, float] = {}
    seconds = defaultdict[str, list[float]](list)
    missed = set[str]()

    def answered(engine: EngineProcess, name: str, seed: int) -> float:
        answer = send(engine, tokens, seed)
        if not is_hit_in(name, answer, tokens):
            missed.add(name)
        return answer.ttft_s

    for group in [(name,) for name in names] if model else [names]:
        with ExitStack() as stack:
            engines: dict[str, EngineProcess] = {}
            timed: dict[str, dict[str, Callable[[], float]]] = {}
            for name in group:
                say(f"vLLM: {name}, a prompt of {tokens:,} tokens")
                place = MEMORY if name == SHARED else parent
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-bench-", dir=place)))
                host = host_gib if model else min(host_gib, SMALL_HOST_GIB)
                spec = engine_specs(folder, tokens + 16, model=model, host_gib=host, remote_url=redis)[name]
                if not model:
                    spec = evolve(spec, options=SHARED_DEVICE)
                if name == SHARED:
                    store_and_end(spec, folder, tokens, SEVERAL_PROCESSES)
                engine = stack.enter_context(closing(EngineProcess(spec, folder, SEVERAL_PROCESSES)))
                cold[name] = first_time(engine, folder, tokens).ttft_s
                engines[name] = engine
                timed[name] = {name: partial(answered, engine, name, PROMPT)}
                if name in BELOW:
                    hold(engine, tokens)
                    timed[name][own_ram(name)] = partial(answered, engine, own_ram(name), OTHER_PROMPT)
                if (read := _plain_read(name, folder, redis)) is not None:
                    timed[name][plain_read_of(name)] = partial(seconds_of, read)
            for _, name in turns(group, QUICK_ROUNDS if quick else ROUNDS):
                send(engines[name], tokens)
                found = [{each: call() for each, call in timed[name].items()} for _ in range(ANSWERS)]
                for each in timed[name]:
                    seconds[each].append(statistics.median(times[each] for times in found))
    yield from comparisons(f"First token, {tokens:,} tokens", cold[OWN], seconds, missed, in_turn=not model)


def comparisons(
    title: str, computed: float, seconds: Mapping[str, Sequence[float]], missed: Set[str], *, in_turn: bool = True
) -> Iterator[Comparison]:
    """Tiers with each other, and each lower one with its bounds. None of a lower tier with answers that it `missed`.

    `seconds`: of each round, by name of a tier, or by that which `own_ram` or `plain_read_of` gives it. `in_turn`:
    whether all engines took part in each round. Rounds of engines that ran one after the other say nothing of each
    other: their medians are divided, without a verdict.
    """
    tiers = {name: seconds[name] for name in (*NAMES, REDIS) if name in seconds}
    notes = [f"not all hits, or from another tier: {', '.join(sorted(missed))}"] if missed else []
    if not in_turn:
        notes.append("the engines ran one after the other")
    targets = {RAM: RAM_TARGET} if in_turn and not missed & {OWN, RAM} else {}
    found = Comparison.of_rounds(title, "s", tiers, OWN, targets, note="; ".join(notes))
    ratios = found.ratios if in_turn else {}
    yield evolve(found, bars={COMPUTED: computed, **found.bars}, ratios=ratios, log=True)
    for name in BELOW:
        own, read = own_ram(name), plain_read_of(name)
        if name not in seconds or missed & {name, own}:
            continue
        if read in seconds:
            both = zip(seconds[own], seconds[read], strict=True)
            bound = {BOUND: [one + MARGIN * other for one, other in both]}
            shown = bound | {each: seconds[each] for each in (own, read, name)}
            yield Comparison.of_rounds(f"{title}, {name.removeprefix('lmkv ')}", "s", shown, BOUND, {name: 1.0})


def own_ram(name: str) -> str:
    """The name of a hit in the host memory of the engine that has the lower tier `name`."""
    return f"{name}'s own host memory"


def plain_read_of(name: str) -> str:
    """The name of a plain read of what the lower tier `name` has of a prompt."""
    return f"a plain read of {name}"


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
    """The cold prompt, after another one: only the first long prompt allocates buffers and loads kernels.

    Returns once the tier in `folder` has written the chunks of both.
    """
    for seed in (OTHER_PROMPT, PROMPT):
        answer = send(engine, tokens, seed)
        wait_until_written(folder)
    return answer


def hold(engine: EngineProcess, tokens: int) -> None:
    """Have the engine's host memory keep the other prompt, so that hits in it and in a lower tier are compared there.

    Engines differ: of two equal ones, one computes a step in 25 ms, and the other in 34.
    """
    send(engine, tokens, OTHER_PROMPT, prefetch=True)


def is_hit_in(name: str, answer: Answer, tokens: int) -> bool:
    """Whether most of a prompt was found, and all of that in the tier `name`."""
    below = sum(count for tier, count in answer.sources.items() if tier != "cpu")
    mixed = below and answer.sources.get("cpu")
    return answer.hit_tokens > tokens // 2 and (name in BELOW) == bool(below) and not mixed


def send(engine: EngineProcess, tokens: int, seed: int = PROMPT, *, prefetch: bool = False) -> Answer:
    """Send a prompt after a pause."""
    time.sleep(PAUSE)
    # A second token, since vLLM wants the report of a request that ends before it tells of its copy.
    return engine.send(seed, tokens, 2, prefetch=prefetch)
