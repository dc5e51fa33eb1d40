"""`MRU`: evicts the chunk that was used last."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define

from lmkv.policies.queue import QueuePolicy
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class MRU(QueuePolicy):
    """Evicts the chunk that was used last. It suits prompts that repeat in the same order and do not all fit.

    Examples
    --------
    >>> policy = MRU()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'a', b'c']
    """

    def add(self, key: ChunkKey) -> None:
        self.put_back(key)

    def use(self, keys: Sequence[ChunkKey]) -> None:
        queue = self.queue
        for key in keys:
            if key in queue:
                queue.move_to_end(key, last=False)
