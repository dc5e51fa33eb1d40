"""Tails, the chunks after a prompt's last whole chunk: which are in host memory, and where their bytes are.

A tail fills only a part of its slot. So a share of the slots is theirs at most, and lower tiers get just the
filled part. A key is a tail if `type(key) is TailKey`, which is asked of every chunk and twice as fast as isinstance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from lmkv.chunks.hashing import TailKey
from lmkv.protocols import ChunkKey
from lmkv.store.tiers.entry import Entry

_TAIL_SHARE = 8
"""One slot in so many may be a tail's: most of such a slot is not used."""


@define(eq=False)
class Tails:
    """The tails in host memory, least recently used first. Called under the store's lock."""

    num_slots: int
    _entries: OrderedDict[ChunkKey, Entry] = field(init=False, factory=OrderedDict)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    @property
    def full(self) -> bool:
        """Whether another tail may only take the place of one of these."""
        return len(self._entries) >= max(1, self.num_slots // _TAIL_SHARE)

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry

    def discard(self, key: ChunkKey) -> None:
        del self._entries[key]

    def touch(self, key: ChunkKey) -> None:
        """Note a use of the chunk, if it is a tail."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def oldest_unused(self) -> Entry | None:
        return next((entry for entry in self._entries.values() if not entry.refs), None)


@frozen
class Payloads:
    """Which bytes of a slot lower tiers get: all of a whole chunk's, a tail's pages only.

    `spans(tokens)`: where the bytes of a tail of so many tokens are in a slot.
    """

    slot_bytes: int
    spans: Callable[[int], Sequence[slice]]

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the chunk in a lower tier."""
        if type(key) is not TailKey:
            return self.slot_bytes
        return sum(span.stop - span.start for span in self.spans(key.tokens))

    def gather(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """The payload in a slot: the slot's own memory, or a copy of a tail's parts."""
        if type(key) is not TailKey:
            return slot
        return memoryview(b"".join(slot[span] for span in self.spans(key.tokens)))

    def buffer(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """Memory to read a payload into, for `scatter`: the slot itself, or a buffer for a tail's parts."""
        return memoryview(bytearray(self.nbytes(key))) if type(key) is TailKey else slot

    def scatter(self, key: ChunkKey, payload: memoryview, slot: memoryview) -> None:
        """Put a payload in its place in the slot."""
        if type(key) is TailKey:
            at = 0
            for span in self.spans(key.tokens):
                slot[span] = payload[at : at + span.stop - span.start]
                at += span.stop - span.start
