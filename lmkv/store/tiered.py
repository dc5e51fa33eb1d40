"""TieredStore: who is where, who may go, who is on the way.

One lock guards the metadata of all tiers; it is never held during I/O, copies, log lines or callbacks. Each
method plans under it into a `Deferred` and acts outside. The parts (`primary`, `pins`, `eviction`, `flush`,
`promoter`, `secondary`) share that lock and say which of their methods want it held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lmkv.memory.slab import Slab
from lmkv.outcomes import Presence
from lmkv.protocols import Backend, ChunkKey, Clock, ListsKeys, Tier
from lmkv.store.allocator import SlotAllocator
from lmkv.store.flusher import Flusher
from lmkv.store.leases import Lease, Reservation
from lmkv.store.pins import Pins
from lmkv.store.promoter import Promoter, wake
from lmkv.store.promotion import Promotion
from lmkv.store.tiers.iopool import Deferred, IOPool, Job, Priority, attempt
from lmkv.store.tiers.primary import Entry, PrimaryTier, State
from lmkv.store.tiers.scanner import TierScanner
from lmkv.store.tiers.secondary import Secondary, first_with
from lmkv.store.tiers.stats import StoreStats

logger = logging.getLogger(__name__)

_MAX_STORES = 64


class TieredStore:
    """A primary tier in host memory over any number of secondary tiers, fastest first.

    `prefetch_share`: of the primary tier's slots, how many prefetches may hold at once. `retain`: False
    makes the primary tier a mere passage to the others. Secondary tiers that persist are indexed in the
    background; what is indexed already is served meanwhile. Thread-safe. The store owns its tiers' backends
    and closes them; closed, it has nothing and takes nothing.
    """

    def __init__(
        self,
        primary: Tier,
        secondaries: Sequence[Tier] = (),
        *,
        io_threads: int = 8,
        prefetch_share: float = 0.5,
        retain: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._primary = PrimaryTier(primary, retain=retain)
        slots = self._primary.slab.num_slots
        self._tiers = [Secondary(tier, self._primary.slot_bytes, self._lock, clock) for tier in secondaries]
        # A store must not hold so many slots for its writes that loads find none.
        self.store_window = max(1, min(_MAX_STORES, slots // 2)) if secondaries else slots
        """Chunks that can be stored at a time without a copy down being refused, when no other is waiting."""
        self._pool = IOPool(io_threads, self.store_window)
        self._pins = Pins(self._primary, clock)
        self._flusher = Flusher(self._lock, self._primary, self._tiers, self._pool, self._resume)
        self._allocator = SlotAllocator(
            self._primary,
            self._flusher,
            self._expire,
            max_flushing=self.store_window if any(tier.write == "back" for tier in secondaries) else 0,
        )
        prefetched = max(1, int(slots * prefetch_share))
        self._promoter = Promoter(
            self._lock, self._primary, self._tiers, self._allocator, self._pool, prefetched, clock
        )
        self._closed = False
        self._scanners = [
            TierScanner(tier, self._lock) for tier in self._tiers if isinstance(tier.backend, ListsKeys)
        ]

    @property
    def slab(self) -> Slab:
        return self._primary.slab

    @property
    def primary_name(self) -> str:
        return self._primary.name

    # -- looking ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """Where each chunk is. Free of side effects."""
        with self._lock:
            return [self._presence(key) for key in keys]

    def _presence(self, key: ChunkKey) -> Presence:
        """Locked."""
        entry = self._primary.entries.get(key)
        if entry is not None:
            return Presence.READY if entry.ready else Presence.PENDING
        return Presence.SECONDARY if first_with(self._tiers, key) else Presence.MISS

    def match(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks in the primary tier, and leading chunks anywhere."""
        with self._lock:
            ready = found = len(self._primary.leading_ready(keys))
            entries = self._primary.entries
            indexes = [tier.index for tier in self._tiers if tier.usable]
            for key in keys[ready:]:
                if key not in entries and not any(key in index for index in indexes):
                    break
                found += 1
            return ready, found

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name of the fastest secondary tier that has the chunk, None when none has."""
        with self._lock:
            tier = first_with(self._tiers, key)
            return tier.name if tier else None

    # -- reading ------------------------------------------------------------------------------------------

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Claim the leading READY chunks of `keys` for reading, as many as there are."""
        with self._lock:
            entries = self._primary.leading_ready(keys)
            for entry in entries:
                self._primary.ref(entry)
            self._primary.counters.hits += len(entries)
        return Lease(entries, self._let_go)

    def _let_go(self, entries: Sequence[Entry]) -> None:
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
        protect: Sequence[ChunkKey] = (),
    ) -> Reservation:
        """Claim slots for consecutive chunks of a chain, head first, evicting what the policy gives.

        `parent`: the key before `keys[0]`; `tokens`: the token ids of these chunks, for tiers that describe
        what they hold. `protect`: the whole chain, head first: what comes before a chunk is not evicted for
        it, unless a lower tier has it.
        """
        deferred = Deferred()
        entries: list[Entry] = []
        accepted = 0
        width = len(tokens) // len(keys) if keys else 0
        with self._lock:
            kept = self._only_copies(keys, protect)
            if kept is not None and not self._closed:
                self._make_room(keys, kept)
            for key in () if self._closed else keys:
                known = self._primary.entries.get(key)
                if known is None:
                    slot = self._allocator.acquire(deferred, kept or frozenset())
                    if slot is None:
                        break
                    ids = tokens[accepted * width : (accepted + 1) * width]
                    entries.append(self._primary.enter(key, slot, State.WRITING, parent, ids))
                elif kept is not None and first_with(self._tiers, key) is None:
                    kept.add(key)
                accepted += 1
                parent = key
            self._primary.counters.write_rejects += len(keys) - accepted
        deferred.run(self._pool)
        chain = protect or keys
        return Reservation(entries, accepted, lambda done: self._commit(done, chain), self._abort)

    def _only_copies(self, keys: Sequence[ChunkKey], chain: Sequence[ChunkKey]) -> set[ChunkKey] | None:
        """Locked. Chunks before `keys` that no lower tier has; None when nothing need go for these."""
        if self._primary.slab.free_slots >= len(keys):
            return None
        kept = set()
        for key in chain:
            if key == keys[0]:
                break
            if first_with(self._tiers, key) is None:
                kept.add(key)
        return kept

    def _make_room(self, keys: Sequence[ChunkKey], kept: set[ChunkKey]) -> None:
        """Locked. Slots for those of `keys` that are not here; nothing that is wanted goes for it."""
        entries = self._primary.entries
        here = {key for key in keys if key in entries}
        self._allocator.make_room(len(keys) - len(here), kept | here)

    def _commit(self, entries: Sequence[Entry], chain: Sequence[ChunkKey]) -> None:
        deferred = Deferred()
        primary = self._primary
        with self._lock:
            for entry in entries:
                primary.mark_ready(entry)
                if entry.waiters:
                    wake(entry, deferred)
            if self._tiers:
                self._flusher.store(entries, chain, deferred)
            for entry in reversed(entries):
                primary.unref(entry)
            primary.counters.writes += len(entries)
            primary.counters.written_bytes += len(entries) * primary.slot_bytes
            self._allocator.keep_room(deferred)
        deferred.run(self._pool)

    def _abort(self, entries: Sequence[Entry]) -> None:
        deferred = Deferred()
        with self._lock:
            for entry in entries:
                self._primary.remove(entry)
                wake(entry, deferred)
                self._primary.unref(entry)
        deferred.run(self._pool)

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Hold the leading READY chunks of `keys` in the primary tier for `ttl` seconds; returns how many.

        Pinning again moves the end of the pin.
        """
        with self._lock:
            return self._pins.pin(keys, ttl)

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End the pins of `keys`; returns how many there were."""
        with self._lock:
            return sum(self._pins.unpin(key) for key in reversed(keys))

    def _expire(self, deferred: Deferred) -> bool:
        """Locked. End the pins and prefetches whose time is over; whether there were any."""
        pins = self._pins.expire()
        return self._promoter.expire(deferred) or pins

    def poll(self) -> None:
        """Housekeeping that otherwise waits until slots are wanted: ends what has run out of time."""
        deferred = Deferred()
        with self._lock:
            self._expire(deferred)
        deferred.run(self._pool)

    # -- from lower tiers ---------------------------------------------------------------------------------

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
        deferred = Deferred()
        with self._lock:
            promotion = self._promoter.promote(() if self._closed else keys[:limit], priority, ttl, deferred)
        deferred.run(self._pool)
        return promotion

    def _resume(self, deferred: Deferred) -> None:
        """Locked."""
        self._promoter.resume(deferred)

    def wait_indexed(self, timeout: float | None = None) -> bool:
        """Wait until the persistent tiers are indexed, at most `timeout` seconds; whether they are."""
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            scanner.listed.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for scanner in self._scanners
        )

    # -- removing -----------------------------------------------------------------------------------------

    def drop(self, keys: Sequence[ChunkKey]) -> None:
        """Remove chunks from the primary tier, whatever its policy says, and stop copies down that are on

        their way. What is leased stays readable.
        """
        with self._lock:
            self._drop(keys)

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        """Locked."""
        for key in keys:
            entry = self._primary.entries.get(key)
            if entry is not None:
                self._pins.unpin(key)
                self._primary.remove(entry)

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks from every tier; returns how many were in one. What is leased stays readable.

        None of them is served any more; `drain` waits until the lower tiers' bytes are gone, too.
        """
        deferred = Deferred()
        with self._lock:
            known = sum(self._presence(key) is not Presence.MISS for key in keys)
            self._drop(keys)
            for tier in self._tiers:
                # Also where a tier that is away now would have served them again later.
                tier.index.mark_deleted(keys)
                deferred.jobs.append(Job(tier.reclaim, Priority.LOAD, _nothing))
        deferred.run(self._pool)
        return known

    def clear(self) -> int:
        """Remove everything from every tier; returns how many chunks that were.

        From its return on nothing of before is served, not even what is being stored or loaded right now, or
        what other processes have put into a shared tier. `drain` waits until it is deleted, too.
        """
        deferred = Deferred()
        with self._lock:
            keys = set(self._primary.clear())
            self._pins.clear()
            for tier in self._tiers:
                keys.update(tier.index.clear())
                deferred.jobs.append(Job(tier.delete_all, Priority.LOAD, _nothing))
        deferred.run(self._pool)
        return len(keys)

    # -- the rest -----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            primary = self._primary
            tiers = (primary.stats(), *(tier.stats() for tier in self._tiers))
            held, pinned = primary.referenced, len(self._pins)
            writing, loading = primary.writing, primary.loading
        return StoreStats(tiers, held, pinned, writing, loading, self._pool.pending)

    def drain(self, timeout: float = 10.0) -> bool:
        """Wait until no I/O is waiting or running, at most `timeout` seconds; True when that is so."""
        return self._pool.drain(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what I/O there is, at most `timeout` seconds, and close every backend. Idempotent.

        What hangs is left behind on its daemon thread; whoever waits for it is told that it never comes.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for scanner in self._scanners:
            scanner.stop(max(0.0, deadline - time.monotonic()))
        if not self._pool.close(max(0.0, deadline - time.monotonic())):
            logger.warning("lmkv: an I/O thread hangs and is left behind")
        deferred = Deferred()
        with self._lock:
            self._promoter.close(deferred)
            self._primary.clear()
            for tier in self._tiers:
                tier.close()
        deferred.run(self._pool)
        for backend in (*(tier.backend for tier in self._tiers), self._primary.backend):
            _close(backend)


def _nothing() -> None:
    """A deletion that the closed pool refuses: the store serves nothing any more."""


def _close(backend: Backend) -> None:
    attempt(
        backend.close,
        lambda error: logger.warning("lmkv: closing %s failed: %r", backend.name, error),
    )
