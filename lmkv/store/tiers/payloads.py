"""What of a slot is a chunk's payload: all of it, or the pages of a tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from lmkv.chunks.hashing import TailKey
from lmkv.protocols import ChunkKey


@frozen
class Payloads:
    """`spans(tokens)`: where the bytes of a tail of so many tokens are in a slot; lower tiers get these only."""

    slot_bytes: int
    spans: Callable[[int], Sequence[slice]]

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the chunk in a lower tier."""
        if not isinstance(key, TailKey):
            return self.slot_bytes
        return sum(span.stop - span.start for span in self.spans(key.tokens))

    def gather(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """The payload in a slot: the slot's own memory, or a copy of a tail's parts."""
        if not isinstance(key, TailKey):
            return slot
        return memoryview(b"".join(slot[span] for span in self.spans(key.tokens)))

    def room(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """Memory to read a payload into, then to be given to `scatter`."""
        return memoryview(bytearray(self.nbytes(key))) if isinstance(key, TailKey) else slot

    def scatter(self, key: ChunkKey, payload: memoryview, slot: memoryview) -> None:
        """Put a payload in its place in the slot."""
        if isinstance(key, TailKey):
            at = 0
            for span in self.spans(key.tokens):
                slot[span] = payload[at : at + span.stop - span.start]
                at += span.stop - span.start
