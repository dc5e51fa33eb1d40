"""Runs promotions: which chunk is loaded from which tier into which slot, and which promotion waits for it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.entries import Entry, State
from lmkv.store.guards import Changes, locked
from lmkv.store.iopool import AfterLock, IOPool, Job, Priority
from lmkv.store.primary import PrimaryTier
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.store.tier import LowerTier, first_with
from lmkv.store.wishes import Owners, Wishes
from lmkv.store.writes import SlotAllocator

_MAX_KEPT: Final = 1 << 16
"""Prefetches, and chunks of theirs, that are kept at least."""
_DEMANDS: Final = b"demands"
"""The owner of promotions that are no prefetches."""
_MAX_RELEASED: Final = 64
"""Prefetches that one more slot may end."""


@define(eq=False)
class _Work:
    """A promotion, and the state of it that callers do not see.

    `end`: when its time to live is over. `owner`: of the request, `tenant`: of its chunks, `part`: of that tenant.
    `missing`: keys that wait for `lookup`, or for slots while chunks are flushed. `awaited`: entries that are not
    filled yet, by the tier that fills them. `chain`: everything that the request wants; the promotion may be its
    beginning.
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
    """Whether `promote` has ended. If not, nobody has the promotion."""
    awaited: dict[Entry, str] = field(init=False, factory=dict)


@define(eq=False)
class _Load:
    """The read that fills an entry. `prefetch`: only prefetches want it."""

    tier: LowerTier
    prefetch: bool
    begun: bool = False


