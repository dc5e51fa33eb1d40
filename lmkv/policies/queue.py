"""`QueuePolicy`: base of policies with one queue, whose front is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class QueuePolicy(PolicyBase):
    """New keys go to the end of the queue, and a use changes nothing: that is FIFO. Subclasses override `use`.

    Examples
    --------
    >>> class MRU(QueuePolicy):  # evicts the chunk that was used last
    ...     def use(self, keys):
    ...         for key in keys:
    ...             if key in self.queue:
    ...                 self.queue.move_to_end(key, last=False)
    >>> policy = MRU()
    >>> policy.insert(b"a", size=10)
    >>> policy.insert(b"b", size=10)
    >>> policy.touch([b"b"])
    >>> policy
    <MRU: 20 evictable bytes, 0 keys held>
    >>> policy.evict(5)
    [b'b']
    """

    queue: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)

    def add(self, key: ChunkKey) -> None:
        self.queue[key] = None

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """Do nothing: use does not count."""

    def pop(self) -> ChunkKey | None:
        try:
            return self.queue.popitem(False)[0]
        except KeyError:
            return None

    def put_back(self, key: ChunkKey) -> None:
        self.queue[key] = None
        self.queue.move_to_end(key, last=False)

    def drop(self, key: ChunkKey) -> None:
        self.queue.pop(key, None)
