"""`SIEVE`: a hand passes over the queue and evicts chunks that were not used since it came by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class SIEVE(PolicyBase):
    """SIEVE (Zhang et al., NSDI 2024): chunks keep their places, and a use spares one from the hand's next pass.

    Examples
    --------
    >>> policy = SIEVE()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    uses: dict[ChunkKey, int] = field(init=False, factory=dict)
    """A known key has -1 until the request that inserted it has touched it, then 0, or 1 if the hand is to spare it."""
    ahead: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """Holds the keys from the hand to the newest one."""
    behind: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """Holds the keys from the oldest one to the hand."""

    def add(self, key: ChunkKey) -> None:
        self.uses[key] = -1
        self.ahead[key] = None

    def use(self, keys: Sequence[ChunkKey]) -> None:
        uses = self.uses
        for key in keys:
            if key in uses and uses[key] < 1:
                uses[key] += 1

    def pop(self) -> ChunkKey | None:
        uses = self.uses
        while self.ahead or self.behind:
            if not self.ahead:
                self.ahead, self.behind = self.behind, self.ahead
            key, _ = self.ahead.popitem(last=False)
            if uses[key] < 1:
                return key
            uses[key] = 0
            self.behind[key] = None
        return None

    def put_back(self, key: ChunkKey) -> None:
        self.ahead[key] = None
        self.ahead.move_to_end(key, last=False)

    def forget(self, key: ChunkKey) -> None:
        del self.uses[key]

    def drop(self, key: ChunkKey) -> None:
        if key in self.ahead:
            del self.ahead[key]
        else:
            self.behind.pop(key, None)
