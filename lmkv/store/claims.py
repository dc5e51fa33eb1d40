"""`Claims`: the pins, prefetches or priorities that clients have requested, with a limit for their total size."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Generic, NamedTuple, TypeVar

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.entries import Entry
from lmkv.store.primary import PrimaryTier

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

STEP: Final = 1024
"""Approximate number of chunks that one call handles. Later calls handle the rest."""


@define(eq=False)
class Ranked(Generic[K]):
    """Keys with numbers. `first` returns the key with the smallest number, or of several such keys the oldest one."""

    _heap: list[tuple[float, int, K]] = field(init=False, factory=list)
    _places: dict[K, int] = field(init=False, factory=dict)
    _turn: int = field(init=False, default=0)

    def rank(self, key: K, number: float) -> None:
        self._turn += 1
        self._settle((number, self._turn, key), self._places.get(key, len(self._heap)))

    def drop(self, key: K) -> None:
        place = self._places.pop(key, None)
        last = self._heap.pop() if place is not None else None
        if last is not None and place is not None and place < len(self._heap):
            self._settle(last, place)

    def first(self) -> tuple[float, K] | None:
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None

    def _settle(self, item: tuple[float, int, K], place: int) -> None:
        """Put an item at a place in the heap, and move the item up or down until the heap is in order."""
        heap = self._heap
        if place == len(heap):
            heap.append(item)
        while place and item < heap[above := (place - 1) // 2]:
            self._put(heap[above], place)
            place = above
        while (below := 2 * place + 1) < len(heap):
            below += below + 1 < len(heap) and heap[below + 1] < heap[below]
            if item < heap[below]:
                break
            self._put(heap[below], place)
            place = below
        self._put(item, place)

    def _put(self, item: tuple[float, int, K], place: int) -> None:
        self._heap[place] = item
        self._places[item[2]] = place


@define(eq=False)
class Owners:
    """Sums the sizes of the pins, prefetches or priorities of each owner (client), and finds the largest sum.

    `total`: the sum for all owners. `owned`: the sum for each owner.
    """

    total: int = 0
    owned: Counter[bytes] = field(factory=Counter)
    _most: Ranked[bytes] = field(factory=Ranked)

    def count(self, owner: bytes, change: int) -> None:
        self.total += change
        self.owned[owner] += change
        if self.owned[owner]:
            self._most.rank(owner, -self.owned[owner])
        else:
            del self.owned[owner]
            self._most.drop(owner)

    def first(self) -> bytes:
        """Return the owner with the largest sum of sizes, or b"" if there is no owner."""
        found = self._most.first()
        return b"" if found is None else found[1]


class Claim(NamedTuple, Generic[V]):
    owner: bytes
    size: int
    end: float
    value: V


@define(eq=False, repr=False)
class Claims(Generic[K, V]):
    """Pins, prefetches or priorities (items) by key. Not thread-safe: the caller holds the store's lock.

    Each item has an owner (a client), a size in chunks, and an end (its expiry time, by the store's clock). If the sum
    of all sizes exceeds a limit, the owner with the largest sum loses its oldest item. So an owner with many items
    cannot displace the items of an owner with few. `total`: the sum of all sizes.

    Examples
    --------
    >>> claims = Claims()
    >>> for number, owner in enumerate([b"a", b"b", b"b"]):
    ...     claims.add(number, owner, size=1, end=10.0 * number, value="chunk")
    >>> [key for key, _ in claims.excess(2)]
    [1]
    >>> [key for key, _ in claims.due(now=15.0)]
    [0]
    """

    _claims: dict[K, Claim[V]] = field(init=False, factory=dict)
    _of: dict[bytes, OrderedDict[K, None]] = field(init=False, factory=dict)
    _sizes: Owners = field(init=False, factory=Owners)
    _ends: Ranked[K] = field(init=False, factory=Ranked)

    @property
    def total(self) -> int:
        return self._sizes.total

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, key: K) -> bool:
        return key in self._claims

    def add(self, key: K, owner: bytes, *, size: int, end: float, value: V) -> None:
        """Add an item, which replaces an earlier item with this key. An item with an infinite `end` never expires."""
        self.pop(key)
        self._claims[key] = Claim(owner, size, end, value)
        self._of.setdefault(owner, OrderedDict())[key] = None
        self._sizes.count(owner, size)
        if end < math.inf:
            self._ends.rank(key, end)

    def pop(self, key: K) -> V | None:
        """Remove the item with this key, and return its value or None."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return None
        del self._of[claim.owner][key]
        if not self._of[claim.owner]:
            del self._of[claim.owner]
        self._sizes.count(claim.owner, -claim.size)
        self._ends.drop(key)
        return claim.value

    def claim(self, key: K) -> Claim[V] | None:
        return self._claims.get(key)

    def items(self) -> list[tuple[K, V]]:
        return [(key, claim.value) for key, claim in self._claims.items()]

    def owned(self, owner: bytes) -> int:
        """Return the sum of the sizes of an owner's items."""
        return self._sizes.owned[owner]

    def due(self, now: float) -> Iterator[tuple[K, V]]:
        """Remove expired items, and yield `(key, value)` for each. One call removes about `STEP` chunks at most, and
        leaves the rest to later calls.
        """
        size = 0
        while size < STEP and (found := self._ends.first()) is not None and found[0] <= now:
            size += self._claims[found[1]].size
            yield found[1], self._ended(found[1])

    def excess(self, limit: int) -> Iterator[tuple[K, V]]:
        """Remove items until the sum of all sizes is at most `limit`. Yields `(key, value)` for each removed item."""
        while self.total > limit and self._claims:
            yield self.shed()

    def oldest_of(self, owner: bytes) -> K | None:
        """Return the key of an owner's oldest item, or None if the owner has no item."""
        return next(iter(self._of.get(owner, ())), None)

    def shed(self) -> tuple[K, V]:
        """Remove the oldest item of the owner with the largest sum, and return `(key, value)`. Fails if there is no
        item.
        """
        key = next(iter(self._of[self._sizes.first()]))
        return key, self._ended(key)

    def rebuilt(self) -> Claims[K, V]:
        """Return a copy with newly computed sums of sizes, because an exception may have left wrong sums."""
        made: Claims[K, V] = Claims()
        for key, claim in self._claims.items():
            made.add(key, claim.owner, size=claim.size, end=claim.end, value=claim.value)
        return made

    def clear(self) -> Iterator[tuple[K, V]]:
        """Remove all items, newest first, and yield `(key, value)` for each."""
        for key in list(reversed(self._claims)):
            yield key, self._ended(key)

    def _ended(self, key: K) -> V:
        value = self._claims[key].value
        self.pop(key)
        return value


_Pins = Claims[ChunkKey, Entry]


@define(eq=False, repr=False)
class Pins:
    """The pinned chunks. Each tenant may pin the fraction `share` of the slots in its quota, or of all slots without
    quotas.

    The caller holds the store's lock.
    """

    _primary: PrimaryTier
    _clock: Clock
    _share: float
    _of: dict[tuple[str, type], _Pins] = field(init=False, factory=dict)
    """The pins of each tenant, by the type of the keys: chunks, tails and states have separate slots."""
    _of_key: dict[ChunkKey, _Pins] = field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._of_key)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._of_key)

    def pin(self, keys: Sequence[ChunkKey], ttl: float, owner: bytes) -> int:
        """Pin chunks for `ttl` seconds, from `keys[0]` up to the first chunk that is not in host memory.

        Returns the number of pinned chunks. An earlier pin of a chunk is not shortened. If there are too many pins, the
        owner with the most pins loses its oldest pins. Within a prompt, the last chunk loses its pin first.
        """
        entries, end = self._primary.leading_ready(keys), self._clock() + ttl
        for kind, group in groupby(entries, lambda entry: type(entry.key)):
            self._pin(list(group), kind, end, owner)
        left = (number for number, entry in enumerate(entries) if entry.key not in self._of_key)
        return next(left, len(entries))

    def _pin(self, entries: Sequence[Entry], kind: type, end: float, owner: bytes) -> None:
        primary = self._primary
        tenant, part = primary.part_of(entries[0].key, entries[0].parent)
        pins = self._of.setdefault((tenant, kind), Claims())
        others = sum(other.total for (each, _), other in self._of.items() if each == tenant) - pins.total
        # A share of the slots, for tails and states a share of theirs as well.
        most = min(primary.slots_of(self._share * part, bytes) - others, primary.slots_of(self._share * part, kind))
        # A small memory has one slot for tails: a prefetch may have it, a pin may not.
        most = max(0, min(most, primary.slots_of(1.0, kind) - 1, pins.total + primary.slots_for_claims(kind)))
        for entry in reversed(entries[:most]):
            known = pins.claim(entry.key)
            if known is None:
                self.unpin(entry.key)
                primary.ref(entry)
                primary.prioritized[kind] += 1
                self._of_key[entry.key] = pins
            pins.add(entry.key, owner, size=1, end=max(end, known.end if known else end), value=entry)
        self._end(pins.excess(most))

    def unpin(self, key: ChunkKey) -> bool:
        """Remove the pin of a chunk. Returns whether the chunk was pinned."""
        pins = self._of_key.get(key)
        entry = pins.pop(key) if pins is not None else None
        self._end([(key, entry)] if entry is not None else ())
        return entry is not None

    def expire(self) -> None:
        """Remove expired pins."""
        now = self._clock()
        for pins in self._of.values():
            self._end(pins.due(now))

    def clear(self) -> None:
        for pins in self._of.values():
            self._end(pins.clear())

    def recount(self) -> list[Entry]:
        """Repair the records of pins after an exception in a change. Returns the entries of all pinned chunks."""
        self._of, self._of_key, entries = {group: pins.rebuilt() for group, pins in self._of.items()}, {}, []
        for pins in self._of.values():
            for key, entry in pins.items():
                if key in self._of_key:
                    pins.pop(key)
                else:
                    self._of_key[key] = pins
                    entries.append(entry)
        self._primary.prioritized = Counter(type(entry.key) for entry in entries)
        return entries

    def _end(self, ended: Iterable[tuple[ChunkKey, Entry]]) -> None:
        for key, entry in ended:
            del self._of_key[key]
            self._primary.prioritized[type(key)] -= 1
            self._primary.unref(entry)
