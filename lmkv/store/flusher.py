"""Copies chunks to lower tiers: as they are stored (write-through) or as they are evicted (write-back)."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal

from attrs import define, field

from lmkv.protocols import Chunk, ChunkKey
from lmkv.store.tiers.changes import Changes
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.jobs import AfterLock, Job, Priority
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier
from lmkv.store.tiers.primary import PrimaryTier

_Copy = tuple[LowerTier, Entry]


@define(eq=False)
class _Flush:
    """Copies of one chain's chunks, head first. They refer to their chunks until the last of them has ended.

    `running`, `ended`: how many of them are. `chain`: to make room for one of its chunks, lower tiers evict none of the
    chunks before it. `late`: the rest of the chain was copied before.
    """

    chain: Sequence[ChunkKey]
    copies: list[_Copy]
    late: bool = False
    running: int = field(init=False, default=0)
    ended: int = field(init=False, default=0)
    queued: deque[_Copy] = field(init=False)
    """Copies that no thread has begun."""

    def __attrs_post_init__(self) -> None:
        self.queued = deque(self.copies)

    def ancestors(self, key: ChunkKey) -> frozenset[ChunkKey]:
        return frozenset(takewhile(lambda other: other != key, self.chain))


@define(eq=False, repr=False)
class Flusher:
    """Makes copies in lower tiers. `on_slots_freed`: called without the lock when ended copies may have freed slots."""

    _lock: threading.Lock
    _changes: Changes
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _on_slots_freed: Callable[[AfterLock], None]
    _late: deque[tuple[_Copy, Sequence[ChunkKey]]] = field(init=False, factory=deque)
    """Copies that the pool had no room for, with their chains. They refer to no slot: eviction may come first."""
    _flushes: dict[_Flush, None] = field(init=False, factory=dict)
    """Those that have not ended."""

    @locked
    def write_through(self, entries: Sequence[Entry], chain: Sequence[ChunkKey], after: AfterLock) -> None:
        """Plan the copies that write-through tiers want of entries that were just stored."""
        copies = [copy for entry in entries for copy in self._wanted(entry, "through")]
        for _, entry in copies:
            self._primary.ref(entry)
        self._plan(copies, chain, after)

    @locked
    def write_to_shared(self, keys: Sequence[ChunkKey], after: AfterLock) -> int:
        """Plan copies of leading chunks for shared tiers that lack them; how many are there, or on their way."""
        shared = [tier for tier in self._tiers if tier.shared and tier.usable and tier.write_mode == "through"]
        writable = any(tier.writable for tier in shared)
        entries, count = [], 0
        for key in keys if shared else ():
            entry = self._primary.entries.get(key) if writable else None
            known = any(tier.index.knows(key) if tier.writable else key in tier.index for tier in shared)
            if entry is None and not known:
                break
            # A referenced entry is being written already, or will be when it is committed.
            if entry is not None and entry.ready and not entry.refs and not known:
                entries.append(entry)
            count += 1
        self.write_through(entries, keys, after)
        return count

    @locked
    def flush(self, victim: Entry, after: AfterLock) -> bool:
        """Plan the copies that write-back tiers want of a victim; False when none of them does."""
        copies = self._wanted(victim, "back")
        if copies:
            self._primary.begin_flush(victim)
            for _ in copies[1:]:
                victim.refs += 1
            self._plan(copies, (victim.parent, victim.key), after)
        return bool(copies)

    def _wanted(self, entry: Entry, mode: Literal["through", "back"]) -> list[_Copy]:
        return [
            (tier, entry)
            for tier in self._tiers
            if tier.write_mode == mode and not entry.removed and tier.wants(entry.key)
        ]

    def _plan(
        self, copies: Sequence[_Copy], chain: Sequence[ChunkKey], after: AfterLock, *, late: bool = False
    ) -> None:
        """Queue copies, each of which refers to its entry already."""
        if copies:
            flush = _Flush(chain, list(copies), late)
            self._flushes[flush] = None
            after.jobs += self._jobs(flush)

    def _jobs(self, flush: _Flush) -> list[Job]:
        # The same job for each: this runs on the scheduler's thread.
        job = Job(partial(self._copy, flush), Priority.STORE, partial(self._refused, flush))
        return [job] * len(flush.queued)

    def _copy(self, flush: _Flush, after: AfterLock) -> None:
        """Make the first copy that no thread has begun, on an I/O thread."""
        with self._lock, self._changes:
            if not flush.queued:
                # Its job was queued again, because an exception came while it was.
                return
            tier, entry = flush.queued.popleft()
            flush.running += 1
        try:
            payload = self._primary.payloads.gather(entry.key, self._primary.slab.view(entry.slot))
            chunk = Chunk(entry.key, payload, entry.parent, entry.tokens)
            tier.write(chunk, lambda: not entry.removed, partial(flush.ancestors, entry.key))
        finally:
            with self._lock, self._changes:
                flush.running -= 1
                flush.ended += 1
                self._end_copy(flush, after)
                self._plan_late(after)

    def _refused(self, flush: _Flush, after: AfterLock) -> None:
        """Make the last copy later, if the chunk is still here then. Its slot is not kept for it.

        The pool refuses the last ones, and says so from the last to the first.
        """
        with self._lock, self._changes:
            if not flush.queued:
                return
            copy = tier, entry = flush.queued.pop()
            flush.copies.pop()
            self._primary.unref(entry)
            if entry.removed or len(self._late) >= self._primary.slab.num_slots:
                tier.count_dropped()
            else:
                # Refused tail first, planned head first.
                self._late.appendleft((copy, flush.chain))
            self._end_copy(flush, after)

    @locked
    def _plan_late(self, after: AfterLock) -> None:
        """Queue a late copy, because another copy has ended."""
        while self._late:
            (tier, entry), chain = self._late.popleft()
            if entry.removed:
                tier.count_dropped()
            elif not tier.index.knows(entry.key):
                self._primary.ref(entry)
                self._plan([(tier, entry)], chain, after, late=True)
                return

    @locked
    def _end_copy(self, flush: _Flush, after: AfterLock) -> None:
        if len(flush.copies) > flush.ended:
            return
        self._flushes.pop(flush, None)
        # Tail first, so that the head of the chain is evicted last, here and below.
        for _, entry in reversed(flush.copies):
            self._primary.unref(entry)
        after.calls.append(self._on_slots_freed)

    @locked
    def recount(self, refs: Counter[Entry], after: AfterLock) -> None:
        """Count the references of the copies, and queue again those that no thread has begun."""
        for flush in list(self._flushes):
            # Copies that were refused are the last ones.
            del flush.copies[len(flush.queued) + flush.running + flush.ended :]
            if len(flush.copies) <= flush.ended:
                del self._flushes[flush]
                continue
            refs.update(entry for _, entry in flush.copies)
            after.jobs += self._jobs(flush)
        after.calls.append(self._on_slots_freed)
