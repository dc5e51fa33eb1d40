"""Writers that die by SIGKILL at random moments, and processes that share a folder."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.outcomes import WriteStatus
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import listed, read_back, statuses

SCRIPT = Path(__file__).with_name("disk_writer.py")


def load_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("disk_writer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer = load_writer()
PAYLOADS: dict[bytes, bytes] = writer.PAYLOADS


class Children:
    """The process that forks writers for us."""

    def __init__(self, folder: Path, direct: str) -> None:
        command = [sys.executable, str(SCRIPT), str(folder), direct]
        paths = [str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def kill(self, pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        return self.ask("wait", pid)

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(params=["off", "auto"])
def direct(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def children(tmp_path: Path, direct: str) -> Iterator[Children]:
    children = Children(tmp_path, direct)
    yield children
    children.close()


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def check_store(folder: Path) -> int:
    """Reopen as a new process would: everything listed is exact and right, nothing else is there."""
    backend = LocalDiskBackend(folder, writer.NAMESPACE)
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
def test_killed_at_any_moment(tmp_path: Path, children: Children, cycles: int) -> None:
    chooser = random.Random(cycles)
    leavings, sizes = 0, set()
    for seed in range(cycles):
        pid = children.ask("write", seed)
        time.sleep(chooser.uniform(0.0, 0.03))
        assert children.kill(pid) == -signal.SIGKILL
        leavings += len(temporaries(tmp_path))
        sizes.add(check_store(tmp_path))
    # Otherwise the kills came too early or too late to prove anything.
    assert leavings > cycles // 10
    assert len(sizes) > 3
    backend = LocalDiskBackend(tmp_path, writer.NAMESPACE)
    chunks = [Chunk(key, memoryview(payload)) for key, payload in PAYLOADS.items()]
    assert set(statuses(backend, chunks)) <= {WriteStatus.STORED, WriteStatus.PRESENT}
    assert check_store(tmp_path) == len(chunks)


def test_a_sweep_spares_the_living(tmp_path: Path, children: Children) -> None:
    """One writer is killed, another one in the same folder goes on while its temporaries are looked at."""
    survivor = children.ask("write", 0)
    for seed in range(1, 8):
        victim = children.ask("write", seed)
        time.sleep(0.03)
        assert children.kill(victim) == -signal.SIGKILL
        list(LocalDiskBackend(tmp_path, writer.NAMESPACE).list_keys())
    # It ends with an error of its own, and not by our hand, if a single write of it failed.
    assert children.kill(survivor) == -signal.SIGKILL
    check_store(tmp_path)


def test_processes_that_share_a_folder(tmp_path: Path, children: Children) -> None:
    """Three of them write, read, list and delete the same keys; each checks every byte it is given."""
    pids = [children.ask("churn", seed, 1.5) for seed in range(3)]
    assert [children.ask("wait", pid) for pid in pids] == [0, 0, 0]
    check_store(tmp_path)
