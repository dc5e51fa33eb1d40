"""Leases (to read) and reservations (to write): references to slots of host memory, as context managers.

A leased chunk stays. A chunk that was only looked up may be evicted before it is read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from attrs import define, field

from lmkv.protocols import ChunkKey
from lmkv.store.tiers.changes import Changes
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.primary import PrimaryTier


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
