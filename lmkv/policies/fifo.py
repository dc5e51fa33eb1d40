"""`FIFO`: evicts the chunk that was inserted first."""

from __future__ import annotations

from collections.abc import Sequence, Set
from heapq import heappop, heappush

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.protocols import ChunkKey

_MIN_STALE = 64
"""Stale heap items that do not justify a rebuild."""


@define(eq=False, repr=False)
class FIFO(PolicyBase):
    """Evicts the chunk that was inserted first, however often it was used.

    Notes
    -----
    A key keeps its place while it is acquired. The order is a heap of insertion numbers, whose items of keys
    that left it are dropped when they come to the top: `evict` is O((victims + protected) log n), amortised.

    Examples
    --------
    >>> policy = FIFO()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'a', b'b']
    """

    _numbers: dict[ChunkKey, int] = field(init=False, factory=dict)
    """Of the known keys, in their order of insertion."""
    _queued: set[ChunkKey] = field(init=False, factory=set)
    """Keys with a heap item, which an acquired key may have or not."""
    _heap: list[tuple[int, ChunkKey]] = field(init=False, factory=list)
    _next_number: int = field(init=False, default=0)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: use does not count."""

    def _enqueue(self, key: ChunkKey) -> None:
        if key not in self._numbers:
            self._numbers[key] = self._next_number
            self._next_number += 1
        if key not in self._queued:
            self._queued.add(key)
            heappush(self._heap, (self._numbers[key], key))

    def _dequeue(self, key: ChunkKey) -> None:
        if key in self._acquired:
            return
        del self._numbers[key]
        self._queued.discard(key)
        if len(self._heap) > 2 * len(self._numbers) + _MIN_STALE:
            # The dictionary is in order of insertion, and a sorted list is a heap.
            self._heap = [(number, key) for key, number in self._numbers.items() if key in self._queued]

    def _choose(self, nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        victims: list[tuple[int, ChunkKey]] = []
        protected: list[tuple[int, ChunkKey]] = []
        while nbytes > 0 and self._heap:
            item = number, key = heappop(self._heap)
            if self._numbers.get(key) != number:
                continue
            if key in self._acquired:
                self._queued.remove(key)
            elif key in protect:
                protected.append(item)
            else:
                victims.append(item)
                nbytes -= self._sizes[key]
        for item in protected if nbytes <= 0 else protected + victims:
            heappush(self._heap, item)
        return [key for _, key in victims] if nbytes <= 0 else None
