"""Least recently used: the order of one OrderedDict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

from attrs import define, field

from lmkv.errors import UsageError
from lmkv.protocols import ChunkKey


@define(eq=False)
class LRU:
    """Evicts the chunk whose last use is longest ago; see `lmkv.protocols.Policy` for the verbs.

    A chain's tail goes before its head, whatever their order of insertion, as long as chains are touched:
    `touch` leaves the head most recent. A held key is out of the order, so it costs `evict` nothing;
    let go of, it counts as just used. Everything is O(1) a key, `evict` O(victims + protected).
    """

    _order: OrderedDict[ChunkKey, int] = field(init=False, factory=OrderedDict)
    _held: dict[ChunkKey, int] = field(init=False, factory=dict)
    _evictable_bytes: int = field(init=False, default=0)

    def __len__(self) -> int:
        return len(self._order) + len(self._held)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._order or key in self._held

    def insert(self, key: ChunkKey, size: int, parent: ChunkKey = b"") -> None:
        """Add an evictable key of `size` bytes as the most recent. `parent` does not matter here."""
        if key in self._order or key in self._held:
            raise UsageError(f"chunk {key.hex()} is already in the policy")
        if size < 1:
            raise UsageError(f"chunk {key.hex()} has the size {size}")
        self._order[key] = size
        self._evictable_bytes += size

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def discard(self, key: ChunkKey) -> None:
        if key in self._order:
            self._evictable_bytes -= self._order.pop(key)
        else:
            self._held.pop(key, None)

    def set_evictable(self, key: ChunkKey, evictable: bool) -> None:
        """Hold a known key back, or let go of it as the most recent; no news changes nothing."""
        if key not in self:
            raise UsageError(f"chunk {key.hex()} is not in the policy")
        if evictable and key in self._held:
            size = self._order[key] = self._held.pop(key)
            self._evictable_bytes += size
        elif not evictable and key in self._order:
            size = self._held[key] = self._order.pop(key)
            self._evictable_bytes -= size

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        victims = self._victims(nbytes, protect)
        for key in victims or ():
            self._evictable_bytes -= self._order.pop(key)
        return victims

    def clear(self) -> None:
        self._order.clear()
        self._held.clear()
        self._evictable_bytes = 0

    def _victims(self, nbytes: int, protect: Set[ChunkKey]) -> list[ChunkKey] | None:
        victims: list[ChunkKey] = []
        if nbytes <= 0:
            return victims
        if nbytes > self._evictable_bytes:
            return None
        for key, size in self._order.items():
            if key not in protect:
                victims.append(key)
                nbytes -= size
                if nbytes <= 0:
                    return victims
        return None
