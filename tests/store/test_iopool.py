"""IOPool: the order of service, what it refuses, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lmkv.store.guards import attempt
from lmkv.store.iopool import Deferred, IOPool, Job, Priority
from tests.kit import LIMIT, raised

LOAD, PREFETCH, DELETION, STORE = Priority


def job(
    work: Callable[[], None], priority: Priority = LOAD, refused: Callable[[], None] = lambda: None, lane: str = ""
) -> Job:
    return Job(lambda after: work(), priority, lambda after: refused(), lane)


class Gate:
    """Work that waits until it is opened; `begun_by(count)` waits until so many threads do it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.begun.release()
        assert self.opened.wait(LIMIT)

    def begun_by(self, count: int) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=LIMIT)


@contextmanager
def busy(threads: int, begun: int, priority: Priority = LOAD, **options: Any) -> Iterator[tuple[IOPool, Gate]]:
    """A pool of which so many threads do work that waits; at the end they go on, and it is closed."""
    pool, gate = IOPool(threads, **options), Gate()
    pool.submit([job(gate, priority) for _ in range(begun)])
    gate.begun_by(begun)
    yield pool, gate
    gate.opened.set()
    assert pool.close(LIMIT)


def test_loads_go_before_prefetches_before_deletions_before_stores() -> None:
    pool, gates = IOPool(2, name="ordered"), {"ordered-0": Gate(), "ordered-1": Gate()}
    order: list[str] = []

    def wait() -> None:
        gates[threading.current_thread().name]()

    pool.submit([job(wait), job(wait)])
    for gate in gates.values():
        gate.begun_by(1)
    names = {"l": LOAD, "p": PREFETCH, "d": DELETION, "s": STORE}
    for name, priority in [*reversed(names.items()), *reversed(names.items())]:
        pool.submit([job(lambda name=name: order.append(name), priority)])  # type: ignore[misc]
    done = threading.Event()
    pool.submit([job(done.set, STORE)])
    gates["ordered-0"].opened.set()
    assert done.wait(LIMIT)
    assert "".join(order) == "llppddss"
    gates["ordered-1"].opened.set()
    assert pool.close(LIMIT)


@pytest.mark.parametrize(("threads", "storing"), [(1, 1), (2, 1), (4, 3), (16, 12)])
@pytest.mark.parametrize("priority", [DELETION, STORE])
def test_some_threads_are_kept_for_loads(threads: int, storing: int, priority: Priority) -> None:
    with busy(threads, storing, priority) as (pool, gate):
        pool.submit([job(gate, priority) for _ in range(20)])
        free = max(threads, 2) - storing
        for _ in range(3):
            # They meet only if each has a thread; and meet again only if none of these took a store meanwhile.
            met = threading.Barrier(free + 1)
            pool.submit([job(lambda met=met: met.wait(LIMIT)) for _ in range(free)])  # type: ignore[misc]
            met.wait(LIMIT)
        assert not gate.begun.acquire(blocking=False)


@pytest.mark.parametrize("priority", Priority)
def test_a_lane_that_stands_still_delays_no_other(priority: Priority) -> None:
    pool, gate = IOPool(2), Gate()
    pool.submit([job(gate, priority, lane="a") for _ in range(3)])
    gate.begun_by(1 if priority >= DELETION else 2)
    for other in Priority:
        done = threading.Event()
        assert pool.submit([job(done.set, other, lane="b")]) == []
        assert done.wait(LIMIT)
    assert len(pool.withdraw("a", priority)) == (2 if priority >= DELETION else 1)
    gate.opened.set()
    assert pool.close(LIMIT)


def test_what_waits_in_a_lane_can_be_withdrawn_from_a_priority_on() -> None:
    with busy(2, 2) as (pool, _):
        jobs = [job(lambda: None, priority) for priority in Priority]
        assert pool.submit(jobs) == []
        assert pool.withdraw("", DELETION) == jobs[2:]
        assert pool.withdraw("", LOAD) == jobs[:2]
        assert pool.pending == 2


def test_threads_come_with_the_work_and_go_at_the_end() -> None:
    pool = IOPool(3, name="counted")

    def alive() -> int:
        return sum(thread.name.startswith("counted") for thread in threading.enumerate())

    assert alive() == 0
    pool.submit([job(lambda: None)])
    assert pool.drain(LIMIT)
    assert alive() == 1
    gate = Gate()
    pool.submit([job(gate) for _ in range(10)])
    gate.begun_by(3)
    assert alive() == 3
    gate.opened.set()
    assert pool.close(LIMIT)
    assert pool.close(LIMIT)
    assert alive() == 0


class PanicError(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, PanicError, SystemExit])
def test_a_job_that_raises_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    pool, ran = IOPool(2), threading.Event()

    def explode() -> None:
        raise kind("on purpose")

    pool.submit([job(explode) for _ in range(10)])
    pool.submit([job(ran.set)])
    assert ran.wait(LIMIT)
    assert pool.drain(LIMIT)
    assert sum("on purpose" in str(record.exc_info) for record in caplog.records) == 10
    assert pool.close(LIMIT)


def test_draining_and_closing_are_bounded_while_a_job_hangs() -> None:
    with busy(2, 2) as (pool, gate):
        never = threading.Event()
        pool.submit([job(never.set)])
        assert not pool.drain(0.01)
        assert not pool.close(0.01)
        refused = [job(lambda: None)]
        assert pool.submit(refused) == refused
        gate.opened.set()
        assert pool.drain(LIMIT)
        assert not never.is_set(), "what still waited when it was closed is dropped"


def test_close_finishes_what_waits() -> None:
    pool, done = IOPool(2), []
    pool.submit([job(lambda: done.append(1), STORE) for _ in range(50)])
    assert pool.close(LIMIT)
    assert len(done) == 50


def test_a_machine_without_threads_to_spare_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool, jobs = IOPool(2), [job(lambda: None), job(lambda: None)]

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "lmkv"):
        patched.setattr(threading.Thread, "start", start)
        assert pool.submit(jobs) == jobs
    assert pool.pending == 0
    assert "can't start new thread" in caplog.text
    assert pool.submit(jobs) == []
    assert pool.close(LIMIT)


def test_what_is_deferred_is_submitted_refused_tail_first_and_called_last() -> None:
    pool, log, after = IOPool(2), list[object](), Deferred()
    assert pool.close(LIMIT)
    for number in range(4):
        after.jobs.append(job(lambda: None, STORE, lambda number=number: log.append(number)))  # type: ignore[misc]

    def plan_more(after: Deferred) -> None:
        log.append("call")
        after.callbacks.append(lambda after: log.append("planned by a call"))

    after.callbacks.append(plan_more)
    after.run(pool.submit)
    assert log == [3, 2, 1, 0, "call", "planned by a call"]


def test_attempt_turns_errors_into_values_and_lets_ends_through() -> None:
    def stop() -> str:
        raise KeyboardInterrupt

    def panic() -> str:
        raise PanicError("on purpose")

    assert attempt(lambda: "fine", str) == "fine"
    assert attempt(lambda: str(1 // 0), lambda error: type(error).__name__) == "ZeroDivisionError"
    assert attempt(panic, str) == "PanicError('on purpose')"
    raised(KeyboardInterrupt, "", attempt, stop, str)
