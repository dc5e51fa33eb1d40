"""Runs promotions: reads chunks from lower tiers into slots, and knows which promotions wait for each chunk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from attrs import define, field

from lmkv.protocols import ChunkKey
from lmkv.store.claims import Claims, Owners
from lmkv.store.entries import Entry, State
from lmkv.store.guards import locked
from lmkv.store.iopool import Deferred, Job, Priority
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.store.tier import LowerTier, first_tier_with
from lmkv.store.writes import SlotAllocator, StoreComponent

_MAX_KEPT: Final = 1 << 16
"""Number of prefetches, and number of chunks in prefetches, that may always be kept."""
_DEMANDS: Final = b"demands"
"""The owner of promotions that are not prefetches."""
_MAX_RELEASED: Final = 64
"""Largest number of prefetches that are ended to get a slot for another prefetch."""


@define(eq=False)
class _Work:
    """A promotion (a read of chunks into host memory), and the part of its state that callers do not see.

    `end`: the time at which the promotion expires. `owner`: the client who made the request. `tenant`: the tenant of
    the chunks. `part`: the tenant's fraction of host memory, 0 to 1. `missing`: keys that wait for `lookup`, or for the
    slots of chunks that are being flushed. `awaited`: the unfilled entries, each with the name of the tier that fills
    it. `chain`: all keys of the request, of which the promotion may be the beginning.
    """

    promotion: Promotion
    prefetch: bool
    end: float
    owner: bytes
    tenant: str
    part: float
    chain: Sequence[ChunkKey]
    missing: Sequence[ChunkKey] = ()
    lookup: SharedLookup | None = None
    begun: bool = field(init=False, default=False)
    """Whether `promote` has returned. Before that, no caller has the promotion."""
    awaited: dict[Entry, str] = field(init=False, factory=dict)


@define(eq=False)
class _Load:
    """The read that fills an entry's slot. `prefetch`: whether only prefetches need the entry."""

    tier: LowerTier
    prefetch: bool
    begun: bool = False


