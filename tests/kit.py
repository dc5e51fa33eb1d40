"""Small stores for the tests, chunks whose bytes tell their key, backends that wait or fail.

Nothing waits for a time: clocks stand still until a test moves them, and tests wait for states that other threads or
processes bring about, for as long as only a hang takes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from attrs import define, field

import lmkv.store.tiered
from lmkv.backends.adapters import WrapperBackend
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.policies import make_policy
from lmkv.protocols import Backend, ChunkKey, Listed, Tier
from lmkv.store.catalog import TierScanner
from lmkv.store.leases import Lease
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests import tables

T = TypeVar("T")
chain, every, raised = tables.chain, tables.every, tables.raised
SLOT = 4096
LIMIT = 60.0
"""Seconds that only a hang takes, on however busy a machine."""

NEVER = 1e6
"""More seconds than any test takes."""

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where temporary folders are in memory, if anywhere."""


def eventually(
    true: Callable[[], bool], what: str = "", limit: float = LIMIT, seen: Callable[[], object] | None = None
) -> None:
    """Wait for a state that another thread or process brings about. Raises TimeoutError, with what is `seen`."""
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit:.0f} s: {what}" + (f"; seen: {seen()}" if seen else ""))
        time.sleep(0.002)


def possible(*command: object) -> None:
    """Run a command that only root may, on some machines; skips elsewhere."""
    if os.geteuid():
        pytest.skip("only root may do this")
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"not possible here: {' '.join(map(str, command))}: {done.stderr.strip()}")


@contextmanager
def mounted_tmpfs(folder: Path, *options: str) -> Iterator[None]:
    """A medium of its own, mounted for real; skips where nobody may mount."""
    possible("mount", "-t", "tmpfs", *(word for option in options for word in ("-o", option)), "lmkv-test", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def payload(key: ChunkKey, version: int = 0) -> bytes:
    """Bytes of a slot that differ for each key and each version of its chunk."""
    return (key + version.to_bytes(4, "little")) * (SLOT // 36) + bytes(SLOT % 36)


def memory(slots: int, name: str = "cpu") -> CPUPinnedBackend:
    backend = CPUPinnedBackend(slots * SLOT, SLOT, populate=False)
    backend.name = name
    return backend


def lower(backend: Backend, slots: int | None = None, *, policy: str = "LRU", **options: Any) -> Tier:
    """A lower tier. `slots`: its capacity."""
    capacity = None if slots is None else slots * SLOT
    return Tier(backend, make_policy(policy), capacity_bytes=capacity, **options)


def small_store(slots: int, *tiers: Tier, policy: str = "LRU", **options: Any) -> TieredStore:
    """A store whose clock stands still unless `options` bring another: no call is slow, and no breaker closes."""
    with listing_every(NEVER):
        host = Tier(memory(slots), make_policy(policy))
        return TieredStore(host, tiers, **{"clock": ManualClock(), **options})


@define
class Residents:
    """An observer that notes which chunks each tier has, and fails when it is told of one twice."""

    of: dict[str, set[ChunkKey]] = field(factory=dict)

    def stored(self, tier: str, key: ChunkKey) -> None:
        assert key not in self.of.setdefault(tier, set()), f"stored in {tier!r} twice"
        self.of[tier].add(key)

    def removed(self, tier: str, key: ChunkKey) -> None:
        self.of[tier].remove(key)


@contextmanager
def listing_every(seconds: float) -> Iterator[None]:
    """Have stores that are made in here list a tier again after so long, if it is shared or was not listed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmkv.store.tiered, "TierScanner", partial(TierScanner, interval=seconds))
        yield


def put(store: TieredStore, keys: Sequence[ChunkKey], version: int = 0, protect: Iterable[ChunkKey] = ()) -> int:
    """Store chunks as an engine does; returns how many, from the first, were accepted."""
    with store.reserve(keys, protect=tuple(protect) or keys) as reservation:
        for key, slot in reservation.slots.items():
            store.slab.view(slot)[:] = payload(key, version)
        reservation.commit()
        return reservation.accepted


def put_through(store: TieredStore, keys: Sequence[ChunkKey], version: int = 0) -> None:
    """Store chunks, and wait until every tier has what it takes of them."""
    put(store, keys, version)
    assert store.drain(LIMIT)


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
        assert data == payload(key, version), f"a slot of {key.hex()[:8]} has other bytes"
        found.append(version)
    return found


def get(store: TieredStore, keys: Sequence[ChunkKey]) -> list[int]:
    """Promote and read as an engine does, all at once; the versions of the leading chunks."""
    promotion = store.promote(keys)
    assert promotion.wait(LIMIT)
    try:
        with store.lease(promotion.keys) as lease:
            return versions(store, lease)
    finally:
        promotion.release()


def assert_idle(store: TieredStore) -> None:
    """Assert that nothing is referenced or under way, and that every slot is either free or an entry's."""
    assert store.drain(LIMIT)
    stats = store.stats()
    assert (stats.leased, stats.writing, stats.loading, stats.pinned) == (0, 0, 0, 0)
    assert store.slab.free_slots + stats.primary.chunks == store.slab.num_slots


class Gated(WrapperBackend):
    """Stops calls of `shut` verbs until `open` is called; `waiting(verb)` waits until one is stopped."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._shut: set[str] = set()
        self._stopped: list[str] = []
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
            assert self._changed.wait_for(lambda: self._stopped.count(verb) >= count, LIMIT), f"no {verb} came"

    def around(self, verb: str, call: Callable[[], T]) -> T:
        self.calls.append((verb, threading.current_thread().name))
        with self._changed:
            self._stopped.append(verb)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: verb not in self._shut, LIMIT)
            self._stopped.remove(verb)
        return call()


class Failing(WrapperBackend):
    """Raises from the verbs in `failing`, whatever they are."""

    def __init__(self, inner: Backend, *failing: str, error: BaseException | None = None) -> None:
        super().__init__(inner)
        self.failing = set(failing)
        self.error = error or RuntimeError("fails on purpose")

    def around(self, verb: str, call: Callable[[], T]) -> T:
        if verb in self.failing:
            raise self.error
        return call()


class Persistent(WrapperBackend):
    """Memory that outlives its store and can be listed. `shared`: other processes write to it."""

    def __init__(self, inner: CPUPinnedBackend, *, shared: bool = False) -> None:
        super().__init__(inner)
        self.shared = shared

    def list_keys(self) -> Iterator[list[Listed]]:
        slots: dict[ChunkKey, tuple[int, int]] = self.inner._slots  # type: ignore[attr-defined]
        found = [Listed(key, nbytes) for key, (_, nbytes) in slots.items()]
        for start in range(0, len(found), 2):
            yield found[start : start + 2]

    def close(self) -> None:
        """Do nothing, because it outlives its store."""


def median_ratio(times: Mapping[str, Sequence[float]], case: str, of: str) -> float:
    """Median over the rounds of the time of `case` divided by that of `of` in the same round."""
    return statistics.median(one / other for one, other in zip(times[case], times[of], strict=True))
