"""The health of tiers: counters, circuit breakers, log lines about failures, and the meaning of a backend's results."""

from __future__ import annotations

import errno
import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, TypeVar

from attrs import define, field, frozen

from lmkv.errors import BackendError, CorruptChunkError, NoSpaceError, safe_repr
from lmkv.protocols import ChunkKey, Clock, Read, ReadStatus, WriteStatus, Written
from lmkv.store.entries import Entry

BreakerState = Literal["closed", "open", "half-open"]

_SHARE = 0.01
"""Largest share of time, 0 to 1, to spend on trials of a failing tier."""
logger = logging.getLogger(__name__)
_EVERY = 60.0
_MOST = 100
"""Largest number of topics whose last log line is remembered."""
_BETWEEN = re.compile(r"([\s,;'\"<>\[\]]+)")
_KEY = re.compile("[0-9a-f]{64}")
_DURATION = re.compile(r"\d[\d.]{0,20} ?[nuµm]?s\b")
_THEN = {
    "contains": "lmkv treats the chunks as missing",
    "read": "the model computes the chunk's tokens",
    "write": "lmkv does not store the chunk in this tier",
    "list": "lmkv tries again later",
}
"""The consequence of a failed call, by the action that failed."""
T = TypeVar("T")


@define
class TierCounters:
    """The totals of one tier since the store was created. The store changes the totals while it holds its lock."""

    hits: int = 0
    """Chunks that were served."""
    reads: int = 0
    read_bytes: int = 0
    read_failures: int = 0
    lost: int = 0
    """Indexed chunks that turned out to be missing or corrupt."""
    writes: int = 0
    written_bytes: int = 0
    write_rejects: int = 0
    write_failures: int = 0
    evictions: int = 0
    dropped: int = 0
    """Chunks that were not written because too many writes were waiting, or because the tier hangs."""
    prefetched: int = 0
    """Chunks that a prefetch brought into host memory. `prefetch_hits` counts those that were leased later,
    `prefetch_expired` those that were removed without a lease.
    """
    prefetch_hits: int = 0
    prefetch_expired: int = 0


@frozen(kw_only=True)
class TierStats(TierCounters):
    """The state of a tier at one moment: its content, its capacity, and its totals so far.

    `states`: number of states of recurrent layers in host memory; lower tiers count states as chunks. `breaker`: "open"
    while the tier keeps failing and is not used, "half-open" before the next trial. `write_breaker`: the same for
    writes. While only `write_breaker` is open, the tier still serves stored chunks. `hung_reads`, `hung_writes`: calls
    that have run for more than five seconds; deletions count as writes. Until such a call ends, it occupies a thread of
    the tier, and perhaps a slot of host memory.
    """

    name: str
    chunks: int
    used_bytes: int
    capacity_bytes: int | None
    states: int = 0
    breaker: BreakerState = "closed"
    write_breaker: BreakerState = "closed"
    hung_reads: int = 0
    hung_writes: int = 0


@frozen
class StoreStats:
    """The state of a `TieredStore` at one moment.

    `leased`: slots with references, for example of leases, pins and copies. `pinned`: pinned chunks. `writing` and
    `loading`: slots that callers and loads are filling. `pending_io`: reads and writes of lower tiers that are queued
    or running.
    """

    tiers: tuple[TierStats, ...]
    leased: int
    pinned: int
    writing: int
    loading: int
    pending_io: int

    @property
    def primary(self) -> TierStats:
        return self.tiers[0]


@frozen
class Stored:
    """The content of a lower tier's index.

    `sizes`: the bytes of each stored chunk. `writing`: chunks that are being written. `rewriting`: the chunks in
    `writing` that may have an older copy on the medium. `tombstones`: deleted chunks with bytes that are still on the
    medium. `reclaiming`: deleted chunks with bytes that are being removed from the medium now.
    """

    sizes: Mapping[ChunkKey, int]
    reclaiming_bytes: int
    writing: Collection[ChunkKey]
    rewriting: Collection[ChunkKey]
    tombstones: Collection[ChunkKey]
    reclaiming: Collection[ChunkKey]


@frozen
class Snapshot:
    """The complete content of a `TieredStore` at one moment.

    `held`: the chunks in host memory. `tiers`: the index contents of the lower tiers. `prefetched`: the keys of the
    chunks that prefetches keep in slots, even after the chunks were removed. `prioritized`: the number of slots that
    pins and prefetches keep, by the type of the keys (whole chunk, incomplete chunk or recurrent state). `promotions`:
    the number of promotions that are not released.
    """

    held: Mapping[ChunkKey, Entry]
    tiers: Sequence[Stored]
    pinned: Collection[ChunkKey]
    prioritized: Mapping[type, int]
    prefetched: Collection[ChunkKey]
    promotions: int


