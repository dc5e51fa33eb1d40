"""Writers and stores that die by SIGKILL at random moments, and processes that share a folder."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.medium import NAME as MARK
from lmkv.protocols import Chunk, WriteStatus
from lmkv.testing.backend_suite import listed, read_back, statuses
from tests.backends.disk.disk_writer import NAMESPACE, PAYLOADS, churn, stop_halfway, write_until_killed
from tests.forked import Child, barrier
from tests.kit import LIMIT
from tests.store.shared_store import CHUNK, KEYS, live, open_store, payload, put


@pytest.fixture(params=["off", "auto"])
def direct(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def working(work: Callable[..., None], folder: Path, *args: Any) -> Child:
    """A child, from the moment on that it says it is ready."""
    child = Child(work, str(folder), *args)
    assert child.heard() == "ready"
    return child


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def check_store(folder: Path) -> int:
    """Reopen as a new process would: everything listed is exact and right, nothing else is there."""
    backend = LocalDiskBackend(folder, NAMESPACE)
    found = listed(backend)
    assert temporaries(folder) == []
    for key, nbytes in found.items():
        payload = memoryview(PAYLOADS[key])
        assert nbytes == backend.stored_bytes(len(payload))
        assert read_back(backend, Chunk(key, payload)) == payload
    on_disk = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != MARK]
    assert sorted(on_disk) == sorted(found.values())
    return len(found)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cycles", [24, pytest.param(1000, marks=pytest.mark.nightly("kills"))])
def test_killed_at_any_moment(tmp_path: Path, direct: str, cycles: int) -> None:
    """In turn by itself, in the middle of a write, and by another process at any time."""
    chooser = random.Random(cycles)
    unfinished, sizes = 0, set()
    for seed in range(0, cycles, 2):
        child = working(write_until_killed, tmp_path, direct, seed, chooser.randint(1, 60))
        assert child.ended() == -signal.SIGKILL
        unfinished += len(temporaries(tmp_path))
        sizes.add(check_store(tmp_path))
        child = working(write_until_killed, tmp_path, direct, seed + 1)
        time.sleep(chooser.uniform(0.0, 0.03))
        assert child.kill() == -signal.SIGKILL
        sizes.add(check_store(tmp_path))
    # Otherwise the kills came too early or too late to prove anything.
    assert unfinished == cycles // 2
    assert len(sizes) > 3
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    chunks = [Chunk(key, memoryview(payload)) for key, payload in PAYLOADS.items()]
    assert set(statuses(backend, chunks)) <= {WriteStatus.STORED, WriteStatus.PRESENT}
    assert check_store(tmp_path) == len(chunks)


def test_a_sweep_spares_the_living(tmp_path: Path, direct: str) -> None:
    """One writer after the other is killed in the middle of a write, beside one that takes its time."""
    with Child(stop_halfway, str(tmp_path), direct) as living:
        temporary = living.heard()
        for seed in range(4):
            dead = working(write_until_killed, tmp_path, direct, seed, 10 * seed + 1)
            assert dead.ended() == -signal.SIGKILL
            assert len(temporaries(tmp_path)) == 2
            list(LocalDiskBackend(tmp_path, NAMESPACE).list_keys())
            assert [path.name for path in temporaries(tmp_path)] == [temporary]
        assert living.kill() == -signal.SIGKILL
    check_store(tmp_path)


def test_processes_that_share_a_folder(tmp_path: Path, direct: str) -> None:
    """Three of them write, read, list and delete the same keys; each checks every byte it is given."""
    start = barrier(3)
    children = [Child(churn, str(tmp_path), direct, seed, 400, start) for seed in range(3)]
    assert [child.ended() for child in children] == [0, 0, 0]
    check_store(tmp_path)


# -- a store over a disk tier, opened again each time ----------------------------------------------------------

COST = CHUNK + 4096
CAPACITY = 40 * COST


def nbytes_of(folder: Path, pattern: str) -> int:
    """Bytes of the files of that name."""
    return sum(path.stat().st_size for path in folder.rglob(pattern))


def right_chunks(folder: Path) -> int:
    """Every file has the bytes of its key; returns how many there are."""
    disk = LocalDiskBackend(folder, bytes([1]) * 32)
    return sum(read_back(disk, Chunk(key, memoryview(payload(key)))) == payload(key) for key in KEYS)


def check_new_store(folder: Path) -> None:
    """A new store has the whole capacity, no key is stuck, and no temporary file is left."""
    store = open_store(str(folder), 1, CAPACITY)
    for key in KEYS[:50]:
        put(store, [key])
        assert store.drain(LIMIT)
        assert key in store.snapshot().tiers[0].sizes
    assert store.stats().tiers[1].chunks == 40
    store.close()
    assert nbytes_of(folder, "*.kv1") == CAPACITY
    assert nbytes_of(folder, "*.tmp") == 0


@pytest.mark.parametrize(
    "cycles", [25, pytest.param(1000, marks=[pytest.mark.nightly("kills"), pytest.mark.timeout(1800)])]
)
def test_a_store_that_is_killed_again_and_again(tmp_path: Path, cycles: int) -> None:
    """No wrong byte, never more than the capacity, no key that cannot be stored again."""
    moments, found = random.Random(cycles), 0
    for cycle in range(cycles):
        child = Child(live, str(tmp_path), 1, cycle, CAPACITY)
        assert child.heard() == "stored"
        time.sleep(moments.uniform(0.0, 0.1))
        assert child.kill() == -signal.SIGKILL, "it must not have ended by itself"
        assert nbytes_of(tmp_path, "*.kv1") <= CAPACITY
        found += right_chunks(tmp_path)
        if cycle % 25 == 24:
            check_new_store(tmp_path)
    assert found > cycles, "it has to have something to lose"
