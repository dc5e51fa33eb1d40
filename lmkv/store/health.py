"""The health of a lower tier: its breakers, the meaning of its answers, and the log of its failures."""

from __future__ import annotations

import errno
import logging
import math
import re
import threading
from collections.abc import Callable
from typing import TypeVar

from attrs import define, field

from lmkv.errors import BackendError, CorruptChunkError, NoSpaceError, safe_repr
from lmkv.outcomes import Read, ReadStatus, WriteStatus, Written
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.stats import BreakerState

_SHARE = 0.01
"""Largest share of the time spent on trying a tier that fails."""


logger = logging.getLogger(__name__)
_EVERY = 60.0
_MOST = 100
"""Most topics remembered."""
_BETWEEN = re.compile(r"([\s,;'\"<>\[\]]+)")
_KEY = re.compile("[0-9a-f]{64}")
_DURATION = re.compile(r"\d[\d.]{0,20} ?[nuµm]?s\b")
T = TypeVar("T")


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
        """Whether `begin` would let a call through now."""
        if self._retry_at is None:
            return not self.hangs
        return self._probe is None and self.state == "half-open"

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def hanging(self) -> int:
        """Calls that have run for longer than the patience."""
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
        """Note how a call ended. `ok` is None if the result says nothing about the tier; then the next call tries."""
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
        """Let the next call through."""
        if self._retry_at is not None:
            self._delay, self._retry_at = 0.0, self.clock()

    def _open(self, took: float) -> None:
        longest = min(max(self.quick_delay, took / _SHARE), self.longest_delay)
        self._delay = min(max(2 * self._delay, self.first_delay), longest)
        self._retry_at = self.clock() + self._delay


@define(eq=False)
class Complaints:
    """Logs failures of one tier. Thread-safe; called without the store's lock."""

    name: str
    clock: Clock
    _said: dict[str, tuple[float, int]] = field(init=False, factory=dict)
    """For each topic: when it was logged last, and how often it was suppressed since."""
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def failed(self, error: BackendError | None, *, then: str = "") -> None:
        """Log a failed call. `then`: its consequence."""
        if error is None:
            return
        # The same topic for any key and duration.
        topic = f"{then} {_DURATION.sub('', _with_names(error.reason, 0))}"
        self._say(topic, lambda: f"{_with_names(str(error), 1)}{then and f'; {then}'}")

    def wrote(self, result: Written, until_deleted: str) -> None:
        """Log a failed or refused write. `until_deleted`: the consequence if a deletion failed."""
        if result.status is WriteStatus.REJECTED:
            reason = _with_names(result.reason, 1)
            self._say("refused", lambda: f"tier {self.name!r} refuses what is written to it: {reason}")
        self.failed(result.error, then=until_deleted if result.error and result.error.action == "delete" else "")

    def _say(self, topic: str, line: Callable[[], str]) -> None:
        now = self.clock()
        with self._lock:
            last, more = self._said.pop(topic, (-math.inf, 0))
            if suppressed := now - last < _EVERY:
                self._said[topic] = last, more + 1
            else:
                self._said[topic] = now, 0
                if len(self._said) > _MOST:
                    del self._said[next(iter(self._said))]
        if not suppressed:
            logger.warning("lmkv: %s%s", line(), f" ({more:,} more like it since it was last said)" if more else "")


def _with_names(text: str, most: int) -> str:
    """The text with only the first `most` names of chunks.

    >>> _with_names(f"no: {'a' * 64}, {'b' * 64}, {'c' * 64}", 1) == f"no: {'a' * 64}, ..."
    True
    >>> _with_names(f"no {'a' * 64} in /{'a' * 64}: why", 1) == f"no {'a' * 64} in ... why"
    True
    """
    # Word by word: a pattern of a word with a key in it takes the square of the text's length.
    found: list[str] = []
    words = _BETWEEN.split(text)
    for word, between in zip(words[::2], [*words[1::2], ""], strict=True):
        if not _KEY.search(word):
            found.append(word + between)
        elif most:
            most -= 1
            found.append(word + between)
        elif not found or found[-1] != "... ":
            found.append("... ")
    return "".join(found).rstrip()


def read_works(result: Read) -> bool | None:
    """Whether the tier can be read. None: no bytes came, so the answer does not say."""
    if result.status is ReadStatus.MISS:
        return None
    return result.status is ReadStatus.HIT or isinstance(result.error, CorruptChunkError)


def write_works(result: Written) -> bool | None:
    """Whether the tier accepts writes. None: no write was needed, or it was refused for lack of room."""
    return {WriteStatus.STORED: True, WriteStatus.FAILED: False}.get(result.status)


def is_full(result: Written) -> bool:
    """Whether a deletion would help: the medium is full, rather than refusing all writes."""
    code = getattr(result.error.__cause__, "errno", None) if isinstance(result.error, NoSpaceError) else None
    rejected = result.status is WriteStatus.REJECTED and result.lacking is not None
    return rejected or code in (errno.ENOSPC, errno.EDQUOT)


def checked(result: object, kind: type[T]) -> T:
    if not isinstance(result, kind):
        raise TypeError(f"a backend returned {result!r} instead of a {kind.__name__}")
    return result


def as_backend_error(name: str, action: str, key: ChunkKey, error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    translated = BackendError(name, action, key.hex(), safe_repr(error))
    translated.__cause__ = error
    return translated
