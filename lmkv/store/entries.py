"""`Entry`, the record of a chunk in host memory: its slot, its state and its references. Also helpers for entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from attrs import define, field, frozen

from lmkv.chunks.hashing import StateKey, TailKey
from lmkv.chunks.layout import align_up
from lmkv.protocols import ChunkKey

Chain = Sequence[ChunkKey]
"""Keys of consecutive chunks, first to last."""
_TAILS_IN_SMALL_MEMORY = 32
"""Largest number of tails (chunks with fewer tokens) in 256 to 1,024 slots. Of fewer slots, tails get an eighth."""
_SLOTS_PER_TAIL = 32
"""Slots per tail in larger host memory. Tails are few, because most of a tail's slot is unused."""
_STATE_SHARE = 2 / 3
"""Largest share of the slots for states."""
_TOKEN_BYTES = 4


class State(Enum):
    """The state of an entry: reserved for a caller that fills the slot, being loaded from a lower tier, or complete."""

    WRITING = "writing"
    LOADING = "loading"
    READY = "ready"


@define(eq=False)
class Entry:
    """A chunk in host memory. The store changes an entry only while the store's lock is held.

    `refs`: the number of leases, reservations, reads, writes, promotions and pins that use the slot. `removed`: whether
    the entry has left the index; the slot is freed when `refs` is 0. `flushing`: whether the entry was evicted and is
    still being written to lower tiers. `in_policy`: whether the eviction policy knows the entry. `origin`: the chunk's
    `KeyChain.origin`; empty if requests find the chunk only by its key. `prefetched`: whether a prefetch has read the
    chunk, and no request has leased the chunk since.
    """

    key: ChunkKey = field(repr=bytes.hex)
    slot: int
    state: State
    parent: ChunkKey = field(default=b"", repr=bytes.hex)
    tokens: bytes = field(default=b"", repr=False)
    origin: bytes = field(default=b"", repr=False)
    refs: int = 1
    removed: bool = False
    flushing: bool = False
    in_policy: bool = False
    prefetched: bool = False

    @property
    def ready(self) -> bool:
        return self.state is State.READY and not self.removed


