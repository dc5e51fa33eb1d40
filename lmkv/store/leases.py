"""Leases and reservations: handles with which callers read and fill slots of host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

from attrs import define, field

from lmkv.protocols import ChunkKey
from lmkv.store.entries import Chain, Entry, State
from lmkv.store.guards import locked
from lmkv.store.iopool import Deferred
from lmkv.store.promoter import Promoter
from lmkv.store.tier import first_tier_with
from lmkv.store.writes import SlotAllocator, StoreComponent, Writes


class Lease(AbstractContextManager["Lease"]):
    """Keeps the leading chunks of a request in host memory until `release`, so that the caller can read their slots."""

    def __init__(self, chunks: Sequence[Entry], release: Callable[[Lease], None]) -> None:
        self.chunks = chunks
        self._release = release
        self.released = False

    def __repr__(self) -> str:
        return f"<Lease of {len(self)} chunks{', released' if self.released else ''}>"

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def slots(self) -> list[int]:
        return [chunk.slot for chunk in self.chunks]

    @property
    def keys(self) -> list[ChunkKey]:
        return [chunk.key for chunk in self.chunks]

    def release(self) -> None:
        """End the lease, so that the store may evict its chunks. Idempotent. Takes the store's lock."""
        if not self.released:
            self._release(self)

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(AbstractContextManager["Reservation"]):
    """Slots of host memory for chunks that a caller is about to store. Not thread-safe.

    Fill `slots`, then call `commit`. The end of the `with` block frees slots that were not committed. `accepted`: how
    many of the keys passed to `reserve`, from the first on, are reserved here, stored, or being stored by others.
    """

    def __init__(self, entries: dict[ChunkKey, Entry], accepted: int, commit: _End, abort: _End) -> None:
        self._open = entries
        self._commit, self._abort = commit, abort
        self.accepted = accepted

    def __repr__(self) -> str:
        return f"<Reservation: {len(self)} slots to fill, {self.accepted} keys accepted>"

    @property
    def slots(self) -> dict[ChunkKey, int]:
        """The slot to fill for each reserved key, first chunk of the prompt first."""
        return {key: entry.slot for key, entry in self._open.items()}

    @property
    def _chunks(self) -> list[Entry]:
        """The entries of the reserved slots."""
        return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Mark the slots of `keys` (by default all) as filled, so that requests find the chunks. Takes the store's
        lock.
        """
        self._end(keys, self._commit)

    def abort(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Free the slots of `keys` (by default all) without storing the chunks. Takes the store's lock."""
        self._end(keys, self._abort)

    def _end(self, keys: Sequence[ChunkKey] | None, how: _End) -> None:
        if self._open:
            how(self, keys)

    def take(self, keys: Sequence[ChunkKey] | None) -> list[Entry]:
        """Remove the entries of `keys` (all if None) from the reservation, and return the entries.

        The caller holds the store's lock.
        """
        if keys is None:
            entries, self._open = list(self._open.values()), {}
            return entries
        taken = [self._open.pop(key, None) for key in keys]
        return [entry for entry in taken if entry is not None]

    def __exit__(self, *_: object) -> None:
        self.abort()


_End: TypeAlias = Callable[[Reservation, Sequence[ChunkKey] | None], None]


