"""`LateWrites`: writes that got no answer. Their store may carry them out at any time, even after a clear."""

from __future__ import annotations

from lmkv.protocols import ChunkKey


class LateWrites:
    """Keys under which bytes from before a clear may still appear. Called under the store's lock.

    A write that ends without an answer may lie in a buffer on its way to the store. Without a clear it does no harm:
    its bytes are those of its key. After a clear the same key stands for new bytes, so a value that appears under it is
    not trusted until this process has stored the key again.
    """

    def __init__(self) -> None:
        self._unanswered: set[ChunkKey] = set()
        self._suspect: set[ChunkKey] = set()

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a value under this key may be from before a clear."""
        return key in self._suspect

    def unanswered(self, key: ChunkKey, *, cleared: bool) -> None:
        """Note a write that ended without an answer. `cleared`: everything was cleared since it began."""
        (self._suspect if cleared else self._unanswered).add(key)

    def stored(self, key: ChunkKey) -> None:
        """Note that the store took this process's value, and said that it had no other one."""
        self._unanswered.discard(key)
        self._suspect.discard(key)

    def clear(self) -> None:
        """Note that everything was cleared."""
        self._suspect |= self._unanswered
        self._unanswered.clear()
