"""`TieredStore`: stores chunks in host memory and in lower tiers.

One lock guards the metadata of all tiers. No thread holds the lock during I/O, copies, log lines or callbacks. Each
method plans such work in a `Deferred`, which runs after the lock is released.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from lmkv.memory.slab import Slab
from lmkv.protocols import Backend, ChunkKey, Clock, ListsKeys, Policy, Presence, RegistersMemory, Tier
from lmkv.store.catalog import Catalog, TierScanner
from lmkv.store.claims import Pins
from lmkv.store.guards import (
    PATIENCE,
    ChangeGuard,
    StoreObserver,
    attempt,
    close_after_fork,
    close_all,
    ends_in_time,
    locked,
)
from lmkv.store.health import Snapshot, StoreStats
from lmkv.store.hints import MAX_HINTED, Hints
from lmkv.store.iopool import Deferred, IOPool, Job, Priority, deletion
from lmkv.store.leases import Holders, Lease, Reservation
from lmkv.store.primary import PrimaryTier
from lmkv.store.promoter import Promoter
from lmkv.store.promotion import Promotion, SharedLookup
from lmkv.store.tier import LowerTier
from lmkv.store.writes import SlotAllocator, StoreComponent, Writes

logger = logging.getLogger(__name__)

_MAX_STORES = 64


class TieredStore(StoreComponent):
    """Stores chunks in host memory and in any number of lower tiers, and moves them between these tiers.

    Parameters
    ----------
    primary : Tier
        Host memory: a tier with a `CPUPinnedBackend`. The store takes over its slots.
    lower : sequence of Tier
        Lower tiers, fastest first. Persistent tiers already serve chunks while the store lists these tiers.
    io_threads : int
        Number of threads for the I/O of each lower tier. All threads read; three quarters of the threads also write.
    prefetch_share : float
        Largest share of the slots for prefetched chunks, 0 to 1.
    pin_share : float
        Largest share of the slots for pinned chunks, 0 to 1. With quotas, `prefetch_share` and `pin_share` are shares
        of each tenant's quota. Pins and prefetches together leave an eighth of the slots for loads.
    retain : bool
        If False, host memory is only a buffer for lower tiers: a chunk leaves host memory as soon as nothing uses the
        chunk.
    spans, sizes : optional
        `KVLayout.spans` and `KVLayout.sizes`. With both arguments, lower tiers get only the filled parts of slots
        with recurrent states or tails (the tokens after a prompt's last whole chunk).
    clock : Clock
        A function that returns monotonic seconds.

    Raises
    ------
    UsageError
        The backend of `primary` is not an empty, unused `CPUPinnedBackend`, or `primary` has an admission filter.

    Notes
    -----
    Thread-safe. The store closes the backends of its tiers. A closed store stores nothing and finds nothing. In a
    forked child the store is closed. `catalog` tells where chunks are.

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
        pin_share: float = 0.5,
        retain: bool = True,
        spans: Callable[[int], Sequence[slice]] | None = None,
        sizes: Sequence[int] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        self._closed = self._ended = True
        self.forked = False
        self._closing = threading.Lock()
        self._observers: list[StoreObserver] = []
        lock, changes, watched = threading.Lock(), ChangeGuard(), self._observers
        host = PrimaryTier(primary, retain=retain, spans=spans, sizes=sizes, observers=watched)
        slots, slab = host.slab.num_slots, host.slab
        for tier in lower:
            if slab.descriptor >= 0 and isinstance(tier.backend, RegistersMemory):
                memory = slab.descriptor, slab.address, slab.nbytes
                register, name = partial(tier.backend.register_memory, *memory), tier.name
                said = "lmkv: tier %r cannot use host memory directly: %r; the tier's reads and writes are slower"
                attempt(register, partial(logger.warning, said, name))
        below = [LowerTier(tier, host.payloads.nbytes, lock, changes, clock, watched) for tier in lower]
        parts = lock, changes, host, below, IOPool(io_threads), clock
        super().__init__(*parts)
        self._shared = [tier for tier in below if tier.shared]
        # Writes must leave slots to loads.
        self.max_pending_stores = max(1, min(_MAX_STORES, slots // 2)) if lower else slots
        """Number of chunks that can be stored at a time without a refused write to a lower tier."""
        self._pins = Pins(host, clock, pin_share)
        orders = {host.name: host.order, **{tier.name: tier.index.order for tier in below}}
        prompted = [tier.admission for tier in below if tier.admission and tier.admission.sees_prompts]
        # Half of the chunks of host memory, where chunks stay there; else of the largest tier.
        sizes_below = [tier.capacity_bytes or math.inf for tier in lower] if not retain else []
        most = max(1, int(min(MAX_HINTED, max([slab.nbytes, *sizes_below]) // host.slot_bytes // 2)))
        self.hints = Hints(lock, orders, clock, prompted, changes, most, host.part_of)
        most = self.max_pending_stores
        self._writes = Writes(*parts, self._resume, most)
        self._allocator = SlotAllocator(host, self._writes, most if any(tier.write == "back" for tier in lower) else 0)
        self._promoter = Promoter(*parts, self._allocator, prefetch_share)
        self._holders = Holders(*parts, self._allocator, self._promoter, self._writes)
        self.catalog = Catalog(*parts, self._promoter, watched)
        changes.repair = partial(self._recount, below, cut_short=True)
        self._scanners: list[TierScanner] = []
        self._begin()

    def _begin(self) -> None:
        """Start the scanners, which index the persistent and shared tiers. No other thread uses the store yet."""
        try:
            for tier in self._tiers:
                if tier.shared or isinstance(tier.backend, ListsKeys):
                    self._scanners.append(TierScanner(tier, self._lock))
        except BaseException:
            for scanner in self._scanners:
                scanner.stop(PATIENCE)
            raise
        close_after_fork(self)
        self._closed = self._ended = False

    def __repr__(self) -> str:
        tiers = " over ".join([self._primary.name, *(tier.name for tier in self._tiers)])
        return f"<TieredStore {tiers}{' (closed)' if self._closed else ''}: {self._primary!r}>"

    @property
    def slab(self) -> Slab:
        return self._primary.slab

    @property
    def primary_name(self) -> str:
        return self._primary.name

    # -- reading ------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Lease chunks for reading, from `keys[0]` up to the first chunk that is not in host memory.

        A leased chunk stays in host memory until the lease ends.
        """
        return self._holders.lease(keys)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record in every tier's policy that a request has used the chunks `keys`, given first to last."""
        with self._lock, self._changes:
            for order in (self._primary.order, *(tier.index.order for tier in self._tiers)):
                order.touch(keys)

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
        """Reserve slots for consecutive chunks of a prompt, first to last, and evict other chunks if necessary.

        `parent`: the key of the chunk before `keys[0]`. `tokens`: the token ids of the chunks `keys` as little-endian
        uint32, for backends that record token ids. `origins`: each chunk's `KeyChain.origin`, so that
        `Catalog.longest_prefix` finds the chunk. `protect`: the keys of the whole prompt, first to last. A chunk
        of this prompt before `keys[0]` is evicted only if a lower tier stores the chunk.
        """

        def plan(after: Deferred) -> Reservation:
            self._expire(after)
            return self._holders.reserve(() if self._closed else keys, parent, tokens, origins, protect, after)

        return self._change(plan, Reservation.abort)

    def write_to_shared(self, keys: Sequence[ChunkKey]) -> int:
        """Write chunks, from `keys[0]` on, to the shared tiers that lack these chunks.

        Returns how many chunks are in a shared tier or being written to one. A chunk that is still being stored in host
        memory is written after its commit.
        """
        return self._change(partial(self._writes.write_to_shared, keys))

    def write_lost(self, keys: Sequence[ChunkKey]) -> None:
        """Write chunks from host memory to lower tiers that have lost these chunks.

        Ignores tiers with a capacity, because these tiers evict chunks themselves.
        """
        self._change(partial(self._writes.write_lost, () if self._closed else keys))

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], ttl: float, owner: bytes = b"") -> int:
        """Keep chunks in host memory for `ttl` seconds, from `keys[0]` on, and return the number of pinned chunks.

        The first chunk that is not in host memory, and all later chunks, are not pinned. `owner`: an id of the client
        who pins the chunks. If there are too many pins, the owner with the most pins loses its oldest pins.
        """
        with self._lock, self._changes:
            return self._pins.pin(keys, ttl, owner)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End the pins of the chunks `keys`, and return the number of ended pins."""
        with self._lock, self._changes:
            return sum(self._pins.unpin(key) for key in reversed(keys))

    @locked
    def _expire(self, after: Deferred) -> None:
        """End expired pins, priorities and promotions, and jobs of a tier that hangs, so that their slots become
        free.
        """
        self._pins.expire()
        self.hints.expire()
        self._promoter.expire(after)
        for tier in self._tiers:
            first = tier.hangs
            if first is not None:
                self._writes.abandon(tier, after)
                after.callbacks.extend(job.refused for job in reversed(self._pool.withdraw(tier.name, first)))

    # -- from lower tiers ---------------------------------------------------------------------------------

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        prefetch: bool = False,
        limit: int | None = None,
        ttl: float | None = None,
        owner: bytes = b"",
        look_up_shared: bool = False,
    ) -> Promotion:
        """Start to read at most `limit` chunks into host memory, from `keys[0]` on. Never waits.

        The promotion stops before the first chunk that no tier stores, or for which there is no slot. The chunks stay
        in host memory until the promotion is released. After `ttl` seconds, the next call that needs slots releases the
        promotion.

        `prefetch`: whether to read after all other promotions, and only within the share of the slots for prefetches.
        `owner`: an id of the client who prefetches. If the share is full, the owner with the most prefetched chunks
        loses its oldest prefetch; if `owner` has almost as many chunks, the new prefetch stops instead.
        `look_up_shared`: whether the store first asks shared tiers for chunks that it does not know.
        """

        def plan(after: Deferred) -> Promotion:
            self._expire(after)
            wanted = () if self._closed else keys[:limit]
            lookup = self._plan_shared_lookup(wanted, 0, self._resume, after) if look_up_shared else None
            return self._promoter.promote(wanted, keys, lookup, after, prefetch=prefetch, ttl=ttl, owner=owner)

        return self._change(plan, Promotion.release)

    def _resume(self, after: Deferred) -> None:
        """Continue the promotions that waited for slots or for a shared lookup."""
        with self._lock, self._changes:
            self._expire(after)
            self._promoter.resume(after)

    def look_up_shared(self, keys: Sequence[ChunkKey], states: int = 0) -> SharedLookup | None:
        """Start a search in shared tiers for the chunks that this store does not know. Never waits.

        `states`: the number of entries with recurrent states after each chunk; the search includes them. Returns None
        if no shared tier can be read now, or if the store knows all chunks and states.
        """
        if not self._shared or self._closed:
            return None
        return self._change(partial(self._plan_shared_lookup, keys, states, lambda after: None))

    @locked
    def _plan_shared_lookup(
        self, keys: Sequence[ChunkKey], states: int, on_done: Callable[[Deferred], None], after: Deferred
    ) -> SharedLookup | None:
        shared = [tier for tier in self._shared if tier.usable]
        chunks, other = self.catalog.unknown(keys, states) if shared else ((), ())
        if not (chunks or other):
            return None
        lookup = SharedLookup(chunks, other, shared, on_done, self._clock)
        after.jobs.append(lookup.job())
        return lookup

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until all persistent tiers are listed, for at most `timeout` seconds. Returns whether all are listed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for scanner in self._scanners:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            scanner.bell.wait_for(partial(getattr, scanner, "listed"), left)
        return all(scanner.listed for scanner in self._scanners) and not self._closed

    # -- removing -----------------------------------------------------------------------------------------

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from host memory, without writing them to lower tiers. Leased chunks stay readable."""
        self._change(partial(self._drop, keys))

    @locked
    def _drop(self, keys: Sequence[ChunkKey], after: Deferred) -> None:
        dropped = [entry for key in keys if (entry := self._primary.entries.get(key)) is not None]
        prefetched = self._promoter.are_prefetched(dropped)
        for entry in dropped:
            self._pins.unpin(entry.key)
            self._primary.remove(entry)
        if prefetched:
            self._promoter.end_prefetches(after, frozenset(keys))

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks from every tier, so that requests no longer find them. Leased chunks stay readable.

        Returns how many of the chunks were in some tier. `drain` waits until their bytes in lower tiers are deleted.
        """

        def plan(after: Deferred) -> int:
            known = sum(self.catalog.presence(key) is not Presence.MISS for key in keys)
            self._drop(keys, after)
            for tier in self._tiers:
                # Also in tiers that cannot be read now: they would serve the chunks again later.
                tier.index.mark_deleted(keys, unknown=tier.shared)
                after.jobs.append(deletion(tier.reclaim, tier.name))
            return known

        return self._change(plan)

    def clear(self, *, lower: bool = True) -> int:
        """Remove all chunks, or with `lower=False` only the chunks in host memory. Returns the number of removed
        chunks.

        Also removes chunks that are being stored or loaded now, and chunks of other processes in a shared tier.
        Requests no longer find removed chunks. `drain` waits until the bytes of removed chunks in lower tiers are
        deleted.
        """

        def plan(after: Deferred) -> int:
            keys = set(self._primary.clear())
            self._pins.clear()
            self._promoter.end_prefetches(after)
            tiers = self._tiers if lower else ()
            for tier in tiers:
                keys.update(tier.index.clear())
                after.jobs.append(deletion(tier.delete_all, tier.name))
            # This also recovers slots lost in an earlier exception.
            self._recount(tiers, cut_short=False)
            return len(keys)

        return self._change(plan)

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            primary = self._primary
            tiers = (primary.stats(), *(tier.stats() for tier in self._tiers))
            counts = primary.referenced, len(self._pins), primary.writing, primary.loading
        return StoreStats(tiers, *counts, self._pool.pending)

    def snapshot(self) -> Snapshot:
        """Return all chunks and the references to them, for tests and debugging. Holds the store's lock meanwhile."""
        with self._lock:
            held = {key: copy(entry) for key, entry in self._primary.entries.items()}
            stored = tuple(tier.index.snapshot() for tier in self._tiers)
            pinned, prioritized = frozenset(self._pins), dict(self._primary.prioritized)
            return Snapshot(held, stored, pinned, prioritized, *self._promoter.snapshot())

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The backends of all tiers, host memory first."""
        return self._primary.backend, *(tier.backend for tier in self._tiers)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of all tiers, host memory first. The store calls its policies while it holds its lock."""
        return self._primary.policy, *(tier.index.policy for tier in self._tiers)

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until each lower tier accepts `self.max_pending_stores` more chunks, for at most `timeout` seconds.

        Returns whether all lower tiers accept this number of chunks. Ignores tiers that hang.
        """
        return self._writes.wait_for_room(self.max_pending_stores, timeout)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until no I/O is queued or running, for at most `timeout` seconds. Returns False if I/O is left."""
        return self._pool.drain(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish queued and running I/O, for at most `timeout` seconds, and close every backend. Idempotent.

        Backends have some more seconds to close. If a read or write hangs, promotions that wait for it fail. If Ctrl-C
        interrupts `close`, call `close` again.
        """
        deadline = time.monotonic() + timeout
        # Without the lock, which a policy of another package may hold forever.
        self._closed = True
        with self._closing:
            if not self._ended:
                self._end(deadline)
                self._ended = True

    def _end(self, deadline: float) -> None:
        for scanner in self._scanners:
            scanner.stop(max(0.0, deadline - time.monotonic()))
        if not self._pool.close(max(0.0, deadline - time.monotonic())):
            logger.warning("lmkv: a read or write of a lower tier hangs; lmkv closes without waiting longer")
        ended = ends_in_time(self._empty)
        if not ended:
            logger.error("lmkv: a policy, filter or observer hangs; host memory stays taken until the process ends")
        # Host memory last: backends may work on it.
        close_all((tier.name, tier.backend) for tier in self._tiers)
        if ended:
            close_all([(self._primary.name, self._primary.backend)])

    def _empty(self) -> None:
        """Remove all chunks, so that requests find none. Finishes every waiting promotion."""

        def plan(after: Deferred) -> None:
            self._promoter.close(after)
            self._primary.clear()
            for tier in self._tiers:
                tier.close()

        self._change(plan)

    # -- after an exception -------------------------------------------------------------------------------

    @locked
    def _recount(self, tiers: Sequence[LowerTier], *, cut_short: bool) -> None:
        """Recount the references and free slots of host memory. Rebuilds the policies of host memory and of `tiers`.

        The recount relies only on the entries and on the objects that refer to entries. If an exception interrupts the
        recount, another call does the same work.
        """
        after = Deferred()
        refs = Counter(self._pins.recount())
        held = list(self._holders.entries())
        refs.update(entry for entry, _ in held)
        self._writes.recount(refs, after)
        filled = self._promoter.recount(refs) | {entry for entry, fills in held if fills}
        self._primary.recount(refs, filled)
        self._promoter.plan_again(after)
        for tier in tiers:
            tier.index.recount(self._promoter.reading(tier))
            after.jobs.append(deletion(tier.delete_all if tier.index.clearing else tier.reclaim, tier.name))
        # The policies are new.
        self.hints.recount()
        # The plans run after the lock's release, as all plans do.
        self._pool.submit([Job(partial(_run, after, cut_short), Priority.LOAD, lambda after: None)])

    def after_fork(self) -> None:
        """Close the store in a forked child, which has none of the store's threads."""
        self._closed = self._ended = self.forked = self._promoter.forked = True
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]
        self._pool.after_fork()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed: call close()", ResourceWarning, source=self, stacklevel=2)
            if self._pool.runs_here():
                # An I/O thread collects the garbage, perhaps under the pool's lock: it cannot wait for itself.
                threading.Thread(target=self.close, name="lmkv-close", daemon=True).start()
            else:
                self.close()


def _run(planned: Deferred, cut_short: bool, after: Deferred) -> None:
    if cut_short:
        logger.warning("lmkv: an exception (such as Ctrl-C) interrupted the store; lmkv has repaired the store")
    after.jobs += planned.jobs
    after.callbacks += planned.callbacks
