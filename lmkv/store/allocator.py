"""Allocates slots of host memory, evicting when none is free."""

from __future__ import annotations

from lmkv.protocols import ChunkKey
from lmkv.store.flusher import Flusher
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.jobs import AfterLock
from lmkv.store.tiers.primary import PrimaryTier
from lmkv.store.tiers.tails import Share

_FREE_SHARE = 16
"""With write-back, this fraction of the slots is kept free, and at most as many chunks are flushed at a time."""


class SlotAllocator:
    """Gives out slots. Called under the store's lock; nothing here waits.

    `max_flushing`: evicted chunks that may be on their way to lower tiers at a time; 0: no write-back.
    """

    def __init__(self, primary: PrimaryTier, flusher: Flusher, *, max_flushing: int) -> None:
        self._primary = primary
        self._slab = primary.slab
        self._flusher = flusher
        self._free_target = max(1, primary.slab.num_slots // _FREE_SHARE)
        self._write_back = max_flushing > 0
        self._max_flushing = min(max(4, self._free_target), max_flushing)

    def allocate(self, key: ChunkKey, after: AfterLock, protect: set[ChunkKey] | None = None) -> int | None:
        """A free slot for a chunk, evicting if need be. None: every slot is referenced or being flushed."""
        share = None if type(key) is bytes else self._primary.shares.get(type(key))
        if share is not None and share.full and not self._evict_from(share, key, after):
            return None
        while (slot := self._slab.allocate()) is None:
            if self._write_back and self._primary.flushing >= self._max_flushing:
                return None
            if not self._evict(after, protect or frozenset()):
                return None
        return slot

    def free_up(self, count: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> None:
        """Evict for `count` slots at once, which costs half as much as one by one.

        With write-back it does nothing: `allocate` evicts, since it bounds the flushes under way.
        """
        missing = count - self._primary.slab.free_slots
        if missing > 1 and not self._write_back:
            self._primary.evict(protect, missing)

    def _evict(self, after: AfterLock, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> bool:
        """Evict for one slot, at once or once flushed; False when the policy has no victim."""
        victims = self._primary.victims(protect)
        for victim in victims:
            self._drop(victim, after)
        return bool(victims)

    def _evict_from(self, share: Share, key: ChunkKey, after: AfterLock) -> bool:
        """Evict an entry of this kind to make room for another; False when all are in use."""
        victim = self._primary.evict_from(share, key)
        if victim is not None:
            self._drop(victim, after)
        return victim is not None

    def _drop(self, victim: Entry, after: AfterLock) -> None:
        if not (self._write_back and self._flusher.flush(victim, after)):
            self._primary.remove(victim)

    def keep_free(self, after: AfterLock) -> None:
        """With write-back, flush the next victims before their slots are wanted."""
        if not self._write_back:
            return
        primary = self._primary
        wanted = self._free_target - primary.slab.free_slots
        while primary.flushing < min(wanted, self._max_flushing) and self._evict(after):
            wanted = self._free_target - primary.slab.free_slots
