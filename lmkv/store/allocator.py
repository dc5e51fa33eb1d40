"""Slots of the primary tier for whoever needs one, and who has to go for it."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.protocols import ChunkKey
from lmkv.store.flusher import Flusher
from lmkv.store.tiers.iopool import Deferred
from lmkv.store.tiers.primary import PrimaryTier

_ROOM_SHARE = 16
"""With write-back, one slot in so many is kept free, and as many chunks at most go down at a time."""


class SlotAllocator:
    """No lock inside, nothing waits.

    `expire`: ends pins and prefetches whose time is over; whether there were any. `max_flushing`: how many
    evicted chunks may be on their way down at a time; 0 without write-back.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        flusher: Flusher,
        expire: Callable[[Deferred], bool],
        *,
        max_flushing: int,
    ) -> None:
        self._primary = primary
        self._flusher = flusher
        self._expire = expire
        self._room = max(1, primary.slab.num_slots // _ROOM_SHARE)
        self._write_back = max_flushing > 0
        self._max_flushing = min(max(4, self._room), max_flushing)

    def acquire(
        self, deferred: Deferred, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()
    ) -> int | None:
        """A free slot, evicting for it if need be. None: none can be had, or not before others are down."""
        while (slot := self._primary.slab.acquire()) is None:
            if self._write_back and self._primary.flushing >= self._max_flushing:
                return None
            if not self._evict(deferred, protect) and not self._expire(deferred):
                return None
        return slot

    def make_room(self, count: int, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> None:
        """Evict for `count` slots at once where that is possible: one by one costs twice as much.

        What is to be copied down first is left to `acquire`, which counts how much of that is under way.
        """
        missing = count - self._primary.slab.free_slots
        if missing > 1 and not self._write_back:
            for victim in self._primary.victims(protect, missing):
                self._primary.remove(victim)

    def _evict(self, deferred: Deferred, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> bool:
        """Evict for one slot, at once or after copying down; False when the policy gives nothing."""
        victims = self._primary.victims(protect)
        for victim in victims:
            if not (self._write_back and self._flusher.flush(victim, deferred)):
                self._primary.remove(victim)
        return bool(victims)

    def keep_room(self, deferred: Deferred) -> None:
        """With write-back, send the next victims down before their slots are wanted."""
        if not self._write_back:
            return
        primary = self._primary
        wanted = self._room - primary.slab.free_slots
        while primary.flushing < min(wanted, self._max_flushing) and self._evict(deferred):
            wanted = self._room - primary.slab.free_slots
