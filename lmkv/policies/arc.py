"""`ARC`: balances recency and frequency by the evicted chunks that come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import SIZE, PolicyBase
from lmkv.policies.ghosts import Ghosts
from lmkv.protocols import ChunkKey


@define(eq=False, repr=False)
class ARC(PolicyBase):
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

    once: OrderedDict[ChunkKey, bool] = field(init=False, factory=OrderedDict)
    """Chunks that were used once. The value says whether the request that inserted the key has touched it yet."""
    again: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    once_bytes: int = field(init=False, default=0)
    again_bytes: int = field(init=False, default=0)
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
            self.once[key] = False
            self.once_bytes += size
            return
        self.again[key] = None
        self.again_bytes += size

    def use(self, keys: Sequence[ChunkKey]) -> None:
        once, again = self.once, self.again
        for key in reversed(keys):
            if key in again:
                again.move_to_end(key)
            elif key in once:
                if once[key]:
                    del once[key]
                    size = self.nodes[key][SIZE]
                    self.once_bytes -= size
                    self.again_bytes += size
                    again[key] = None
                else:
                    once[key] = True
                    once.move_to_end(key)

    def pop(self) -> ChunkKey | None:
        if self.once and (self.once_bytes > self.target or not self.again):
            key, _ = self.once.popitem(last=False)
            self.once_bytes -= self.nodes[key][SIZE]
            self.from_once = True
            return key
        if not self.again:
            return None
        key, _ = self.again.popitem(last=False)
        self.again_bytes -= self.nodes[key][SIZE]
        self.from_once = False
        return key

    def put_back(self, key: ChunkKey) -> None:
        # A key that waited for its children was used at least as often as they were.
        self.again[key] = None
        self.again.move_to_end(key, last=False)
        self.again_bytes += self.nodes[key][SIZE]

    def rejoin(self, key: ChunkKey) -> None:
        self.again[key] = None
        self.again_bytes += self.nodes[key][SIZE]

    def evicted(self, key: ChunkKey, size: int) -> None:
        (self.ghosts_once if self.from_once else self.ghosts_again).add(key, size)
        self.ghosts_once.trim(max(0, self.total_bytes - self.once_bytes))
        self.ghosts_again.trim(
            max(0, 2 * self.total_bytes - self.once_bytes - self.again_bytes - self.ghosts_once.total_bytes)
        )

    def remove(self, key: ChunkKey, size: int) -> None:
        self.from_once = key in self.once
        super().remove(key, size)

    def drop(self, key: ChunkKey) -> None:
        size = self.nodes[key][SIZE]
        if self.once.pop(key, None) is not None:
            self.once_bytes -= size
        elif key in self.again:
            del self.again[key]
            self.again_bytes -= size
