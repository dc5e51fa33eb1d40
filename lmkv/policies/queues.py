"""Policies that keep chunks in queues: `FIFO`, `LRU`, `MRU`, `LFU`, `SLRU`, `ARC`, `S3FIFO` and `SIEVE`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from attrs import define, field

from lmkv.policies.base import SIZE, Ghosts, PolicyBase
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class QueuePolicy(PolicyBase):
    """Base class of policies with one queue. New keys are appended, and the key at the front is evicted first. A
    subclass overrides `use`.

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
        """Do nothing, because a use does not change the order of the queue."""

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
    """First in, first out: evicts the chunk that was inserted first, even if it is used often.

    Raises
    ------
    UsageError
        A key is inserted twice or without a size, or an unknown key is held or released.

    Notes
    -----
    A held key at the front is skipped. It is the next key to evict once it is released.

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
    """Least recently used: evicts the chunk with the oldest last use.

    Raises
    ------
    UsageError
        A key is inserted twice or without a size, or an unknown key is held or released.

    Notes
    -----
    `touch(keys)` makes the prompt's first key, `keys[0]`, the most recently used key. So a prompt's last key is
    evicted before its other keys. `release` counts as a use.

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
    """Most recently used: evicts the chunk with the latest use. Good if prompts repeat in a fixed order and the tier is
    too small for all of them.

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
    """Least frequently used: evicts the chunk with the fewest uses. Older uses count less.

    At each use, a chunk's rank becomes its number of uses plus the rank of the last evicted chunk ("dynamic ageing").
    So chunks that were used often, but long ago, are evicted at some time.

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
    """Number of uses of each known key."""
    buckets: dict[int, OrderedDict[ChunkKey, None]] = field(init=False, factory=dict)
    """The keys of each rank (uses plus age), least recently used first."""
    age: int = field(init=False, default=0)
    """The rank of the last evicted key. No key has a lower rank."""

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
        # The next rank in use is close, unless an often used key has left a gap.
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


# -- used once, and used again ----------------------------------------------------------------------------


_PROTECTED_SHARE = 0.8


@define(eq=False, repr=False)
class TwoQueues(PolicyBase):
    """Base class of policies with two queues: one for chunks that were used once, one for chunks that were used
    again.
    """

    once: OrderedDict[ChunkKey, bool] = field(init=False, factory=OrderedDict)
    """The keys of chunks that were used once. The value of a key: whether the request that inserted the key has touched
    it.
    """
    again: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    once_bytes: int = field(init=False, default=0)
    again_bytes: int = field(init=False, default=0)

    def add(self, key: ChunkKey) -> None:
        self.once[key] = False
        self.once_bytes += self.nodes[key][SIZE]

    def add_again(self, key: ChunkKey) -> None:
        """Append a key to the queue of chunks that were used again."""
        self.again[key] = None
        self.again_bytes += self.nodes[key][SIZE]

    def use(self, keys: Sequence[ChunkKey]) -> None:
        once, again = self.once, self.again
        for key in reversed(keys):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if once[key]:
                    del once[key]
                    self.once_bytes -= self.nodes[key][SIZE]
                    self.add_again(key)
                else:
                    once[key] = True
                    once.move_to_end(key)

    def pop_once(self) -> ChunkKey:
        key, _ = self.once.popitem(last=False)
        self.once_bytes -= self.nodes[key][SIZE]
        return key

    def pop_again(self) -> ChunkKey:
        key, _ = self.again.popitem(last=False)
        self.again_bytes -= self.nodes[key][SIZE]
        return key

    def drop(self, key: ChunkKey) -> None:
        size = self.nodes[key][SIZE]
        if self.once.pop(key, None) is not None:
            self.once_bytes -= size
        elif key in self.again:
            del self.again[key]
            self.again_bytes -= size


