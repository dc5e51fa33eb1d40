"""One index over a host-memory tier and lower tiers.

One lock guards the metadata of all tiers; it is never held during I/O, copies, log lines or callbacks. Each
method plans under it into an `AfterLock`, and runs that outside. The parts (`allocator`, `flusher`, `promoter`,
`pins`, `tiers`) share that lock: `@locked` marks those of their methods that want it held.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from lmkv.memory.slab import Slab
from lmkv.outcomes import Presence
from lmkv.protocols import Backend, ChunkKey, Clock, ListsKeys, RegistersMemory, Tier
from lmkv.store.allocator import SlotAllocator
from lmkv.store.flusher import Flusher
from lmkv.store.leases import Lease, Reservation
from lmkv.store.pins import Pins
from lmkv.store.promoter import Promoter, wake
from lmkv.store.promotion import Promotion
from lmkv.store.shared_lookup import SharedLookup
from lmkv.store.tiers.iopool import AfterLock, IOPool, Job, Priority, attempt
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier, Operation, first_with
from lmkv.store.tiers.observer import StoreObserver
from lmkv.store.tiers.primary import Entry, PrimaryTier, State
from lmkv.store.tiers.scanner import TierScanner
from lmkv.store.tiers.stats import StoreStats

logger = logging.getLogger(__name__)

_MAX_STORES = 64


class TieredStore:
    """A primary tier in host memory over any number of lower tiers, fastest first.

    Parameters
    ----------
    primary : Tier
        Its backend must be in host memory (`CPUPinnedBackend`); its slots become the store's.
    lower : sequence of Tier
        Lower tiers. Those that persist are indexed in the background; what is indexed already is served
        meanwhile.
    io_threads : int
        Threads for the I/O of all lower tiers; three quarters of them write, too.
    prefetch_share : float
        Most of the primary tier's slots that prefetches may refer to at a time, 0 to 1.
    retain : bool
        False makes the primary tier mere staging for the others: a chunk is removed with its last reference.
    clock : Clock
        Monotonic seconds, for times to live, deadlines of breakers and speeds.

    spans
        `KVLayout.spans`, where tails are stored: what of a slot lower tiers get of a tail. All of it by default.

    Raises
    ------
    UsageError
        The primary tier's backend has no slots to give, or the tier has an admission filter.

    Notes
    -----
    Thread-safe: one lock for all metadata, never held during I/O or copies. The store owns its tiers'
    backends and closes them. Closed, it stores nothing and finds nothing. In a process that was forked from
    the store's it is closed from the start: threads do not cross a fork.

    Examples
    --------
    >>> from lmkv import Tier, TieredStore
    >>> from lmkv.backends import CPUPinnedBackend
    >>> from lmkv.policies import LRU
    >>> store = TieredStore(Tier(CPUPinnedBackend(1 << 20, 4096), LRU()))
    >>> key = bytes(32)
    >>> with store.reserve([key]) as reservation:
    ...     store.slab.view(reservation.slots[key])[:5] = b"hello"
    ...     reservation.commit()
    >>> with store.lease([key]) as lease:
    ...     bytes(store.slab.view(lease.slots[0])[:5])
    b'hello'
    >>> store.close()
    """

    def __init__(
        self,
        primary: Tier,
        lower: Sequence[Tier] = (),
        *,
        io_threads: int = 8,
        prefetch_share: float = 0.5,
        retain: bool = True,
        spans: Callable[[int], Sequence[slice]] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._observers: list[StoreObserver] = []
        self._primary = PrimaryTier(primary, retain=retain, spans=spans, observers=self._observers)
        slots = self._primary.slab.num_slots
        nbytes = self._primary.payloads.nbytes
        for tier in lower:
            if self.slab.descriptor >= 0 and isinstance(tier.backend, RegistersMemory):
                tier.backend.register_memory(self.slab.descriptor, self.slab.address, self.slab.nbytes)
        self._tiers = [LowerTier(tier, nbytes, self._lock, clock, self._observers) for tier in lower]
        # Writes must not refer to so many slots that loads find none.
        self.max_pending_stores = max(1, min(_MAX_STORES, slots // 2)) if lower else slots
        """Chunks that can be stored at a time without a write to a lower tier being refused for them."""
        self._pool = IOPool(io_threads, self.max_pending_stores * max(1, len(lower)))
        self._pins = Pins(self._primary, clock)
        self._flusher = Flusher(self._lock, self._primary, self._tiers, self._resume)
        self._allocator = SlotAllocator(
            self._primary,
            self._flusher,
            max_flushing=self.max_pending_stores if any(tier.write == "back" for tier in lower) else 0,
        )
        prefetched = max(1, int(slots * prefetch_share))
        self._promoter = Promoter(
            self._lock, self._primary, self._tiers, self._allocator, self._pool, prefetched, clock
        )
        self._closed = self.forked = False
        _stores.add(self)
        self._scanners = [
            TierScanner(tier, self._lock) for tier in self._tiers if tier.shared or isinstance(tier.backend, ListsKeys)
        ]

    def __repr__(self) -> str:
        tiers = " over ".join([self._primary.name, *(tier.name for tier in self._tiers)])
        return f"<TieredStore {tiers}{' (closed)' if self._closed else ''}: {self._primary!r}>"

    @property
    def slab(self) -> Slab:
        return self._primary.slab

    @property
    def primary_name(self) -> str:
        return self._primary.name

    # -- looking ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """Where each chunk is, as far as the indexes know. Free of side effects."""
        with self._lock:
            return [self._presence(key) for key in keys]

    @locked
    def _presence(self, key: ChunkKey) -> Presence:
        entry = self._primary.entries.get(key)
        if entry is not None and not self._promoter.hangs(entry):
            return Presence.READY if entry.ready else Presence.PENDING
        return Presence.LOWER if first_with(self._tiers, key) else Presence.MISS

    def count_prefix(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks in the primary tier, and leading chunks anywhere."""
        with self._lock:
            ready = len(self._primary.leading_ready(keys))
            return ready, self._count_found(keys, ready)

    @locked
    def _count_found(self, keys: Sequence[ChunkKey], found: int = 0) -> int:
        """How many leading chunks are known to be in some tier; the first `found` of them are.

        Not one that is being loaded from a tier that hangs: it may never come.
        """
        entries, hangs = self._primary.entries, self._promoter.hangs
        indexes = [tier.index for tier in self._tiers if tier.usable]
        for key in keys[found:]:
            entry = entries.get(key)
            if (entry is None or hangs(entry)) and not any(key in index for index in indexes):
                break
            found += 1
        return found

    def count_stored(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks are stored, in whichever tier: of those that are being stored, none."""
        with self._lock:
            entries = self._primary.entries
            indexes = [tier.index for tier in self._tiers if tier.usable]
            for count, key in enumerate(keys):
                entry = entries.get(key)
                if not (entry and entry.ready) and not any(key in index for index in indexes):
                    return count
        return len(keys)

    def longest_prefix(self, origin: bytes, tokens: bytes) -> tuple[ChunkKey, int]:
        """`(key, count)`: the chunk in the primary tier that begins with the most of `tokens`, and how many.

        `origin`: what the tokens continue. `(b"", 0)` when there is none.
        """
        with self._lock:
            return self._primary.prefixes.longest(origin, tokens)

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name of the fastest lower tier that stores the chunk, None when none does."""
        with self._lock:
            tier = first_with(self._tiers, key)
            return tier.name if tier else None

    def by_tier(self, keys: Sequence[ChunkKey]) -> dict[str | None, int]:
        """How many of the chunks each lower tier would deliver, in the order in which the tiers come; None: no tier."""
        with self._lock:
            return dict(Counter(tier.name if (tier := first_with(self._tiers, key)) else None for key in keys))

    def unavailable_in(self, key: ChunkKey) -> str | None:
        """Name of a lower tier that stores the chunk and cannot be read now, None when there is none."""
        with self._lock:
            return next((tier.name for tier in self._tiers if key in tier.index and not tier.usable), None)

    def add_observer(self, observer: StoreObserver) -> None:
        """Tell it from now on what comes into the tiers and goes. What they have already: `replay_to`."""
        with self._lock:
            self._observers.append(observer)

    def replay_to(self, observer: StoreObserver, keys: Sequence[ChunkKey]) -> list[bool]:
        """Tell an observer which tiers have these chunks, as `stored`; for each, whether any of them has."""
        with self._lock:
            return [self._replay_to(observer, key) for key in keys]

    @locked
    def _replay_to(self, observer: StoreObserver, key: ChunkKey) -> bool:
        entry = self._primary.entries.get(key)
        names = [self._primary.name] if entry is not None and entry.ready else []
        names += [tier.name for tier in self._tiers if key in tier.index]
        for name in names:
            observer.stored(name, key)
        return bool(names)

    # -- reading ------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Refer to the leading READY chunks of `keys` for reading, as many as there are."""
        with self._lock:
            entries = self._primary.leading_ready(keys)
            for entry in entries:
                self._primary.ref(entry)
                if entry.prefetched:
                    self._primary.use_prefetched(entry)
            if entries:
                self._primary.touch_tail(entries[-1].key)
            self._primary.counters.hits += len(entries)
        return Lease(entries, self._unref)

    def _unref(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in reversed(entries):
                self._primary.unref(entry)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note the use of a chain's chunks, head first, in every tier."""
        with self._lock:
            self._primary.policy.touch(keys)
            for tier in self._tiers:
                tier.index.policy.touch(keys)

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        *,
        parent: ChunkKey = b"",
        tokens: bytes = b"",
        origins: Sequence[bytes] = (),
        protect: Sequence[ChunkKey] = (),
    ) -> Reservation:
        """Reserve slots for consecutive chunks of a chain, head first, evicting what the policy gives.

        `parent`: the key before `keys[0]`; `tokens`: the token ids of these chunks, for tiers that describe
        what they store. `origins`: what each continues (see `KeyChain.origin`), to be found by `longest_prefix`,
        too. `protect`: the whole chain, head first: what comes before a chunk is not evicted for
        it, unless a lower tier stores it.
        """
        after = AfterLock()
        entries: list[Entry] = []
        accepted = 0
        width = len(tokens) // len(keys) if keys else 0
        with self._lock:
            self._expire(after)
            kept = self._only_copies(keys, protect)
            if kept is not None and not self._closed:
                self._free_up(keys, kept)
            known_entries, enter, writing = self._primary.entries, self._primary.enter, State.WRITING
            for key in () if self._closed else keys:
                known = known_entries.get(key)
                if known is not None and self._promoter.hangs(known):
                    self._promoter.give_up(known, after)
                    known = None
                if known is None:
                    slot = self._allocator.allocate(key, after, kept)
                    if slot is None:
                        break
                    ids = tokens[accepted * width : (accepted + 1) * width] if width else b""
                    origin = origins[accepted] if origins else b""
                    entries.append(enter(key, slot, writing, parent, ids, origin))
                elif kept is not None and first_with(self._tiers, key) is None:
                    kept.add(key)
                accepted += 1
                parent = key
            self._primary.counters.write_rejects += len(keys) - accepted
        after.run(self._pool)
        chain = protect or keys
        return Reservation(entries, accepted, lambda done: self._commit(done, chain), self._abort)

    @locked
    def _only_copies(self, keys: Sequence[ChunkKey], chain: Sequence[ChunkKey]) -> set[ChunkKey] | None:
        """Chunks before `keys` that no lower tier stores; None when nothing need be evicted for `keys`."""
        if self._primary.slab.free_slots >= len(keys):
            return None
        before = chain[: chain.index(keys[0])] if keys[0] in chain else chain
        return {key for key in before if first_with(self._tiers, key) is None} if self._tiers else set(before)

    @locked
    def _free_up(self, keys: Sequence[ChunkKey], kept: set[ChunkKey]) -> None:
        """Free slots for those of `keys` that are not here, evicting none of `keys` and `kept` for them."""
        entries = self._primary.entries
        here = {key for key in keys if key in entries}
        self._allocator.free_up(len(keys) - len(here), kept | here)

    def _commit(self, entries: Sequence[Entry], chain: Sequence[ChunkKey]) -> None:
        after = AfterLock()
        primary = self._primary
        with self._lock:
            for entry in entries:
                primary.mark_ready(entry)
                if entry.origin:
                    primary.drop_shorter_tails(entry)
                if entry.waiters:
                    wake(entry, after)
            if self._tiers:
                self._flusher.write_through(entries, chain, after)
            for entry in reversed(entries):
                primary.unref(entry)
            primary.counters.writes += len(entries)
            primary.counters.written_bytes += len(entries) * primary.slot_bytes
            self._allocator.keep_free(after)
        after.run(self._pool)

    def _abort(self, entries: Sequence[Entry]) -> None:
        after = AfterLock()
        with self._lock:
            for entry in entries:
                self._primary.remove(entry)
                wake(entry, after)
                self._primary.unref(entry)
        after.run(self._pool)

    def write_to_shared(self, keys: Sequence[ChunkKey]) -> int:
        """Have leading chunks written to shared tiers that lack them; how many are there, or on their way.

        Chunks that are still being stored are written when they are committed, the others from now on.
        """
        after = AfterLock()
        with self._lock:
            shared = [tier for tier in self._tiers if tier.shared and tier.usable and tier.write_mode == "through"]
            writable = any(tier.writable for tier in shared)
            entries, count = [], 0
            for key in keys if shared else ():
                entry = self._primary.entries.get(key) if writable else None
                known = any(tier.index.knows(key) if tier.writable else key in tier.index for tier in shared)
                if entry is None and not known:
                    break
                # What is referenced is being written already, or is the next time.
                if entry is not None and entry.ready and not entry.refs and not known:
                    entries.append(entry)
                count += 1
            self._flusher.write_through(entries, keys, after)
        after.run(self._pool)
        return count

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Keep the leading READY chunks of `keys` in the primary tier for `ttl` seconds; returns how many.

        Pinning again moves the end of the pin.
        """
        with self._lock:
            return self._pins.pin(keys, ttl)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End the pins of `keys`; returns how many there were."""
        with self._lock:
            return sum(self._pins.unpin(key) for key in reversed(keys))

    @locked
    def _expire(self, after: AfterLock) -> None:
        """End the pins and prefetches whose time is over, before somebody asks for slots."""
        self._pins.expire()
        self._promoter.expire(after)

    def poll(self) -> None:
        """End pins and prefetches whose time is over now; otherwise the next to want slots does it."""
        after = AfterLock()
        with self._lock:
            self._expire(after)
        after.run(self._pool)

    # -- from lower tiers ---------------------------------------------------------------------------------

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        priority: Priority = Priority.LOAD,
        limit: int | None = None,
        ttl: float | None = None,
        look_up_shared: bool = False,
    ) -> Promotion:
        """Bring the leading chunks of `keys` into the primary tier, at most `limit` of them.

        Ends before the first chunk that no tier stores, or that finds no slot; a prefetch also before it
        would exceed its share of the tier. With `look_up_shared` shared tiers are asked first for what the indexes
        do not know. Never waits. The promotion refers to its chunks until it is released, or until `ttl`
        seconds from now are over and slots are wanted.
        """
        after = AfterLock()
        with self._lock:
            self._expire(after)
            wanted = () if self._closed else keys[:limit]
            shared_lookup = self._plan_shared_lookup(wanted, after, self._resume) if look_up_shared else None
            promotion = self._promoter.promote(wanted, priority, ttl, after, shared_lookup, chain=keys)
        after.run(self._pool)
        return promotion

    def _resume(self, after: AfterLock) -> None:
        """Go on with the promotions that waited for slots or for a shared lookup."""
        with self._lock:
            self._expire(after)
            self._promoter.resume(after)

    def look_up_shared(self, keys: Sequence[ChunkKey]) -> SharedLookup | None:
        """Ask shared tiers, in the background, for leading chunks that the indexes do not know.

        None when there is nothing to ask: no tier is shared, or all chunks are known. Never waits.
        """
        after = AfterLock()
        with self._lock:
            shared_lookup = None if self._closed else self._plan_shared_lookup(keys, after)
        after.run(self._pool)
        return shared_lookup

    @locked
    def _plan_shared_lookup(
        self, keys: Sequence[ChunkKey], after: AfterLock, on_done: Callable[[AfterLock], None] = lambda after: None
    ) -> SharedLookup | None:
        shared = [tier for tier in self._tiers if tier.shared and tier.usable]
        unknown = keys[self._count_found(keys) :] if shared else ()
        if not unknown:
            return None
        shared_lookup = SharedLookup(unknown, shared, on_done, self._clock)
        after.jobs.append(shared_lookup.job())
        return shared_lookup

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until the persistent tiers are indexed, at most `timeout` seconds; whether they are."""
        deadline = None if timeout is None else time.monotonic() + timeout
        listed = all(
            scanner.listed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for scanner in self._scanners
        )
        return listed and not self._closed

    # -- removing -----------------------------------------------------------------------------------------

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from the primary tier, whatever its policy says. What is leased stays readable.

        Flushes of these chunks that are under way are stopped.
        """
        after = AfterLock()
        with self._lock:
            self._drop(keys, after)
        after.run(self._pool)

    @locked
    def _drop(self, keys: Sequence[ChunkKey], after: AfterLock) -> None:
        for key in keys:
            entry = self._primary.entries.get(key)
            if entry is not None:
                self._pins.unpin(key)
                self._primary.remove(entry)
        self._promoter.end_prefetches(after, frozenset(keys))

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks from every tier; returns how many were in one. What is leased stays readable.

        None of them is served any more; `drain` waits until the bytes in lower tiers are deleted, too.
        """
        after = AfterLock()
        with self._lock:
            known = sum(self._presence(key) is not Presence.MISS for key in keys)
            self._drop(keys, after)
            for tier in self._tiers:
                # In tiers that cannot be read now, too: they would serve the chunks again later.
                tier.index.mark_deleted(keys, unknown=tier.shared)
                after.jobs.append(Job(_without_plans(tier.reclaim), Priority.LOAD, _nothing))
        after.run(self._pool)
        return known

    def clear(self, *, lower: bool = True) -> int:
        """Remove everything, without `lower` from the primary tier alone; returns how many chunks that were.

        From its return on nothing of before is served, not even what is being stored or loaded right now, or
        what other processes have put into a shared tier. `drain` waits until it is deleted, too.
        """
        after = AfterLock()
        with self._lock:
            keys = set(self._primary.clear())
            self._pins.clear()
            self._promoter.end_prefetches(after)
            for tier in self._tiers if lower else ():
                keys.update(tier.index.clear())
                after.jobs.append(Job(_without_plans(tier.delete_all), Priority.LOAD, _nothing))
        after.run(self._pool)
        return len(keys)

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            primary = self._primary
            tiers = (primary.stats(), *(tier.stats() for tier in self._tiers))
            leased, pinned = primary.referenced, len(self._pins)
            writing, loading = primary.writing, primary.loading
        return StoreStats(tiers, leased, pinned, writing, loading, self._pool.pending)

    def drain_latencies(self) -> list[tuple[str, Operation, float]]:
        """Lower tiers' reads and writes that succeeded since the last call, with their seconds: 1,000 of each tier."""
        with self._lock:
            taken = [(tier.name, *each) for tier in self._tiers for each in tier.times]
            for tier in self._tiers:
                tier.times.clear()
        return taken

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until a whole `max_pending_stores` can be stored without a refusal, at most `timeout` seconds."""
        return self._pool.wait_for_room(self.max_pending_stores * max(1, len(self._tiers)), timeout)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until no I/O is waiting or running, at most `timeout` seconds; True when that is so."""
        return self._pool.drain(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what I/O there is, at most `timeout` seconds, and close every backend. Idempotent.

        A call that hangs is left behind on its daemon thread; whoever waits for it is told that it failed.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for scanner in self._scanners:
            scanner.stop(max(0.0, deadline - time.monotonic()))
        if not self._pool.close(max(0.0, deadline - time.monotonic())):
            logger.warning("lmkv: a backend hangs; its I/O thread is left behind")
        after = AfterLock()
        with self._lock:
            self._promoter.close(after)
            self._primary.clear()
            for tier in self._tiers:
                tier.close()
        after.run(self._pool)
        for backend in (*(tier.backend for tier in self._tiers), self._primary.backend):
            _close(backend)

    def _after_fork(self) -> None:
        """In a child process, which has none of the threads: the store cannot be used there."""
        self._closed = self.forked = True
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._pool.after_fork()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, source=self, stacklevel=2)
            if self._pool.runs_here():
                # The garbage was collected by an I/O thread of the store's own, perhaps under the pool's lock.
                threading.Thread(target=self.close, name="lmkv-close", daemon=True).start()
            else:
                self.close()


_stores: weakref.WeakSet[TieredStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        # Whatever state one of them was in, the others must not wait for threads that the child lacks.
        attempt(store._after_fork, lambda error: logger.warning("lmkv: a store after a fork: %r", error))


os.register_at_fork(after_in_child=_after_fork)


def _nothing(after: AfterLock) -> None:
    """For a deletion that the closed pool refuses: the store serves nothing any more."""


def _without_plans(work: Callable[[], None]) -> Callable[[AfterLock], None]:
    return lambda after: work()


def _close(backend: Backend) -> None:
    attempt(backend.close, lambda error: logger.warning("lmkv: closing %s failed: %r", backend.name, error))
