"""A lower tier of a store: an index, counters, and reads and writes of the tier's backend that never raise.

Methods without `@locked` run on I/O threads. Such methods hold the lock while they plan I/O and record its result, but
not during the I/O.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress, takewhile
from typing import Literal, TypeVar

import attrs

from lmkv.chunks.hashing import KEY_BYTES
from lmkv.errors import BackendUnavailable, CorruptChunkError
from lmkv.protocols import (
    Chunk,
    ChunkKey,
    Clock,
    ListsKeys,
    Read,
    ReadStatus,
    Shared,
    SharesCapacity,
    SizesChunks,
    Tier,
    WriteStatus,
    Written,
)
from lmkv.store.guards import ChangeGuard, GuardedAdmission, StoreObserver, attempt, locked
from lmkv.store.health import (
    Breaker,
    FailureLog,
    TierCounters,
    TierStats,
    as_backend_error,
    checked,
    is_full,
    read_works,
    write_works,
)
from lmkv.store.index import TierIndex, Victims
from lmkv.store.iopool import Priority

Operation = Literal["read", "write"]
T = TypeVar("T")

_MAX_TIMES = 1000
_FIRST_BATCH, _BATCH_GROWTH = 4, 8
_ANY = bytes(KEY_BYTES)
_LONGEST_PAUSE = 4.0
"""Longest time in seconds between two writes to a tier whose writes fail."""
_MAX_PAUSE = 600.0
"""Longest time in seconds without evictions when the medium stays full despite evictions."""


class LowerTier:
    """A lower tier of a store: a backend and the index of its chunks.

    `payload_bytes`: a function that returns the size in bytes of a chunk, given its key. `lock`, `observers`: the lock
    and the observers of the store. `times`: durations of the latest successful reads and writes, which
    `Catalog.drain_latencies` collects. `shared`: whether other processes write to the medium. If so, the medium may
    have chunks that are not indexed.
    """

    def __init__(
        self,
        tier: Tier,
        payload_bytes: Callable[[ChunkKey], int],
        lock: threading.Lock,
        changes: ChangeGuard,
        clock: Clock,
        observers: Sequence[StoreObserver] = (),
    ) -> None:
        self.backend = backend = tier.backend
        self.shared = isinstance(backend, Shared) and backend.shared
        self.name = tier.name
        self.write_mode = tier.write
        self.index = TierIndex(tier.policy, tier.capacity_bytes, tier.name, observers)
        self.admission = None if tier.admission is None else GuardedAdmission(tier.admission, tier.name)
        self._payload_bytes = payload_bytes
        self._lock, self._changes = lock, changes
        self._clock = clock
        self._counters = TierCounters()
        self.times: deque[tuple[Operation, float]] = deque(maxlen=_MAX_TIMES)
        # One breaker per operation: a cheap call such as a lookup may work where reads fail.
        self._lookups, self._reads = Breaker(clock), Breaker(clock)
        # No request waits for these.
        self._writes, self._clears = (Breaker(clock, longest_delay=_LONGEST_PAUSE) for _ in range(2))
        # Deletions, and questions about sizes. Failures do not open it: each deletion must be tried.
        self._others = Breaker(clock)
        # Evictions for a full medium. One that does not help counts as a failure.
        self._relief = Breaker(clock, threshold=1, longest_delay=_MAX_PAUSE, quick_delay=_MAX_PAUSE)
        self._complaints = FailureLog(tier.name, clock)
        self._failed_once: set[ChunkKey] = set()
        self._clearing = False
        self._silent = False
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether the tier's chunks can be read now."""
        return self._reads.usable and not self._lookups.hangs and not self._closed

    @property
    def writable(self) -> bool:
        """Whether a write may succeed now."""
        return self.usable and self._writes.usable and not self._others.hangs and not self._clears.hangs

    @property
    def hangs(self) -> Priority | None:
        """None if no call of the backend hangs. Otherwise a priority: jobs with this priority, or a less urgent one,
        must not be queued.
        """
        if self._reads.hangs or self._lookups.hangs:
            return Priority.LOAD
        return Priority.DELETION if any(each.hangs for each in (self._writes, self._others, self._clears)) else None

    @locked
    def has(self, key: ChunkKey) -> bool:
        return key in self.index and self.usable

    @locked
    def wants(self, key: ChunkKey) -> bool:
        """Return whether to write the chunk: it is neither stored nor being written, and the admission filter accepts
        it.
        """
        return not self.index.knows(key) and (self.admission is None or self.admission.admit(key))

    def _cost(self, key: ChunkKey) -> int:
        """Return the number of bytes that the chunk takes on the medium."""
        nbytes, backend = self._payload_bytes(key), self.backend
        if not isinstance(backend, SizesChunks):
            return nbytes
        return self._unless_hanging(lambda: checked(backend.stored_bytes(nbytes), int), nbytes)

    def _unless_hanging(self, call: Callable[[], T], default: T) -> T:
        """Return the result of `call()`, or `default` if `call` raises or an earlier call hangs. Not for reads and
        writes.
        """
        with self._lock:
            number = self._others.begin()
        if number is None:
            return default
        try:
            return attempt(call, lambda error: default)
        finally:
            with self._lock:
                self._others.end(number, ok=True)

    def stats(self) -> TierStats:
        return TierStats(
            **attrs.asdict(self._counters),
            name=self.name,
            chunks=len(self.index) - self.index.other_namespace,
            used_bytes=self.index.used,
            capacity_bytes=self.index.capacity,
            hung_reads=self._reads.hanging + self._lookups.hanging,
            hung_writes=self._writes.hanging + self._others.hanging + self._clears.hanging,
            breaker=self._lookups.state if self._reads.state == "closed" else self._reads.state,
            write_breaker=self._writes.state,
        )

    @locked
    def count_dropped(self, chunks: int = 1) -> None:
        """Count chunks that were not written because too many other writes waited, or because the tier hangs."""
        self._counters.dropped += chunks

    @locked
    def close(self) -> None:
        """Stop serving and accepting chunks. The backend stays open."""
        self._closed = True

    # -- existence ----------------------------------------------------------------------------------------

    def look_up(self, keys: Sequence[ChunkKey], *, each: bool = False) -> int:
        """Ask the backend for chunks that are not indexed, and index the found chunks. Returns the number of found
        chunks.

        The search goes from `keys[0]` to the first missing chunk, in batches of increasing size. `each`: whether to ask
        for all keys in one call instead.
        """
        with self._lock:
            scan = self.index.begin_scan() if self.usable else None
        there, count = 0, len(keys) if each else _FIRST_BATCH
        if scan is None:
            return 0
        try:
            while there < len(keys):
                batch = keys[there : there + count]
                answer = self.contains(batch)
                found = list(compress(batch, answer if each else takewhile(bool, answer)))
                # Not under the lock: a backend of another package may hang.
                sizes = {key: self._cost(key) for key in found}
                with self._lock, self._changes:
                    self.index.add_found(sizes, scan)
                there += len(found)
                if len(found) < len(batch):
                    break
                count *= _BATCH_GROWTH
        finally:
            with self._lock:
                self.index.end_scan(scan)
        self.reclaim()
        return there

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return, for each key, whether the backend has the chunk, or an empty list if the call fails."""
        answer: list[bool] = []
        with self._lock:
            call = self._lookups.begin()
        if call is not None:
            ok = False
            try:
                ok = self._tried("contains", lambda: answer.extend(self.backend.contains(keys)))
            finally:
                with self._lock:
                    self._lookups.end(call, ok)
        return answer

    def probe(self) -> None:
        """Test a failing tier with a call for which no request waits. If the tier works, it is used again.

        If reads have failed, `probe` also reads one chunk, because a lookup does not prove that reads work.
        """
        breakers = self._lookups, self._reads, self._writes
        with self._lock:
            if all(each.state == "closed" for each in breakers) or self.hangs is not None:
                self._silent = False
                return
            key = self.index.first() if self._reads.state == "open" else None
        answers = attempt(lambda: len(self.backend.contains([_ANY])) > 0, lambda error: False)
        reads = False
        if answers and key is not None:
            reads = self._read(key, memoryview(bytearray(self._payload_bytes(key)))).status is ReadStatus.HIT
        with self._lock:
            for each in breakers if answers and (self._silent or reads) else ():
                each.hasten()
            if reads:
                self._reads.close()
            self._silent = not answers

    def note_unlisted(self, error: Exception) -> None:
        """Log a failed listing."""
        self._complaints.failed(as_backend_error(self.name, "list", b"", error))

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, key: ChunkKey, into: memoryview) -> bool:
        """Read an indexed chunk into the buffer `into`. Returns whether `into` now has the right bytes."""
        with self._lock:
            call = self._reads.begin()
        if call is None:
            return False
        started = self._clock()
        result = self._read(key, into)
        with self._lock, self._changes:
            # A foreign server that answers instead of the store would cost one chunk after the other.
            foreign = self.shared and isinstance(result.error, CorruptChunkError)
            self._reads.end(call, False if foreign else read_works(result))
            self._count_read(result, len(into), self._clock() - started)
            deleted = self._note_read(key, result)
        self._complaints.failed(result.error)
        if deleted:
            self.reclaim()
        return result.status is ReadStatus.HIT

    def _read(self, key: ChunkKey, into: memoryview) -> Read:
        failed = partial(as_backend_error, self.name, "read", key)
        return attempt(lambda: checked(self.backend.read(key, into), Read), lambda error: Read.failed(failed(error)))

    @locked
    def _count_read(self, result: Read, nbytes: int, seconds: float) -> None:
        counters = self._counters
        counters.reads += 1
        if result.status is ReadStatus.HIT:
            counters.hits += 1
            counters.read_bytes += nbytes
            self.times.append(("read", seconds))
        counters.read_failures += result.status is ReadStatus.FAILED

    @locked
    def _note_read(self, key: ChunkKey, result: Read) -> bool:
        """Update the index after a read. Returns True if the chunk's bytes are wrong and must be deleted."""
        if isinstance(result.error, BackendUnavailable) and not self._failed_before(key):
            return False
        self._failed_once.discard(key)
        damaged = isinstance(result.error, CorruptChunkError)
        self._counters.lost += (damaged or result.status is ReadStatus.MISS) and key in self.index
        if damaged:
            self.index.mark_deleted([key])
        elif result.status is ReadStatus.MISS:
            self.index.discard(key)
        elif result.status is ReadStatus.FAILED:
            self.index.distrust(key)
        return damaged

    @locked
    def _failed_before(self, key: ChunkKey) -> bool:
        """Return whether an earlier read of this chunk failed while the tier worked.

        If so, the cause is probably the chunk, not the tier.
        """
        if self._reads.state != "closed":
            self._failed_once.clear()
            return False
        known = key in self._failed_once
        self._failed_once.add(key)
        return known

    # -- writing ------------------------------------------------------------------------------------------

    def write(self, chunk: Chunk, is_wanted: Callable[[], bool], protect: Callable[[], frozenset[ChunkKey]]) -> None:
        """Write a chunk to the backend, after evicting other chunks if necessary.

        `is_wanted`: a function that returns whether the chunk should still be stored. `protect`: a function that
        returns the keys that must not be evicted for the chunk. Both functions are called while the lock is held.
        """
        if self.index.clearing:
            self.delete_all()
        cost = self._cost(chunk.key)
        with self._lock, self._changes:
            begun = self._begin_write(chunk.key, cost, is_wanted, protect)
        if begun is None:
            return
        victims, call = begun
        started = self._clock()
        result = attempt(
            lambda: self._make_room(chunk.key, victims, cost, protect) or self._write(chunk, cost, protect),
            lambda error: Written.failed(as_backend_error(self.name, "write", chunk.key, error)),
        )
        backend = self.backend
        if (
            result.status is not WriteStatus.STORED
            and isinstance(backend, SharesCapacity)
            and self.index.capacity is not None
        ):
            self._tried("release", lambda: backend.release_bytes(cost))
        with self._lock, self._changes:
            self._writes.end(call, write_works(result))
            self._count_write(result, len(chunk.payload), self._clock() - started)
            wanted = is_wanted()
            stored = self._is_stored(chunk.key, result, wanted=wanted)
            self.index.end_write(chunk.key, cost, stored=stored, wanted=wanted, parent=chunk.parent)
        self._complaints.wrote(result, self._until_deleted)
        if not wanted:
            self.reclaim()

    @locked
    def _is_stored(self, key: ChunkKey, result: Written, *, wanted: bool) -> bool:
        """Return whether the medium has the chunk's bytes now. Bytes from before a `clear` do not count."""
        index = self.index
        if result.status is WriteStatus.STORED:
            index.unanswered.discard(key)
            index.suspect.discard(key)
        elif isinstance(result.error, BackendUnavailable):
            (index.unanswered if wanted else index.suspect).add(key)
        return result.status is WriteStatus.STORED or (
            result.status is WriteStatus.PRESENT and key not in index.suspect
        )

    @locked
    def _begin_write(
        self, key: ChunkKey, cost: int, is_wanted: Callable[[], bool], protect: Callable[[], frozenset[ChunkKey]]
    ) -> tuple[Victims, int] | None:
        if self.index.knows(key) or not is_wanted() or self._closed:
            return None
        if self.writable:
            stored = len(self.index)
            victims = self.index.begin_write(key, cost, protect)
            if victims is not None:
                self._counters.evictions += stored - len(self.index)
                call = self._writes.begin()
                assert call is not None
                return victims, call
        self._counters.write_rejects += 1
        return None

    def _make_room(
        self, key: ChunkKey, victims: Victims, cost: int, protect: Callable[[], frozenset[ChunkKey]]
    ) -> Written | None:
        """Delete the victims, and more chunks if other processes have filled the medium.

        Returns None, or the refused write if there is no space. Processes that share the medium count their bytes
        together. A writer whose `cost` brings the count above the capacity first frees the excess, so the capacity is
        never exceeded.
        """
        if self.index.capacity is None:
            # Their room is not needed: if they cannot be deleted, other chunks are still written.
            deleted = self._tried("delete", lambda: self._reclaim(victims), then=self._until_deleted)
            return None if deleted or key not in victims else Written.rejected("the old bytes cannot be deleted")
        owed = 0
        if isinstance(self.backend, SharesCapacity):
            # Other processes fill the medium as well.
            owed = min(self.backend.reserve_bytes(cost) - self.index.capacity, cost)
        freed = self._reclaim(victims)
        while freed < owed:
            with self._lock, self._changes:
                more = self._evict_more(owed - freed, protect)
            if more is None:
                return Written.rejected("the tier is full, and no chunk can be evicted")
            freed += self._reclaim(more)
        return None

    def _evict_more(self, nbytes: int, protect: Callable[[], frozenset[ChunkKey]]) -> Victims | None:
        stored = len(self.index)
        victims = self.index.evict_more(nbytes, protect)
        self._counters.evictions += stored - len(self.index)
        return victims

    def _write(self, chunk: Chunk, cost: int, protect: Callable[[], frozenset[ChunkKey]]) -> Written:
        """Write a chunk. If the medium is full below the tier's capacity, evict chunks once and write again.

        If other programs fill the freed space, so that this does not help, nothing is evicted for a while.
        """
        written = checked(self.backend.write(chunk), Written)
        with self._lock, self._changes:
            if written.status is WriteStatus.STORED:
                self._relief.close()
            lacking = max(cost, written.lacking or 0)
            # A deletion of more than the chunk takes serves the other writers as well.
            call = self._relief.begin() if is_full(written) and (lacking <= cost or not self._relief.busy) else None
        if call is None:
            return written
        helped: bool | None = None
        try:
            with self._lock, self._changes:
                victims = self._evict_more(lacking, protect)
            if victims:
                helped = False
                self._reclaim(victims)
                written = checked(self.backend.write(chunk), Written)
                helped = not is_full(written) and write_works(written)
        finally:
            with self._lock:
                self._relief.end(call, helped)
        return written

    @locked
    def _count_write(self, result: Written, nbytes: int, seconds: float) -> None:
        counters = self._counters
        if result.status is WriteStatus.STORED:
            counters.writes += 1
            counters.written_bytes += nbytes
            self.times.append(("write", seconds))
        counters.write_rejects += result.status is WriteStatus.REJECTED
        counters.write_failures += result.status is WriteStatus.FAILED

    # -- deleting -----------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Delete the bytes of tombstones (deleted keys). After a failure, a later `reclaim` or `write` tries again."""
        # Repeated for tombstones added while a call hung.
        while self._unless_hanging(self._reclaim_once, False):
            pass

    @property
    def _until_deleted(self) -> str:
        """The consequence of a failed deletion, for a log line."""
        what = "none of these chunks" if self.index.capacity is None else "no chunk"
        return f"lmkv writes {what} to this tier until a deletion works"

    def _reclaim_once(self) -> bool:
        with self._lock, self._changes:
            victims = self.index.take_tombstones()
        return bool(victims) and self._tried("delete", lambda: self._reclaim(victims), then=self._until_deleted)

    def delete_all(self) -> None:
        """Delete all chunks of the backend, even unindexed ones. Nothing is written until the deletion has
        succeeded.
        """
        with self._lock:
            call = None if self._clearing else self._clears.begin()
            if call is None:
                return
            self._clearing = True
            victims = self.index.take_tombstones()
        what = "lmkv writes nothing to this tier until all its chunks are deleted"
        ok = self._tried("clear", lambda: self._reclaim(victims), then=what)
        ok = ok and self._tried("clear", self._delete_unlisted, then=what)
        with self._lock:
            self._clears.end(call, ok)
            self.index.clearing = not ok
            self._clearing = False

    def _tried(self, action: str, call: Callable[[], object], *, then: str = "") -> bool:
        """Return whether `call()` succeeded. If it raises, log the failure of `action` and the consequence `then`."""

        def run() -> bool:
            call()
            return True

        def failed(error: Exception) -> bool:
            self._complaints.failed(as_backend_error(self.name, action, b"", error), then=then)
            return False

        return attempt(run, failed)

    def _reclaim(self, victims: Victims) -> int:
        """Delete the bytes of evicted chunks, and return the number of freed bytes. Raises the backend's exceptions."""
        ok = False
        try:
            freed = self._delete(victims)
            ok = True
        finally:
            with self._lock, self._changes:
                self.index.reclaimed(victims, ok)
        return freed

    def _delete(self, victims: Victims) -> int:
        if not victims:
            return 0
        if isinstance(self.backend, SharesCapacity):
            return self.backend.reclaim(list(victims))
        self.backend.delete(list(victims))
        return sum(victims.values())

    def _delete_unlisted(self) -> None:
        if isinstance(self.backend, ListsKeys):
            for batch in self.backend.list_keys():
                self.backend.delete([found.key for found in batch])


def first_tier_with(tiers: Iterable[LowerTier], key: ChunkKey) -> LowerTier | None:
    """Return the fastest tier that stores the chunk, or None. The caller holds the store's lock."""
    return next((tier for tier in tiers if tier.has(key)), None)
