"""Writers that die by SIGKILL at random moments, and processes that share a folder."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.medium import NAME as MARK
from lmkv.outcomes import WriteStatus
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import listed, read_back, statuses
from tests.backends.disk.disk_writer import NAMESPACE, PAYLOADS, churn, stop_halfway, write_until_killed
from tests.forked import Child, barrier


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
