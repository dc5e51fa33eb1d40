"""`InPlace`: chunks in memory that a node shares are leased to be read there, without a slot of host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from attrs import define

from lmkv.outcomes import HIT, MISS
from lmkv.protocols import ChunkKey, InMemory, Place
from lmkv.store.leases import Lease
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier
from lmkv.store.tiers.primary import PrimaryTier


@define(eq=False, repr=False)
class InPlace:
    """Leases chunks of host memory and of the first lower tier, if its chunks can be read in place. Thread-safe.

    `lock`, `tiers`: the store's. Another process may evict a chunk before it is read: `ended` is told so.
    """

    _lock: threading.Lock
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]

    @property
    def place(self) -> Place | None:
        """Where the chunks are that can be read in place; None if none can."""
        return next((tier.backend.place for tier in self._tiers[:1] if isinstance(tier.backend, InMemory)), None)

    def count(self, keys: Sequence[ChunkKey], *, look: bool = True) -> int:
        """How many leading chunks can be leased, as far as is known.

        `look`: look for the file of each one that is not in host memory, which takes microseconds, and forget those that
        are gone.
        """
        with self._lock:
            chunks = self._leading(keys)
        files = [chunk for chunk in chunks if look and not isinstance(chunk, Entry)]
        there = self._tiers[0].contains(files) if files else []
        first = next((number for number, found in enumerate(there) if not found), len(there))
        if first == len(files):
            return len(chunks)
        with self._lock:
            for key, found in zip(files, there, strict=False):
                if not found:
                    self._tiers[0].index.discard(key)
        return chunks.index(files[first])

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Refer to the leading chunks that are in host memory or can be read in place, as many as there are."""
        with self._lock:
            chunks = self._leading(keys)
            self._primary.use([chunk for chunk in chunks if isinstance(chunk, Entry)])
            if self._tiers:
                # The tier evicts them last: they are read within this step.
                self._tiers[0].index.policy.touch([chunk for chunk in chunks if not isinstance(chunk, Entry)])
        return Lease(chunks, self._lock, self._primary)

    @locked
    def _leading(self, keys: Sequence[ChunkKey]) -> list[Entry | ChunkKey]:
        """The leading chunks that can be leased: entries of host memory, and keys of those in place."""
        found: list[Entry | ChunkKey] = []
        index = self._tiers[0].index if self.place and self._tiers[0].usable else ()
        for key in keys:
            entry = self._primary.entries.get(key)
            if entry is not None and entry.ready:
                found.append(entry)
            elif key in index:
                found.append(key)
            else:
                break
        return found

    def ended(self, keys: Sequence[ChunkKey], unread: Sequence[ChunkKey], nbytes: int, seconds: float) -> None:
        """Note that chunks were read in place, `nbytes` in `seconds`; or forget those that were not (`unread`)."""
        with self._lock:
            tier = self._tiers[0]
            for key in unread:
                tier.count_read(MISS, 0, 0.0)
                tier.judge(key, MISS)
            for _ in () if unread else keys:
                tier.count_read(HIT, nbytes // len(keys), seconds / len(keys))
