"""Slots of the primary tier for whoever needs one, and who has to go for it."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.protocols import ChunkKey
from lmkv.store.flusher import Descents
from lmkv.store.tiers.iopool import Todo
from lmkv.store.tiers.primary import PrimaryTier

_ROOM_SHARE = 16
"""With write-back, one slot in so many is kept free, and as many chunks at most go down at a time."""


class Evictor:
    """No lock inside, nothing waits.

    `expire`: ends pins and prefetches whose time is over; whether there were any. `max_demotions`: how many
    evicted chunks may be on their way down at a time; 0 without write-back.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        descents: Descents,
        expire: Callable[[Todo], bool],
        *,
        max_demotions: int,
    ) -> None:
        self._primary = primary
        self._descents = descents
        self._expire = expire
        self._room = max(1, primary.slab.num_slots // _ROOM_SHARE)
        self._write_back = max_demotions > 0
        self._max_demotions = min(max(4, self._room), max_demotions)

    def acquire(self, todo: Todo, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> int | None:
        """A free slot, evicting for it if need be. None: none can be had, or not before others are down."""
        while (slot := self._primary.slab.acquire()) is None:
            if self._write_back and self._primary.demoting >= self._max_demotions:
                return None
            if not self._evict(todo, protect) and not self._expire(todo):
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

    def _evict(self, todo: Todo, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset()) -> bool:
        """Evict for one slot, at once or after copying down; False when the policy gives nothing."""
        victims = self._primary.victims(protect)
        for victim in victims:
            if not (self._write_back and self._descents.demote(victim, todo)):
                self._primary.remove(victim)
        return bool(victims)

    def keep_room(self, todo: Todo) -> None:
        """With write-back, send the next victims down before their slots are wanted."""
        if not self._write_back:
            return
        primary = self._primary
        wanted = self._room - primary.slab.free_slots
        while primary.demoting < min(wanted, self._max_demotions) and self._evict(todo):
            wanted = self._room - primary.slab.free_slots
