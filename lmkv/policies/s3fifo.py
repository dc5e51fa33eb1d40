"""`S3FIFO`: a small queue filters chunks that are used once; the rest is in a queue with second chances."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import SIZE, PolicyBase
from lmkv.policies.ghosts import Ghosts
from lmkv.protocols import ChunkKey

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
