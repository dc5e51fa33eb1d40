"""`paced_loop`: an event loop whose thread never takes more than a share of the interpreter from the engine."""

from __future__ import annotations

import asyncio
import selectors
import time

_SHARE = 0.1
"""Of one core. What callers send costs the engine a tenth of its speed at most, however much it is."""
_SAVED = 0.5
"""Seconds of that core which a loop that was idle may take at once."""
_MAX_PAUSE = 1.0
"""Seconds, so that the loop can be ended."""


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
        return super().select(timeout)


def paced_loop() -> asyncio.AbstractEventLoop:
    """To be called in the thread that runs it."""
    return asyncio.SelectorEventLoop(_PacedSelector())
