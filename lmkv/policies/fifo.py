"""First in, first out: a heap of insertion numbers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from heapq import heappop, heappush

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey

_MIN_STALE = 64
"""Stale heap items that are not worth a rebuild."""


@define(eq=False)
class _Entry:
    number: int
    size: int
    evictable: bool = True
    queued: bool = True
    """Whether the heap has an item for it, which a held key may have or not."""


@define(eq=False)
class FIFO:
    """Evicts the chunk that came first, however often used; see `lmkv.protocols.Policy` for the verbs.

    A key keeps its place while it is held. Heap items of held and discarded keys are dropped when they
    surface, so that `evict` is O((victims + protected) log n), amortised over the holds and discards.
    """

    _entries: dict[ChunkKey, _Entry] = field(init=False, factory=dict)
    _queue: list[tuple[int, ChunkKey]] = field(init=False, factory=list)
    _next_number: int = field(init=False, default=0)
    _evictable_bytes: int = field(init=False, default=0)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key of `size` bytes as the last. `parent` does not matter here."""
        if key in self._entries:
            raise UsageError(f"chunk {key.hex()} is already in the policy")
        if size < 1:
            raise UsageError(f"chunk {key.hex()} has the size {size}")
        self._entries[key] = _Entry(self._next_number, size)
        heappush(self._queue, (self._next_number, key))
        self._next_number += 1
        self._evictable_bytes += size

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: use does not count."""

    def discard(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.evictable:
            self._evictable_bytes -= entry.size
        if len(self._queue) > 2 * len(self._entries) + _MIN_STALE:
            self._rebuild()

    def set_evictable(self, key: ChunkKey, evictable: bool) -> None:
        """Hold a known key back, or let go of it in its old place; no news changes nothing."""
        entry = self._entries.get(key)
        if entry is None:
            raise UsageError(f"chunk {key.hex()} is not in the policy")
        if entry.evictable == evictable:
            return
        entry.evictable = evictable
        self._evictable_bytes += entry.size if evictable else -entry.size
        if not entry.queued:
            entry.queued = True
            heappush(self._queue, (entry.number, key))

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        if nbytes > self._evictable_bytes:
            return None
        victims: list[tuple[int, ChunkKey]] = []
        spared: list[tuple[int, ChunkKey]] = []
        while nbytes > 0 and (item := self._next_evictable()):
            if item[1] in protect:
                spared.append(item)
            else:
                victims.append(item)
                nbytes -= self._entries[item[1]].size
        for item in spared if nbytes <= 0 else spared + victims:
            heappush(self._queue, item)
        return [self._remove(key) for _, key in victims] if nbytes <= 0 else None

    def clear(self) -> None:
        self._entries.clear()
        self._queue.clear()
        self._evictable_bytes = 0

    def _next_evictable(self) -> tuple[int, ChunkKey] | None:
        """Take the first evictable item off the heap, and what is stale before it."""
        while self._queue:
            item = heappop(self._queue)
            entry = self._entries.get(item[1])
            if entry is None or entry.number != item[0]:
                continue
            if entry.evictable:
                return item
            entry.queued = False
        return None

    def _remove(self, key: ChunkKey) -> ChunkKey:
        self._evictable_bytes -= self._entries.pop(key).size
        return key

    def _rebuild(self) -> None:
        # The dictionary is in order of insertion, and a sorted list is a heap.
        self._queue = [(entry.number, key) for key, entry in self._entries.items() if entry.queued]
