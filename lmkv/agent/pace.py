"""`Pace`: what the threads of a service compute together is never more than a share of the interpreter."""

from __future__ import annotations

import asyncio
import queue
import random
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_SHARE = 0.1
"""Share of one core. Callers can slow the engine by a tenth at most."""
_SAVED = 0.5
"""Seconds of a core that a service may save up while it is idle."""
_MIN_PAUSE, _MAX_PAUSE = 0.001, 1.0
"""Shortest pause of a worker in seconds, and the longest of any thread, so that it can end."""
_WORKERS = 2
_LOOP, _WORK = 0, 1
P = ParamSpec("P")
T = TypeVar("T")


class Pace:
    """The loop has one half of the share and the workers the other, so that neither waits for the other one's work.

    What one of them leaves, the other may have. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [_SAVED / 2, _SAVED / 2]
        self._time = time.monotonic()
        self._ended = False

    def spend(self, part: int, computed: float = 0.0) -> float:
        """Note seconds that a thread of this part has computed; returns those for which it has to pause."""
        with self._lock:
            now, left = time.monotonic(), self._left
            earned, self._time = _SHARE * (now - self._time), now
            left[part] -= computed
            new = [each + earned / 2 for each in left]
            over = [max(0.0, each - _SAVED / 2) for each in new]
            left[:] = [min(each + more, _SAVED / 2) for each, more in zip(new, reversed(over), strict=True)]
            return 0.0 if self._ended else max(0.0, -left[part] / _SHARE)

    def work(self, call: Callable[[], T]) -> T:
        """Call it on a worker's thread once the workers have time left."""
        while pause := self.spend(_WORK):
            time.sleep(min(max(pause, _MIN_PAUSE), _MAX_PAUSE))
        begun = time.thread_time()
        try:
            return call()
        finally:
            self.spend(_WORK, time.thread_time() - begun)

    def end(self) -> None:
        """Nobody pauses any more."""
        self._ended = True


class _PacedSelector(selectors.DefaultSelector):
    """Pauses before it looks for events when its thread has computed for more than its share."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self._computed = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        computed = time.thread_time()
        pause = self._pace.spend(_LOOP, computed - self._computed)
        self._computed = computed
        if pause:
            time.sleep(min(pause, _MAX_PAUSE))
        if pause > _MAX_PAUSE:
            # Timers run, and whoever comes waits.
            return []
        # One at a time, or many callers together would compute for long until the next pause.
        ready = super().select(timeout)
        return [random.choice(ready)] if ready else ready


class _Workers(ThreadPoolExecutor):
    """A few threads, which the end of the process does not wait for: what they call may hang."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(_WORKERS)
        self._pace = pace
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001
                    future.set_exception(error)

        self._jobs.put(job)
        if not self._begun:
            self._begun = True
            for _ in range(_WORKERS):
                threading.Thread(target=self._run, name="lmkv-agent-work", daemon=True).start()
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._pace.work(job)
            # A prompt may be large.
            del job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Have the threads end after what was submitted and is still awaited. Does not wait for them."""
        for _ in range(_WORKERS):
            self._jobs.put(None)


def paced_loop(pace: Pace | None = None) -> asyncio.AbstractEventLoop:
    """Make the loop, whose executor has the same pace. Call it in the thread that runs the loop."""
    pace = pace or Pace()
    loop = asyncio.SelectorEventLoop(_PacedSelector(pace))
    loop.set_default_executor(_Workers(pace))
    return loop