@define(eq=False, repr=False)
class Holders(StoreComponent):
    """Creates leases and reservations (together: holders), and knows all holders that have not ended.

    After an exception, a holder may be garbage-collected without being ended. The next change of the store then frees
    the slots that this holder has kept.
    """

    _allocator: SlotAllocator
    _promoter: Promoter
    _writes: Writes
    _holders: dict[int, weakref.ref[Lease | Reservation]] = field(init=False, factory=dict)

    @locked
    def _add(self, holder: Lease | Reservation) -> None:
        if holder:
            # The garbage collector calls this, on any thread and at any time.
            self._holders[id(holder)] = weakref.ref(holder, self._changes.lost.append)

    @locked
    def entries(self) -> Iterator[tuple[Entry, bool]]:
        """Yield `(entry, fills)` for each reference of a holder to an entry. `fills`: whether the holder fills the
        entry's slot.
        """
        # A copy, because the garbage collector may run in between.
        for key, found in list(self._holders.items()):
            holder = found()
            if isinstance(holder, Reservation):
                yield from ((entry, True) for entry in holder._chunks)
            elif holder is not None and not holder.released:
                yield from ((entry, False) for entry in holder.chunks)
            elif holder is None:
                self._holders.pop(key, None)

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Create a lease; see `TieredStore.lease`."""
        with self._lock, self._changes:
            entries = self._primary.leading_ready(keys)
            self._primary.use(entries)
            lease = Lease(entries, self._release)
            self._add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock, self._changes:
            if not lease.released:
                lease.released = True
                self._holders.pop(id(lease), None)
                for chunk in reversed(lease.chunks):
                    self._primary.unref(chunk)

    @locked
    def reserve(
        self, keys: Chain, parent: ChunkKey, tokens: bytes, origins: Sequence[bytes], chain: Chain, after: Deferred
    ) -> Reservation:
        """Create a reservation; see `TieredStore.reserve`. `chain`: all keys of the prompt, which `TieredStore.reserve`
        calls `protect`.
        """
        entries: dict[ChunkKey, Entry] = {}
        accepted = 0
        width = len(tokens) // len(keys) if keys else 0
        kept = self._only_copies(keys, chain)
        if kept is not None:
            # Free slots for those of `keys` that are not here, evicting none of `keys` and `kept` for them.
            here = self._primary.entries.keys() & keys
            self._allocator.free_up(len(keys) - len(here), kept | here)
        known_entries, enter, writing = self._primary.entries, self._primary.enter, State.WRITING
        slab = self._primary.slab
        slots, fresh = slab.claim(len(keys)), 0
        for key in keys:
            known = known_entries.get(key)
            if known is not None and self._promoter.is_stuck(known):
                self._promoter.abandon(known, after)
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
            elif kept is not None and first_tier_with(self._tiers, key) is None:
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
        self._add(reservation)
        return reservation

    @locked
    def _only_copies(self, keys: Sequence[ChunkKey], chain: Sequence[ChunkKey]) -> set[ChunkKey] | None:
        """Return the chunks of `chain` before `keys` that no lower tier stores, or None if enough slots for `keys` are
        free.
        """
        if self._primary.slab.free_slots >= len(keys):
            return None
        before = chain[: chain.index(keys[0])] if keys[0] in chain else chain
        return {key for key in before if first_tier_with(self._tiers, key) is None} if self._tiers else set(before)

    def _commit(self, reservation: Reservation, keys: Sequence[ChunkKey] | None, chain: Sequence[ChunkKey]) -> None:
        def publish(after: Deferred) -> None:
            primary, waiters = self._primary, self._promoter.waiters
            entries = self._taken(reservation, keys)
            primary.mark_chain_ready(entries)
            for entry in entries if waiters else ():
                if entry in waiters:
                    self._promoter.settle(entry, after)
            if self._tiers:
                self._writes.write_through(entries, chain, after)
            primary.unref_chain(entries)
            primary.counters.writes += len(entries)
            primary.counters.written_bytes += len(entries) * primary.slot_bytes
            self._allocator.keep_free(after)

        self._change(publish)

    def _abort(self, reservation: Reservation, keys: Sequence[ChunkKey] | None) -> None:
        def free(after: Deferred) -> None:
            for entry in self._taken(reservation, keys):
                self._promoter.abandon(entry, after)
                self._primary.unref(entry)

        self._change(free)

    @locked
    def _taken(self, reservation: Reservation, keys: Sequence[ChunkKey] | None) -> list[Entry]:
        entries = reservation.take(keys)
        if not reservation:
            self._holders.pop(id(reservation), None)
        return entries
