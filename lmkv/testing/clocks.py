"""A clock that moves when it is told to."""

from __future__ import annotations

import threading


class ManualClock:
    """A `Clock`: call it for the time in seconds, `advance` it by hand. Thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Move forward; time never goes back. Returns the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not move by {seconds} s")
        with self._lock:
            self._now += seconds
            return self._now
