"""`SLRU`: chunks that were used again are evicted after those that were not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field

from lmkv.policies.base import SIZE, PolicyBase
from lmkv.protocols import ChunkKey

_PROTECTED_SHARE = 0.8


@define(eq=False, repr=False)
class SLRU(PolicyBase):
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

    probation: OrderedDict[ChunkKey, bool] = field(init=False, factory=OrderedDict)
    """Chunks that are not protected. The value says whether the request that inserted the key has touched it yet."""
    protected: OrderedDict[ChunkKey, None] = field(init=False, factory=OrderedDict)
    protected_bytes: int = field(init=False, default=0)

    def add(self, key: ChunkKey) -> None:
        self.probation[key] = False

    def use(self, keys: Sequence[ChunkKey]) -> None:
        probation, protected, nodes = self.probation, self.protected, self.nodes
        for key in reversed(keys):
            if key in protected:
                protected.move_to_end(key)
            elif key in probation:
                if probation[key]:
                    del probation[key]
                    protected[key] = None
                    self.protected_bytes += nodes[key][SIZE]
                else:
                    probation[key] = True
                    probation.move_to_end(key)
        limit = _PROTECTED_SHARE * self.total_bytes
        while self.protected_bytes > limit:
            key, _ = protected.popitem(last=False)
            self.protected_bytes -= nodes[key][SIZE]
            probation[key] = True

    def pop(self) -> ChunkKey | None:
        if self.probation:
            return self.probation.popitem(last=False)[0]
        if not self.protected:
            return None
        key, _ = self.protected.popitem(last=False)
        self.protected_bytes -= self.nodes[key][SIZE]
        return key

    def put_back(self, key: ChunkKey) -> None:
        self.probation[key] = True
        self.probation.move_to_end(key, last=False)

    def drop(self, key: ChunkKey) -> None:
        if self.probation.pop(key, None) is None and key in self.protected:
            del self.protected[key]
            self.protected_bytes -= self.nodes[key][SIZE]
