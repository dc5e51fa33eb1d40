"""Pins: references to chunks in host memory that a user asked for, with a time to live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.primary import PrimaryTier
from lmkv.store.wishes import Wishes

_Pins = Wishes[ChunkKey, Entry]


@define(eq=False, repr=False)
class Pins:
    """The pinned chunks, at most a `share` of each tenant's part of host memory. Called under the store's lock."""

    _primary: PrimaryTier
    _clock: Clock
    _share: float
    _of: dict[tuple[str, type], _Pins] = field(init=False, factory=dict)
    """The pins of each tenant, by the type of the keys: chunks, tails and states have slots of their own."""
    _of_key: dict[ChunkKey, _Pins] = field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._of_key)

    def pin(self, keys: Sequence[ChunkKey], ttl: float, owner: bytes) -> int:
        """Pin the leading READY chunks for `ttl` seconds; returns how many. No pin ends sooner for it.

        Where pins exceed their share, the oldest of the owner with the most end, of a chain those at its tail first.
        """
        entries, end = self._primary.leading_ready(keys), self._clock() + ttl
        for kind, group in groupby(entries, lambda entry: type(entry.key)):
            self._pin(list(group), kind, end, owner)
        left = (number for number, entry in enumerate(entries) if entry.key not in self._of_key)
        return next(left, len(entries))

    def _pin(self, entries: Sequence[Entry], kind: type, end: float, owner: bytes) -> None:
        primary = self._primary
        tenant, part = primary.part_of(entries[0].key, entries[0].parent)
        pins = self._of.setdefault((tenant, kind), Wishes())
        others = sum(other.total for (each, _), other in self._of.items() if each == tenant) - pins.total
        # A share of the slots, for tails and states a share of theirs as well.
        most = min(primary.slots_of(self._share * part, bytes) - others, primary.slots_of(self._share * part, kind))
        # A small memory has one slot for tails: a prefetch may have it, a pin not.
        most = max(0, min(most, primary.slots_of(1.0, kind) - 1, pins.total + primary.slots_for_wishes(kind)))
        for entry in reversed(entries[:most]):
            known = pins.wish(entry.key)
            if known is None:
                self.unpin(entry.key)
                primary.ref(entry)
                primary.wish(kind, 1)
                self._of_key[entry.key] = pins
            pins.add(entry.key, owner, size=1, end=max(end, known.end if known else end), value=entry)
        self._end(pins.excess(most))

    def unpin(self, key: ChunkKey) -> bool:
        """End a pin; whether there was one."""
        pins = self._of_key.get(key)
        entry = pins.pop(key) if pins is not None else None
        self._end([(key, entry)] if entry is not None else ())
        return entry is not None

    def expire(self) -> None:
        """End pins whose time is over."""
        now = self._clock()
        for pins in self._of.values():
            self._end(pins.due(now))

    def clear(self) -> None:
        for pins in self._of.values():
            self._end(pins.clear())

    def recount(self) -> list[Entry]:
        """After an exception: the entries of the pins that are left, to which nothing else of this refers."""
        self._of, self._of_key, entries = {group: pins.rebuilt() for group, pins in self._of.items()}, {}, []
        for pins in self._of.values():
            for key, entry in pins.items():
                if key in self._of_key:
                    pins.pop(key)
                else:
                    self._of_key[key] = pins
                    entries.append(entry)
        self._primary.wished = Counter(type(entry.key) for entry in entries)
        return entries

    def _end(self, ended: Iterable[tuple[ChunkKey, Entry]]) -> None:
        for key, entry in ended:
            del self._of_key[key]
            self._primary.wish(type(key), -1)
            self._primary.unref(entry)
