"""Pins: holds of the primary tier's chunks that a user asked for, with an end."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiers.primary import Entry, PrimaryTier


class Pins:
    """No lock inside: the store calls it under its own."""

    def __init__(self, primary: PrimaryTier, clock: Clock) -> None:
        self._primary = primary
        self._clock = clock
        self._pins: dict[ChunkKey, tuple[Entry, float]] = {}
        self._next_end = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Hold the leading READY chunks; returns how many. Pinning again moves the end."""
        end = self._clock() + ttl
        entries = self._primary.leading_ready(keys)
        for entry in entries:
            if self._pins.pop(entry.key, None) is None:
                self._primary.ref(entry)
            self._pins[entry.key] = entry, end
        self._next_end = min(self._next_end, end)
        return len(entries)

    def unpin(self, key: ChunkKey) -> bool:
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._primary.unref(pin[0])
        return pin is not None

    def expire(self) -> bool:
        """End the pins whose time is over; whether there were any."""
        now = self._clock()
        if now < self._next_end:
            return False
        over = [key for key, (_, end) in self._pins.items() if end <= now]
        for key in reversed(over):
            self.unpin(key)
        self._next_end = min((end for _, end in self._pins.values()), default=float("inf"))
        return bool(over)

    def clear(self) -> None:
        for key in list(reversed(self._pins)):
            self.unpin(key)