@define(eq=False, repr=False)
class SLRU(TwoQueues):
    """Segmented LRU: first evicts chunks that were used once. Chunks that were used again may fill 80 % of the tier.

    Examples
    --------
    >>> policy = SLRU()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    def use(self, keys: Sequence[ChunkKey]) -> None:
        super().use(keys)
        limit = _PROTECTED_SHARE * self.total_bytes
        while self.again_bytes > limit:
            key = self.pop_again()
            self.add(key)
            self.once[key] = True

    def pop(self) -> ChunkKey | None:
        return self.pop_once() if self.once else self.pop_again() if self.again else None

    def put_back(self, key: ChunkKey) -> None:
        self.add(key)
        self.once[key] = True
        self.once.move_to_end(key, last=False)


@define(eq=False, repr=False)
class ARC(TwoQueues):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), with sizes in bytes.

    There is one queue for chunks that were used once, and another queue for chunks that were used again. When an
    evicted chunk is stored again, the queue from which it was evicted gets a larger share of the tier.

    Examples
    --------
    >>> policy = ARC()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    ghosts_once: Ghosts = field(init=False, factory=Ghosts)
    ghosts_again: Ghosts = field(init=False, factory=Ghosts)
    target: float = field(init=False, default=0.0)
    """Number of bytes that the chunks in `once` should have together."""
    from_once: bool = field(init=False, default=True)
    """Whether the latest key that `pop` has returned came from the queue `once`."""

    def add(self, key: ChunkKey) -> None:
        size = self.nodes[key][SIZE]
        once, again = self.ghosts_once, self.ghosts_again
        if key in once:
            self.target = min(self.total_bytes, self.target + size * max(1.0, again.total_bytes / once.total_bytes))
            once.discard(key)
        elif key in again:
            self.target = max(0.0, self.target - size * max(1.0, once.total_bytes / again.total_bytes))
            again.discard(key)
        else:
            super().add(key)
            return
        self.add_again(key)

    def pop(self) -> ChunkKey | None:
        if self.once and (self.once_bytes > self.target or not self.again):
            self.from_once = True
            return self.pop_once()
        if not self.again:
            return None
        self.from_once = False
        return self.pop_again()

    def put_back(self, key: ChunkKey) -> None:
        # A key that waited for its children was used at least as often as they were.
        self.add_again(key)
        self.again.move_to_end(key, last=False)

    def rejoin(self, key: ChunkKey) -> None:
        self.add_again(key)

    def evicted(self, key: ChunkKey, size: int) -> None:
        (self.ghosts_once if self.from_once else self.ghosts_again).add(key, size)
        self.ghosts_once.trim(max(0, self.total_bytes - self.once_bytes))
        self.ghosts_again.trim(
            max(0, 2 * self.total_bytes - self.once_bytes - self.again_bytes - self.ghosts_once.total_bytes)
        )


_SMALL_SHARE = 0.1


@define(eq=False, repr=False)
class CountsUses(PolicyBase):
    """Base class of policies that count the uses of each chunk. A count never exceeds `most`."""

    most: ClassVar[int] = 1
    uses: dict[ChunkKey, int] = field(init=False, factory=dict)
    """Number of uses of each known key; -1 until the request that inserted the key has touched it."""

    def add(self, key: ChunkKey) -> None:
        self.uses[key] = -1

    def use(self, keys: Sequence[ChunkKey]) -> None:
        uses, most = self.uses, self.most
        for key in keys:
            if key in uses and uses[key] < most:
                uses[key] += 1

    def forget(self, key: ChunkKey) -> None:
        del self.uses[key]


@define(eq=False, repr=False)
class S3FIFO(CountsUses):
    """S3-FIFO (Yang et al., SOSP 2023), with sizes in bytes: two queues, each first in, first out.

    A new chunk joins the small queue, which is a tenth of the tier. A chunk that is used in the small queue, or comes
    back after its eviction from this queue, joins the main queue. A chunk at the front of the main queue moves back to
    the end once for each use, at most three times.

    Examples
    --------
    >>> policy = S3FIFO()
    >>> for name in (b"a", b"b", b"c"):
    ...     policy.insert(name, size=10)
    ...     policy.touch([name])
    >>> policy.touch([b"a"])
    >>> policy.evict(15)
    [b'b', b'c']
    """

    most: ClassVar[int] = 3
    small: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    main: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    small_bytes: int = field(init=False, default=0)
    ghosts: Ghosts = field(init=False, factory=Ghosts)
    from_small: bool = field(init=False, default=True)

    def add(self, key: ChunkKey) -> None:
        super().add(key)
        if key in self.ghosts:
            self.ghosts.discard(key)
            self.main[key] = None
        else:
            self.small[key] = None
            self.small_bytes += self.nodes[key][SIZE]

    def pop(self) -> ChunkKey | None:
        small, main, uses, nodes = self.small, self.main, self.uses, self.nodes
        limit = _SMALL_SHARE * self.total_bytes
        while small and (self.small_bytes > limit or not main):
            key, _ = small.popitem(last=False)
            self.small_bytes -= nodes[key][SIZE]
            if uses[key] < 1:
                self.from_small = True
                return key
            uses[key] = 0
            main[key] = None
        while main:
            key, _ = main.popitem(last=False)
            if uses[key] < 1:
                self.from_small = False
                return key
            uses[key] -= 1
            main[key] = None
        return None

    def put_back(self, key: ChunkKey) -> None:
        self.main[key] = None
        self.main.move_to_end(key, last=False)

    def evicted(self, key: ChunkKey, size: int) -> None:
        self.forget(key)
        if self.from_small:
            self.ghosts.add(key, size)
            self.ghosts.trim(self.total_bytes)

    def drop(self, key: ChunkKey) -> None:
        if key in self.small:
            del self.small[key]
            self.small_bytes -= self.nodes[key][SIZE]
        else:
            self.main.pop(key, None)


@define(eq=False, repr=False)
class SIEVE(CountsUses):
    """SIEVE (Zhang et al., NSDI 2024): a pointer, the hand, moves through a queue and selects the chunk to evict.

    The hand moves from old to new chunks, and stops at a chunk that was not used since the last pass. Chunks never
    change their places in the queue. The first `touch` after an insertion is not a use.

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

    ahead: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """The keys from the hand (the place where the search for a chunk to evict begins) to the newest key."""
    behind: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    """The keys from the oldest key to the hand (the place where the search for a chunk to evict begins)."""

    def add(self, key: ChunkKey) -> None:
        super().add(key)
        self.ahead[key] = None

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

    def drop(self, key: ChunkKey) -> None:
        if key in self.ahead:
            del self.ahead[key]
        else:
            self.behind.pop(key, None)
