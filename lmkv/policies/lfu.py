"""`LFU`: evicts the chunk that was used the fewest times, with ageing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import PolicyBase
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class LFU(PolicyBase):
    """Least frequently used, with dynamic ageing: a chunk ranks by its uses plus the rank that was evicted last.

    So chunks that were used often long ago make way for new ones in the end.

    Examples
    --------
    >>> policy = LFU()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    ranks: dict[ChunkKey, int] = field(init=False, factory=dict)
    uses: dict[ChunkKey, int] = field(init=False, factory=dict)
    """How often each known key was used."""
    buckets: dict[int, OrderedDict[ChunkKey, None]] = field(init=False, factory=dict)
    """The keys of each rank, least recently used first."""
    age: int = field(init=False, default=0)
    """The rank that was evicted last. No key has a lower one."""

    def add(self, key: ChunkKey) -> None:
        self.uses[key] = 0
        self._place(key, self.age + 1)

    def use(self, keys: Sequence[ChunkKey]) -> None:
        uses, ranks, age, buckets = self.uses, self.ranks, self.age, self.buckets
        for key in reversed(keys):
            if key in uses:
                uses[key] += 1
                rank = ranks.get(key)
                if rank is not None:
                    bucket = buckets[rank]
                    del bucket[key]
                    if not bucket:
                        del buckets[rank]
                    self._place(key, age + uses[key])

    def _place(self, key: ChunkKey, rank: int) -> None:
        self.ranks[key] = rank
        bucket = self.buckets.get(rank)
        if bucket is None:
            bucket = self.buckets[rank] = OrderedDict()
        bucket[key] = None

    def pop(self) -> ChunkKey | None:
        if not self.buckets:
            return None
        # The next rank in use is close, unless a key that was used very often has left a gap.
        rank = self.age
        buckets = self.buckets
        while rank not in buckets:
            rank += 1
            if rank > self.age + 64:
                rank = min(buckets)
        bucket = buckets[rank]
        key, _ = bucket.popitem(last=False)
        if not bucket:
            del buckets[rank]
        del self.ranks[key]
        self.age = rank
        return key

    def put_back(self, key: ChunkKey) -> None:
        self._place(key, self.age)
        self.buckets[self.age].move_to_end(key, last=False)

    def rejoin(self, key: ChunkKey) -> None:
        self._place(key, self.age + self.uses[key])

    def forget(self, key: ChunkKey) -> None:
        del self.uses[key]

    def drop(self, key: ChunkKey) -> None:
        rank = self.ranks.pop(key)
        del self.buckets[rank][key]
        if not self.buckets[rank]:
            del self.buckets[rank]
