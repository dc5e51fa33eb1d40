"""The threads that do lmkv's I/O: loads first, stores only in the room that is left."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class Priority(IntEnum):
    """Order of service. A store waits for every load; a prefetch waits for every demanded load."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2


class IOPool:
    """`threads` daemon threads over one bounded, prioritised queue.

    One thread never takes stores, so that a load waits for no write. At most `max_stores` stores wait:
    one more is refused, and its chunk is a future miss. Loads are never refused. Thread-safe.
    """

    def __init__(self, threads: int = 4, max_stores: int = 64, name: str = "lmkv-io") -> None:
        self._size = max(threads, 2)
        self._max_stores = max_stores
        self._name = name
        self._queues: dict[Priority, deque[Task]] = {priority: deque() for priority in Priority}
        self._wakeup = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._closed = False

    def submit(self, task: Task, priority: Priority) -> bool:
        """Queue a task; False when it is refused (stores beyond the bound, or the pool is closed).

        A task handles its own errors; one that raises is logged and does not end its thread.
        """
        with self._wakeup:
            queue = self._queues[priority]
            if self._closed or (priority is Priority.STORE and len(queue) >= self._max_stores):
                return False
            queue.append(task)
            if len(self._threads) < self._size:
                self._start_thread()
            self._wakeup.notify_all()
            return True

    def _start_thread(self) -> None:
        index = len(self._threads)
        thread = threading.Thread(
            target=self._work, args=(index == 1,), name=f"{self._name}-{index}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _next(self, loads_only: bool) -> Task | None:
        for priority in Priority:
            if loads_only and priority is Priority.STORE:
                break
            if self._queues[priority]:
                return self._queues[priority].popleft()
        return None

    def _work(self, loads_only: bool) -> None:
        while True:
            with self._wakeup:
                while (task := self._next(loads_only)) is None:
                    if self._closed:
                        return
                    self._wakeup.wait()
                self._running += 1
            try:
                task()
            except Exception:
                logger.exception("lmkv: an I/O task failed in a way that nobody expected")
            del task
            with self._wakeup:
                self._running -= 1
                self._wakeup.notify_all()

    @property
    def pending(self) -> int:
        """Tasks waiting or running."""
        with self._wakeup:
            return self._running + sum(map(len, self._queues.values()))

    def drain(self, timeout: float) -> bool:
        """Wait until nothing waits or runs, at most `timeout` seconds; True when that is so."""
        deadline = time.monotonic() + timeout
        with self._wakeup:
            while self._running or any(self._queues.values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._wakeup.wait(left)
            return True

    def close(self, timeout: float = 5.0) -> bool:
        """Finish what waits, at most `timeout` seconds, then end the threads. Idempotent.

        False when a task hangs: its daemon thread is left behind, and what waited is dropped.
        """
        deadline = time.monotonic() + timeout
        drained = self.drain(timeout)
        with self._wakeup:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()
            self._wakeup.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        return drained and not any(thread.is_alive() for thread in self._threads)
