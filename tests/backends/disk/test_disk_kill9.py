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
from lmkv.outcomes import WriteStatus
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import listed, read_back, statuses
from tests.backends.disk.disk_writer import NAMESPACE, PAYLOADS, churn, write_until_killed
from tests.forked import Child


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
    on_disk = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert sorted(on_disk) == sorted(found.values())
    return len(found)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cycles", [25, pytest.param(1000, marks=pytest.mark.nightly)])
def test_killed_at_any_moment(tmp_path: Path, direct: str, cycles: int) -> None:
    chooser = random.Random(cycles)
    leavings, sizes = 0, set()
    for seed in range(cycles):
        child = working(write_until_killed, tmp_path, direct, seed)
        time.sleep(chooser.uniform(0.0, 0.03))
        assert child.kill() == -signal.SIGKILL
        leavings += len(temporaries(tmp_path))
        sizes.add(check_store(tmp_path))
    # Otherwise the kills came too early or too late to prove anything.
    assert leavings > cycles // 10
    assert len(sizes) > 3
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    chunks = [Chunk(key, memoryview(payload)) for key, payload in PAYLOADS.items()]
    assert set(statuses(backend, chunks)) <= {WriteStatus.STORED, WriteStatus.PRESENT}
    assert check_store(tmp_path) == len(chunks)


def test_a_sweep_spares_the_living(tmp_path: Path, direct: str) -> None:
    """One writer is killed, another one in the same folder goes on while its temporaries are looked at."""
    survivor = working(write_until_killed, tmp_path, direct, 0)
    for seed in range(1, 8):
        victim = working(write_until_killed, tmp_path, direct, seed)
        time.sleep(0.03)
        assert victim.kill() == -signal.SIGKILL
        list(LocalDiskBackend(tmp_path, NAMESPACE).list_keys())
    # It ends with an error of its own, and not by our hand, if a single write of it failed.
    assert survivor.kill() == -signal.SIGKILL
    check_store(tmp_path)


def test_processes_that_share_a_folder(tmp_path: Path, direct: str) -> None:
    """Three of them write, read, list and delete the same keys; each checks every byte it is given."""
    children = [working(churn, tmp_path, direct, seed, 1.5) for seed in range(3)]
    assert [child.ended() for child in children] == [0, 0, 0]
    check_store(tmp_path)
