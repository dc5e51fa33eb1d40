"""The threads that read and write lower tiers.

The store plans jobs while it holds its lock, and queues the jobs afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

from attrs import define, field

from lmkv.store.guards import Waker, locked

_TRIES = 10
"""Number of times that one job or callback is tried again after a Ctrl-C."""


logger = logging.getLogger(__name__)


class Priority(IntEnum):
    """The priority of a job. Jobs with the lowest number run first: loads that a request waits for, then prefetches,
    deletions, stores.
    """

    LOAD = 0
    PREFETCH = 1
    DELETION = 2
    STORE = 3


@define(eq=False)
class Job:
    """A job for an I/O thread. `work` is the function to run, which handles its own errors.

    `refused`: the function that runs if the pool refuses the job. Each function gets a `Deferred` for work that runs
    afterwards. `lane`: the name of the tier.
    """

    work: Callable[[Deferred], None]
    priority: Priority
    refused: Callable[[Deferred], None]
    lane: str = ""


@define(eq=False)
class Deferred:
    """Work that is planned while a lock is held, and that runs after the lock is released.

    `jobs` are queued first; then `callbacks` run, which must not raise.
    """

    jobs: list[Job] = field(factory=list)
    callbacks: deque[Callable[[Deferred], None]] = field(factory=deque)

    def run(self, submit: Callable[[Sequence[Job]], list[Job]]) -> None:
        """Queue all jobs and run all callbacks, including those that are added meanwhile. The caller holds no lock.

        `submit`: `IOPool.submit`, which queues jobs and returns the refused jobs. If one callback raises, the others
        still run; the exception is raised at the end. If Ctrl-C interrupts a callback, the callback runs again.
        """
        raised: BaseException | None = None
        tries = _TRIES
        while self.jobs or self.callbacks:
            try:
                self._run(submit)
            except BaseException as error:
                raised, tries = error, tries - 1
                if isinstance(error, Exception) or not tries:
                    tries = _TRIES
                    self._give_up()
        if raised is not None:
            raise raised

    def _run(self, submit: Callable[[Sequence[Job]], list[Job]]) -> None:
        if self.jobs:
            # A chain is unreferenced tail first: its head is evicted last.
            self.callbacks.extendleft(job.refused for job in submit(self.jobs))
            self.jobs = []
        while self.callbacks and not self.jobs:
            self.callbacks[0](self)
            self.callbacks.popleft()

    def _give_up(self) -> None:
        """Skip the jobs or the callback that have just failed."""
        if self.jobs:
            self.callbacks.extendleft(job.refused for job in self.jobs)
            self.jobs = []
        else:
            self.callbacks.popleft()


def deletion(work: Callable[[], None], lane: str) -> Job:
    """Return a job that deletes chunks. A pool may refuse the job without harm: the store has already stopped serving
    these chunks.
    """
    return Job(lambda after: work(), Priority.DELETION, lambda after: None, lane)


@define(eq=False)
class _Lane:
    """The queues of one tier's jobs. `threads`: the number of the tier's threads. `running`: the number of running
    jobs.
    """

    wakeup: threading.Condition
    threads: int = 0
    running: int = 0
    queues: dict[Priority, deque[Job]] = field(init=False, factory=lambda: {priority: deque() for priority in Priority})

    @property
    def pending(self) -> int:
        """Number of jobs that are queued or running."""
        return self.running + sum(map(len, self.queues.values()))

    def next(self, loads_only: bool) -> Job | None:
        for priority in (Priority.LOAD, Priority.PREFETCH) if loads_only else Priority:
            if self.queues[priority]:
                return self.queues[priority].popleft()
        return None

    def take(self, first: Priority = Priority.LOAD) -> list[Job]:
        """Remove and return the waiting jobs of the priority `first` and of all less urgent priorities."""
        queues = [queue for priority, queue in self.queues.items() if priority >= first]
        taken = [job for queue in queues for job in queue]
        for queue in queues:
            queue.clear()
        return taken


class IOPool:
    """Runs jobs on daemon threads, most urgent priority first. Thread-safe.

    Each tier has a lane: its own queues and up to `threads` threads (at least two). So a tier that hangs delays no
    other tier. A quarter of a lane's threads, at least one, runs only loads and prefetches. So loads never wait for a
    write to end. A closed pool refuses jobs.
    """

    def __init__(self, threads: int = 16, name: str = "lmkv-io") -> None:
        self._size = max(threads, 2)
        self._storing = self._size - max(self._size // 4, 1)
        self._name = name
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()
        self._idle = Waker()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> list[Job]:
        """Queue jobs. Returns the refused jobs: all if the pool is closed, and those of a tier whose threads cannot be
        started.
        """
        with self._lock:
            lanes = {name: self._lane(name) for name in {job.lane for job in jobs}}
            queued = [self._queue(lanes[job.lane], job) for job in jobs]
            for lane in lanes.values():
                self._start_threads(lane)
                if not lane.threads:
                    lane.take()
                lane.wakeup.notify_all()
            return [job for job, ok in zip(jobs, queued, strict=True) if not (ok and lanes[job.lane].threads)]

    @locked
    def _lane(self, name: str) -> _Lane:
        if name not in self._lanes:
            self._lanes[name] = _Lane(threading.Condition(self._lock))
        return self._lanes[name]

    @locked
    def _queue(self, lane: _Lane, job: Job) -> bool:
        if not self._closed:
            lane.queues[job.priority].append(job)
        return not self._closed

    def withdraw(self, lane: str, first: Priority) -> list[Job]:
        """Remove and return a lane's waiting jobs of the priority `first` and of all less urgent priorities.

        The most urgent jobs come first.
        """
        with self._lock:
            jobs = self._lane(lane).take(first)
        self._idle.ring()
        return jobs

    @locked
    def _start_threads(self, lane: _Lane) -> None:
        """Start threads for the lane's pending jobs, up to the limit. The last threads of a lane run only loads and
        prefetches.
        """
        while lane.threads < min(self._size, lane.pending):
            name, loads_only = f"{self._name}-{len(self._threads)}", lane.threads >= self._storing
            thread = threading.Thread(target=self._work, args=(lane, loads_only), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("lmkv: cannot start I/O thread %d: %s; I/O is slower", len(self._threads) + 1, error)
                return
            self._threads.append(thread)
            lane.threads += 1

    def _work(self, lane: _Lane, loads_only: bool) -> None:
        while True:
            with self._lock:
                while (job := lane.next(loads_only)) is None:
                    if self._closed:
                        return
                    lane.wakeup.wait()
                lane.running += 1
            try:
                self._do(job)
            finally:
                del job
                with self._lock:
                    lane.running -= 1
                    idle = not self._pending
                if idle:
                    self._idle.ring()

    def _do(self, job: Job) -> None:
        after = Deferred()
        try:
            try:
                job.work(after)
            finally:
                after.run(self.submit)
        except BaseException:
            # The thread must go on even if a log handler raises.
            with suppress(BaseException):
                logger.exception("lmkv: an I/O thread met an unexpected error and continues; please report the error")

    @property
    @locked
    def _pending(self) -> int:
        return sum(lane.pending for lane in self._lanes.values())

    @property
    def pending(self) -> int:
        """Number of jobs that are queued or running."""
        with self._lock:
            return self._pending

    def after_fork(self) -> None:
        """Reset the pool in a forked child. The child has none of the threads, and the lock may be held forever."""
        self._lock = threading.Lock()
        self._idle = Waker()
        self._threads, self._lanes, self._closed = [], {}, True

    def runs_here(self) -> bool:
        """Return whether the calling thread belongs to the pool. Such a thread cannot wait for the pool's jobs."""
        return threading.current_thread() in self._threads

    def drain(self, timeout: float) -> bool:
        """Wait until no job waits or runs, for at most `timeout` seconds. Returns False if jobs are left."""
        return self._idle.wait_for(lambda: not self.pending, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Finish the queued jobs, for at most `timeout` seconds, and stop the threads. Idempotent.

        Returns False if a job hangs. The job's daemon thread then keeps running, and queued jobs are dropped.
        """
        deadline = time.monotonic() + timeout
        self.drain(timeout)
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.take()
                lane.wakeup.notify_all()
        self._idle.ring()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 0.05)
        return not any(thread.is_alive() for thread in self._threads)