@define(eq=False, repr=False)
class Promoter:
    """Runs promotions. `prefetch_share`: of the slots, which prefetches may refer to at a time. `lock`: the store's.

    `waiters`: the promotions that wait for an entry to be filled. `forked`: this is a child process without threads.
    """

    _lock: threading.Lock
    _changes: Changes
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _allocator: SlotAllocator
    _pool: IOPool
    _prefetch_share: float
    _clock: Clock
    waiters: dict[Entry, list[_Work]] = field(init=False, factory=dict)
    forked: bool = field(init=False, default=False)
    _unreleased: dict[Promotion, _Work] = field(init=False, factory=dict)
    _waiting: list[_Work] = field(init=False, factory=list)
    _loads: dict[Entry, _Load] = field(init=False, factory=dict)
    """The loads of the entries that are LOADING."""
    _prefetches: Counter[Entry] = field(init=False, factory=Counter)
    """How many prefetches refer to each entry; entries without any are absent."""
    _prefetched: Counter[tuple[str, type]] = field(init=False, factory=Counter)
    """How many entries of each tenant, by the type of their keys, prefetches refer to."""
    _tenants: dict[Entry, tuple[str, bytes]] = field(init=False, factory=dict)
    """The tenant and the owner that each of them counts for."""
    _owners: dict[str, Owners] = field(init=False, factory=dict)
    """How many of them each tenant's owners have."""
    _kept: dict[str, Wishes[Promotion, _Work]] = field(init=False, factory=dict)
    """The prefetches, and other promotions with an end, by tenant."""

    @locked
    def promote(
        self,
        keys: Sequence[ChunkKey],
        after: AfterLock,
        *,
        prefetch: bool,
        ttl: float | None,
        owner: bytes = b"",
        lookup: SharedLookup | None = None,
        chain: Sequence[ChunkKey] = (),
    ) -> Promotion:
        """Begin a promotion: at once, or when `lookup` is done. Expired ones were released before.

        Chunks of the rest of `chain` that no lower tier stores are evicted last for it.
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
    def _extend(self, work: _Work, keys: Sequence[ChunkKey], after: AfterLock) -> None:
        """Add the leading chunks of `keys`; those that have to wait for slots become `missing`."""
        work.missing = ()
        promotion = work.promotion
        parent = promotion.entries[-1].key if promotion.entries else b""
        entries, kept = self._primary.entries, None
        for index, key in enumerate(keys):
            if work.prefetch and not self._finds_room(work, key, after):
                break
            entry = entries.get(key)
            if entry is not None and self.hangs(entry):
                self.give_up(entry, after)
                entry = None
            tier = None if entry else first_with(self._tiers, key)
            if tier is not None:
                if kept is None and not self._primary.slab.free_slots:
                    kept = {here for here in work.chain if here in entries and not first_with(self._tiers, here)}
                slot = self._allocator.allocate(key, after, kept)
                if slot is None and kept:
                    slot = self._allocator.allocate(key, after)
                if slot is None:
                    self._wait_for_slots(work, keys[index:])
                    break
                entry = self._primary.enter(key, slot, State.LOADING, parent)
                self._begin_load(entry, tier, work.prefetch, after)
            if entry is None:
                break
            self._join(work, entry, tier, after)
            parent = key
        self._keep(work, after)
        self._finish_if_complete(work, after)

    @locked
    def _keep(self, work: _Work, after: AfterLock) -> None:
        """Note the size of a promotion with an end; too many of them end the oldest."""
        if work.promotion.released:
            return
        kept = self._keep_as(work)
        for promotion, _ in kept.excess(max(_MAX_KEPT, 4 * self._primary.slab.num_slots)):
            self._release(promotion, after)

    def _keep_as(self, work: _Work) -> Wishes[Promotion, _Work]:
        kept = self._kept.setdefault(work.tenant, Wishes())
        if work.prefetch or work.end < math.inf:
            # No prefetch ends a demand, which only has an end should its caller be lost.
            owner = work.owner if work.prefetch else _DEMANDS
            kept.add(work.promotion, owner, size=1 + len(work.promotion.entries), end=work.end, value=work)
        return kept

    @locked
    def _finds_room(self, work: _Work, key: ChunkKey, after: AfterLock) -> bool:
        """Whether a slot may be prefetched into; owners with more prefetches lose their oldest for it."""
        if self._primary.entries.get(key) in self._tenants:
            return True
        primary, kind, share = self._primary, type(key), self._prefetch_share * work.part
        if kind is not bytes and self._prefetched[work.tenant, kind] >= primary.slots_of(share, kind):
            return False
        owners = self._owners.setdefault(work.tenant, Owners())
        for _ in range(_MAX_RELEASED):
            if owners.total < primary.slots_of(share, bytes):
                return primary.slots_for_wishes(kind) > 0
            most = owners.first()
            first = self._kept.setdefault(work.tenant, Wishes()).oldest_of(most)
            if first is None or owners.owned[most] <= owners.owned[work.owner] + 1:
                return False
            self._release(first, after)
        return False

    def _begin_load(self, entry: Entry, tier: LowerTier, prefetch: bool, after: AfterLock) -> None:
        self._loads[entry] = _Load(tier, prefetch)
        tier.index.begin_read(entry.key)
        self._queue(entry, Priority.PREFETCH if prefetch else Priority.LOAD, after)

    def _queue(self, entry: Entry, priority: Priority, after: AfterLock) -> None:
        lane = self._loads[entry].tier.name
        after.jobs.append(Job(partial(self._load, entry), priority, partial(self._refused, entry), lane))

    def _join(self, work: _Work, entry: Entry, tier: LowerTier | None, after: AfterLock) -> None:
        """Add an entry to a promotion, which refers to it from now on and waits until it is filled."""
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
                self._primary.wish(type(entry.key), 1)
        elif load is not None and load.prefetch and not load.begun:
            # Queued again, with a demand's priority: whichever job comes first does the load.
            load.prefetch = False
            self._queue(entry, Priority.LOAD, after)

    # -- loads --------------------------------------------------------------------------------------------

    def _load(self, entry: Entry, after: AfterLock) -> None:
        """I/O thread: fill the entry's slot from the tier, unless the load was cancelled or has begun before."""
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
    def _end_load(self, entry: Entry, after: AfterLock) -> None:
        """Drop the load's reference to its chunk, which is READY or never will be."""
        tier = self._loads.pop(entry).tier
        if entry.state is not State.READY:
            self._primary.remove(entry)
        tier.index.end_read(entry.key)
        self.wake(entry, after)
        self._primary.unref(entry)

    @locked
    def wake(self, entry: Entry, after: AfterLock) -> None:
        """An entry is READY, or was removed unfilled: finish the promotions that waited for nothing else."""
        for work in self.waiters.pop(entry, ()):
            promotion, source = work.promotion, work.awaited.pop(entry)
            if entry.ready:
                nbytes, _ = promotion.delivered.get(source, (0, 0.0))
                promotion.delivered[source] = nbytes + self._primary.payloads.nbytes(entry.key), self._clock()
            else:
                promotion.failed_at = min(promotion.entries.index(entry), len(promotion))
            self._finish_if_complete(work, after)

    @locked
    def _finish_if_complete(self, work: _Work, after: AfterLock) -> None:
        if not work.awaited and not work.missing:
            finish = work.promotion.finish
            after.calls.append(lambda after: finish())

    @locked
    def hangs(self, entry: Entry) -> bool:
        """Whether the entry is LOADING from a tier that cannot be read now: the load may never end."""
        load = self._loads.get(entry)
        return load is not None and not load.tier.usable

    @locked
    def give_up(self, entry: Entry, after: AfterLock) -> None:
        """Another slot takes the place of an entry that `hangs`; its own is freed when the load ends, if ever."""
        self._primary.remove(entry)
        self.wake(entry, after)

    def _refused(self, entry: Entry, after: AfterLock) -> None:
        """Give up a load that the closed pool refused. Called without the lock."""
        with self._lock, self._changes:
            self._cancel_load(entry, after)

    @locked
    def _cancel_load(self, entry: Entry, after: AfterLock) -> None:
        """End a load whose read has not begun."""
        load = self._loads.get(entry)
        if load is not None and not load.begun:
            self._end_load(entry, after)

    # -- waiting for slots --------------------------------------------------------------------------------

    def _wait_for_slots(self, work: _Work, keys: Sequence[ChunkKey]) -> None:
        """A demand waits for slots as long as evicted chunks are being flushed, a prefetch does not."""
        if not work.prefetch and self._primary.flushing:
            work.missing = keys
            self._waiting.append(work)

    @locked
    def resume(self, after: AfterLock) -> None:
        """Slots may be free, or a shared lookup done: go on with the promotions that wait, in their order."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            if work.lookup is not None and not work.lookup.done:
                self._waiting.append(work)
            elif not work.promotion.released:
                self._extend(work, work.missing if work.promotion.failed_at is None else (), after)

    # -- ends ---------------------------------------------------------------------------------------------

    def release(self, promotion: Promotion) -> None:
        """Release a promotion's chunks. Called without the lock; idempotent."""
        after = AfterLock()
        with self._lock, self._changes:
            self._release(promotion, after)
        after.run(self._pool.submit)

    @locked
    def _release(self, promotion: Promotion, after: AfterLock) -> None:
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
                    self._primary.wish(type(entry.key), -1)
            self._primary.unref(entry)
            if entry.refs == 1 and entry in self._loads:
                # Nobody else waits for this read.
                self._cancel_load(entry, after)

    @locked
    def expire(self, after: AfterLock) -> None:
        """Release promotions whose time is over."""
        now = self._clock()
        for kept in self._kept.values():
            for promotion, _ in kept.due(now):
                self._release(promotion, after)

    def are_prefetched(self, entries: Sequence[Entry]) -> bool:
        """Whether prefetches refer to any of them."""
        return any(entry in self._prefetches for entry in entries)

    @locked
    def end_prefetches(self, after: AfterLock, removed: Collection[ChunkKey] | None = None) -> None:
        """Release prefetches of which chunks were removed: the rest is useless alone.

        Default: all promotions with a time to live.
        """
        for work in list(self._unreleased.values()):
            if work.end < math.inf and (work.prefetch or removed is None):
                promotion = work.promotion
                if removed is None or any(entry.key in removed for entry in promotion.entries):
                    self._release(promotion, after)

    # -- after an exception -------------------------------------------------------------------------------

    @locked
    def recount(self, refs: Counter[Entry]) -> set[Entry]:
        """Count the references of promotions and loads; returns the entries that are being loaded."""
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
        self._primary.wished.update(type(entry.key) for entry in self._tenants)
        refs.update(self._loads.keys())
        return set(self._loads)

    @locked
    def reading(self, tier: LowerTier) -> list[ChunkKey]:
        return [entry.key for entry, load in self._loads.items() if load.tier is tier]

    @locked
    def settle(self, after: AfterLock) -> None:
        """After a recount: find out what each promotion waits for, and queue again what no thread has begun."""
        # Somebody may wait for a promotion that was released, too.
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
    def close(self, after: AfterLock) -> None:
        """Nothing more will be loaded: finish every promotion that waits."""
        for work in self._waiting:
            work.missing = ()
            self._finish_if_complete(work, after)
        self._waiting.clear()
        for entry in list(self._primary.entries.values()):
            if entry.state is State.LOADING:
                self.give_up(entry, after)
