"""Reserves slots of host memory for chunks that are about to be stored, and publishes them once they are filled."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from attrs import define

from lmkv.protocols import ChunkKey
from lmkv.store.allocator import SlotAllocator
from lmkv.store.flusher import Flusher
from lmkv.store.leases import Holders, Reservation
from lmkv.store.promoter import Promoter
from lmkv.store.tiers.changes import Changes
from lmkv.store.tiers.entry import Entry, State
from lmkv.store.tiers.iopool import IOPool
from lmkv.store.tiers.jobs import AfterLock
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier, first_with
from lmkv.store.tiers.primary import PrimaryTier


@define(eq=False, repr=False)
class Reserver:
    """Plans reservations, and publishes or frees their slots. `lock`: the store's."""

    _lock: threading.Lock
    _changes: Changes
    _holders: Holders
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _allocator: SlotAllocator
    _promoter: Promoter
    _flusher: Flusher
    _pool: IOPool

    @locked
    def reserve(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey,
        tokens: bytes,
        origins: Sequence[bytes],
        chain: Sequence[ChunkKey],
        after: AfterLock,
    ) -> Reservation:
        """See `TieredStore.reserve`, whose `protect` is the `chain`."""
        entries: dict[ChunkKey, Entry] = {}
        accepted = 0
        width = len(tokens) // len(keys) if keys else 0
        kept = self._only_copies(keys, chain)
        if kept is not None:
            self._free_up(keys, kept)
        known_entries, enter, writing = self._primary.entries, self._primary.enter, State.WRITING
        slab = self._primary.slab
        slots, fresh = slab.take(len(keys)), 0
        for key in keys:
            known = known_entries.get(key)
            if known is not None and self._promoter.hangs(known):
                self._promoter.give_up(known, after)
                known = None
            if known is None:
                ids = tokens[accepted * width : (accepted + 1) * width] if width else b""
                origin = origins[accepted] if origins else b""
                if slots and type(key) is bytes:
                    # `enter` for the most frequent case, inlined: storing spends much of its time here.
                    entries[key] = known_entries[key] = Entry(key, slots.pop(), writing, parent, ids, origin)
                    fresh += 1
                else:
                    slab.free(*slots)
                    slots.clear()
                    slot = self._allocator.allocate(key, after, kept)
                    if slot is None:
                        break
                    entries[key] = enter(key, slot, writing, parent, ids, origin)
            elif kept is not None and first_with(self._tiers, key) is None:
                kept.add(key)
            accepted += 1
            parent = key
        slab.free(*slots)
        self._primary.referenced += fresh
        self._primary.writing += fresh
        self._primary.counters.write_rejects += len(keys) - accepted
        chain = chain or keys
        commit = partial(self._commit, chain=chain)
        reservation = Reservation(entries, accepted, commit, self._abort)
        self._holders.add(reservation)
        return reservation

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
        here = entries.keys() & keys
        self._allocator.free_up(len(keys) - len(here), kept | here)

    def _commit(self, reservation: Reservation, keys: Sequence[ChunkKey] | None, chain: Sequence[ChunkKey]) -> None:
        after = AfterLock()
        with self._lock, self._changes:
            primary, waiters = self._primary, self._promoter.waiters
            entries = self._taken(reservation, keys)
            primary.mark_chain_ready(entries)
            for entry in entries if waiters else ():
                if entry in waiters:
                    self._promoter.wake(entry, after)
            if self._tiers:
                self._flusher.write_through(entries, chain, after)
            primary.unref_chain(entries)
            primary.counters.writes += len(entries)
            primary.counters.written_bytes += len(entries) * primary.slot_bytes
            self._allocator.keep_free(after)
        after.run(self._pool.submit)

    def _abort(self, reservation: Reservation, keys: Sequence[ChunkKey] | None) -> None:
        after = AfterLock()
        with self._lock, self._changes:
            for entry in self._taken(reservation, keys):
                self._promoter.give_up(entry, after)
                self._primary.unref(entry)
        after.run(self._pool.submit)

    @locked
    def _taken(self, reservation: Reservation, keys: Sequence[ChunkKey] | None) -> list[Entry]:
        entries = reservation.take(keys)
        if not reservation:
            self._holders.discard(reservation)
        return entries
