"""The chunks of one prompt, and the blocks that hold or want their KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmkv.chunks.hashing import KeyChain
from lmkv.engine.validation import not_negative
from lmkv.memory.copier import ChunkCopy, Run, block_ids
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Reservation
from lmkv.store.tiered import TieredStore


class Request:
    """The `keys` of the whole chunks that `blocks` covers, each of `chunk_size` tokens and `pages` blocks."""

    def __init__(self, chain: KeyChain, blocks: object, chunk_size: int, pages: int) -> None:
        self._chain = chain
        self._blocks = block_ids(blocks)
        self._chunk_size = chunk_size
        self._pages = pages
        self.keys = chain.keys[: len(self._blocks) // pages]

    def chunks_in(self, tokens: object) -> int:
        """How many of the chunks lie in the first `tokens` tokens. Raises UsageError for anything but a count."""
        return min(not_negative(tokens, "skip_tokens") // self._chunk_size, len(self.keys))

    def reserve(self, store: TieredStore, first: int, end: int) -> Reservation:
        """Reserve slots for chunks [first, end)."""
        keys = self.keys[first:end]
        ids = self._chain.token_bytes(first, first + len(keys))
        store.hints.prompt(keys, len(self.keys) * self._chunk_size)
        return store.reserve(keys, parent=self._chain.parent(first), tokens=ids, protect=self.keys)

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
