"""Copies chunks to lower tiers when the chunks are stored (write-through) or evicted (write-back)."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal, TypeVar

from attrs import define, field

from lmkv.protocols import Chunk, ChunkKey, Clock
from lmkv.store.entries import Entry
from lmkv.store.guards import ChangeGuard, Waker, locked
from lmkv.store.iopool import Deferred, IOPool, Job, Priority
from lmkv.store.primary import PrimaryTier
from lmkv.store.tier import LowerTier

T = TypeVar("T")
_FREE_SHARE = 16
"""With write-back, 1/`_FREE_SHARE` of the slots is kept free. At most this number of evicted chunks is written at a
time.
"""


@define(eq=False, repr=False)
class StoreComponent:
    """Base class of the components of a `TieredStore`. All components share the store's lock, tiers, I/O threads and
    clock.
    """

    _lock: threading.Lock
    _changes: ChangeGuard
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _pool: IOPool
    _clock: Clock

    def _change(self, plan: Callable[[Deferred], T], undo: Callable[[T], object] = lambda result: None) -> T:
        """Call `plan` with the lock held, release the lock, and run the work that `plan` has planned.

        Returns the result of `plan`. If the planned work raises, `undo` is called with this result.
        """
        after, results = Deferred(), list[T]()
        try:
            with self._lock, self._changes:
                results.append(plan(after))
            after.run(self._pool.submit)
        except BaseException:
            # Ctrl-C may come before the first of them: the next change counts anew, and plans them again.
            self._changes.lost.append(None)
            for result in results:
                undo(result)
            raise
        return results[0]


@define(eq=False)
class _Flush:
    """Copies of a prompt's chunks to one tier, first to last. All chunks stay in host memory until the last copy has
    ended.

    `chain`: the keys of the prompt. To write a chunk, the tier evicts no earlier chunk of `chain`.
    """

    tier: LowerTier
    chain: Sequence[ChunkKey]
    copies: list[Entry]
    running: list[Entry] = field(init=False, factory=list)
    queued: deque[Entry] = field(init=False)
    """The entries whose copies no thread has begun."""

    def __attrs_post_init__(self) -> None:
        self.queued = deque(self.copies)

    def ancestors(self, key: ChunkKey) -> frozenset[ChunkKey]:
        return frozenset(takewhile(lambda other: other != key, self.chain))


@define(eq=False, repr=False)
class Writes(StoreComponent):
    """Copies chunks from host memory to lower tiers.

    `on_slots_freed`: a function that is called, without the lock, when copies have ended and may have freed slots.
    `most`: largest number of queued and running copies to one tier. Further chunks wait without a reference, so they
    may be evicted before they are copied.
    """

    _on_slots_freed: Callable[[Deferred], None]
    _most: int
    _late: defaultdict[LowerTier, deque[tuple[Entry, Sequence[ChunkKey]]]] = field(
        init=False, factory=lambda: defaultdict(deque)
    )
    """Entries to copy beyond `most`, with the chains of their prompts. Such an entry may be evicted before its copy
    begins.
    """
    _flushes: dict[_Flush, None] = field(init=False, factory=dict)
    """Flushes that have not ended."""
    _ended: Waker = field(init=False, factory=Waker)

    @locked
    def write_through(self, entries: Sequence[Entry], chain: Sequence[ChunkKey], after: Deferred) -> None:
        """Plan copies of entries that were just stored, to the write-through tiers that want these chunks. `chain`: the
        keys of the prompt.
        """
        for tier in self._tiers:
            self._write_through(tier, entries, chain, after)

    @locked
    def _write_through(
        self, tier: LowerTier, entries: Sequence[Entry], chain: Sequence[ChunkKey], after: Deferred
    ) -> None:
        wanted, room, late = self._wanted(tier, entries, "through"), self._room(tier), self._late[tier]
        for entry in wanted[:room]:
            self._primary.ref(entry)
        self._plan(tier, wanted[:room], chain, after)
        left = max(0, self._primary.slab.num_slots - len(late))
        late.extend((entry, chain) for entry in wanted[room:][:left])
        tier.count_dropped(max(0, len(wanted) - room - left))

    def _room(self, tier: LowerTier) -> int:
        """Return how many more copies to a tier may be queued now."""
        flushes = [flush for flush in self._flushes if flush.tier is tier]
        return max(0, self._most - sum(len(flush.queued) + len(flush.running) for flush in flushes))

    def wait_for_room(self, copies: int, timeout: float) -> bool:
        """Wait until each tier accepts `copies` more copies, for at most `timeout` seconds. Returns whether this is the
        case.

        Tiers that hang are ignored.
        """

        def has_room() -> bool:
            with self._lock, self._changes:
                return all(self._room(tier) >= copies for tier in self._tiers if tier.hangs is None)

        return self._ended.wait_for(has_room, timeout)

    @locked
    def write_lost(self, chain: Sequence[ChunkKey], after: Deferred) -> None:
        """Plan copies of chunks in host memory to tiers without a capacity limit, if the tiers have lost the chunks."""
        ready = [entry for key in chain if (entry := self._primary.entries.get(key)) is not None and entry.ready]
        for tier in self._tiers:
            if tier.index.capacity is None and tier.writable:
                planned = {entry for flush in self._flushes if flush.tier is tier for entry in flush.copies}
                self._write_through(tier, [entry for entry in ready if entry not in planned], chain, after)

    @locked
    def write_to_shared(self, keys: Sequence[ChunkKey], after: Deferred) -> int:
        """Plan copies of chunks, from `keys[0]` on, to the shared tiers that lack these chunks.

        Returns how many chunks are in a shared tier or will be.
        """
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
    def flush(self, victim: Entry, after: Deferred) -> bool:
        """Plan copies of an evicted chunk to write-back tiers. Returns False if no tier wants the chunk."""
        wanted = [tier for tier in self._tiers if self._wanted(tier, (victim,), "back")]
        tiers = [tier for tier in wanted if self._room(tier)]
        for tier in wanted:
            tier.count_dropped(tier not in tiers)
        if tiers:
            self._primary.begin_flush(victim)
            victim.refs = len(tiers)
            for tier in tiers:
                self._plan(tier, [victim], (victim.parent, victim.key), after)
        return bool(tiers)

    @staticmethod
    def _wanted(tier: LowerTier, entries: Sequence[Entry], mode: Literal["through", "back"]) -> list[Entry]:
        if tier.write_mode != mode:
            return []
        wanted = [entry for entry in entries if not entry.removed and tier.wants(entry.key)]
        if wanted and tier.hangs is not None:
            tier.count_dropped(len(wanted))
            wanted = []
        return wanted

    def _plan(self, tier: LowerTier, copies: list[Entry], chain: Sequence[ChunkKey], after: Deferred) -> None:
        """Queue copies to a tier. The caller has already added a reference to each entry."""
        if copies:
            flush = _Flush(tier, chain, copies)
            self._flushes[flush] = None
            after.jobs += self._jobs(flush)

    def _jobs(self, flush: _Flush) -> list[Job]:
        # One job object for all: this runs on the scheduling thread.
        job = Job(partial(self._copy, flush), Priority.STORE, partial(self._refused, flush), flush.tier.name)
        return [job] * len(flush.queued)

    def _copy(self, flush: _Flush, after: Deferred) -> None:
        """Copy the first queued chunk to the tier. Runs on an I/O thread."""
        with self._lock, self._changes:
            if not flush.queued:
                # Its job was queued twice, because of an exception.
                return
            entry = flush.queued.popleft()
            flush.running.append(entry)
        try:
            payload = self._primary.payloads.gather(entry.key, self._primary.slab.view(entry.slot))
            chunk = Chunk(entry.key, payload, entry.parent, entry.tokens)
            flush.tier.write(chunk, lambda: not entry.removed, partial(flush.ancestors, entry.key))
        finally:
            with self._lock, self._changes:
                flush.running.remove(entry)
                self._end_if_done(flush, after)
                self._plan_late(flush.tier, after)
            self._ended.ring()

    def _refused(self, flush: _Flush, after: Deferred) -> None:
        """Drop the last queued copy, because the closed pool has refused a job."""
        with self._lock, self._changes:
            if flush.queued:
                flush.queued.pop()
                flush.tier.count_dropped()
                self._end_if_done(flush, after)
        self._ended.ring()

    @locked
    def _plan_late(self, tier: LowerTier, after: Deferred) -> None:
        """Queue the next copy that was held back beyond the limit, because another copy to `tier` has ended."""
        late = self._late[tier]
        while late:
            entry, chain = late.popleft()
            if entry.removed:
                tier.count_dropped()
            elif not tier.index.knows(entry.key):
                self._primary.ref(entry)
                self._plan(tier, [entry], chain, after)
                return

    @locked
    def _end_if_done(self, flush: _Flush, after: Deferred) -> None:
        if not (flush.queued or flush.running):
            self._flushes.pop(flush, None)
            self._free(flush, after)

    @locked
    def _free(self, flush: _Flush, after: Deferred) -> None:
        """Free the slots of copies that are neither queued nor running."""
        needed = {*flush.queued, *flush.running}
        ended = [entry for entry in flush.copies if entry not in needed]
        flush.copies = [entry for entry in flush.copies if entry in needed]
        # Tail first, so that the head of the chain is evicted last, here and below.
        for entry in reversed(ended):
            self._primary.unref(entry)
        if ended:
            after.callbacks.append(self._on_slots_freed)

    @locked
    def abandon(self, tier: LowerTier, after: Deferred) -> None:
        """Drop the queued copies to a tier that hangs, so that they no longer keep slots of host memory."""
        after.callbacks.append(lambda after: self._ended.ring())
        for flush in [flush for flush in self._flushes if flush.tier is tier]:
            tier.count_dropped(len(flush.queued))
            flush.queued.clear()
            for entry in flush.running:
                if entry.flushing and entry.refs == 1:
                    # Evicted, and kept by this call alone: demands must not wait for its slot.
                    self._primary.remove(entry)
            self._end_if_done(flush, after)
            self._free(flush, after)

    @locked
    def recount(self, refs: Counter[Entry], after: Deferred) -> None:
        """After an interrupted change, count in `refs` the entries that are being copied to lower tiers.

        Also queues again the copies that no thread has begun.
        """
        for flush in list(self._flushes):
            # Some may have been refused, or ended, only in part.
            flush.queued = deque(entry for entry in flush.queued if entry in flush.copies)
            if not (flush.queued or flush.running):
                del self._flushes[flush]
                continue
            refs.update(flush.copies)
            after.jobs += self._jobs(flush)
        after.callbacks.append(self._on_slots_freed)


class SlotAllocator:
    """Finds slots for new chunks, and evicts other chunks if necessary. No method waits.

    `max_flushing`: largest number of evicted chunks that are being written to lower tiers at a time; 0 without
    write-back. The caller holds the store's lock.
    """

    def __init__(self, primary: PrimaryTier, writes: Writes, max_flushing: int) -> None:
        self._primary = primary
        self._slab = primary.slab
        self._writes = writes
        self._free_target = max(1, primary.slab.num_slots // _FREE_SHARE)
        self._write_back = max_flushing > 0
        self._max_flushing = min(max(4, self._free_target), max_flushing)

    def allocate(self, key: ChunkKey, after: Deferred, protect: set[ChunkKey] | None = None) -> int | None:
        """Return a free slot, or None if no slot can be freed now. May evict another chunk, but no chunk in `protect`.

        If the limit of tails (tokens after a prompt's last whole chunk) or recurrent states is reached, a new one
        replaces an unused one, even one in `protect`.
        """
        share = None if type(key) is bytes else self._primary.shares.get(type(key))
        if share is not None and share.full:
            victim = self._primary.evict_from(share, key)
            if victim is None:
                return None
            self._drop(victim, after)
        while (slot := self._slab.allocate()) is None:
            if self._write_back and self._primary.flushing >= self._max_flushing:
                return None
            if not self._evict(after, protect or frozenset()):
                return None
        return slot

    def free_up(self, count: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> None:
        """If `count` free slots need several evictions, evict these chunks together. Does nothing with write-back."""
        missing = count - self._primary.slab.free_slots
        if missing > 1 and not self._write_back:
            self._primary.evict(protect, missing)

    def _evict(self, after: Deferred, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> bool:
        """Evict a chunk. Returns False if no chunk can be evicted.

        The slot is free now, or with write-back after the chunk is written to lower tiers.
        """
        victims = self._primary.victims(protect)
        for victim in victims:
            self._drop(victim, after)
        return bool(victims)

    def _drop(self, victim: Entry, after: Deferred) -> None:
        if not (self._write_back and self._writes.flush(victim, after)):
            self._primary.remove(victim)

    def keep_free(self, after: Deferred) -> None:
        """With write-back, evict chunks before their slots are needed, because writes to lower tiers take time."""
        if not self._write_back:
            return
        primary = self._primary
        wanted = self._free_target - primary.slab.free_slots
        while primary.flushing < min(wanted, self._max_flushing) and self._evict(after):
            wanted = self._free_target - primary.slab.free_slots
