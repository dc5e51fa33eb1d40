"""Runs promotions: which chunk is loaded from which tier into which slot, and who is told."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial

from attrs import define, evolve

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.allocator import SlotAllocator
from lmkv.store.promotion import Promotion
from lmkv.store.shared_lookup import SharedLookup
from lmkv.store.tiers.iopool import AfterLock, IOPool, Job, Priority
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier, first_with
from lmkv.store.tiers.primary import Entry, PrimaryTier, State


@define(eq=False)
class _Load(Job):
    tier: LowerTier


def wake(entry: Entry, after: AfterLock) -> None:
    """Locked. Tell those who wait for an entry that it is READY, or was removed unfilled."""
    waiters, entry.waiters = entry.waiters, ()
    for waiter in waiters:
        waiter.on_entry_done(entry, after)


class Promoter:
    """`max_prefetched`: slots that prefetches may refer to at a time. `lock`: the store's."""

    def __init__(
        self,
        lock: threading.Lock,
        primary: PrimaryTier,
        tiers: Sequence[LowerTier],
        allocator: SlotAllocator,
        pool: IOPool,
        max_prefetched: int,
        clock: Clock,
    ) -> None:
        self._lock = lock
        self._primary = primary
        self._tiers = tiers
        self._allocator = allocator
        self._pool = pool
        self._max_prefetched = max_prefetched
        self._prefetched = 0
        self._clock = clock
        self._waiting: list[Promotion] = []
        self._sources: dict[Entry, LowerTier] = {}
        """Of the entries that are LOADING."""
        self._expiring: dict[Promotion, float] = {}
        self._next_end = float("inf")

    @locked
    def promote(
        self,
        keys: Sequence[ChunkKey],
        priority: Priority,
        ttl: float | None,
        after: AfterLock,
        shared_lookup: SharedLookup | None = None,
        chain: Sequence[ChunkKey] = (),
    ) -> Promotion:
        """Begin a promotion: at once, or when `shared_lookup` is done. Expired ones were released before.

        Of the rest of `chain` nothing is evicted for it that no lower tier stores, if there is anything else.
        """
        promotion = Promotion(priority, self._lock, self.release, chain, self._clock)
        if shared_lookup is None:
            self._extend(promotion, keys, after)
        else:
            promotion.waiting_keys, promotion.shared_lookup = keys, shared_lookup
            self._waiting.append(promotion)
        if ttl is not None:
            end = self._expiring[promotion] = self._clock() + ttl
            self._next_end = min(self._next_end, end)
        self._allocator.keep_free(after)
        return promotion

    @locked
    def _extend(self, promotion: Promotion, keys: Sequence[ChunkKey], after: AfterLock) -> None:
        """Add the leading chunks of `keys`; `waiting_keys` is what has to wait for slots."""
        promotion.waiting_keys = ()
        parent = promotion.entries[-1].key if promotion.entries else b""
        entries, kept = self._primary.entries, None
        for index, key in enumerate(keys):
            if promotion.priority is Priority.PREFETCH and not self._may_prefetch(key):
                break
            entry = entries.get(key)
            if entry is not None and self.hangs(entry):
                self.give_up(entry, after)
                entry = None
            tier = None if entry else first_with(self._tiers, key)
            if tier is not None:
                if kept is None and not self._primary.slab.free_slots:
                    kept = {here for here in promotion.chain if here in entries and not first_with(self._tiers, here)}
                slot = self._allocator.allocate(key, after, kept)
                if slot is None and kept:
                    slot = self._allocator.allocate(key, after)
                if slot is None:
                    self._wait_for_slots(promotion, keys[index:])
                    break
                entry = self._primary.enter(key, slot, State.LOADING, parent)
                self._begin_load(entry, tier, promotion.priority, after)
            if entry is None:
                break
            self._join(promotion, entry, tier, after)
            parent = key
        promotion.finish_if_complete(after)

    def _may_prefetch(self, key: ChunkKey) -> bool:
        """Whether a prefetch may refer to one more chunk: one that others prefetched costs nothing more."""
        entry = self._primary.entries.get(key)
        return self._prefetched < self._max_prefetched or (entry is not None and entry.prefetches > 0)

    def _begin_load(self, entry: Entry, tier: LowerTier, priority: Priority, after: AfterLock) -> None:
        work, refused = partial(self._load, tier, entry), partial(self._refused, tier, entry)
        entry.load = _Load(work, priority, refused, tier)
        self._sources[entry] = tier
        tier.index.begin_read(entry.key)
        after.jobs.append(entry.load)

    def _join(self, promotion: Promotion, entry: Entry, tier: LowerTier | None, after: AfterLock) -> None:
        self._primary.ref(entry)
        promotion.add(entry, tier.name if tier else self._primary.name)
        if promotion.priority is Priority.PREFETCH:
            self._prefetched += not entry.prefetches
            entry.prefetches += 1
        elif entry.load is not None and entry.load.priority is Priority.PREFETCH:
            # Queued again, with a demand's priority: whichever job comes first does the load.
            entry.load = evolve(entry.load, priority=Priority.LOAD)
            after.jobs.append(entry.load)

    # -- loads --------------------------------------------------------------------------------------------

    def _load(self, tier: LowerTier, entry: Entry, after: AfterLock) -> None:
        """I/O thread: fill the entry's slot from the tier, if that is wanted and was not done yet."""
        with self._lock:
            load, entry.load = entry.load, None
        if load is None:
            return
        payloads, slot = self._primary.payloads, self._primary.slab.view(entry.slot)
        room = payloads.room(entry.key, slot)
        loaded = False
        try:
            if tier.read(entry.key, room):
                payloads.scatter(entry.key, room, slot)
                loaded = True
        finally:
            with self._lock:
                # READY before anybody is woken, and the load's own reference dropped last: the slot stays theirs.
                if loaded:
                    self._primary.mark_ready(entry)
                    entry.prefetched = load.priority is Priority.PREFETCH and not entry.removed
                    self._primary.counters.prefetched += entry.prefetched
                self._end_load(tier, entry, after)
                self._allocator.keep_free(after)

    @locked
    def _end_load(self, tier: LowerTier, entry: Entry, after: AfterLock) -> None:
        """The load refers to its chunk no more, which is READY or never will be."""
        del self._sources[entry]
        if entry.state is not State.READY:
            self._primary.remove(entry)
        tier.index.end_read(entry.key)
        wake(entry, after)
        self._primary.unref(entry)

    @locked
    def hangs(self, entry: Entry) -> bool:
        """Whether the entry is LOADING from a tier that cannot be read now: the load may never end."""
        tier = self._sources.get(entry)
        return tier is not None and not tier.usable

    @locked
    def give_up(self, entry: Entry, after: AfterLock) -> None:
        """Another slot takes the place of an entry that `hangs`; its own is freed when the load ends, if ever."""
        self._primary.remove(entry)
        wake(entry, after)

    def _refused(self, tier: LowerTier, entry: Entry, after: AfterLock) -> None:
        """Not locked. The pool is closed."""
        with self._lock:
            if entry.load is not None:
                entry.load = None
                self._end_load(tier, entry, after)

    # -- waiting for slots --------------------------------------------------------------------------------

    def _wait_for_slots(self, promotion: Promotion, keys: Sequence[ChunkKey]) -> None:
        """A demand waits for slots as long as evicted chunks are being flushed, a prefetch does not."""
        if promotion.priority is Priority.LOAD and self._primary.flushing:
            promotion.waiting_keys = keys
            self._waiting.append(promotion)

    @locked
    def resume(self, after: AfterLock) -> None:
        """Slots may be free, or a shared lookup done: go on with the promotions that wait, in their order."""
        waiting, self._waiting = self._waiting, []
        for promotion in waiting:
            if promotion.shared_lookup is not None and not promotion.shared_lookup.done:
                self._waiting.append(promotion)
            elif not promotion.released:
                self._extend(promotion, () if promotion.failed else promotion.waiting_keys, after)

    # -- ends ---------------------------------------------------------------------------------------------

    def release(self, promotion: Promotion) -> None:
        """Not locked. Idempotent."""
        after = AfterLock()
        with self._lock:
            self._release(promotion, after)
        after.run(self._pool)

    @locked
    def _release(self, promotion: Promotion, after: AfterLock) -> None:
        if promotion.released:
            return
        promotion.released = True
        self._expiring.pop(promotion, None)
        promotion.waiting_keys = ()
        promotion.finish_if_complete(after)
        for entry in reversed(promotion.entries):
            if promotion.priority is Priority.PREFETCH:
                entry.prefetches -= 1
                self._prefetched -= not entry.prefetches
            self._primary.unref(entry)
            if entry.load is not None and entry.refs == 1:
                self._cancel_load(entry, after)
        keys = promotion.keys if self._tiers else ()
        for tier in self._tiers:
            tier.index.policy.touch(keys)

    def _cancel_load(self, entry: Entry, after: AfterLock) -> None:
        """No promotion waits any more for a read that has not begun."""
        load, entry.load = entry.load, None
        assert isinstance(load, _Load)
        self._end_load(load.tier, entry, after)

    @locked
    def expire(self, after: AfterLock) -> None:
        """Release the promotions whose time is over."""
        now = self._clock()
        if now < self._next_end:
            return
        for promotion in [promotion for promotion, end in self._expiring.items() if end <= now]:
            self._release(promotion, after)
        self._next_end = min(self._expiring.values(), default=float("inf"))

    @locked
    def end_prefetches(self, after: AfterLock, removed: Collection[ChunkKey] | None = None) -> None:
        """Release prefetches whose chunks were removed, some of them or all: the rest is of no use without them."""
        for promotion in list(self._expiring):
            if promotion.priority is Priority.PREFETCH and (
                removed is None or any(entry.key in removed for entry in promotion.entries)
            ):
                self._release(promotion, after)

    @locked
    def close(self, after: AfterLock) -> None:
        """Nothing more will be loaded: tell everybody who waits."""
        for promotion in self._waiting:
            promotion.waiting_keys = ()
            promotion.finish_if_complete(after)
        self._waiting.clear()
        for entry in list(self._primary.entries.values()):
            if entry.state is State.LOADING:
                self._primary.remove(entry)
                wake(entry, after)
