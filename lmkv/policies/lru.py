"""`LRU`: evicts the chunk that was used least recently."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from lmkv.policies.queue import QueuePolicy
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class LRU(QueuePolicy):
    """Evicts the chunk that was used least recently.

    Raises
    ------
    UsageError
        A key is inserted twice or with no size, or held or released without being known.

    Notes
    -----
    `touch` makes the head of a chain the most recent, so that its tail is evicted first, whatever the order
    of insertion. A release counts as a use.

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

    def extend(self, keys: Sequence[ChunkKey]) -> None:
        queue = self.queue
        for key in keys:
            queue[key] = None

    def use(self, keys: Sequence[ChunkKey]) -> None:
        queue, move = self.queue, self.queue.move_to_end
        for key in reversed(keys):
            if key in queue:
                move(key)

    def rejoin(self, key: ChunkKey) -> None:
        self.queue[key] = None

    def release(self, key: ChunkKey) -> None:
        held = key in self.held
        super().release(key)
        if held and key in self.queue:
            self.queue.move_to_end(key)
