"""`WeightedAge`: the queue of chunks that were used again ages more slowly than that of chunks that were not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.policies.ghosts import Ghosts
from lmkv.protocols import ChunkKey

_GHOST_SHARE = 4
"""Evicted bytes to remember, as a multiple of the tier's. With fewer, short-lived chunks displace the others."""


@define(eq=False, repr=False)
class WeightedAge(PolicyBase):
    """Evicts the older one of two candidates: the oldest chunk that was used once, and the oldest that was used again.

    The age of the latter is divided by `weight`: 1 is LRU, and the larger it is, the sooner chunks go that were used
    once. A chunk that comes back after its eviction counts as used again.

    Parameters
    ----------
    weight : float
        1 or more.

    Examples
    --------
    >>> policy = WeightedAge(weight=4)
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    weight: float = field(default=2.0)
    once: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    """When each key was used last. It is negative until the request that inserted the key has touched it."""
    again: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    now: int = field(init=False, default=1)
    """The clock counts the chunks that were used, repetitions included."""
    ghosts: Ghosts = field(init=False, factory=Ghosts)

    def add(self, key: ChunkKey) -> None:
        if key in self.ghosts.keys:
            self.ghosts.discard(key)
            self.again[key] = self.now
        else:
            self.once[key] = -self.now

    def use(self, keys: Sequence[ChunkKey]) -> None:
        once, again, now = self.once, self.again, self.now
        for key in reversed(keys):
            if key in again:
                again[key] = now
                again.move_to_end(key)
            elif key in once:
                if once[key] < 0:
                    once[key] = now
                    once.move_to_end(key)
                else:
                    del once[key]
                    again[key] = now
        self.now = now + len(keys)

    def pop(self) -> ChunkKey | None:
        once, again = self.once, self.again
        if once and again:
            age = self.now - abs(once[next(iter(once))])
            queue = once if age * self.weight >= self.now - again[next(iter(again))] else again
        else:
            queue = once or again
        return queue.popitem(last=False)[0] if queue else None

    def put_back(self, key: ChunkKey) -> None:
        # It waited for chunks behind it, so it was used whenever they were.
        again = self.again
        again[key] = again[next(iter(again))] if again else self.now
        again.move_to_end(key, last=False)

    def rejoin(self, key: ChunkKey) -> None:
        self.again[key] = self.now

    def evicted(self, key: ChunkKey, size: int) -> None:
        self.ghosts.add(key, size)
        self.ghosts.trim(_GHOST_SHARE * self.total_bytes)

    def drop(self, key: ChunkKey) -> None:
        if self.once.pop(key, None) is None:
            del self.again[key]
