"""Measure what the disk tier keeps: real vLLM is killed with SIGKILL, started again, and asked the same.

The engine runs in a child process, in a process group that is made for it, so that it can be killed as a
whole and nothing else is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from lmkv.backends.disk.probe import try_folder
from lmkv.cli.measure.hit import (
    CHUNK_TOKENS,
    KV_ROOM,
    PROMPTS,
    Answer,
    Machine,
    Plan,
    Progress,
    ask,
    ask_in_turn,
    describe_machine,
    fastest,
    prepare_environment,
    running_engine,
    same_outputs,
)
from lmkv.errors import NoSpaceError

START_TIMEOUT = 900.0
ANSWER_TIMEOUT = 1800.0
WRITE_TIMEOUT = 120.0
END_TIMEOUT = 60.0
FILES = "*.kv1"
"""Names of complete chunks, see docs/format.md."""


@frozen(kw_only=True)
class RestartMeasurement:
    """`disk_ttft_s`: after the kill and the restart. `speedup`: disk against cold."""

    prompt_tokens: int
    hit_tokens: int
    hit_tier: str
    cold_ttft_s: float
    ram_ttft_s: float
    disk_ttft_s: float
    speedup: float
    outputs_equal: bool
    direct_io: bool
    engine: str
    device: str
    layers: int
    dtype: str
    hit_as_expected: bool

    @property
    def passed(self) -> bool:
        return self.hit_as_expected and self.outputs_equal

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_restart(plan: Plan, folder: Path, disk: Path, say: Progress = print) -> RestartMeasurement:
    """Run `plan` with a model written into `folder`, made if missing, and a disk tier below `disk`."""
    prepare_environment()
    say("trying the disk")
    facts = try_folder(disk)
    plan = evolve(plan, options={**disk_settings(plan, disk), **plan.options})
    needed = (plan.settings["max_local_disk_size"] + plan.settings["disk_min_free"]) * 2**30
    if facts.free_bytes < needed:
        reason = f"{needed / 2**30:.1f} GB are wanted, {facts.free_bytes / 2**30:.1f} GB are free"
        raise NoSpaceError("disk", "demo", reason=reason)
    say("writing a small model with random weights")
    plan.model.write(folder)
    before = run_and_kill(plan, folder, disk, say)
    with engine_process(plan, folder, "starting vLLM again", say) as engine:
        warm_up(engine, plan, PROMPTS + 1, say)
        after = ask_in_turn("from disk", plan, engine.ask, say)
        return summarize(plan, *before, after, engine.machine, facts.direct_io)


def disk_settings(plan: Plan, disk: Path) -> dict[str, Any]:
    """Room for every prompt. What is shown is the disk, even where it is slower than computing."""
    prompts_gb = plan.max_tokens * plan.model.kv_bytes_per_token * (PROMPTS + 2) / 2**30
    return {
        "local_disk": str(disk),
        "max_local_disk_size": KV_ROOM * prompts_gb + 0.1,
        "disk_min_free": 1.0,
        "prefetch_deadline": 60.0,
        "load_or_recompute": False,
    }


def run_and_kill(plan: Plan, folder: Path, disk: Path, say: Progress) -> tuple[list[Answer], list[Answer]]:
    """The prompts cold, then from host memory; the engine is killed once their chunks are on disk."""
    with engine_process(plan, folder, "starting vLLM", say) as engine:
        warm_up(engine, plan, PROMPTS, say)
        cold = ask_in_turn("cold", plan, engine.ask, say)
        warm = ask_in_turn("from memory", plan, engine.ask, say)
        wait_for_files(disk, (PROMPTS + 1) * (plan.tokens // CHUNK_TOKENS), say)
        say("killing vLLM")
        engine.kill()
    return cold, warm


def wait_for_files(disk: Path, wanted: int, say: Progress) -> None:
    """Stores reach the disk in the background: wait, but not for ever. What is missing will be a miss."""
    say(f"waiting for {wanted} chunks to be on disk")
    deadline = time.monotonic() + WRITE_TIMEOUT
    while (found := sum(1 for _ in disk.rglob(FILES))) < wanted:
        if time.monotonic() > deadline:
            say(f"only {found} of {wanted} chunks are on disk after {WRITE_TIMEOUT:.0f} s")
            return
        time.sleep(0.05)


def warm_up(engine: EngineProcess, plan: Plan, number: int, say: Progress) -> None:
    """With a prompt that nobody has seen: what the first long one alone pays would flatter or blame lmkv."""
    say(f"warm-up: {plan.tokens:,} tokens")
    engine.ask(number)


class EngineProcess:
    """vLLM in a child process that answers one prompt at a time."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._wire, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(plan, folder, theirs), name="lmkv-demo-engine")
        self._process.start()
        theirs.close()
        self._killed = False

    def wait_ready(self) -> None:
        self.machine: Machine = self._receive(START_TIMEOUT)

    def ask(self, number: int) -> Answer:
        self._wire.send(number)
        answer: Answer = self._receive(ANSWER_TIMEOUT)
        return answer

    def _receive(self, timeout: float) -> Any:
        if not self._wire.poll(timeout):
            raise TimeoutError(f"the engine did not answer within {timeout:.0f} s")
        try:
            return self._wire.recv()
        except EOFError:
            self._process.join(END_TIMEOUT)
            raise ChildProcessError(f"the engine ended with {self._process.exitcode}") from None

    def kill(self) -> None:
        """SIGKILL for the child and all that it started. Idempotent."""
        if self._killed:
            return
        self._killed = True
        assert self._process.pid is not None
        # The group is there unless the child died before it could make it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(END_TIMEOUT)
        self._wire.close()


@contextmanager
def engine_process(plan: Plan, folder: Path, what: str, say: Progress) -> Iterator[EngineProcess]:
    """A process that is ready to answer; killed at the end, if it was not before."""
    say(what)
    engine = EngineProcess(plan, folder)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


def serve(plan: Plan, folder: Path, wire: Connection) -> None:
    """In the child: answer until the parent is gone."""
    os.setpgid(0, 0)
    with running_engine(plan, folder) as llm:
        wire.send(describe_machine())
        with suppress(EOFError):
            while True:
                wire.send(ask(llm, plan.prompt(wire.recv())))


def summarize(
    plan: Plan,
    cold: list[Answer],
    warm: list[Answer],
    after: list[Answer],
    machine: Machine,
    direct_io: bool,
) -> RestartMeasurement:
    """The best of times, since a disturbance only ever adds; the worst of everything else."""
    cold_ttft_s, disk_ttft_s = fastest(cold), fastest(after)
    tiers = Counter[str]()
    for answer in after:
        tiers.update(answer.sources)
    hit_tokens = min(answer.hit_tokens for answer in after)
    from_disk = min(answer.sources.get("disk", 0) for answer in after)
    return RestartMeasurement(
        prompt_tokens=plan.tokens,
        hit_tokens=hit_tokens,
        hit_tier=max(tiers, key=lambda tier: tiers[tier]) if hit_tokens else "none",
        cold_ttft_s=cold_ttft_s,
        ram_ttft_s=fastest(warm),
        disk_ttft_s=disk_ttft_s,
        speedup=cold_ttft_s / disk_ttft_s,
        outputs_equal=same_outputs(cold, warm, after),
        direct_io=direct_io,
        layers=plan.model.layers,
        dtype=plan.model.dtype,
        hit_as_expected=min(hit_tokens, from_disk) >= plan.expected_hit,
        **asdict(machine),
    )
