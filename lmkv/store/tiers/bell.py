"""`Bell`: wakes threads that wait for a state, and stays whole when Ctrl-C comes into any line of a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from attrs import define, field


@define(eq=False, repr=False)
class Bell:
    """Whoever brings about a state rings it; whoever waits for the state asks again. Thread-safe, and without a lock.

    A `threading.Condition`, or an `Event`, may keep its lock, or release another thread's, after a KeyboardInterrupt in
    one that waits. Here each wait has a lock of its own, which is released at most once.
    """

    _waiters: list[threading.Lock] = field(init=False, factory=list)

    def ring(self) -> None:
        """Wake everybody. Call it after the state has changed."""
        while self._waiters:
            with suppress(IndexError):
                self._waiters.pop().release()

    def wait_for(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the state is `true`, at most `timeout` seconds; whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            try:
                left = -1 if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                # Asked after the waiter is there: nobody can ring in between unheard.
                if true() or (deadline is not None and left <= 0) or not waiter.acquire(timeout=left):
                    return true()
            finally:
                with suppress(ValueError):
                    self._waiters.remove(waiter)
