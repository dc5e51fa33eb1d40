"""Test helpers for authors of backends: a test suite, hypothesis strategies, fault injection, and `ManualClock`.

The module `backend_suite` needs pytest, `strategies` needs hypothesis, and `faults` needs neither.
"""

from __future__ import annotations

import threading


class ManualClock:
    """A `Clock` that changes only by `advance`. Thread-safe.

    Parameters
    ----------
    start
        The initial time, in seconds.

    Raises
    ------
    ValueError
        `advance` is called with a negative number.

    Examples
    --------
    >>> clock = ManualClock(100.0)
    >>> clock.advance(1.5)
    101.5
    >>> clock
    <ManualClock: 101.5 s>
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def __repr__(self) -> str:
        return f"<ManualClock: {self()} s>"

    def advance(self, seconds: float) -> float:
        """Add `seconds` to the time, and return the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot be advanced by {seconds} s")
        with self._lock:
            self._now += seconds
            return self._now