@define(eq=False)
class LimitedEntries:
    """The tails in host memory, or the recurrent states in host memory, with a limit for their number.

    A tail has the tokens after a prompt's last whole chunk. `limit`: the largest number of slots for these entries. The
    caller holds the store's lock.
    """

    limit: int
    _entries: dict[ChunkKey, Entry] = field(init=False, factory=dict)
    _idle: dict[str, OrderedDict[ChunkKey, Entry]] = field(init=False, factory=dict)
    """For each tenant, the entries without references."""
    _tenants: dict[ChunkKey, str] = field(init=False, factory=dict)
    _counts: Counter[str] = field(init=False, factory=Counter)
    _parts: dict[str, float] = field(init=False, factory=dict)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether the limit is reached. A new entry then replaces an entry of the same kind."""
        return len(self._entries) >= self.limit

    def add(self, entry: Entry, tenant: str = "", part: float = 1.0) -> None:
        """Add an entry of a tenant. `part`: the fraction of `limit` that the tenant may use, 0 to 1."""
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
        """Mark the entry as referenced."""
        self._idle[self._tenants[key]].pop(key, None)

    def release(self, key: ChunkKey) -> None:
        """Mark the entry as unreferenced, which counts as a use."""
        self._idle[self._tenants[key]][key] = self._entries[key]

    def touch(self, key: ChunkKey) -> None:
        """Note a use of the entry with this key, if there is one."""
        if key in self._entries and key in (idle := self._idle[self._tenants[key]]):
            idle.move_to_end(key)

    def clear(self) -> None:
        self._entries, self._idle, self._tenants, self._counts = {}, {}, {}, Counter()

    def count_ready(self) -> int:
        return sum(entry.ready for entry in self._entries.values())

    def oldest_unused(self, tenant: str = "") -> Entry | None:
        """Return the entry that a new entry of `tenant` replaces, or None if all entries have references.

        The tenant that exceeds its part of `limit` the most loses its least recently used entry without references.
        """
        over = {each: self._counts[each] - self._parts[each] * self.limit for each in self._idle}
        over[tenant] = over.get(tenant, 0.0) + 1
        for each in sorted(self._idle, key=over.__getitem__, reverse=True):
            if self._idle[each]:
                return next(iter(self._idle[each].values()))
        return None


def shares(num_slots: int) -> dict[type, LimitedEntries]:
    """Return, by key type, `LimitedEntries` for the tails and the recurrent states in `num_slots` slots of host memory.

    A tail has the tokens after a prompt's last whole chunk.
    """
    tails = max(num_slots // _SLOTS_PER_TAIL, min(num_slots // 8, _TAILS_IN_SMALL_MEMORY))
    return {TailKey: LimitedEntries(max(1, tails)), StateKey: LimitedEntries(max(1, int(num_slots * _STATE_SHARE)))}


@frozen
class Payloads:
    """Finds the payload in a slot: the bytes of a chunk, state or tail that lower tiers store.

    A tail (the tokens after a prompt's last whole chunk) fills only some byte ranges of its slot. `spans(tokens)`: a
    function that returns these ranges for a tail of `tokens` tokens. `sizes`: the bytes of a chunk, then of each state
    entry. An empty `sizes` means that chunks and states fill their slots.
    """

    slot_bytes: int
    spans: Callable[[int], Sequence[slice]]
    sizes: Sequence[int] = ()

    def nbytes(self, key: ChunkKey) -> int:
        """Return the size of the chunk's payload in bytes."""
        if type(key) is not TailKey:
            number = key.number if type(key) is StateKey else 0
            return align_up(self.sizes[number]) if number < len(self.sizes) else self.slot_bytes
        return sum(span.stop - span.start for span in self.spans(key.tokens))

    def gather(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """Return the payload that `slot` holds: a view of the slot or, for an incomplete chunk, a joined copy of the
        byte ranges that the chunk fills.
        """
        if type(key) is not TailKey:
            return self._filled(key, slot)
        return memoryview(b"".join(slot[span] for span in self.spans(key.tokens)))

    def buffer(self, key: ChunkKey, slot: memoryview) -> memoryview:
        """Return the memory into which the caller reads a payload: the slot itself, or for an incomplete chunk a new
        buffer, which `scatter` then copies to the slot.
        """
        return memoryview(bytearray(self.nbytes(key))) if type(key) is TailKey else self._filled(key, slot)

    def _filled(self, key: ChunkKey, slot: memoryview) -> memoryview:
        nbytes = self.nbytes(key)
        return slot if nbytes == len(slot) else slot[:nbytes]

    def scatter(self, key: ChunkKey, payload: memoryview, slot: memoryview) -> None:
        """Copy the payload of an incomplete chunk to the byte ranges that the chunk fills in `slot`.

        Does nothing for other chunks: their payloads were read into the slot itself.
        """
        if type(key) is TailKey:
            at = 0
            for span in self.spans(key.tokens):
                slot[span] = payload[at : at + span.stop - span.start]
                at += span.stop - span.start


@define(eq=False)
class PrefixIndex:
    """Finds chunks by their tokens (four bytes per token id) and their origin. Not thread-safe.

    The origin is a digest of everything before the chunk's tokens; see `KeyChain.origin`.
    """

    _chunks: dict[bytes, list[tuple[bytes, ChunkKey]]] = field(init=False, factory=dict, repr=False)
    """For each origin, the tokens and key of each chunk, sorted by tokens. So the longest common prefix is that of a
    neighbour.
    """

    def add(self, origin: bytes, tokens: bytes, key: ChunkKey) -> None:
        insort(self._chunks.setdefault(origin, []), (tokens, key))

    def discard(self, origin: bytes, tokens: bytes, key: ChunkKey) -> None:
        chunks = self._chunks[origin]
        del chunks[bisect_left(chunks, (tokens, key))]
        if not chunks:
            del self._chunks[origin]

    def longest(self, origin: bytes, tokens: bytes) -> tuple[ChunkKey, int]:
        """Return `(key, count)` for the chunk with the longest common prefix with `tokens`.

        `origin`: the origin that the chunk must have. `count`: the number of tokens in this prefix. Returns
        `(b"", 0)` if no chunk has a common prefix.
        """
        best, most = b"", 0
        chunks = self._chunks.get(origin, [])
        at = bisect_left(chunks, (tokens, b""))
        for found, key in chunks[max(0, at - 1) : at + 1]:
            count = _common(found, tokens)
            if count > most:
                best, most = key, count
        return best, most

    def shorter(self, origin: bytes, tokens: bytes) -> Iterator[ChunkKey]:
        """Yield the keys of chunks with tokens that are a shorter prefix of `tokens`, longest first. May miss some.

        `origin`: the origin that the chunks must have.
        """
        chunks = self._chunks.get(origin, [])
        for found, key in reversed(chunks[: bisect_left(chunks, (tokens, b""))]):
            if not tokens.startswith(found):
                return
            yield key


def _common(left: bytes, right: bytes) -> int:
    """Return the number of tokens in the common prefix of two token sequences. Each token has four bytes."""
    low, high = 0, min(len(left), len(right)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[: middle * _TOKEN_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low
