"""`Patience`: how long one request may wait for chunks of lower tiers."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

STALL = 0.8
"""Seconds without a chunk after which a request computes, while the time to compute is not known."""


@define
class Patience:
    """The waits of one request, one after the other. All together last `deadline` seconds at most.

    A wait has a limit of its own. It lasts from the first call of `lasts` to `end`: a request that has been
    promised its chunks and waits for KV space alone is not waiting for them.
    """

    deadline: float
    late: bool = field(default=False, init=False)
    """Whether a wait took too long. Then no other wait follows."""
    spent: float = field(default=0.0, init=False)
    """Seconds of all waits, up to the last call."""
    _since: float | None = field(default=None, init=False)
    _limit: float | None = field(default=None, init=False)
    _arrived: int = field(default=0, init=False)

    def lasts(self, now: float, limit: Callable[[], float | None], arrived: int) -> bool:
        """Whether the request may wait on. `arrived`: chunks that are there by now.

        `limit`: seconds that this wait may last; asked once, at its beginning. None: not known, and the wait
        goes on as long as chunks arrive, at least one every `STALL` seconds.
        """
        if self.late:
            return False
        if self._since is None:
            self._since, self._limit, self._arrived = now, limit(), arrived
        if self._limit is None and arrived > self._arrived:
            self._spend(now)
            self._arrived = arrived
        waited = now - self._since
        if waited > (STALL if self._limit is None else self._limit) or self.spent + waited > self.deadline:
            self.end(now)
            self.late = True
        return not self.late

    def waited(self, now: float) -> float:
        """Seconds of all waits."""
        return self.spent + (0.0 if self._since is None else now - self._since)

    def end(self, now: float) -> None:
        """The chunks that the request waited for are there, or given up."""
        if self._since is not None:
            self._spend(now)
            self._since = None

    def _spend(self, now: float) -> None:
        if self._since is not None:
            self.spent, self._since = self.spent + now - self._since, now