@define(eq=False, repr=False)
class Promoter(StoreComponent):
    """Runs a store's promotions: reads of chunks into host memory. `waiters`: the promotions that wait for each entry.

    `prefetch_share`: largest fraction of the slots for prefetched chunks. `forked`: whether this process is a forked
    child, which has no threads.
    """

    _allocator: SlotAllocator
    _prefetch_share: float
    waiters: dict[Entry, list[_Work]] = field(init=False, factory=dict)
    forked: bool = field(init=False, default=False)
    _unreleased: dict[Promotion, _Work] = field(init=False, factory=dict)
    _waiting: list[_Work] = field(init=False, factory=list)
    _loads: dict[Entry, _Load] = field(init=False, factory=dict)
    """The loads of the entries that are LOADING."""
    _prefetches: Counter[Entry] = field(init=False, factory=Counter)
    """Number of prefetches that refer to each entry; absent if 0."""
    _prefetched: Counter[tuple[str, type]] = field(init=False, factory=Counter)
    """Number of prefetched entries of each tenant, by the tenant and the type of the keys."""
    _tenants: dict[Entry, tuple[str, bytes]] = field(init=False, factory=dict)
    """The tenant and the owner of each prefetched entry."""
    _owners: dict[str, Owners] = field(init=False, factory=dict)
    """For each tenant, the number of prefetched entries of each owner."""
    _kept: dict[str, Claims[Promotion, _Work]] = field(init=False, factory=dict)
    """For each tenant, the prefetches and other promotions that have a time to live."""

    def snapshot(self) -> tuple[tuple[ChunkKey, ...], int]:
        """Return the keys of the prefetched entries, and the number of promotions that are not released."""
        return tuple(entry.key for entry in self._prefetches), len(self._unreleased)

    @locked
    def promote(
        self,
        keys: Sequence[ChunkKey],
        chain: Sequence[ChunkKey],
        lookup: SharedLookup | None,
        after: Deferred,
        *,
        prefetch: bool,
        ttl: float | None,
        owner: bytes,
    ) -> Promotion:
        """Begin a promotion now, or when `lookup` is done. The caller has released expired promotions.

        `chain`: all keys of the request. If slots are needed, those chunks of `chain` that no lower tier stores are
        evicted last.
        """
        promotion = Promotion(self.release, lambda: self.forked)
        end = math.inf if ttl is None else self._clock() + ttl
        tenant, part = self._primary.part_of(keys[0]) if keys else ("", 0.0)
        work = self._unreleased[promotion] = _Work(promotion, prefetch, end, owner, tenant, part, chain)
        self._keep(work, after)
        if lookup is None:
            self._extend(work, keys, after)
        else:
            work.missing, work.lookup = keys, lookup
            self._waiting.append(work)
        self._allocator.keep_free(after)
        work.begun = True
        return promotion

    @locked
    def _extend(self, work: _Work, keys: Sequence[ChunkKey], after: Deferred) -> None:
        """Add chunks to a promotion, from `keys[0]` on. If there is no slot yet, the remaining keys become
        `missing`.
        """
        work.missing = ()
        promotion = work.promotion
        parent = promotion.entries[-1].key if promotion.entries else b""
        entries, kept = self._primary.entries, None
        for index, key in enumerate(keys):
            if work.prefetch and not self._finds_room(work, key, after):
                break
            entry = entries.get(key)
            if entry is not None and self.is_stuck(entry):
                self.abandon(entry, after)
                entry = None
            tier = None if entry else first_tier_with(self._tiers, key)
            if tier is not None:
                if kept is None and not self._primary.slab.free_slots:
                    kept = {here for here in work.chain if here in entries and not first_tier_with(self._tiers, here)}
                slot = self._allocator.allocate(key, after, kept)
                if slot is None and kept:
                    slot = self._allocator.allocate(key, after)
                if slot is None:
                    # A demand waits for slots as long as evicted chunks are being flushed; a prefetch does not.
                    if not work.prefetch and self._primary.flushing:
                        work.missing = keys[index:]
                        self._waiting.append(work)
                    break
                entry = self._primary.enter(key, slot, State.LOADING, parent)
                self._loads[entry] = _Load(tier, work.prefetch)
                tier.index.begin_read(key)
                self._queue(entry, Priority.PREFETCH if work.prefetch else Priority.LOAD, after)
            if entry is None:
                break
            self._join(work, entry, tier, after)
            parent = key
        self._keep(work, after)
        self._finish_if_complete(work, after)

    @locked
    def _keep(self, work: _Work, after: Deferred) -> None:
        """Record the size of a promotion that has a time to live. If the sizes exceed a limit, release the oldest
        promotions.
        """
        if work.promotion.released:
            return
        kept = self._keep_as(work)
        for promotion, _ in kept.excess(max(_MAX_KEPT, 4 * self._primary.slab.num_slots)):
            self._release(promotion, after)

    def _keep_as(self, work: _Work) -> Claims[Promotion, _Work]:
        kept = self._kept.setdefault(work.tenant, Claims())
        if work.prefetch or work.end < math.inf:
            # No prefetch ends a demand. A demand has an end in case its caller is lost.
            owner = work.owner if work.prefetch else _DEMANDS
            kept.add(work.promotion, owner, size=1 + len(work.promotion.entries), end=work.end, value=work)
        return kept

    @locked
    def _finds_room(self, work: _Work, key: ChunkKey, after: Deferred) -> bool:
        """Return whether a prefetch may use one more slot.

        If prefetches use all their slots, the client with the most prefetched chunks loses its oldest prefetch, unless
        this prefetch's client has about as many.
        """
        if self._primary.entries.get(key) in self._tenants:
            return True
        primary, kind, share = self._primary, type(key), self._prefetch_share * work.part
        if kind is not bytes and self._prefetched[work.tenant, kind] >= primary.slots_of(share, kind):
            return False
        owners = self._owners.setdefault(work.tenant, Owners())
        for _ in range(_MAX_RELEASED):
            if owners.total < primary.slots_of(share, bytes):
                return primary.slots_for_claims(kind) > 0
            most = owners.first()
            first = self._kept.setdefault(work.tenant, Claims()).oldest_of(most)
            if first is None or owners.owned[most] <= owners.owned[work.owner] + 1:
                return False
            self._release(first, after)
        return False

    def _queue(self, entry: Entry, priority: Priority, after: Deferred) -> None:
        lane = self._loads[entry].tier.name
        after.jobs.append(Job(partial(self._load, entry), priority, partial(self._refused, entry), lane))

    def _join(self, work: _Work, entry: Entry, tier: LowerTier | None, after: Deferred) -> None:
        """Add an entry to a promotion. The promotion then has a reference to the entry, and waits until the entry is
        filled.
        """
        self._primary.ref(entry)
        source = tier.name if tier else self._primary.name
        work.promotion.entries.append(entry)
        work.promotion.origins.append(source)
        if not entry.ready:
            self.waiters.setdefault(entry, []).append(work)
            work.awaited[entry] = source
        load = self._loads.get(entry)
        if work.prefetch:
            self._prefetches[entry] += 1
            if entry not in self._tenants:
                self._tenants[entry] = work.tenant, work.owner
                self._owners.setdefault(work.tenant, Owners()).count(work.owner, 1)
                self._prefetched[work.tenant, type(entry.key)] += 1
                self._primary.prioritized[type(entry.key)] += 1
        elif load is not None and load.prefetch and not load.begun:
            # Queued again, with a demand's priority: whichever job comes first does the load.
            load.prefetch = False
            self._queue(entry, Priority.LOAD, after)

    # -- loads --------------------------------------------------------------------------------------------

    def _load(self, entry: Entry, after: Deferred) -> None:
        """Fill the entry's slot from its tier, on an I/O thread, unless the load was cancelled or has begun."""
        with self._lock, self._changes:
            load = self._loads.get(entry)
            if load is None or load.begun:
                return
            load.begun = True
        payloads, slot = self._primary.payloads, self._primary.slab.view(entry.slot)
        buffer = payloads.buffer(entry.key, slot)
        loaded = False
        try:
            if load.tier.read(entry.key, buffer):
                payloads.scatter(entry.key, buffer, slot)
                loaded = True
        finally:
            with self._lock, self._changes:
                # READY before anybody is woken, and the load's own reference dropped last: the slot stays theirs.
                if loaded:
                    self._primary.mark_ready(entry)
                    entry.prefetched = load.prefetch and not entry.removed
                    self._primary.counters.prefetched += entry.prefetched
                self._end_load(entry, after)
                self._allocator.keep_free(after)

    @locked
    def _end_load(self, entry: Entry, after: Deferred) -> None:
        """Remove a load's reference to its entry, after the load has succeeded or failed."""
        tier = self._loads.pop(entry).tier
        if entry.state is not State.READY:
            self._primary.remove(entry)
        tier.index.end_read(entry.key)
        self.settle(entry, after)
        self._primary.unref(entry)

    @locked
    def settle(self, entry: Entry, after: Deferred) -> None:
        """Note that an entry is READY, or was removed unfilled. Promotions that waited only for this entry are then
        done.
        """
        for work in self.waiters.pop(entry, ()):
            promotion, source = work.promotion, work.awaited.pop(entry)
            if entry.ready:
                nbytes, _ = promotion.delivered.get(source, (0, 0.0))
                promotion.delivered[source] = nbytes + self._primary.payloads.nbytes(entry.key), self._clock()
            else:
                promotion.failed_at = min(promotion.entries.index(entry), len(promotion))
            self._finish_if_complete(work, after)

    @locked
    def _finish_if_complete(self, work: _Work, after: Deferred) -> None:
        if not work.awaited and not work.missing:
            finish = work.promotion.finish
            after.callbacks.append(lambda after: finish())

    @locked
    def is_stuck(self, entry: Entry) -> bool:
        """Return whether the entry is LOADING from a tier that cannot be read now. Such a load may never end."""
        load = self._loads.get(entry)
        return load is not None and not load.tier.usable

    @locked
    def abandon(self, entry: Entry, after: Deferred) -> None:
        """Remove an unfilled entry. Promotions no longer wait for it. Its slot is freed when it has no references."""
        self._primary.remove(entry)
        self.settle(entry, after)

    def _refused(self, entry: Entry, after: Deferred) -> None:
        """Cancel a load that the closed pool refused. The caller does not hold the lock."""
        with self._lock, self._changes:
            self._cancel_load(entry, after)

    @locked
    def _cancel_load(self, entry: Entry, after: Deferred) -> None:
        """Cancel a load whose read has not begun."""
        load = self._loads.get(entry)
        if load is not None and not load.begun:
            self._end_load(entry, after)

    # -- waiting for slots --------------------------------------------------------------------------------

    @locked
    def resume(self, after: Deferred) -> None:
        """Continue the waiting promotions, oldest first. Slots may be free now, or a shared lookup may be done."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            if work.lookup is not None and not work.lookup.done:
                self._waiting.append(work)
            elif not work.promotion.released:
                self._extend(work, work.missing if work.promotion.failed_at is None else (), after)

    # -- ends ---------------------------------------------------------------------------------------------

    def release(self, promotion: Promotion) -> None:
        """Release a promotion: allow the eviction of its chunks. Idempotent. The caller does not hold the lock."""
        self._change(partial(self._release, promotion))

    @locked
    def _release(self, promotion: Promotion, after: Deferred) -> None:
        work = self._unreleased.pop(promotion, None)
        if work is None:
            return
        promotion.released = True
        work.missing = ()
        if work.tenant in self._kept:
            self._kept[work.tenant].pop(promotion)
        self._finish_if_complete(work, after)
        for entry in reversed(promotion.entries):
            if work.prefetch:
                self._prefetches[entry] -= 1
                if not self._prefetches[entry]:
                    del self._prefetches[entry]
                    tenant, owner = self._tenants.pop(entry)
                    self._owners[tenant].count(owner, -1)
                    self._prefetched[tenant, type(entry.key)] -= 1
                    self._primary.prioritized[type(entry.key)] -= 1
            self._primary.unref(entry)
            if entry.refs == 1 and entry in self._loads:
                # No other promotion waits for this read.
                self._cancel_load(entry, after)

    @locked
    def expire(self, after: Deferred) -> None:
        """Release expired promotions."""
        now = self._clock()
        for kept in self._kept.values():
            for promotion, _ in kept.due(now):
                self._release(promotion, after)

    def are_prefetched(self, entries: Sequence[Entry]) -> bool:
        """Return whether a prefetch refers to any of the entries."""
        return any(entry in self._prefetches for entry in entries)

    @locked
    def end_prefetches(self, after: Deferred, removed: Collection[ChunkKey] | None = None) -> None:
        """Release prefetches that have lost a chunk, because a prefetch is useless after its first missing chunk.

        `removed`: the keys of the lost chunks. If None, all chunks are lost, and all promotions with a time to live are
        released.
        """
        for work in list(self._unreleased.values()):
            if work.end < math.inf and (work.prefetch or removed is None):
                promotion = work.promotion
                if removed is None or any(entry.key in removed for entry in promotion.entries):
                    self._release(promotion, after)

    # -- after an exception -------------------------------------------------------------------------------

    @locked
    def recount(self, refs: Counter[Entry]) -> set[Entry]:
        """After an interrupted change, count in `refs` the references that promotions and loads have to entries.

        Returns the entries that loads are filling.
        """
        self._unreleased = {promotion: work for promotion, work in self._unreleased.items() if work.begun}
        self._prefetches, self._prefetched, self._tenants = Counter(), Counter(), {}
        self._kept = {}
        for promotion, work in self._unreleased.items():
            del promotion.entries[len(promotion.origins) :]
            refs.update(promotion.entries)
            self._keep_as(work)
            if work.prefetch:
                self._prefetches.update(promotion.entries)
                self._tenants.update(dict.fromkeys(promotion.entries, (work.tenant, work.owner)))
        self._owners = {}
        for tenant, owner in self._tenants.values():
            self._owners.setdefault(tenant, Owners()).count(owner, 1)
        self._prefetched.update((tenant, type(entry.key)) for entry, (tenant, _) in self._tenants.items())
        self._primary.prioritized.update(type(entry.key) for entry in self._tenants)
        refs.update(self._loads.keys())
        return set(self._loads)

    @locked
    def reading(self, tier: LowerTier) -> list[ChunkKey]:
        return [entry.key for entry, load in self._loads.items() if load.tier is tier]

    @locked
    def plan_again(self, after: Deferred) -> None:
        """Find again which entries each promotion waits for, and queue the loads that have not begun. Called when the
        store repairs itself after an interrupted change.
        """
        # Callers may also wait for a released promotion.
        works = dict.fromkeys(
            (*self._unreleased.values(), *(work for waiting in self.waiters.values() for work in waiting))
        )
        self.waiters = {}
        for work in works:
            promotion, work.awaited = work.promotion, {}
            del promotion.entries[len(promotion.origins) :]
            for index, (entry, source) in enumerate(zip(promotion.entries, promotion.origins, strict=True)):
                if entry.state is not State.READY and not entry.removed:
                    work.awaited[entry] = source
                    self.waiters.setdefault(entry, []).append(work)
                elif not entry.ready:
                    promotion.failed_at = min(index, len(promotion))
            self._finish_if_complete(work, after)
        self._waiting = [work for work in self._unreleased.values() if work.missing]
        after.jobs += [work.lookup.job() for work in self._waiting if work.lookup and not work.lookup.done]
        for entry, load in self._loads.items():
            if not load.begun:
                self._queue(entry, Priority.PREFETCH if load.prefetch else Priority.LOAD, after)

    @locked
    def close(self, after: Deferred) -> None:
        """Finish every waiting promotion without further loads, and abandon the running loads."""
        for work in self._waiting:
            work.missing = ()
            self._finish_if_complete(work, after)
        self._waiting.clear()
        for entry in list(self._primary.entries.values()):
            if entry.state is State.LOADING:
                self.abandon(entry, after)
