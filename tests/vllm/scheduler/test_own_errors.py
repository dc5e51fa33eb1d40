"""Errors of lmkv's own in the middle of a schedule, answered as the connector answers them: nothing wrong is stored."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from lmkv.vllm.plan import JobReport, WorkerReport
from lmkv.vllm.plan.request import Storing
from lmkv.vllm.scheduler.context import Job
from lmkv.vllm.scheduler.loads import Loads
from lmkv.vllm.scheduler.observer import RecentRequests
from tests.tables import raised
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
    made = SimulatedVLLM(seed, **{"ram_chunks": 30, "prefix_caching": True, "local_hits": 0.0, **options})
    answer_errors(made)
    return made


def answer_errors(engine: SimulatedVLLM) -> None:
    """Answer exceptions of `update_state_after_alloc` as `LMKVConnector` does."""
    scheduler: Any = engine.scheduler
    allocated = scheduler.update_state_after_alloc

    def guarded(request: Any, tables: Any, tokens: int) -> None:
        try:
            allocated(request, tables, tokens)
        except RuntimeError:
            if tokens > 0:
                scheduler.fail_load(request.request_id, tables, tokens)

    scheduler.update_state_after_alloc = guarded


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def ask(engine: SimulatedVLLM, name: str, tokens: list[int], upto: int = 1) -> SimulatedRequest:
    return engine.begin(name, tokens, upto)


def stored(engine: SimulatedVLLM, tokens: list[int]) -> None:
    """A request has stored this prompt, of which vLLM has forgotten all."""
    engine.serve("stores", tokens)
    engine.forget()


@pytest.mark.parametrize("after", [False, True], ids=["before it is ordered", "after"])
@pytest.mark.parametrize("shared", [False, True], ids=["no prefix cache", "prefix cache"])
def test_what_is_computed_from_a_load_that_could_not_be_ordered_is_not_stored(
    seed: int, shared: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Once(monkeypatch, Loads, "plan", "longer", after=after)
    with engine(seed, prefix_caching=shared) as simulated:
        first = list(range(20))
        longer = first + list(range(49, 37, -1))
        for name, tokens in (("stores", first), ("longer", longer), ("again", [*longer, 1])):
            ask(simulated, name, tokens)
            simulated.finish()
            simulated.forget()
        assert error.raised


def test_a_load_that_had_begun_before_an_error_ends_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = Once(monkeypatch, RecentRequests, "scheduled", "fails")
    options = {"num_blocks": 34, "ram_chunks": 8, "lower_chunks": 60, "prefix_caching": False, "io_moves": 1}
    with engine(seed, depth=2, **options) as simulated:
        rng = random.Random(seed)
        tokens = [rng.randrange(50) for _ in range(64)]
        stored(simulated, tokens)
        ask(simulated, "fails", [*tokens, 7], 3)
        for _ in range(4):
            simulated.step()
        for number in range(3):
            ask(simulated, f"other {number}", [rng.randrange(50) for _ in range(40)], 4)
        simulated.finish()
        assert error.raised


def test_an_error_reports_none_of_the_blocks_that_are_shared_with_a_running_request(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = Once(monkeypatch, Loads, "begin", "fails")
    with engine(seed, num_blocks=34, depth=2) as simulated:
        rng = random.Random(seed)
        tokens = [rng.randrange(50) for _ in range(64)]
        stored(simulated, tokens)
        runs = simulated.begin("runs", [*tokens[:24], 1, 2, 3], 20, **{"lmkv.skip_load": True})
        for _ in range(12):
            simulated.step()
        assert runs.status == "running"
        ask(simulated, "fails", [*tokens, 7], 3)
        simulated.finish()
        assert error.raised


@pytest.mark.parametrize("options", [{}, {"ranks": 2}, {"device": True}], ids=["one rank", "two ranks", "a device"])
@pytest.mark.parametrize("where", ["the report", "the end of a load", "the end of a store"])
def test_no_end_that_is_lost_keeps_anybody_waiting(seed: int, where: str, options: dict[str, Any]) -> None:
    with engine(seed, **options) as simulated:
        scheduler: Any = simulated.scheduler
        telemetry = scheduler.observer.telemetry
        owner, name = {
            "the report": (scheduler, "_note"),
            "the end of a load": (telemetry, "loaded"),
            "the end of a store": (telemetry, "stored"),
        }[where]
        method, raised = getattr(owner, name), []

        def once(*arguments: Any, **named: Any) -> Any:
            if not raised and (name != "_note" or scheduler.loads.busy):
                raised.append(True)
                raise RuntimeError("injected")
            return method(*arguments, **named)

        setattr(owner, name, once)
        tokens = list(range(40))
        stored(simulated, tokens)
        ask(simulated, "first", tokens, 2)
        for _ in range(30):
            simulated.step()
        ask(simulated, "second", tokens, 2)
        simulated.finish()
        assert raised
        assert not scheduler.busy


def test_an_error_behind_one_end_keeps_no_other_from_being_noted() -> None:
    with engine(0) as simulated:
        scheduler: Any = simulated.scheduler
        noted = []

        class Planner:
            def ended(self, number: int, job: Job, report: JobReport) -> None:
                noted.append(number)
                raise RuntimeError("injected")

        for number in (1, 2):
            scheduler._jobs.begin(number, Job(planner=Planner(), request=scheduler))
        scheduler.on_report(WorkerReport({1: JobReport(1, ok=True), 2: JobReport(1, ok=True)}))
    assert noted == [1, 2]


def test_a_lost_report_taints_what_is_being_stored(seed: int) -> None:
    """It may have told of a load that failed, from whose blocks these chunks were computed."""
    with engine(seed, device=True) as simulated:
        scheduler: Any = simulated.scheduler
        ask(simulated, "stores", list(range(40)))
        while not scheduler.busy:
            simulated.step()

        def broken(report: WorkerReport) -> None:
            raise RuntimeError("injected")

        scheduler._note, note = broken, scheduler._note
        scheduler.on_report(WorkerReport())
        scheduler._note = note
        assert all(job.distrusted for job in scheduler._jobs.of(Job))
        simulated.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_that_could_not_be_ordered_keeps_nobody_waiting(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load counts on its copy, which no worker will report."""
    with engine(seed, load_mode="async", num_blocks=60) as running:
        plan_step = running.scheduler.plan_step

        def guarded(*step: Any) -> None:
            # As the connector does.
            try:
                plan_step(*step)
            except RuntimeError:
                running.scheduler.loads.cancel()

        monkeypatch.setattr(running.scheduler, "plan_step", guarded)
        tokens = list(range(44))
        stored(running, tokens)
        once = Once(monkeypatch, Loads, "_plan_window", "loads")
        running.serve("loads", tokens)
        assert once.raised


def test_an_error_at_the_end_of_a_store_keeps_nothing_from_what_waits_for_it() -> None:
    called: list[str] = []

    def fails() -> None:
        called.append("fails")
        raise RuntimeError("injected")

    storing = Storing(copying=1)
    for call in (partial(called.append, "first"), fails, partial(called.append, "last")):
        storing.once_stored(call)
    raised(RuntimeError, "injected", storing.copy_ended)
    assert called == ["first", "fails", "last"]
