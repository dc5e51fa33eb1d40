"""Pins: references to chunks in host memory that a user asked for, with a time to live."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.primary import PrimaryTier


@define(eq=False, repr=False)
class Pins:
    """The pinned chunks, and when each pin ends. Called under the store's lock."""

    _primary: PrimaryTier
    _clock: Clock
    _pins: dict[ChunkKey, tuple[Entry, float]] = field(init=False, factory=dict)
    _next_end: float = field(init=False, default=math.inf)

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Pin the leading READY chunks for `ttl` seconds; returns how many. Pinning again moves the end."""
        end = self._clock() + ttl
        entries = self._primary.leading_ready(keys)
        for entry in entries:
            if self._pins.pop(entry.key, None) is None:
                self._primary.ref(entry)
            self._pins[entry.key] = entry, end
        self._next_end = min(self._next_end, end)
        return len(entries)

    def unpin(self, key: ChunkKey) -> bool:
        """End a pin; whether there was one."""
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._primary.unref(pin[0])
        return pin is not None

    def expire(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        if now < self._next_end:
            return
        # Tail first: the head of a chain is evicted last.
        for key in reversed([key for key, (_, end) in self._pins.items() if end <= now]):
            self.unpin(key)
        self._next_end = min((end for _, end in self._pins.values()), default=math.inf)

    def clear(self) -> None:
        for key in list(reversed(self._pins)):
            self.unpin(key)
