"""I/O one step at a time: jobs stop before and after every backend call until they are told to go on.

Only one thread runs at any moment, so that whatever happens, happens again for the same choices.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

import lmkv.store.tiered
from lmkv.backends.adapters import WrapperBackend
from lmkv.store.iopool import Deferred, Job, Priority
from tests.kit import LIMIT

T = TypeVar("T")


class _Running:
    """A job on a thread of its own that runs only while its owner waits for it."""

    def __init__(self, job: Job, pool: SteppedPool) -> None:
        self._pool: Any = pool
        # FallbackLRU locks, released by the other side: many times as fast as semaphores.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self.ended = False
        self.sleeps: Callable[[], bool] = lambda: False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="lmkv-io-stepped", daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        threading.current_thread().stepped = self  # type: ignore[attr-defined]
        assert self._turn.acquire(timeout=LIMIT)
        try:
            after = Deferred()
            job.work(after)
            after.run(self._pool.submit)
        except BaseException as error:  # noqa: BLE001
            self.error = error
        self.ended = True
        self._back.release()

    def pause(self) -> None:
        self._back.release()
        assert self._turn.acquire(timeout=LIMIT), "left alone"

    def sleep(self, while_: Callable[[], bool]) -> None:
        self.sleeps = while_
        while while_():
            self.pause()
        self.sleeps = lambda: False

    def step(self) -> None:
        """Go on to the next backend call, or to the end."""
        self._turn.release()
        assert self._back.acquire(timeout=LIMIT), "a job hangs"
        if self.error is not None:
            raise self.error


def sleep(while_: Callable[[], bool]) -> None:
    """Have the job that calls a backend stop for as long as `while_` is true."""
    running = _running_here()
    assert running is not None
    running.sleep(while_)


def _running_here() -> _Running | None:
    return getattr(threading.current_thread(), "stepped", None)


class Pausing(WrapperBackend):
    """Stops a stepped job before and after each call, and lets everybody else through."""

    def around(self, verb: str, call: Callable[[], T]) -> T:
        running = _running_here()
        if running is None:
            return call()
        running.pause()
        result = call()
        running.pause()
        return result


class SteppedPool:
    """An `IOPool` that does nothing by itself: `begin` starts the next queued job, `step` moves one."""

    def __init__(self, threads: int) -> None:
        self._size = threads
        self._queues: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._running: list[_Running] = []
        self._closed = False

    @staticmethod
    def runs_here() -> bool:
        return False

    def submit(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if not self._queue(job)]

    def _queue(self, job: Job) -> bool:
        if not self._closed:
            self._queues[job.priority].append(job)
        return not self._closed

    def withdraw(self, lane: str, first: Priority) -> list[Job]:
        taken = [job for at, queue in self._queues.items() if at >= first for job in queue if job.lane == lane]
        for at, queue in self._queues.items():
            self._queues[at] = deque(job for job in queue if at < first or job.lane != lane)
        return taken

    @property
    def pending(self) -> int:
        return len(self._running) + sum(map(len, self._queues.values()))

    def begin(self) -> None:
        """Start the first job, if there is one and a thread for it."""
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is not None and len(self._running) < self._size:
            self._running.append(_Running(queue.popleft(), self))

    def step(self, which: int) -> bool:
        """Move one of the begun jobs that do not sleep; whether there was one."""
        awake = [running for running in self._running if not running.sleeps()]
        if awake:
            running = awake[which % len(awake)]
            running.step()
            if running.ended:
                self._running.remove(running)
        return bool(awake)

    def move(self, choices: Iterable[int]) -> None:
        """Begin and step, once for each choice, while there is anything to move."""
        for which in choices:
            self.begin()
            if not self.step(which):
                break

    def drain(self, timeout: float) -> bool:
        """Do all jobs but those that sleep."""
        self.move(itertools.repeat(0))
        return not self.pending

    def close(self, timeout: float = 5.0) -> bool:
        self.drain(timeout)
        self._closed = True
        return True


@contextmanager
def stepped() -> Iterator[None]:
    """Have stores that are made in here get a `SteppedPool`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmkv.store.tiered, "IOPool", SteppedPool)
        yield
