"""Small stores for the tests, chunks whose bytes say whose they are, backends that wait or fail."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.wrapper import WrapperBackend
from lmkv.policies import make_policy
from lmkv.protocols import Backend, ChunkKey, Listed, Tier
from lmkv.store.leases import Lease
from lmkv.store.tiered import TieredStore

T = TypeVar("T")
SLOT = 4096
LIMIT = 20.0


def chain(name: str, count: int) -> list[ChunkKey]:
    """Keys of a chain, head first."""
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]


def payload(key: ChunkKey, version: int = 0) -> bytes:
    """A slot's bytes that no other key, and no other version of this one, has."""
    return (key + version.to_bytes(4, "little")) * (SLOT // 36) + bytes(SLOT % 36)


def memory(slots: int, name: str = "cpu") -> CPUPinnedBackend:
    backend = CPUPinnedBackend(slots * SLOT, SLOT, populate=False)
    backend.name = name
    return backend


def lower(backend: Backend, slots: int | None = None, *, policy: str = "LRU", **options: Any) -> Tier:
    """`slots`: the tier's capacity."""
    capacity = None if slots is None else slots * SLOT
    return Tier(backend, make_policy(policy), capacity_bytes=capacity, **options)


def small_store(slots: int, *tiers: Tier, policy: str = "LRU", **options: Any) -> TieredStore:
    return TieredStore(Tier(memory(slots), make_policy(policy)), tiers, **options)


def put(
    store: TieredStore, keys: Sequence[ChunkKey], version: int = 0, protect: Iterable[ChunkKey] = ()
) -> int:
    """Store chunks as an engine does; returns how many, from the first, are taken care of."""
    with store.reserve(keys, protect=tuple(protect) or keys) as reservation:
        for key, slot in reservation.slots.items():
            store.slab.view(slot)[:] = payload(key, version)
        reservation.commit()
        return reservation.accepted


def put_below(store: TieredStore, keys: Sequence[ChunkKey], version: int = 0) -> None:
    """Store chunks in every tier, one by one so that no copy down is refused; then drop them from memory."""
    for key in keys:
        assert put(store, [key], version, protect=keys) == 1
        assert store.drain(LIMIT)
    store.drop(keys)


def versions(store: TieredStore, lease: Lease) -> list[int]:
    """The versions of the leased chunks; fails on bytes that are not the key's."""
    found = []
    for key, slot in zip(lease.keys, lease.slots, strict=True):
        data = bytes(store.slab.view(slot))
        version = int.from_bytes(data[32:36], "little")
        assert data == payload(key, version), f"a slot of {key.hex()[:8]} holds other bytes"
        found.append(version)
    return found


def get(store: TieredStore, keys: Sequence[ChunkKey]) -> list[int]:
    """Promote and read as an engine does, in one piece; the versions of the leading chunks."""
    promotion = store.promote(keys)
    assert promotion.wait(LIMIT)
    try:
        with store.lease(promotion.keys) as lease:
            return versions(store, lease)
    finally:
        promotion.release()


def assert_settled(store: TieredStore) -> None:
    """Nothing is held, nothing is under way, and every slot is either free or an entry's."""
    assert store.drain(LIMIT)
    stats = store.stats()
    assert (stats.leased, stats.writing, stats.loading, stats.pinned) == (0, 0, 0, 0)
    assert store.slab.free_slots + stats.primary.chunks == store.slab.num_slots


class Gated(WrapperBackend):
    """Holds calls of `shut` verbs until `open` is called; `waiting(verb)` waits until one is held."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._shut: set[str] = set()
        self._held: list[str] = []
        self.calls: list[tuple[str, str]] = []
        """Verb and thread of every call."""

    def shut(self, *verbs: str) -> None:
        with self._changed:
            self._shut.update(verbs)

    def open(self) -> None:
        with self._changed:
            self._shut.clear()
            self._changed.notify_all()

    def waiting(self, verb: str, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._held.count(verb) >= count, LIMIT), f"no {verb} came"

    def around(self, verb: str, call: Callable[[], T]) -> T:
        self.calls.append((verb, threading.current_thread().name))
        with self._changed:
            self._held.append(verb)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: verb not in self._shut, LIMIT)
            self._held.remove(verb)
        return call()


class Failing(WrapperBackend):
    """Raises from the verbs in `broken`, whatever they are."""

    def __init__(self, inner: Backend, *broken: str, error: Exception | None = None) -> None:
        super().__init__(inner)
        self.broken = set(broken)
        self.error = error or RuntimeError("broken on purpose")

    def around(self, verb: str, call: Callable[[], T]) -> T:
        if verb in self.broken:
            raise self.error
        return call()


class Persistent(WrapperBackend):
    """Memory that outlives its store and can say what it holds. `shared`: other processes write to it."""

    def __init__(self, inner: CPUPinnedBackend, *, shared: bool = False) -> None:
        super().__init__(inner)
        self.shared = shared

    def list_keys(self) -> Iterator[list[Listed]]:
        keys = list(self.inner._slots)  # type: ignore[attr-defined]
        for start in range(0, len(keys), 2):
            yield [Listed(key, SLOT) for key in keys[start : start + 2]]

    def close(self) -> None:
        """It outlives its store."""
