"""Observers of a store, which are notified when a chunk enters or leaves a tier."""

from __future__ import annotations

from typing import Protocol

from lmkv.protocols import ChunkKey


class StoreObserver(Protocol):
    """Notified of chunks that a tier serves from now on, and no longer: evicted, deleted or lost.

    Called under the store's lock, on any thread that changes an index. A method takes constant time, and must not
    wait, call the store or raise. Keys of more than 32 bytes in a lower tier belong to other namespaces.
    """

    def stored(self, tier: str, key: ChunkKey) -> None: ...

    def removed(self, tier: str, key: ChunkKey) -> None: ...
