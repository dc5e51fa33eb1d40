"""Failures outside of copies: the disk is away or silent, the engine sleeps, weights change."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.testing import ManualClock
from lmkv.testing.faults import FaultyBackend
from tests.kit import LIMIT, eventually
from tests.vllm.harness import CHUNK_BYTES, Engine, engine, external_hits, parameters, prompt

DEADLINE = 0.8
CROWD = [prompt(1000 + number, 300) for number in range(120)]
STEP = 0.01
"""Seconds on the engine's clock from one step to the next, where it does not stand still."""


@contextlib.contextmanager
def over_faulty_disk(model: Path, folder: Path, **options: Any) -> Iterator[tuple[Engine, FaultyBackend, ManualClock]]:
    """An engine whose clock stands still until it is moved; a slow disk takes its time by that clock."""
    clock, disks = ManualClock(), list[FaultyBackend]()

    def dawdle(seconds: float) -> None:
        end = clock() + seconds
        eventually(lambda: clock() >= end or not disks[0].latency)

    def make(*args: Any, **more: Any) -> FaultyBackend:
        disks.append(FaultyBackend(LocalDiskBackend(*args, **more), sleep=dawdle, max_hold=LIMIT))
        return disks[-1]

    extra = {
        "local_disk": str(folder),
        "max_local_disk_size": 1.0,
        "max_local_cpu_size": 64 * CHUNK_BYTES / 2**30,
        "disk_min_free": 0.0,
        "prefetch_deadline": DEADLINE,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.build.LocalDiskBackend", make)
        with engine(model, clock=clock, extra=extra, **options) as running:
            assert running.store.wait_indexed(LIMIT)
            yield running, disks[0], clock


def filled(model: Path, folder: Path, ids: list[int]) -> list[int]:
    with over_faulty_disk(model, folder) as (running, _, _):
        answer = running.ids([ids])[0]
        assert running.store.drain(LIMIT)
    return answer


def ask(running: Engine, name: str, ids: list[int], max_tokens: int = 2, **params: Any) -> None:
    running.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, parameters(max_tokens, **params))


def finish(running: Engine) -> dict[str, list[int]]:
    """The answers, by name, of all that was asked."""
    core, found = running.llm.llm_engine, dict[str, list[int]]()
    while core.has_unfinished_requests():
        found |= finished(core.step())
    return found


def finished(outputs: list[Any]) -> dict[str, list[int]]:
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}


def test_a_disk_that_hangs_adds_a_bounded_wait(model: Path, tmp_path: Path) -> None:
    ids = prompt(60, 1500)
    answer = filled(model, tmp_path, ids)
    with over_faulty_disk(model, tmp_path) as (running, disk, clock):
        core = running.llm.llm_engine
        disk.black_hole()
        try:
            ask(running, "waits", ids)
            begun = time.monotonic()
            for _ in range(50):
                core.step()
                assert not running.scheduler.running
            assert time.monotonic() - begun > 0.05, "such steps leave the interpreter to the disk's threads"
            clock.advance(DEADLINE + STEP)
            core.step()
            assert running.scheduler.running
            core.abort_request(["waits"])
            # After so long without an answer nobody waits for this disk any more.
            clock.advance(5.0)
            assert running.ids([ids]) == [answer]
        finally:
            disk.release()
        assert running.store.drain(LIMIT)
        running.assert_nothing_leaked()


def waits_of(running: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Filled with the seconds from a request's first lookup to its first answer, by request."""
    since: dict[str, float] = {}
    waits: dict[str, float] = {}
    look_up = running.connector.get_num_new_matched_tokens

    def noted(request: Any, computed: int) -> Any:
        answer = look_up(request, computed)
        since.setdefault(request.request_id, clock())
        if answer[0] is not None:
            waits.setdefault(request.request_id, clock() - since[request.request_id])
        return answer

    monkeypatch.setattr(running.connector, "get_num_new_matched_tokens", noted)
    return waits


def answers_of(running: Engine, clock: ManualClock, prompts: list[list[int]]) -> list[list[int]]:
    """A request comes each few steps, once nobody computes: none waits for room."""
    core, found, due = running.llm.llm_engine, dict[str, list[int]](), 0.0
    pending = list(enumerate(prompts))
    while pending or core.has_unfinished_requests():
        if pending and not running.scheduler.running and clock() >= due:
            number, ids = pending.pop(0)
            ask(running, str(number), ids)
            due = clock() + 5 * STEP
        found |= finished(core.step())
        clock.advance(STEP)
    return [found[str(number)] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def crowd(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder with the chunk and the tail of each prompt of the crowd, and the answers to them."""
    folder = tmp_path_factory.mktemp("crowd")
    with over_faulty_disk(model, folder) as (running, _, _):
        answers = [answer for ids in CROWD for answer in running.ids([ids], max_tokens=2)]
        assert running.store.drain(LIMIT)
    return folder, answers


@pytest.mark.parametrize("spoiled", ["hangs", "is slow", "fails"])
def test_many_requests_over_a_bad_disk_wait_for_the_deadline_at_most(
    model: Path, crowd: tuple[Path, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    full, answers = crowd
    folder = shutil.copytree(full, tmp_path / "kv", copy_function=os.link)
    with over_faulty_disk(model, folder, kv_cache_memory_bytes=256 << 20) as (running, disk, clock):
        assert running.store.stats().tiers[1].chunks == 2 * len(CROWD), "a chunk and a tail each"
        if spoiled == "hangs":
            disk.black_hole()
        disk.latency = 3.0 if spoiled == "is slow" else 0.0
        disk.error_rate = float(spoiled == "fails")
        waits = waits_of(running, clock, monkeypatch)
        try:
            assert answers_of(running, clock, CROWD) == answers
        finally:
            disk.latency = 0.0
            disk.release()
        assert len(waits) == len(CROWD)
        assert (disk.faults if spoiled == "fails" else max(waits.values())) > 0, "nothing was tested"
        assert max(waits.values()) <= DEADLINE + 2 * STEP
        assert running.store.drain(LIMIT)
        running.assert_nothing_leaked()


def test_a_disk_that_fails_opens_its_breaker_and_comes_back(model: Path, tmp_path: Path) -> None:
    ids, without = prompt(62, 1500), {"lmkv.skip_save": True}
    answer = filled(model, tmp_path, ids)
    with over_faulty_disk(model, tmp_path) as (running, disk, clock):
        # All six reads fail at once: the last failure opens the breaker before a second one costs a chunk.
        disk.black_hole()
        disk.error_rate = 1.0
        ask(running, "fails", ids, len(answer), **without)
        eventually(lambda: disk.calls["read"] == 6)
        disk.release()
        assert finish(running) == {"fails": answer}
        assert running.store.drain(LIMIT)
        assert running.store.stats().tiers[1].breaker == "open"
        disk.error_rate = 0.0
        assert external_hits(running.again([ids], params=without)[0]) == 0
        clock.advance(1.0)
        # One read is let through to try, the others are not.
        running.forget_local()
        assert running.ids([ids], params=without) == [answer]
        assert running.store.drain(LIMIT)
        assert running.store.stats().tiers[1].breaker == "closed"
        again = running.again([ids])[0]
        assert external_hits(again) == 1499
        assert list(again.outputs[0].token_ids) == answer
        running.assert_nothing_leaked()
