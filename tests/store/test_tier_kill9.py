"""A store over a disk tier, killed by SIGKILL again and again, and opened again each time."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.outcomes import ReadStatus
from tests.forked import Child
from tests.kit import LIMIT
from tests.store.shared_store import CHUNK, KEYS, live, open_store, payload, put

COST = CHUNK + 4096
CAPACITY = 40 * COST


def files(folder: Path, pattern: str) -> int:
    """Bytes of the files of that name."""
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def check_bytes(folder: Path) -> int:
    """Every file has the bytes of its key; returns how many there are."""
    disk = LocalDiskBackend(folder, bytes([1]) * 32)
    into = memoryview(bytearray(CHUNK))
    hits = 0
    for key in KEYS:
        read = disk.read(key, into)
        assert read.status in (ReadStatus.HIT, ReadStatus.MISS), read.error
        if read.status is ReadStatus.HIT:
            assert bytes(into) == payload(key)
            hits += 1
    return hits


def check_store(folder: Path) -> None:
    """A new store has the whole capacity, no key is stuck, and no temporary file is left."""
    store = open_store(str(folder), 1, CAPACITY)
    for key in KEYS[:50]:
        put(store, [key])
        assert store.drain(LIMIT)
        assert key in store._tiers[0].index
    assert store.stats().tiers[1].chunks == 40
    store.close()
    assert files(folder, "*.kv1") == CAPACITY
    assert files(folder, "*.tmp") == 0


@pytest.mark.parametrize(
    "cycles", [25, pytest.param(1000, marks=[pytest.mark.nightly("kills"), pytest.mark.timeout(1800)])]
)
def test_killed_again_and_again(tmp_path: Path, cycles: int) -> None:
    """No wrong byte, never more than the capacity, no key that cannot be stored again."""
    moments = random.Random(cycles)
    found = 0
    for cycle in range(cycles):
        child = Child(live, str(tmp_path), 1, cycle, CAPACITY)
        assert child.heard() == "stored"
        time.sleep(moments.uniform(0.0, 0.1))
        assert child.kill() == -signal.SIGKILL, "it must not have ended by itself"
        assert files(tmp_path, "*.kv1") <= CAPACITY
        found += check_bytes(tmp_path)
        if cycle % 25 == 24:
            check_store(tmp_path)
    assert found > cycles, "it has to have something to lose"
