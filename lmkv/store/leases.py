"""Who reads and who writes slots of host memory: leases and reservations."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

from attrs import define, field

from lmkv.protocols import ChunkKey
from lmkv.store.entries import Entry, State
from lmkv.store.guards import Changes, locked
from lmkv.store.iopool import AfterLock, IOPool
from lmkv.store.primary import PrimaryTier
from lmkv.store.promoter import Promoter
from lmkv.store.tier import LowerTier, first_with
from lmkv.store.writes import SlotAllocator, Writes


class Lease(AbstractContextManager["Lease"]):
    """Read references to the leading chunks of a request: their slots keep their bytes until `release`."""

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
        """Give the references back. Idempotent. Takes the store's lock."""
        if not self.released:
            self._release(self)

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(AbstractContextManager["Reservation"]):
    """Write references to slots of chunks that are about to be stored. Not thread-safe.

    `accepted`: how many leading keys are reserved here, already stored, or being stored by another caller; fewer
    than wanted when there is no slot for the next one. Slots that are not committed are aborted at the end.
    """

    def __init__(self, entries: dict[ChunkKey, Entry], accepted: int, commit: _End, abort: _End) -> None:
        self._open = entries
        self._commit, self._abort = commit, abort
        self.accepted = accepted

    def __repr__(self) -> str:
        return f"<Reservation: {len(self)} slots to fill, {self.accepted} keys accepted>"

    @property
    def slots(self) -> dict[ChunkKey, int]:
        """Slots to fill, by key, in the order of the wanted keys."""
        return {key: entry.slot for key, entry in self._open.items()}

    @property
    def _chunks(self) -> list[Entry]:
        """The entries of these slots."""
        return list(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """The slots of `keys` (default: all) are filled: publish them. Takes the store's lock."""
        self._end(keys, self._commit)

    def abort(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """The slots of `keys` (default: all) have no usable bytes: free them. Takes the store's lock."""
        self._end(keys, self._abort)

    def _end(self, keys: Sequence[ChunkKey] | None, how: _End) -> None:
        if self._open:
            how(self, keys)

    def take(self, keys: Sequence[ChunkKey] | None) -> list[Entry]:
        """The entries of these keys (None: all), the caller's from now on. Called under the store's lock."""
        if keys is None:
            entries, self._open = list(self._open.values()), {}
            return entries
        taken = [self._open.pop(key, None) for key in keys]
        return [entry for entry in taken if entry is not None]

    def __exit__(self, *_: object) -> None:
        self.abort()


_End: TypeAlias = Callable[[Reservation, Sequence[ChunkKey] | None], None]


@define(eq=False, repr=False)
class Holders:
    """The leases and reservations that there are. `lock`: the store's.

    One may be gone that was never ended: an exception came before anybody had it. A recount finds its slots.
    """

    _lock: threading.Lock
    _changes: Changes
    _primary: PrimaryTier
    _holders: dict[int, weakref.ref[Lease | Reservation]] = field(init=False, factory=dict)

    @locked
    def add(self, holder: Lease | Reservation) -> None:
        if holder:
            # The collector calls this, on any thread and at any time.
            self._holders[id(holder)] = weakref.ref(holder, self._changes.lost.append)

    @locked
    def discard(self, holder: Lease | Reservation) -> None:
        self._holders.pop(id(holder), None)

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """See `TieredStore.lease`."""
        with self._lock, self._changes:
            entries = self._primary.leading_ready(keys)
            self._primary.use(entries)
            lease = Lease(entries, self._release)
            self.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        with self._lock, self._changes:
            if not lease.released:
                lease.released = True
                self.discard(lease)
                for chunk in reversed(lease.chunks):
                    self._primary.unref(chunk)

    @locked
    def entries(self) -> Iterator[tuple[Entry, bool]]:
        """Each reference to an entry, and whether its holder fills it."""
        # A copy, because the collector may come in between.
        for key, found in list(self._holders.items()):
            holder = found()
            if isinstance(holder, Reservation):
                yield from ((entry, True) for entry in holder._chunks)
            elif holder is not None and not holder.released:
                yield from ((entry, False) for entry in holder.chunks)
            elif holder is None:
                self._holders.pop(key, None)


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
    _writes: Writes
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
                self._writes.write_through(entries, chain, after)
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
