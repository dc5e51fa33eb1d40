"""Policies that keep keys in queues by one measure: `FIFO`, `LRU`, `MRU` and `LFU`, and their base `QueuePolicy`."""

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


@define(eq=False, repr=False)
class FIFO(QueuePolicy):
    """Evicts the chunk that was inserted first, however often it was used.

    Raises
    ------
    UsageError
        A key is inserted twice or with no size, or held or released without being known.

    Notes
    -----
    A key keeps its place while it is held. When its turn comes meanwhile, it is the first to be evicted
    once it is released.

    Examples
    --------
    >>> policy = FIFO()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'a', b'b']
    """


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
