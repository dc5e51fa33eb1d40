"""Leases (to read) and reservations (to write): references to slots of host memory, as context managers.

A leased chunk stays. A chunk that was only looked up may be evicted before it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lmkv.protocols import ChunkKey
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.primary import PrimaryTier


class Lease(AbstractContextManager["Lease"]):
    """Read references to the leading chunks of a request: their slots keep their bytes until `release`."""

    def __init__(self, chunks: Sequence[Entry], lock: threading.Lock, primary: PrimaryTier) -> None:
        self._chunks = chunks
        self._lock = lock
        self._primary = primary
        self._released = False

    def __repr__(self) -> str:
        return f"<Lease of {len(self)} chunks{', released' if self._released else ''}>"

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def slots(self) -> list[int]:
        return [chunk.slot for chunk in self._chunks]

    @property
    def keys(self) -> list[ChunkKey]:
        return [chunk.key for chunk in self._chunks]

    def release(self) -> None:
        """Give the references back. Idempotent. Takes the store's lock."""
        if not self._released:
            self._released = True
            with self._lock:
                for chunk in reversed(self._chunks):
                    self._primary.unref(chunk)

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(AbstractContextManager["Reservation"]):
    """Write references to slots of chunks that are about to be stored. Not thread-safe.

    `accepted`: how many leading keys are reserved here, already stored, or being stored by another caller; fewer
    than wanted when there is no slot for the next one. Slots that are not committed are aborted at the end.
    """

    def __init__(
        self,
        entries: dict[ChunkKey, Entry],
        accepted: int,
        commit: Callable[[Sequence[Entry]], None],
        abort: Callable[[Sequence[Entry]], None],
    ) -> None:
        self._open = entries
        self._commit, self._abort = commit, abort
        self.accepted = accepted

    def __repr__(self) -> str:
        return f"<Reservation: {len(self)} slots to fill, {self.accepted} keys accepted>"

    @property
    def slots(self) -> dict[ChunkKey, int]:
        """Slots to fill, by key, in the order of the wanted keys."""
        return {key: entry.slot for key, entry in self._open.items()}

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """The slots of `keys` (default: all) are filled: publish them. Takes the store's lock."""
        self._end(keys, self._commit)

    def abort(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """The slots of `keys` (default: all) have no usable bytes: free them. Takes the store's lock."""
        self._end(keys, self._abort)

    def _end(self, keys: Sequence[ChunkKey] | None, how: Callable[[Sequence[Entry]], None]) -> None:
        if keys is None:
            entries, self._open = list(self._open.values()), {}
        else:
            entries = [self._open.pop(key) for key in keys if key in self._open]
        if entries:
            how(entries)

    def __exit__(self, *_: object) -> None:
        self.abort()
