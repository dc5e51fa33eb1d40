"""I/O one step at a time: jobs stop before and after every backend call until they are told to go on.

Only one thread runs at any moment, so that whatever happens, happens again for the same choices.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lmkv.backends.wrapper import WrapperBackend
from lmkv.store.tiers.iopool import Deferred, Job, Priority

T = TypeVar("T")
LIMIT = 30.0


class _Running:
    """A job on a thread of its own that runs only while its owner waits for it."""

    def __init__(self, job: Job, pool: SteppedPool) -> None:
        self._pool: Any = pool
        # Plain locks, released by the other side: many times as fast as semaphores.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="lmkv-io-stepped", daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        threading.current_thread().stepped = self  # type: ignore[attr-defined]
        assert self._turn.acquire(timeout=LIMIT)
        try:
            deferred = Deferred()
            job.work(deferred)
            deferred.run(self._pool)
        except BaseException as error:  # noqa: BLE001
            self.error = error
        self.ended = True
        self._back.release()

    def pause(self) -> None:
        self._back.release()
        assert self._turn.acquire(timeout=LIMIT), "left alone"

    def step(self) -> None:
        """Go on to the next backend call, or to the end."""
        self._turn.release()
        assert self._back.acquire(timeout=LIMIT), "a job hangs"
        if self.error is not None:
            raise self.error


class Pausing(WrapperBackend):
    """Stops a stepped job before and after each call, and lets everybody else through."""

    def around(self, verb: str, call: Callable[[], T]) -> T:
        running = getattr(threading.current_thread(), "stepped", None)
        if running is None:
            return call()
        running.pause()
        result = call()
        running.pause()
        return result


class SteppedPool:
    """An `IOPool` that does nothing by itself: `begin` starts the next queued job, `step` moves one."""

    def __init__(self, threads: int, max_stores: int) -> None:
        self._size = threads
        self._max_stores = max_stores
        self._queues: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._running: list[_Running] = []
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if not self._queue(job)]

    def _queue(self, job: Job) -> bool:
        queue = self._queues[job.priority]
        if self._closed or (job.priority is Priority.STORE and len(queue) >= self._max_stores):
            return False
        queue.append(job)
        return True

    @property
    def pending(self) -> int:
        return len(self._running) + sum(map(len, self._queues.values()))

    def begin(self) -> None:
        """Start the first job, if there is one and a thread for it."""
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is not None and len(self._running) < self._size:
            self._running.append(_Running(queue.popleft(), self))

    def step(self, which: int) -> None:
        """Move one of the begun jobs."""
        if self._running:
            running = self._running[which % len(self._running)]
            running.step()
            if running.ended:
                self._running.remove(running)

    def drain(self, timeout: float) -> bool:
        while self.pending:
            self.begin()
            self.step(0)
        return True

    def close(self, timeout: float = 5.0) -> bool:
        self.drain(timeout)
        self._closed = True
        return True
