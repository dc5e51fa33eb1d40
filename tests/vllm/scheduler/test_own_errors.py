"""Errors of lmkv's own in the middle of a schedule, answered as the connector answers them: nothing wrong is stored."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest

from lmkv.vllm.block_map import Group
from lmkv.vllm.observe.recent import RecentRequests
from lmkv.vllm.scheduler.load_jobs import LoadJobs
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

SEEDS = range(10)


class Once:
    """Raises in one call of a class's method, for the request of this name, before or after the method's own work."""

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: type, name: str, request_id: str, *, after: bool = False
    ) -> None:
        self.raised = False
        method = getattr(owner, name)

        def broken(this: Any, state: Any, *rest: Any) -> Any:
            due = not self.raised and state.request_id == request_id
            answer = method(this, state, *rest) if after or not due else None
            if due:
                self.raised = True
                raise RuntimeError("injected")
            return answer

        patch.setattr(owner, name, broken)


def engine(seed: int, **options: Any) -> SimulatedVLLM:
    made = SimulatedVLLM(random.Random(seed), groups=[Group(4)], chunk_size=8, **options)
    made.local_hits = 0.0
    answer_errors(made)
    return made


def answer_errors(engine: SimulatedVLLM) -> None:
    """Answer exceptions as `LMKVConnector` does."""
    scheduler: Any = engine.scheduler
    allocated, on_report = scheduler.update_state_after_alloc, scheduler.on_report

    def guarded(request: Any, tables: Any, tokens: int) -> None:
        try:
            allocated(request, tables, tokens)
        except RuntimeError:
            if tokens > 0:
                scheduler.fail_load(request.request_id, tables, tokens)

    def reported(report: Any) -> None:
        try:
            on_report(report)
        except RuntimeError:
            scheduler.on_lost_report(report)

    scheduler.update_state_after_alloc, scheduler.on_report = guarded, reported


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def ask(engine: SimulatedVLLM, name: str, tokens: list[int], upto: int = 1) -> SimulatedRequest:
    request = SimulatedRequest(name, list(tokens), len(tokens), upto, "a")
    engine.add(request)
    return request


@pytest.mark.parametrize("after", [False, True], ids=["before it is ordered", "after"])
@pytest.mark.parametrize("shared", [False, True], ids=["no prefix cache", "prefix cache"])
def test_what_is_computed_from_a_load_that_could_not_be_ordered_is_not_stored(
    seed: int, shared: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Once(monkeypatch, LoadJobs, "order", "longer", after=after)
    with closing(engine(seed, num_blocks=90, ram_chunks=30, prefix_caching=shared)) as simulated:
        first = list(range(20))
        longer = first + list(range(49, 37, -1))
        for name, tokens in (("stores", first), ("longer", longer), ("again", [*longer, 1])):
            ask(simulated, name, tokens)
            simulated.finish()
            simulated.forget()
        assert error.raised
        assert not simulated.wrong


def test_a_load_that_had_begun_before_an_error_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Once(monkeypatch, RecentRequests, "scheduled", "fails")
    options = {
        "num_blocks": 34,
        "ram_chunks": 8,
        "lower_chunks": 60,
        "depth": 2,
        "prefix_caching": False,
        "io_moves": 1,
    }
    with closing(engine(seed, **options)) as simulated:
        rng = random.Random(seed)
        tokens = [rng.randrange(50) for _ in range(64)]
        ask(simulated, "stores", tokens)
        simulated.finish()
        simulated.forget()
        ask(simulated, "fails", [*tokens, 7], 3)
        for _ in range(4):
            simulated.step()
        for number in range(3):
            ask(simulated, f"other {number}", [rng.randrange(50) for _ in range(40)], 4)
        simulated.finish()
        assert error.raised
        assert not simulated.wrong


def test_an_error_reports_none_of_the_blocks_that_are_shared_with_a_running_request(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Once(monkeypatch, LoadJobs, "begin", "fails")
    with closing(engine(seed, num_blocks=34, ram_chunks=30, depth=2, prefix_caching=True)) as simulated:
        rng = random.Random(seed)
        tokens = [rng.randrange(50) for _ in range(64)]
        ask(simulated, "stores", tokens)
        simulated.finish()
        simulated.forget()
        runs = SimulatedRequest("runs", [*tokens[:24], 1, 2, 3], 27, 20, "a", {"lmkv.skip_load": True})
        simulated.add(runs)
        for _ in range(12):
            simulated.step()
        assert runs.status == "running"
        ask(simulated, "fails", [*tokens, 7], 3)
        simulated.finish()
        assert error.raised
        assert not simulated.wrong


@pytest.mark.parametrize("where", ["the report", "the end of a load", "the end of a store"])
def test_no_end_that_is_lost_keeps_anybody_waiting(seed: int, where: str) -> None:
    raised = False
    simulated = SimulatedVLLM(
        random.Random(seed), groups=[Group(4)], chunk_size=8, num_blocks=90, ram_chunks=30, prefix_caching=True
    )
    scheduler: Any = simulated.scheduler
    telemetry = scheduler._observer.telemetry
    jobs = scheduler.storing if "store" in where else scheduler.loading.jobs
    owner, name = (
        (scheduler, "on_report") if "report" in where else (telemetry, "stored" if "store" in where else "loaded")
    )
    method = getattr(owner, name)

    def once(*arguments: Any, **options: Any) -> Any:
        nonlocal raised
        if not raised and (name != "on_report" or jobs.busy):
            raised = True
            raise RuntimeError("injected")
        return method(*arguments, **options)

    setattr(owner, name, once)
    simulated.local_hits = 0.0
    answer_errors(simulated)
    tokens = list(range(40))
    with closing(simulated):
        ask(simulated, "stores", tokens)
        simulated.finish()
        simulated.forget()
        ask(simulated, "first", tokens, 2)
        for _ in range(30):
            simulated.step()
        ask(simulated, "second", tokens, 2)
        simulated.finish()
        assert not simulated.wrong
    assert raised