@define(eq=False)
class Breaker:
    """A circuit breaker: refuses calls of a tier that fails. Not thread-safe.

    The breaker opens after `threshold` failures in a row, and then refuses calls for `first_delay` seconds. Afterwards
    the breaker is half-open, and allows one call as a trial. If the trial fails, the breaker opens again for twice as
    long, up to `longest_delay`. Any success closes the breaker. If the failed call returned quickly, a trial costs
    little, so the breaker opens for at most `quick_delay`. While a call runs for more than `patience` seconds, the
    breaker stays open.
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
        """Whether a call of the tier is allowed now. If so, `begin` returns a call number."""
        if self._retry_at is None:
            return not self.hangs
        return self._probe is None and self.state == "half-open"

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def hanging(self) -> int:
        """Number of calls that have run for more than `patience` seconds."""
        now = self.clock()
        return sum(now - started > self.patience for started in self._running.values())

    @property
    def hangs(self) -> bool:
        """Whether the oldest running call has taken more than `patience` seconds."""
        return self.busy and self.clock() - next(iter(self._running.values())) > self.patience

    def begin(self) -> int | None:
        """Note that a call begins. Returns the call's number for `end`, or None if the breaker refuses the call."""
        if not self.usable:
            return None
        self._last_call += 1
        self._running[self._last_call] = self.clock()
        if self._retry_at is not None:
            self._probe = self._last_call
        return self._last_call

    def end(self, call: int, ok: bool | None) -> None:
        """Note that a call has ended. `ok`: whether the call succeeded; None if the result says nothing about the
        tier.
        """
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
        """Close the breaker, and forget all failures."""
        self._failures, self._delay, self._retry_at = 0, 0.0, None

    def hasten(self) -> None:
        """Allow one call as a trial now, even if the breaker is open."""
        if self._retry_at is not None:
            self._delay, self._retry_at = 0.0, self.clock()

    def _open(self, took: float) -> None:
        longest = min(max(self.quick_delay, took / _SHARE), self.longest_delay)
        self._delay = min(max(2 * self._delay, self.first_delay), longest)
        self._retry_at = self.clock() + self._delay


@define(eq=False)
class FailureLog:
    """Logs the failures of one tier. The same failure is logged at most once a minute. Thread-safe.

    The caller must not hold the store's lock.
    """

    name: str
    clock: Clock
    _said: dict[str, tuple[float, int]] = field(init=False, factory=dict)
    """For each topic: the time of its last log line, and the number of lines suppressed since then."""
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def failed(self, error: BackendError | None, *, then: str = "") -> None:
        """Log a failed call. `then`: a text about the consequence; by default the text for the kind of call."""
        if error is None:
            return
        # The same topic for any key and duration.
        topic = f"{then} {_DURATION.sub('', _with_names(error.reason, 0))}"
        then = then or _THEN.get(error.action, "")
        self._say(topic, lambda: f"{_with_names(str(error), 1)}{then and f'; {then}'}")

    def wrote(self, result: Written, until_deleted: str) -> None:
        """Log a failed or refused write. `until_deleted`: a text about the consequence, if the write failed because old
        bytes could not be deleted first.
        """
        if result.status is WriteStatus.REJECTED:
            reason = _with_names(result.reason, 1)
            self._say("refused", lambda: f"tier {self.name!r} did not store a chunk: {reason}")
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
            logger.warning("lmkv: %s%s", line(), f" ({more:,} more since the last such line)" if more else "")


def _with_names(text: str, most: int) -> str:
    """Return the text with its first `most` chunk keys. Each later run of keys becomes `...`.

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
    """Return whether reads of the tier work, judging by the result of a read. None if the result does not tell."""
    if result.status is ReadStatus.MISS:
        return None
    return result.status is ReadStatus.HIT or isinstance(result.error, CorruptChunkError)


def write_works(result: Written) -> bool | None:
    """Return whether writes to the tier work, judging by the result of a write. None if the result does not tell."""
    return {WriteStatus.STORED: True, WriteStatus.FAILED: False}.get(result.status)


def is_full(result: Written) -> bool:
    """Return whether a write failed because the medium is full. A deletion of other chunks would help then."""
    code = getattr(result.error.__cause__, "errno", None) if isinstance(result.error, NoSpaceError) else None
    rejected = result.status is WriteStatus.REJECTED and result.lacking is not None
    return rejected or code in (errno.ENOSPC, errno.EDQUOT)


def checked(result: object, kind: type[T]) -> T:
    if not isinstance(result, kind):
        raise TypeError(f"the backend returned {result!r} instead of an lmkv.protocols.{kind.__name__}")
    return result


def as_backend_error(name: str, action: str, key: ChunkKey, error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    translated = BackendError(name, action, key.hex(), safe_repr(error))
    translated.__cause__ = error
    return translated
