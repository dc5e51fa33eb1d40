"""`LRU`: evicts the chunk that was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class LRU(PolicyBase):
    """Evicts the chunk that was used least recently.

    Notes
    -----
    `touch` makes the head of a chain the most recent, so that its tail is evicted first, whatever the order
    of insertion. A release counts as a use. `evict` is O(victims + protected), all else O(1) per key.

    Examples
    --------
    >>> policy = LRU()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    >>> policy.evict(15) is None  # all or nothing
    True
    """

    _order: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def _enqueue(self, key: ChunkKey) -> None:
        self._order[key] = None

    def _dequeue(self, key: ChunkKey) -> None:
        self._order.pop(key, None)

    def _choose(self, nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        return self._first(self._order, nbytes, protect)
