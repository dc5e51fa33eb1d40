"""`TieredStore`: host memory over lower tiers, and the verbs on both.

One lock guards the metadata of all tiers. It is never held during I/O, copies, log lines or callbacks: each
method plans these under it into an `AfterLock`, which runs after its release. The parts (`allocator`, `catalog`,
`flusher`, `promoter`, `reserver`, `pins`, `tiers`) share that lock: their `@locked` methods want it held.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmkv.memory.slab import Slab
from lmkv.outcomes import Presence
from lmkv.protocols import Backend, ChunkKey, Clock, ListsKeys, RegistersMemory, Tier
from lmkv.store.allocator import SlotAllocator
from lmkv.store.catalog import Catalog
from lmkv.store.flusher import Flusher
from lmkv.store.leases import Lease, Reservation
from lmkv.store.pins import Pins
from lmkv.store.promoter import Promoter
from lmkv.store.promotion import Promotion
from lmkv.store.reserver import Reserver
from lmkv.store.shared_lookup import SharedLookup
from lmkv.store.tiers.attempt import attempt
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.iopool import IOPool
from lmkv.store.tiers.jobs import AfterLock, Job, Priority
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier, Operation
from lmkv.store.tiers.observer import StoreObserver
from lmkv.store.tiers.primary import PrimaryTier
from lmkv.store.tiers.scanner import TierScanner
from lmkv.store.tiers.stats import StoreStats

logger = logging.getLogger(__name__)

_MAX_STORES = 64


class TieredStore:
    """Chunks in host memory, over any number of lower tiers.

    Parameters
    ----------
    primary : Tier
        Host memory: a tier of a `CPUPinnedBackend`, whose slots become the store's.
    lower : sequence of Tier
        Lower tiers, fastest first. A tier that persists is indexed in the background, and serves meanwhile the chunks
        that are indexed already.
    io_threads : int
        Threads for the I/O of all lower tiers; three quarters of them write, too.
    prefetch_share : float
        Largest share of the slots that prefetches may refer to at a time, 0 to 1.
    retain : bool
        False makes host memory mere staging for lower tiers: a chunk is removed with its last reference.
    spans : callable, optional
        `KVLayout.spans`, where tails are stored: lower tiers get only these parts of a tail's slot.
    clock : Clock
        Monotonic seconds, for times to live, deadlines of breakers and speeds.

    Raises
    ------
    UsageError
        The backend of `primary` has no slots to give, or `primary` has an admission filter.

    Notes
    -----
    Thread-safe: one lock for all metadata, never held during I/O or copies. The store owns its tiers'
    backends and closes them. Closed, it stores nothing and finds nothing. In a forked child it is closed from the
    start: threads do not cross a fork. `catalog` answers further questions about where chunks are.

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
        parts = self._lock, self._primary, self._tiers
        self._promoter = Promoter(*parts, self._allocator, self._pool, prefetched, clock)
        self._reserver = Reserver(*parts, self._allocator, self._promoter, self._flusher, self._pool)
        self.catalog = Catalog(*parts, self._promoter, self._observers)
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

    @contextmanager
    def _planned(self) -> Iterator[AfterLock]:
        """Hold the lock; do what was planned meanwhile after its release."""
        after = AfterLock()
        with self._lock:
            yield after
        after.run(self._pool.submit)

    # -- looking ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """Where each chunk is, as far as the indexes know."""
        return self.catalog.lookup(keys)

    def count_prefix(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks in host memory, and leading chunks in any tier."""
        return self.catalog.count_prefix(keys)

    def count_stored(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading chunks some tier has in full; chunks that are still being stored do not count."""
        return self.catalog.count_stored(keys)

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
                self._primary.tails.touch(entries[-1].key)
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
        with self._planned() as after:
            self._expire(after)
            wanted = () if self._closed else keys
            return self._reserver.reserve(wanted, parent, tokens, origins, protect, after)

    def write_to_shared(self, keys: Sequence[ChunkKey]) -> int:
        """Have leading chunks written to shared tiers that lack them; how many are there, or on their way.

        Chunks that are still being stored are written when they are committed, the others from now on.
        """
        with self._planned() as after:
            return self._flusher.write_to_shared(keys, after)

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

    # -- from lower tiers ---------------------------------------------------------------------------------

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        prefetch: bool = False,
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
        with self._planned() as after:
            self._expire(after)
            wanted = () if self._closed else keys[:limit]
            lookup = self._plan_shared_lookup(wanted, after, self._resume) if look_up_shared else None
            return self._promoter.promote(wanted, after, prefetch=prefetch, ttl=ttl, lookup=lookup, chain=keys)

    def _resume(self, after: AfterLock) -> None:
        """Go on with the promotions that waited for slots or for a shared lookup."""
        with self._lock:
            self._expire(after)
            self._promoter.resume(after)

    def look_up_shared(self, keys: Sequence[ChunkKey]) -> SharedLookup | None:
        """Ask shared tiers, in the background, for leading chunks that the indexes do not know.

        None when there is nothing to ask: no tier is shared, or all chunks are known. Never waits.
        """
        with self._planned() as after:
            return None if self._closed else self._plan_shared_lookup(keys, after)

    @locked
    def _plan_shared_lookup(
        self, keys: Sequence[ChunkKey], after: AfterLock, on_done: Callable[[AfterLock], None] = lambda after: None
    ) -> SharedLookup | None:
        shared = [tier for tier in self._tiers if tier.shared and tier.usable]
        unknown = keys[self.catalog.count_found(keys) :] if shared else ()
        if not unknown:
            return None
        lookup = SharedLookup(unknown, shared, on_done, self._clock)
        after.jobs.append(lookup.job())
        return lookup

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
        with self._planned() as after:
            self._drop(keys, after)

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
        with self._planned() as after:
            known = sum(self.catalog.presence(key) is not Presence.MISS for key in keys)
            self._drop(keys, after)
            for tier in self._tiers:
                # In tiers that cannot be read now, too: they would serve the chunks again later.
                tier.index.mark_deleted(keys, unknown=tier.shared)
                after.jobs.append(Job(_without_plans(tier.reclaim), Priority.LOAD, _nothing))
            return known

    def clear(self, *, lower: bool = True) -> int:
        """Remove everything, without `lower` from the primary tier alone; returns how many chunks that were.

        From its return on nothing of before is served, not even what is being stored or loaded right now, or
        what other processes have put into a shared tier. `drain` waits until it is deleted, too.
        """
        with self._planned() as after:
            keys = set(self._primary.clear())
            self._pins.clear()
            self._promoter.end_prefetches(after)
            for tier in self._tiers if lower else ():
                keys.update(tier.index.clear())
                after.jobs.append(Job(_without_plans(tier.delete_all), Priority.LOAD, _nothing))
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
        with self._planned() as after:
            self._promoter.close(after)
            self._primary.clear()
            for tier in self._tiers:
                tier.close()
        for backend in (*(tier.backend for tier in self._tiers), self._primary.backend):
            _close(backend)

    def _after_fork(self) -> None:
        """In a child process, which has none of the threads: the store cannot be used there."""
        self._closed = self.forked = self._promoter.forked = True
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
