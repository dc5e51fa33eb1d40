"""A tier: a backend with a capacity, an eviction policy and an admission filter; and the index of one."""

from __future__ import annotations

from typing import Literal

from attrs import define, field, validators

from lmkv.protocols import Admission, Backend, ChunkKey, Policy, SizesChunks


@define(eq=False)
class Tier:
    """How a store uses a backend. Plain data: build it, hand it to a `TieredStore`.

    `capacity_bytes`: None means as much as the backend has (the primary tier: its slab). `write`: "through"
    copies chunks down as they are stored, "back" when they leave the tier above. `admission`: None admits all.
    """

    backend: Backend
    policy: Policy
    capacity_bytes: int | None = None
    admission: Admission | None = None
    write: Literal["through", "back"] = field(
        default="through", validator=validators.in_(("through", "back"))
    )

    @property
    def name(self) -> str:
        return self.backend.name


class TierIndex:
    """What a secondary tier holds and how much of its capacity that takes, without asking the backend.

    No lock inside: the store calls it under its own. `used` never exceeds the capacity, counting chunks
    that are being written from the moment they are begun.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.used = 0
        self._sizes: dict[ChunkKey, int] = {}
        self._writing: set[ChunkKey] = set()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def keys(self) -> list[ChunkKey]:
        return list(self._sizes)

    def cost(self, payload_bytes: int) -> int:
        """Bytes of capacity that a chunk of `payload_bytes` takes."""
        backend = self.tier.backend
        return backend.stored_bytes(payload_bytes) if isinstance(backend, SizesChunks) else payload_bytes

    def wants(self, key: ChunkKey) -> bool:
        """Whether the key should be written: not here, not on its way, and admitted."""
        if key in self._sizes or key in self._writing:
            return False
        return self.tier.admission is None or self.tier.admission.admit(key)

    def begin_write(self, key: ChunkKey, nbytes: int) -> list[ChunkKey] | None:
        """Take room for a write and return the victims to delete first; None when there is no room."""
        if key in self._sizes or key in self._writing:
            return None
        victims = self._make_room(nbytes)
        if victims is not None:
            self.used += nbytes
            self._writing.add(key)
        return victims

    def end_write(self, key: ChunkKey, nbytes: int, stored: bool) -> None:
        self._writing.discard(key)
        self.used -= nbytes
        if stored:
            self.add(key, nbytes)

    def _make_room(self, nbytes: int) -> list[ChunkKey] | None:
        capacity = self.tier.capacity_bytes
        if capacity is None or self.used + nbytes <= capacity:
            return []
        if nbytes > capacity:
            return None
        victims = self.tier.policy.evict(self.used + nbytes - capacity)
        for victim in victims or ():
            self.used -= self._sizes.pop(victim)
        return victims

    def adopt(self, key: ChunkKey, nbytes: int) -> list[ChunkKey]:
        """Index a chunk that was found, not written; returns what has to go for it (itself, if need be)."""
        if key in self._sizes or key in self._writing:
            return []
        victims = self._make_room(nbytes)
        if victims is None:
            return [key]
        self.add(key, nbytes)
        return victims

    def add(self, key: ChunkKey, nbytes: int) -> None:
        if key not in self._sizes:
            self._sizes[key] = nbytes
            self.used += nbytes
            self.tier.policy.insert(key, nbytes)

    def discard(self, key: ChunkKey) -> None:
        nbytes = self._sizes.pop(key, None)
        if nbytes is not None:
            self.used -= nbytes
            self.tier.policy.discard(key)

    def clear(self) -> list[ChunkKey]:
        """Forget everything that is indexed; returns it, to be deleted. Writes under way stay counted."""
        keys = list(self._sizes)
        for key in keys:
            self.discard(key)
        return keys
