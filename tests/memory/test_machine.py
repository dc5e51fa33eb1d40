"""How much memory there is: limits of control groups, and a folder in memory that chunks share."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen

import lmkv.memory.machine
from lmkv.errors import ConfigError
from lmkv.memory import slab
from lmkv.memory.machine import available_ram, check_in_memory, clamp_shared_memory, file_system_of, memory_limit
from tests.kit import possible, raised
from tests.pages import ROOT

MIB = 1 << 20
DOCKER = 64 * MIB

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system of that type for real, where that is allowed."""
    folders = []

    def mounted(kind: str, *options: str) -> Path:
        folder = tmp_path / kind
        folder.mkdir()
        possible("mount", "-t", kind, *options, "lmkv-test", folder)
        folders.append(folder)
        return folder

    yield mounted
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=60)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.memory.machine, "available_ram", lambda: 100 * DOCKER)
    monkeypatch.setattr(slab, "promised_and_taken", lambda: (0, 0))


def test_a_tmpfs_is_in_memory(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    folder = mount("tmpfs")
    check_in_memory(str(folder))
    assert file_system_of(str(folder)) == "tmpfs"
    assert not caplog.records


def test_any_other_folder_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_in_memory("/proc")
    [warning] = warnings(caplog)
    assert warning.startswith("lmkv: shared_memory: /proc is on proc, not in memory")


def test_a_file_system_that_takes_no_writes_is_refused(mount: Mount) -> None:
    raised(ConfigError, r"hugetlbfs.*huge=within_size", lambda: check_in_memory(str(mount("hugetlbfs"))))


def test_a_device_that_is_not_mounted_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("22 1 0:999999 / /elsewhere rw - tmpfs tmpfs rw\n")
    assert file_system_of(str(tmp_path), tmp_path / "mounts") == ""


def test_the_size_of_dockers_own_is_named_at_the_start(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    folder = mount("tmpfs", "-o", "size=64m")
    assert clamp_shared_memory(str(folder), DOCKER // 2, 0) == DOCKER // 2
    assert not caplog.records
    assert clamp_shared_memory(str(folder), 1 << 40, 0) == int(0.9 * DOCKER)
    [warning] = warnings(caplog)
    assert (
        "max_shared_memory_size is cut from 1024.00 GiB to 0.06 GiB, limited by the size of its file system" in warning
    )
    assert "--shm-size" in warning


def test_what_others_have_in_the_file_system_is_theirs(mount: Mount) -> None:
    folder = mount("tmpfs", "-o", "size=64m")
    (folder / "others").write_bytes(bytes(20 * MIB))
    (folder / "chunks").write_bytes(bytes(10 * MIB))
    assert clamp_shared_memory(str(folder), DOCKER, 10 * MIB) == int(0.9 * 44 * MIB)


def test_memory_that_slabs_have_been_promised_is_not_given_twice(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(mount("tmpfs"))
    monkeypatch.setattr(slab, "promised_and_taken", lambda: (60 * DOCKER, 10 * DOCKER))
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert clamp_shared_memory(folder, 100 * DOCKER, 10 * DOCKER) == int(0.8 * 120 * DOCKER) - 60 * DOCKER
    assert "available memory" in caplog.text
    monkeypatch.setattr(slab, "promised_and_taken", lambda: (200 * DOCKER, 0))
    assert clamp_shared_memory(folder, 100 * DOCKER, 0) == 0


# -- limits of control groups ------------------------------------------------------------------------------


@frozen
class Host:
    """Files of the kernel below a folder, in which this process is in a control group. `version`: of the interface."""

    folder: Path
    version: int

    def make(self, available: int, own: str) -> dict[str, Path]:
        """The arguments of `available_ram`."""
        (self.folder / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n")
        line = f"0::{own}" if self.version == 2 else f"4:cpu,memory:{own}"
        (self.folder / "own").write_text(f"9:name=systemd:/\n{line}\n")
        return {name: self.folder / name for name in ("meminfo", "root", "own")}

    def limit(self, group: str, limit: int | None, used: int = 0, cache: int = 0) -> None:
        """Make a control group."""
        folder = self.folder / "root" / ("" if self.version == 2 else "memory") / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            names, beginning, none = ("memory.max", "memory.current"), "", "max"
        else:
            names, beginning, none = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_", "9223372036854771712"
        for name, value in zip(names, (none if limit is None else limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        half = cache // 2
        kinds = f"{beginning}inactive_file {half}\n{beginning}active_file {half}\n"
        (folder / "memory.stat").write_text(f"anon 5\n{kinds}")


@pytest.fixture(params=[1, 2], ids=lambda version: f"v{version}")
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    return Host(tmp_path, request.param)


def test_available_memory_is_the_least_of_what_the_limits_leave(host: Host) -> None:
    files = host.make(64 * MIB, "/")
    assert available_ram(**files) == 64 * MIB
    for limit, used, expected in ((None, 0, 64), (100, 90, 10), (100, 10, 64), (100, 101, 0)):
        host.limit("/", None if limit is None else limit * MIB, used * MIB)
        assert available_ram(**files) == expected * MIB


def test_page_cache_is_not_in_the_way(host: Host) -> None:
    """A model's weights that were read from disk fill a container's limit, and make room at once."""
    host.limit("/", 100 * MIB, 99 * MIB, 50 * MIB)
    assert available_ram(**host.make(64 * MIB, "/")) == 51 * MIB


def test_the_limit_of_a_service_and_of_a_slice_above_it_count(host: Host) -> None:
    """As systemd's MemoryMax= sets them, outside a container."""
    files = host.make(64 * MIB, "/system.slice/vllm.service")
    host.limit("/", None)
    host.limit("/system.slice", 30 * MIB, 10 * MIB)
    host.limit("/system.slice/vllm.service", 50 * MIB, 5 * MIB)
    host.limit("/system.slice/other.service", 1 * MIB)
    assert available_ram(**files) == 20 * MIB
    assert memory_limit(files["root"], files["own"]) == 30 * MIB
    host.limit("/system.slice", None)
    assert available_ram(**files) == 45 * MIB


def test_a_container_sees_its_own_group_at_the_top(host: Host) -> None:
    """Its path is that on the host, below which the container has no files."""
    host.limit("/", 40 * MIB, 10 * MIB)
    files = host.make(64 * MIB, "/docker/0123abc")
    assert available_ram(**files) == 30 * MIB
    assert memory_limit(files["root"], files["own"]) == 40 * MIB


def test_without_a_limit_there_is_none(host: Host) -> None:
    files = host.make(64 * MIB, "/a")
    assert memory_limit(files["root"], files["own"]) is None
    host.limit("/a", None, 10 * MIB)
    assert memory_limit(files["root"], files["own"]) is None


def test_without_any_of_the_files_there_is_an_answer(tmp_path: Path) -> None:
    assert available_ram(*(tmp_path / "none" for _ in range(3))) > 0


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK), reason="no control group to make")
def test_a_real_group_of_version_1_limits_what_is_given(tmp_path: Path) -> None:
    """A process within it is given no more than it may take."""
    group = Path(f"/sys/fs/cgroup/memory/lmkv-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 * MIB))
        program = "from lmkv.memory.machine import available_ram, memory_limit; print(available_ram(), memory_limit())"
        entered = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{program}'"
        done = subprocess.run(["sh", "-c", entered], capture_output=True, text=True, check=True, cwd=ROOT)
        available, limit = map(int, done.stdout.split())
        assert available <= limit == 400 * MIB
    finally:
        group.rmdir()
