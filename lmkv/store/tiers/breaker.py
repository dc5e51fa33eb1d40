"""A circuit breaker: whether to bother a component that keeps failing, or hangs."""

from __future__ import annotations

from attrs import define, field

from lmkv.protocols import Clock
from lmkv.store.tiers.stats import BreakerState

_SHARE = 0.01
"""Largest share of the time that goes into trying, where that would be often."""


@define(eq=False)
class Breaker:
    """Opens after `threshold` failures in a row. Pure: no lock inside, no thread, no time but `clock`'s.

    Open, it refuses calls for `first_delay` seconds, then is half-open: one call is let through to try. If
    that fails it opens again for twice as long, up to `longest_delay`; any success closes it. Where failures come
    at once, trying costs nothing: then it opens for `quick_delay` at most. A call that runs for more than `patience`
    seconds holds it open until it returns.
    """

    clock: Clock
    threshold: int = 5
    first_delay: float = 1.0
    longest_delay: float = 60.0
    quick_delay: float = 4.0
    patience: float = 5.0
    _failures: int = field(init=False, default=0)
    _delay: float = field(init=False, default=0.0)
    _retry_at: float | None = field(init=False, default=None)
    _running: dict[int, float] = field(init=False, factory=dict)
    _last_call: int = field(init=False, default=0)
    _probe: int | None = field(init=False, default=None)

    @property
    def state(self) -> BreakerState:
        if self.hangs:
            return "open"
        if self._retry_at is None:
            return "closed"
        return "half-open" if self.clock() >= self._retry_at else "open"

    @property
    def usable(self) -> bool:
        """Whether a call that began now would be let through."""
        if self._retry_at is None:
            return not self.hangs
        return self._probe is None and self.state == "half-open"

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def hanging(self) -> int:
        """How many calls have run for longer than the patience."""
        now = self.clock()
        return sum(now - started > self.patience for started in self._running.values())

    @property
    def hangs(self) -> bool:
        """Whether the oldest call has run for longer than the patience."""
        return self.busy and self.clock() - next(iter(self._running.values())) > self.patience

    def begin(self) -> int | None:
        """Begin a call: returns its number, for `end`, or None when it must not be made."""
        if not self.usable:
            return None
        self._last_call += 1
        self._running[self._last_call] = self.clock()
        if self._retry_at is not None:
            self._probe = self._last_call
        return self._last_call

    def end(self, call: int, ok: bool | None) -> None:
        """Note how a call ended; None: in a way that tells nothing, so that the next one tries."""
        took = self.clock() - self._running.pop(call)
        probing = call == self._probe
        if probing:
            self._probe = None
        if ok:
            self.close()
        elif ok is not None and self._retry_at is None:
            self._failures += 1
            if self._failures >= self.threshold:
                self._open(took)
        elif ok is not None and probing:
            self._open(took)

    def close(self) -> None:
        """Forget all failures."""
        self._failures, self._delay, self._retry_at = 0, 0.0, None

    def hasten(self) -> None:
        """Let the next call through, if none is."""
        if self._retry_at is not None:
            self._delay, self._retry_at = 0.0, self.clock()

    def _open(self, took: float) -> None:
        longest = min(max(self.quick_delay, took / _SHARE), self.longest_delay)
        self._delay = min(max(2 * self._delay, self.first_delay), longest)
        self._retry_at = self.clock() + self._delay
