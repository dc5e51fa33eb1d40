"""Policies that keep chunks used once apart from those used again: `SLRU`, `ARC`, `S3FIFO` and `SIEVE`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import SIZE, Ghosts, PolicyBase
from lmkv.protocols import ChunkKey

_PROTECTED_SHARE = 0.8


@define(eq=False, repr=False)
class TwoQueues(PolicyBase):
    """Base of policies with a queue for chunks that were used once, and one for those that were used again."""

    once: OrderedDict[ChunkKey, bool] = field(init=False, factory=OrderedDict)
    """Chunks that were used once. The value says whether the request that inserted the key has touched it yet."""
    again: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    once_bytes: int = field(init=False, default=0)
    again_bytes: int = field(init=False, default=0)

    def add(self, key: ChunkKey) -> None:
        self.once[key] = False
        self.once_bytes += self.nodes[key][SIZE]

    def add_again(self, key: ChunkKey) -> None:
        """Put a key to the end of the queue of those that were used again."""
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
    """Segmented LRU: a chunk that is used again is protected, in up to 80 % of the tier.

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
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), in bytes.

    Chunks that were used once and chunks that were used again have a queue each. A chunk that comes back after its
    eviction shifts the share of the tier between them towards the queue that it came from.

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
    """Bytes that `once` should have."""
    from_once: bool = field(init=False, default=True)
    """Whether the last evicted key came from `once`."""

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

    def remove(self, key: ChunkKey, size: int) -> None:
        self.from_once = key in self.once
        super().remove(key, size)


_SMALL_SHARE = 0.1
_MAX_USES = 3


@define(eq=False, repr=False)
class S3FIFO(PolicyBase):
    """Two queues, each first in, first out (Yang et al., SOSP 2023), in bytes.

    A new chunk goes to the small queue, a tenth of the tier, and moves on to the main one if it was used meanwhile,
    or if it comes back after its eviction. In the main queue each use, up to three, is another round.

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

    uses: dict[ChunkKey, int] = field(init=False, factory=dict)
    """How often each known key was used; -1 until the request that inserted it has touched it."""
    small: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    main: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    small_bytes: int = field(init=False, default=0)
    ghosts: Ghosts = field(init=False, factory=Ghosts)
    from_small: bool = field(init=False, default=True)

    def add(self, key: ChunkKey) -> None:
        self.uses[key] = -1
        if key in self.ghosts:
            self.ghosts.discard(key)
            self.main[key] = None
        else:
            self.small[key] = None
            self.small_bytes += self.nodes[key][SIZE]

    def use(self, keys: Sequence[ChunkKey]) -> None:
        uses = self.uses
        for key in keys:
            if key in uses and uses[key] < _MAX_USES:
                uses[key] += 1

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

    def forget(self, key: ChunkKey) -> None:
        del self.uses[key]

    def remove(self, key: ChunkKey, size: int) -> None:
        self.from_small = key in self.small
        super().remove(key, size)

    def drop(self, key: ChunkKey) -> None:
        if key in self.small:
            del self.small[key]
            self.small_bytes -= self.nodes[key][SIZE]
        else:
            self.main.pop(key, None)


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
