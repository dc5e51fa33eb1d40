"""`Ghosts`: the keys of chunks that were evicted, in a bounded number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from attrs import define, field

from lmkv.protocols import ChunkKey

_MAX_KEYS: Final = 1 << 19
"""Most keys to remember. They take about 80 MB."""


@define(eq=False)
class Ghosts:
    """Keys and sizes of evicted chunks, the oldest eviction first. `total_bytes`: the sum of the sizes."""

    keys: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    total_bytes: int = field(init=False, default=0)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.keys

    def add(self, key: ChunkKey, size: int) -> None:
        self.keys[key] = size
        self.total_bytes += size

    def discard(self, key: ChunkKey) -> None:
        self.total_bytes -= self.keys.pop(key, 0)

    def trim(self, limit: float) -> None:
        """Forget the oldest keys until at most `limit` bytes and half a million keys are left."""
        while self.total_bytes > limit or len(self.keys) > _MAX_KEYS:
            self.total_bytes -= self.keys.popitem(last=False)[1]
