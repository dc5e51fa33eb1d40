"""Who is told when a chunk comes into a tier, or goes."""

from __future__ import annotations

from typing import Protocol

from lmkv.protocols import ChunkKey


class StoreObserver(Protocol):
    """Is told which chunks a tier serves from now on, and which no longer: evicted, deleted or lost.

    Called under the store's lock, on whichever thread changes an index. It takes note, in constant time: it
    neither waits nor calls back nor raises. A lower tier's keys of more than 32 bytes are other namespaces'.
    """

    def stored(self, tier: str, key: ChunkKey) -> None: ...

    def removed(self, tier: str, key: ChunkKey) -> None: ...
