"""The chunks of one prompt, and the blocks that hold or want their KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmkv.chunks.hashing import KeyChain
from lmkv.memory.copier import ChunkCopy, Run, block_ids
from lmkv.protocols import ChunkKey


class Request:
    """`keys`: of the whole chunks that `blocks` covers. `pages`: blocks per chunk."""

    def __init__(self, chain: KeyChain, blocks: object, pages: int) -> None:
        self._chain = chain
        self._blocks = block_ids(blocks)
        self._pages = pages
        self.keys = chain.keys[: len(self._blocks) // pages]

    def parent(self, first: int) -> ChunkKey:
        return self._chain.parent(first)

    def tokens(self, first: int, end: int) -> bytes:
        """The token ids of chunks [first, end)."""
        return self._chain.token_bytes(first, min(end, len(self.keys)))

    def copies_to_slots(self, slots: Mapping[ChunkKey, int], first: int, end: int) -> list[ChunkCopy]:
        """Copies that fill these slots. The chunks are some of [first, end)."""
        keys = enumerate(self.keys[first:end], first)
        return [self._copy(slots[key], index) for index, key in keys if key in slots]

    def copies_to_blocks(self, slots: Sequence[int], first: int) -> list[ChunkCopy]:
        """Copies from the slots of chunks `first`, `first` + 1, ..."""
        return [self._copy(slot, index) for index, slot in enumerate(slots, first)]

    def _copy(self, slot: int, index: int) -> ChunkCopy:
        start = index * self._pages
        return ChunkCopy(slot, (Run(0, self._blocks[start : start + self._pages]),))
