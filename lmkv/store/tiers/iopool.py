"""The I/O threads of a store and their bounded, prioritised queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from lmkv.store.tiers.bell import Bell
from lmkv.store.tiers.jobs import AfterLock, Job, Priority
from lmkv.store.tiers.locking import locked

logger = logging.getLogger(__name__)


class IOPool:
    """`threads` daemon threads, at least two, over one queue per priority. Thread-safe.

    A quarter of the threads, at least one, never takes stores, so that no load waits for a write. At most
    `max_stores` stores wait or run: more are refused. Loads are refused only once the pool is closed.
    """

    def __init__(self, threads: int = 16, max_stores: int = 64, name: str = "lmkv-io") -> None:
        self._size = max(threads, 2)
        self._storing = self._size - max(self._size // 4, 1)
        self._max_stores = max_stores
        self._name = name
        self._queues: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._lock = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._idle, self._room = Bell(), Bell()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._storing_now = 0
        self._closed = False

    def submit(self, jobs: Sequence[Job]) -> list[Job]:
        """Queue jobs; returns those that were refused."""
        with self._lock:
            refused = [job for job in jobs if not self._queue(job)]
            self._start_threads()
            if not self._threads:
                self._drop_queues()
                return list(jobs)
            self._wakeup.notify_all()
            return refused

    @locked
    def _queue(self, job: Job) -> bool:
        queue = self._queues[job.priority]
        full = job.priority is Priority.STORE and self._stores >= self._max_stores
        if not (self._closed or full):
            queue.append(job)
        return not (self._closed or full)

    @locked
    def _start_threads(self) -> None:
        """Start as many threads as there is work for; the last ones take no stores."""
        while len(self._threads) < min(self._size, self._pending):
            index = len(self._threads)
            thread = threading.Thread(
                target=self._work, args=(index >= self._storing,), name=f"{self._name}-{index}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("lmkv: no thread for I/O: %s", error)
                return
            self._threads.append(thread)

    @locked
    def _next(self, loads_only: bool) -> Job | None:
        for priority in (Priority.LOAD, Priority.PREFETCH) if loads_only else Priority:
            if self._queues[priority]:
                return self._queues[priority].popleft()
        return None

    def _work(self, loads_only: bool) -> None:
        while True:
            with self._lock:
                while (job := self._next(loads_only)) is None:
                    if self._closed:
                        return
                    self._wakeup.wait()
                self._running += 1
                self._storing_now += job.priority is Priority.STORE
            try:
                self._do(job)
            finally:
                del job
                with self._lock:
                    self._running -= 1
                    idle = not self._pending
                if idle:
                    self._idle.ring()

    def _do(self, job: Job) -> None:
        after = AfterLock()
        try:
            try:
                job.work(after)
            finally:
                if job.priority is Priority.STORE:
                    self._end_store()
                after.run(self.submit)
        except BaseException:
            # The thread must go on, whatever a handler of logs raises.
            with suppress(BaseException):
                logger.exception("lmkv: an unexpected error in an I/O thread; please report it")

    def _end_store(self) -> None:
        """Count a store as ended before its follow-ups run: one of them may take its place."""
        with self._lock:
            self._storing_now -= 1
        self._room.ring()

    @locked
    def _drop_queues(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    @property
    @locked
    def _stores(self) -> int:
        """Stores that wait or run."""
        return self._storing_now + len(self._queues[Priority.STORE])

    @property
    @locked
    def _pending(self) -> int:
        return self._running + sum(map(len, self._queues.values()))

    @property
    def pending(self) -> int:
        """Jobs waiting or running."""
        with self._lock:
            return self._pending

    def wait_for_room(self, stores: int, timeout: float) -> bool:
        """Wait until the pool would take `stores` stores, at most `timeout` seconds; True when it would."""

        def has_room() -> bool:
            with self._lock:
                return self._stores + stores <= self._max_stores

        return self._room.wait_for(has_room, timeout)

    def after_fork(self) -> None:
        """In a child process: there are no threads, and the lock may have been held by one of them."""
        self._lock = threading.Lock()
        self._wakeup, self._idle, self._room = threading.Condition(self._lock), Bell(), Bell()
        self._threads, self._running, self._storing_now, self._closed = [], 0, 0, True
        for queue in self._queues.values():
            queue.clear()

    def runs_here(self) -> bool:
        """Whether this thread is one of the pool's, which cannot wait for the others."""
        return threading.current_thread() in self._threads

    def drain(self, timeout: float) -> bool:
        """Wait until nothing waits or runs, at most `timeout` seconds; True when that is so."""
        return self._idle.wait_for(lambda: not self.pending, timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Finish the waiting jobs, for at most `timeout` seconds, then end the threads. Idempotent.

        False when a job hangs: its daemon thread is left behind, and waiting jobs are dropped.
        """
        deadline = time.monotonic() + timeout
        self.drain(timeout)
        with self._lock:
            self._closed = True
            self._drop_queues()
            self._wakeup.notify_all()
        self._idle.ring()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 0.05)
        return not any(thread.is_alive() for thread in self._threads)
