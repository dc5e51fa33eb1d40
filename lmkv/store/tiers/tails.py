"""Entries that are no whole chunks: how many slots they may have, and which bytes of a slot are theirs.

A tail, the chunk after a prompt's last whole one, fills only a part of its slot. States are as large as chunks, and
would take all slots from them. So a share of the slots is theirs at most, and lower tiers get just the filled part.
A key is a tail if `type(key) is TailKey`, which is asked of every chunk and twice as fast as isinstance.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from lmkv.chunks.hashing import StateKey, TailKey
from lmkv.chunks.layout import align_up
from lmkv.protocols import ChunkKey
from lmkv.store.tiers.entry import Entry

_TAILS_IN_SMALL_MEMORY = 32
"""Tails that host memory of 256 to 1,024 slots has room for; in a smaller one they have an eighth of the slots."""
_SLOTS_PER_TAIL = 32
"""Slots of a larger one for each tail: most of such a slot is unused, and conversations need them for whole chunks."""
_STATE_SHARE = 2 / 3
"""Share of the slots for states: twice as many as chunks, because a state needs all the chunks before it."""


@define(eq=False)
class Share:
    """The entries of one kind in host memory, least recently used first. Called under the store's lock.

    `limit`: how many slots they may have.
    """

    limit: int
    _entries: dict[ChunkKey, Entry] = field(init=False, factory=dict)
    _idle: dict[str, OrderedDict[ChunkKey, Entry]] = field(init=False, factory=dict)
    """The entries of each tenant that nobody refers to."""
    _tenants: dict[ChunkKey, str] = field(init=False, factory=dict)
    _counts: Counter[str] = field(init=False, factory=Counter)
    _parts: dict[str, float] = field(init=False, factory=dict)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether another entry must take the place of one of these."""
        return len(self._entries) >= self.limit

    def add(self, entry: Entry, tenant: str = "", part: float = 1.0) -> None:
        """`part`: the tenant's, of all slots."""
        self._entries[entry.key], self._tenants[entry.key] = entry, tenant
        self._counts[tenant] += 1
        self._parts[tenant] = part
        self._idle.setdefault(tenant, OrderedDict())
        if not entry.refs:
            self.release(entry.key)

    def discard(self, key: ChunkKey) -> None:
        self.hold(key)
        del self._entries[key]
        self._counts[self._tenants.pop(key)] -= 1

    def hold(self, key: ChunkKey) -> None:
        """Somebody refers to the entry."""
        self._idle[self._tenants[key]].pop(key, None)

    def release(self, key: ChunkKey) -> None:
        """Nobody does any more, which counts as a use."""
        self._idle[self._tenants[key]][key] = self._entries[key]

    def touch(self, key: ChunkKey) -> None:
        """Note a use of the entry, if it is of this kind."""
        if key in self._entries and key in (idle := self._idle[self._tenants[key]]):
            idle.move_to_end(key)

    def clear(self) -> None:
        self._entries, self._idle, self._tenants, self._counts = {}, {}, {}, Counter()

    def count_ready(self) -> int:
        return sum(entry.ready for entry in self._entries.values())

    def oldest_unused(self, tenant: str = "") -> Entry | None:
        """The least recently used entry that nobody refers to, of whoever exceeds its part by the most.

        `tenant`: who wants to add one.
        """
        over = {each: self._counts[each] - self._parts[each] * self.limit for each in self._idle}
        over[tenant] = over.get(tenant, 0.0) + 1
        for each in sorted(self._idle, key=over.__getitem__, reverse=True):
            if self._idle[each]:
                return next(iter(self._idle[each].values()))
        return None


def shares(num_slots: int) -> dict[type, Share]:
    """The shares of `num_slots` slots, by the type of the keys."""
    tails = max(num_slots // _SLOTS_PER_TAIL, min(num_slots // 8, _TAILS_IN_SMALL_MEMORY))
    return {TailKey: Share(max(1, tails)), StateKey: Share(max(1, int(num_slots * _STATE_SHARE)))}


@frozen
class Payloads:
    """Which bytes of a slot lower tiers get: a whole chunk, a whole state, or the pages of a tail.

    `spans(tokens)`: where the bytes of a tail of `tokens` tokens are in a slot. `sizes`: bytes of a chunk, and of each
    state entry; none where all of them fill their slots.
    """

    slot_bytes: int
    spans: Callable[[int], Sequence[slice]]
    sizes: Sequence[int] = ()

    def nbytes(self, key: ChunkKey) -> int:
        """Bytes of the chunk in a lower tier."""
        if type(key) is not TailKey:
            number = key.number if type(key) is StateKey else 0
            return align_up(self.sizes[number]) if number < len(self.sizes) else self.slot_bytes
        return sum(span.stop - span.start for span in self.spans(key.tokens))

    def gather(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """The payload in a slot: the slot's own memory, or a copy of a tail's parts."""
        if type(key) is not TailKey:
            return self._filled(key, slot)
        return memoryview(b"".join(slot[span] for span in self.spans(key.tokens)))

    def buffer(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """Memory to read a payload into, for `scatter`: the slot itself, or a buffer for a tail's parts."""
        return memoryview(bytearray(self.nbytes(key))) if type(key) is TailKey else self._filled(key, slot)

    def _filled(self, key: ChunkKey, slot: memoryview) -> memoryview:
        nbytes = self.nbytes(key)
        return slot if nbytes == len(slot) else slot[:nbytes]

    def scatter(self, key: ChunkKey, payload: memoryview, slot: memoryview) -> None:
        """Put a payload in its place in the slot."""
        if type(key) is TailKey:
            at = 0
            for span in self.spans(key.tokens):
                slot[span] = payload[at : at + span.stop - span.start]
                at += span.stop - span.start
