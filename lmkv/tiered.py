"""TieredStore: who is where, who may go, who is on the way.

One lock guards the metadata; it is never held during I/O, copies, log lines or callbacks. Methods plan under
it, return a list of tasks, and act outside. Private methods whose docstring says "locked" want it held.

Entries of the primary tier: absent -> WRITING (reserved) or LOADING (promoted) -> READY -> absent.
A READY entry with `refs` is held; one without is in the policy's hands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import attrs

from lmkv.claims import Entry, Lease, Reservation, State
from lmkv.errors import BackendError, ClosedError, UsageError
from lmkv.iopool import IOPool, Priority, Task
from lmkv.observe import StoreStats, TierCounters, TierStats
from lmkv.outcomes import Presence, Read, ReadStatus, WriteStatus, Written
from lmkv.promotion import Promotion
from lmkv.protocols import Backend, Chunk, ChunkKey, Clock, Listed, ListsKeys
from lmkv.slab import Slab
from lmkv.tier import Tier, TierIndex

logger = logging.getLogger(__name__)

_DEMOTIONS_AT_ONCE = 4


@runtime_checkable
class HostBackend(Backend, Protocol):
    """A backend whose chunks lie in host memory that a store may fill and read in place."""

    @property
    def slab(self) -> Slab: ...

    def publish(self, key: ChunkKey, slot: int) -> None: ...

    def withdraw(self, key: ChunkKey) -> None: ...


@attrs.define(eq=False)
class _Secondary:
    index: TierIndex
    counters: TierCounters = attrs.field(factory=TierCounters)
    clearing: int = 0
    """Deletions of everything that are under way. Until they end, nothing new is written."""

    @property
    def backend(self) -> Backend:
        return self.index.tier.backend


class TieredStore:
    """A primary tier in host memory over any number of secondary tiers, fastest first.

    `prefetch_share`: of the primary tier's slots, how many prefetched chunks may hold at once. Secondary
    tiers that persist are indexed in the background; what is indexed already is served meanwhile.
    Thread-safe. The store owns its tiers' backends and closes them.
    """

    def __init__(
        self,
        primary: Tier,
        secondaries: Sequence[Tier] = (),
        *,
        io_threads: int = 4,
        prefetch_share: float = 0.5,
        clock: Clock = time.monotonic,
    ) -> None:
        if not isinstance(primary.backend, HostBackend):
            raise UsageError(f"the primary tier must be in host memory; {primary.name!r} has no slab")
        self._host: HostBackend = primary.backend
        self._primary = primary
        self._policy = primary.policy
        self._slab = self._host.slab
        self._slot_bytes = self._slab.slot_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[ChunkKey, Entry] = {}
        self._pins: dict[ChunkKey, tuple[Entry, float]] = {}
        self._expiring: dict[Promotion, float] = {}
        self._next_expiry = float("inf")
        self._held = 0
        self._counters = TierCounters()
        self._secondaries = tuple(_Secondary(TierIndex(tier)) for tier in secondaries)
        self._max_prefetched = max(1, int(self._slab.num_slots * prefetch_share))
        self._prefetched = 0
        self._generation = 0
        self._closed = False
        # A store must not hold so many slots for its writes that loads find none.
        self._pool = IOPool(io_threads, max_stores=max(1, min(64, self._slab.num_slots // 2)))
        self._indexed = threading.Event()
        self._index_in_background()

    # -- looking ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """Where each chunk is. Free of side effects."""
        with self._lock:
            return [self._presence(key) for key in keys]

    def _presence(self, key: ChunkKey) -> Presence:
        entry = self._entries.get(key)
        if entry is not None:
            return Presence.READY if entry.state is State.READY else Presence.PENDING
        return Presence.SECONDARY if self._find(key) else Presence.MISS

    def match(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks in the primary tier, and leading chunks anywhere."""
        with self._lock:
            ready = self._count_ready(keys)
            found = ready
            for key in keys[ready:]:
                if key not in self._entries and not self._find(key):
                    break
                found += 1
            return ready, found

    @property
    def primary_name(self) -> str:
        return self._primary.name

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name of the fastest secondary tier that has the chunk, None when none has."""
        with self._lock:
            tier = self._find(key)
            return tier.index.tier.name if tier else None

    def _count_ready(self, keys: Sequence[ChunkKey]) -> int:
        ready = 0
        for entry in map(self._entries.get, keys):
            if entry is None or entry.state is not State.READY:
                break
            ready += 1
        return ready

    def _find(self, key: ChunkKey) -> _Secondary | None:
        return next((tier for tier in self._secondaries if key in tier.index), None)

    def _leading_ready(self, entries: Sequence[Entry]) -> int:
        for count, entry in enumerate(entries):
            if entry.state is not State.READY:
                return count
        return len(entries)

    # -- reading ------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Claim the leading READY chunks of `keys` for reading, as many as there are, and touch them."""
        with self._lock:
            entries = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or entry.state is not State.READY:
                    break
                self._hold(entry)
                entries.append(entry)
            self._counters.hits += len(entries)
            return Lease(self, entries)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note the use of a chain's chunks, head first, in every tier."""
        with self._lock:
            self._policy.touch(keys)
            for tier in self._secondaries:
                tier.index.tier.policy.touch(keys)

    def _hold(self, entry: Entry) -> None:
        """Locked."""
        if entry.demoting:
            entry.demoting = False
            self._policy.insert(entry.key, self._slot_bytes, entry.parent)
            self._policy.set_evictable(entry.key, False)
        elif not entry.refs:
            self._held += 1
            self._policy.set_evictable(entry.key, False)
        entry.refs += 1

    def _let_go(self, entry: Entry) -> None:
        """Locked."""
        entry.refs -= 1
        if entry.refs:
            return
        self._held -= 1
        if entry.gone:
            self._slab.release(entry.slot)
        elif entry.demoting or self._retains_nothing:
            self._remove(entry)
        else:
            self._policy.set_evictable(entry.key, True)

    @property
    def _retains_nothing(self) -> bool:
        admission = self._primary.admission
        return admission is not None and not admission.admit(b"")

    def _let_go_all(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            # Tail first, so that the head of a chain is used last and evicted last.
            for entry in reversed(entries):
                self._let_go(entry)

    def _remove(self, entry: Entry) -> None:
        """Locked. Out of the index; the slot is freed now, or by the last who holds it."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._host.withdraw(entry.key)
            self._policy.discard(entry.key)
        if entry.refs:
            entry.gone = True
        else:
            self._slab.release(entry.slot)

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        *,
        parent: ChunkKey = b"",
        tokens: bytes = b"",
        protect: Collection[ChunkKey] = (),
    ) -> Reservation:
        """Claim slots for consecutive chunks of a chain, head first, evicting what the policy gives.

        `parent`: the key before `keys[0]`; `tokens`: the token ids of these chunks, for tiers that describe
        what they hold. `protect`: keys that must not be evicted for this, beyond those of a lower tier.
        """
        if self._closed:
            return Reservation(self, (), 0)
        tasks: list[Task] = []
        entries: list[Entry] = []
        width = len(tokens) // len(keys) if keys else 0
        with self._lock:
            kept = frozenset(key for key in protect if not self._find(key))
            for handled, key in enumerate(keys):
                if key not in self._entries:
                    slot = self._acquire(kept, tasks)
                    if slot is None:
                        self._counters.write_rejects += len(keys) - handled
                        break
                    ids = tokens[handled * width : (handled + 1) * width]
                    entries.append(self._enter(key, slot, State.WRITING, parent, ids))
                parent = key
            else:
                handled = len(keys)
        self._run(tasks)
        return Reservation(self, entries, handled)

    def _enter(
        self, key: ChunkKey, slot: int, state: State, parent: ChunkKey = b"", tokens: bytes = b""
    ) -> Entry:
        """Locked. The writer, or the load, is the new entry's first holder."""
        entry = self._entries[key] = Entry(key, slot, state, parent, tokens, refs=1)
        self._held += 1
        return entry

    def _commit(self, entries: Sequence[Entry]) -> None:
        finished: list[Promotion] = []
        with self._lock:
            tasks = [task for entry in entries for task in self._make_ready(entry, finished)]
            self._counters.writes += len(entries)
            self._counters.written_bytes += len(entries) * self._slot_bytes
            self._keep_room(tasks)
        self._run(tasks)
        self._finish_all(finished)

    def _make_ready(self, entry: Entry, finished: list[Promotion]) -> list[Task]:
        """Locked. The entry's bytes are complete. Returns the copies that lower tiers want."""
        tasks: list[Task] = []
        stored = entry.state is State.WRITING
        entry.state = State.READY
        if not entry.gone:
            self._host.publish(entry.key, entry.slot)
            self._policy.insert(entry.key, self._slot_bytes, entry.parent)
            self._policy.set_evictable(entry.key, False)
            if stored:
                tasks = self._write_down(entry, "through")
        self._wake(entry, finished)
        self._let_go(entry)
        return tasks

    def _abort(self, entries: Sequence[Entry]) -> None:
        finished: list[Promotion] = []
        with self._lock:
            for entry in entries:
                self._give_up(entry, finished)
        self._finish_all(finished)

    def _give_up(self, entry: Entry, finished: list[Promotion]) -> None:
        """Locked. The entry's bytes will never come."""
        self._remove(entry)
        self._wake(entry, finished)
        self._let_go(entry)

    def _wake(self, entry: Entry, finished: list[Promotion]) -> None:
        """Locked."""
        for promotion in entry.waiters:
            promotion._pending -= 1
            if entry.state is not State.READY or entry.gone:
                index = promotion._entries.index(entry)
                promotion._broken_at = min(index, len(promotion))
            if not promotion._pending:
                finished.append(promotion)
        entry.waiters.clear()

    @staticmethod
    def _finish_all(finished: Sequence[Promotion]) -> None:
        for promotion in finished:
            promotion._finish()

    # -- slots and eviction -------------------------------------------------------------------------------

    def _acquire(self, protect: frozenset[ChunkKey], tasks: list[Task]) -> int | None:
        """Locked. A free slot, evicting for it if need be; never waits."""
        demotions = 0
        while (slot := self._slab.acquire()) is None:
            victims = self._policy.evict(self._slot_bytes, protect)
            if victims is None:
                if not self._drop_expired():
                    return None
                continue
            for victim in victims:
                demotions += self._retire(self._entries[victim], tasks)
            if demotions >= _DEMOTIONS_AT_ONCE:
                return None
        return slot

    def _retire(self, entry: Entry, tasks: list[Task]) -> bool:
        """Locked. Evict the entry, at once or after it is copied down; True in the latter case."""
        self._counters.evictions += 1
        copies = self._write_down(entry, "back", demoting=True)
        if copies:
            tasks += copies
            return True
        self._remove(entry)
        return False

    def _keep_room(self, tasks: list[Task]) -> None:
        """Locked. With write-back, copy the next victims down before their slots are wanted."""
        if not any(tier.index.tier.write == "back" for tier in self._secondaries):
            return
        wanted = max(1, self._slab.num_slots // 16) - self._slab.free_slots
        for _ in range(min(wanted, _DEMOTIONS_AT_ONCE)):
            for victim in self._policy.evict(self._slot_bytes) or ():
                self._retire(self._entries[victim], tasks)

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Hold the leading READY chunks of `keys` in the primary tier for `ttl` seconds; returns how many.

        Pinning again moves the end of the pin.
        """
        with self._lock:
            expiry = self._clock() + ttl
            count = self._count_ready(keys)
            for key in keys[:count]:
                entry = self._entries[key]
                if key not in self._pins:
                    self._hold(entry)
                self._pins[key] = (entry, expiry)
            self._next_expiry = min(self._next_expiry, expiry)
            return count

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End the pins of `keys`; returns how many there were."""
        with self._lock:
            return sum(self._unpin(key) for key in reversed(keys))

    def _unpin(self, key: ChunkKey) -> bool:
        """Locked."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._let_go(pin[0])
        return pin is not None

    def _drop_expired(self) -> bool:
        """Locked. End the pins and prefetches whose time is over; True when there were any."""
        now = self._clock()
        if now < self._next_expiry:
            return False
        expired = [key for key, (_, expiry) in self._pins.items() if expiry <= now]
        for key in expired:
            self._unpin(key)
        stale = [promotion for promotion, expiry in self._expiring.items() if expiry <= now]
        for promotion in stale:
            self._release_promotion(promotion)
        ends = [*(expiry for _, expiry in self._pins.values()), *self._expiring.values()]
        self._next_expiry = min(ends, default=float("inf"))
        return bool(expired or stale)

    def poll(self) -> None:
        """Housekeeping that nothing else triggers: ends pins and prefetches whose time is over."""
        with self._lock:
            self._drop_expired()

    # -- lower tiers: promotion ---------------------------------------------------------------------------

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        priority: Priority = Priority.LOAD,
        limit: int | None = None,
        ttl: float | None = None,
    ) -> Promotion:
        """Bring the leading chunks of `keys` into the primary tier, at most `limit` of them.

        Ends before the first chunk that no tier has, or that finds no slot; a prefetch also before it would
        exceed its share of the tier. Never waits; the promotion holds its chunks until it is released, or
        until `ttl` seconds from now are over and the slots are wanted.
        """
        promotion = Promotion(self)
        if ttl is not None:
            self._expire_later(promotion, ttl)
        loads: list[Task] = []
        demotions: list[Task] = []
        with self._lock:
            if not self._closed:
                self._begin_promotion(promotion, keys[:limit], priority, loads, demotions)
            complete = not promotion._pending
        self._run(demotions)
        self._run(loads, priority)
        if complete:
            promotion._finish()
        return promotion

    def _begin_promotion(
        self,
        promotion: Promotion,
        keys: Sequence[ChunkKey],
        priority: Priority,
        loads: list[Task],
        demotions: list[Task],
    ) -> None:
        """Locked."""
        protect = frozenset(keys)
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                if priority is Priority.PREFETCH and not self._may_prefetch():
                    return
                tier = self._find(key)
                slot = self._acquire(protect, demotions) if tier else None
                if tier is None or slot is None:
                    return
                entry = self._enter(key, slot, State.LOADING)
                loads.append(partial(self._load, tier, entry))
                if priority is Priority.PREFETCH:
                    promotion.prefetched += 1
                    self._prefetched += 1
                name = tier.index.tier.name
            else:
                name = self._primary.name
            promotion._sources[name] = promotion._sources.get(name, 0) + 1
            self._hold(entry)
            promotion._entries.append(entry)
            if entry.state is not State.READY:
                entry.waiters.append(promotion)
                promotion._pending += 1

    def _may_prefetch(self) -> bool:
        """Locked."""
        if self._prefetched >= self._max_prefetched:
            self._drop_expired()
        return self._prefetched < self._max_prefetched

    def _load(self, tier: _Secondary, entry: Entry) -> None:
        """I/O thread: fill the entry's slot from the tier."""
        started = self._clock()
        try:
            result = tier.backend.read([(entry.key, self._slab.view(entry.slot))])[0]
        except Exception as error:
            result = Read.failed(BackendError(tier.backend.name, "read", entry.key.hex(), repr(error)))
        finished: list[Promotion] = []
        tasks: list[Task] = []
        with self._lock:
            self._count_read(tier, result, self._clock() - started)
            if result.status is ReadStatus.HIT:
                tier.index.tier.policy.touch([entry.key])
                tasks = self._make_ready(entry, finished)
            else:
                tier.index.discard(entry.key)
                self._give_up(entry, finished)
        if result.error is not None:
            logger.warning("lmkv: %s", result.error)
        self._run(tasks)
        self._finish_all(finished)

    def _count_read(self, tier: _Secondary, result: Read, seconds: float) -> None:
        """Locked."""
        counters = tier.counters
        counters.reads += 1
        if result.status is ReadStatus.HIT:
            counters.hits += 1
            counters.read_bytes += self._slot_bytes
            counters.read_seconds += seconds
        else:
            counters.lost += 1
            counters.read_failures += result.status is ReadStatus.FAILED

    def _expire_later(self, promotion: Promotion, ttl: float) -> None:
        with self._lock:
            expiry = self._clock() + ttl
            self._expiring[promotion] = expiry
            self._next_expiry = min(self._next_expiry, expiry)

    def _end_promotion(self, promotion: Promotion) -> None:
        with self._lock:
            self._release_promotion(promotion)

    def _release_promotion(self, promotion: Promotion) -> None:
        """Locked. Idempotent."""
        if not promotion._released:
            promotion._released = True
            self._expiring.pop(promotion, None)
            self._prefetched -= promotion.prefetched
            for entry in reversed(promotion._entries):
                self._let_go(entry)

    # -- lower tiers: copying down ------------------------------------------------------------------------

    def _write_down(self, entry: Entry, mode: str, *, demoting: bool = False) -> list[Task]:
        """Locked. The copies of a READY entry that tiers of this write mode want; each holds the entry."""
        tasks: list[Task] = []
        for tier in self._secondaries:
            if tier.index.tier.write == mode and tier.index.wants(entry.key):
                if demoting and not entry.refs:
                    self._held += 1
                    entry.demoting = True
                entry.refs += 1
                tasks.append(partial(self._copy_down, tier, entry, self._generation))
        return tasks

    def _copy_down(self, tier: _Secondary, entry: Entry, generation: int) -> None:
        """I/O thread: write the entry to the tier, making room first."""
        cost = tier.index.cost(self._slot_bytes)
        with self._lock:
            stale = generation != self._generation or tier.clearing or self._closed
            victims = None if stale else tier.index.begin_write(entry.key, cost)
            if victims is None:
                tier.counters.write_rejects += not stale
                self._let_go(entry)
                return
            tier.counters.evictions += len(victims)
        result = self._write(tier.backend, entry, victims)
        stored = result.status in (WriteStatus.STORED, WriteStatus.PRESENT)
        with self._lock:
            self._count_write(tier.counters, result)
            stale = generation != self._generation
            if not stale:
                tier.index.end_write(entry.key, cost, stored)
        if stale:
            # Cleared meanwhile: until the bytes are gone, nobody may take them for a later write of this key.
            self._delete(tier.backend, [entry.key])
            with self._lock:
                tier.index.end_write(entry.key, cost, stored=False)
        with self._lock:
            self._let_go(entry)
        if result.error is not None:
            logger.warning("lmkv: %s", result.error)

    def _write(self, backend: Backend, entry: Entry, victims: list[ChunkKey]) -> Written:
        try:
            if victims:
                backend.delete(victims)
            chunk = Chunk(entry.key, self._slab.view(entry.slot), entry.parent, entry.tokens)
            return backend.write([chunk])[0]
        except Exception as error:
            return Written.failed(BackendError(backend.name, "write", entry.key.hex(), repr(error)))

    def _count_write(self, counters: TierCounters, result: Written) -> None:
        """Locked."""
        counters.writes += result.status is WriteStatus.STORED
        counters.written_bytes += self._slot_bytes * (result.status is WriteStatus.STORED)
        counters.write_rejects += result.status is WriteStatus.REJECTED
        counters.write_failures += result.status is WriteStatus.FAILED

    @staticmethod
    def _delete(backend: Backend, keys: Sequence[ChunkKey]) -> None:
        try:
            backend.delete(keys)
        except Exception as error:
            logger.warning("lmkv: deleting %d chunks from %s failed: %r", len(keys), backend.name, error)

    def _run(self, tasks: Sequence[Task], priority: Priority = Priority.STORE) -> None:
        """Hand tasks to the pool. A copy that the pool refuses lets go of its chunk: a future miss."""
        for task in tasks:
            if not self._pool.submit(task, priority):
                self._refuse(task)

    def _refuse(self, task: Task) -> None:
        assert isinstance(task, partial)
        tier, entry = task.args[:2]
        finished: list[Promotion] = []
        with self._lock:
            if entry.state is State.LOADING:
                self._give_up(entry, finished)
            else:
                tier.counters.dropped += 1
                self._let_go(entry)
        self._finish_all(finished)

    # -- index of what persists ---------------------------------------------------------------------------

    def _index_in_background(self) -> None:
        listing = [tier for tier in self._secondaries if isinstance(tier.backend, ListsKeys)]
        if not listing:
            self._indexed.set()
            return
        thread = threading.Thread(target=self._index_all, args=(listing,), name="lmkv-index", daemon=True)
        thread.start()

    def _index_all(self, tiers: Sequence[_Secondary]) -> None:
        try:
            for tier in tiers:
                self._index(tier)
        except Exception as error:
            logger.warning("lmkv: a tier could not be indexed, what it holds is not served: %r", error)
        finally:
            self._indexed.set()

    def _index(self, tier: _Secondary) -> None:
        backend = tier.backend
        assert isinstance(backend, ListsKeys)
        for batch in backend.list_keys():
            with self._lock:
                if self._closed:
                    return
                surplus = [key for found in batch for key in self._adopt(tier, found)]
            if surplus:
                self._delete(backend, surplus)

    def _adopt(self, tier: _Secondary, found: Listed) -> list[ChunkKey]:
        """Locked."""
        return tier.index.adopt(found.key, found.nbytes)

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until the persistent tiers are indexed, at most `timeout` seconds."""
        return self._indexed.wait(timeout)

    # -- removing and ending ------------------------------------------------------------------------------

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from the primary tier only, whatever its policy says."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._unpin(key)
                    self._remove(entry)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks from every tier; returns how many were in one. What is leased stays readable."""
        with self._lock:
            known = [key for key in keys if self._presence(key) is not Presence.MISS]
            for key in known:
                self._forget(key)
        for tier in self._secondaries:
            self._delete(tier.backend, known)
        return len(known)

    def _forget(self, key: ChunkKey) -> None:
        """Locked."""
        entry = self._entries.get(key)
        if entry is not None:
            self._unpin(key)
            self._remove(entry)
        for tier in self._secondaries:
            tier.index.discard(key)

    def clear(self) -> int:
        """Remove everything from every tier; returns how many chunks that were.

        From its return on nothing of before is served, not even what is being stored or loaded right now.
        """
        with self._lock:
            self._generation += 1
            for entry, _ in self._pins.values():
                self._let_go(entry)
            self._pins.clear()
            keys = set(self._entries)
            for entry in list(self._entries.values()):
                self._remove(entry)
            doomed = [(tier, tier.index.clear()) for tier in self._secondaries]
            for tier, _ in doomed:
                tier.clearing += 1
        for tier, held in doomed:
            keys.update(held)
            self._pool.submit(partial(self._delete_all, tier, held), Priority.LOAD)
        return len(keys)

    def _delete_all(self, tier: _Secondary, keys: Sequence[ChunkKey]) -> None:
        self._delete(tier.backend, keys)
        with self._lock:
            tier.clearing -= 1

    def stats(self) -> StoreStats:
        with self._lock:
            states = [entry.state for entry in self._entries.values()]
            used = self._slab.num_slots - self._slab.free_slots
            primary = TierStats(
                self._primary.name,
                states.count(State.READY),
                used * self._slot_bytes,
                self._slab.num_slots * self._slot_bytes,
                **attrs.asdict(self._counters),
            )
            lower = [
                TierStats(
                    tier.index.tier.name,
                    len(tier.index),
                    tier.index.used,
                    tier.index.tier.capacity_bytes,
                    **attrs.asdict(tier.counters),
                )
                for tier in self._secondaries
            ]
            writing, loading = states.count(State.WRITING), states.count(State.LOADING)
            held, pinned = self._held, len(self._pins)
        return StoreStats((primary, *lower), held, pinned, writing, loading, self._pool.pending)

    @property
    def slab(self) -> Slab:
        return self._slab

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until no I/O is waiting or running, at most `timeout` seconds; True when that is so."""
        return self._pool.drain(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what I/O there is, at most `timeout` seconds, and close every backend. Idempotent."""
        with self._lock:
            if self._closed:
                return
        self._pool.drain(timeout)
        with self._lock:
            self._closed = True
        self._indexed.wait(timeout)
        stuck = not self._pool.close(timeout)
        if stuck:
            logger.warning("lmkv: an I/O thread hangs; its backend is left open")
        for backend in (*(tier.backend for tier in self._secondaries), self._host):
            self._close_backend(backend)

    @staticmethod
    def _close_backend(backend: Backend) -> None:
        try:
            backend.close()
        except Exception as error:
            logger.warning("lmkv: closing %s failed: %r", backend.name, error)

    def check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
