"""`paced_loop`: an event loop whose thread never takes more than a share of the interpreter from the engine."""

from __future__ import annotations

import asyncio
import random
import selectors
import time

_SHARE = 0.1
"""Share of one core. Callers can slow the engine by a tenth at most."""
_SAVED = 0.5
"""Seconds of a core that a loop may save up while it is idle."""
_MAX_PAUSE = 1.0
"""Longest pause in seconds, so that the loop can end."""


class _PacedSelector(selectors.DefaultSelector):
    """Pauses before it looks for events when its thread has computed for more than its share."""

    def __init__(self) -> None:
        super().__init__()
        self._allowance = _SAVED
        self._computed, self._time = time.thread_time(), time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        computed, now = time.thread_time(), time.monotonic()
        earned = _SHARE * (now - self._time) - (computed - self._computed)
        self._allowance = min(self._allowance + earned, _SAVED)
        self._computed, self._time = computed, now
        if self._allowance < 0:
            time.sleep(min(-self._allowance / _SHARE, _MAX_PAUSE))
        # One at a time, or many callers together would compute for long until the next pause.
        ready = super().select(timeout)
        return [random.choice(ready)] if ready else ready


def paced_loop() -> asyncio.AbstractEventLoop:
    """Make the loop. Call it in the thread that runs the loop."""
    return asyncio.SelectorEventLoop(_PacedSelector())
