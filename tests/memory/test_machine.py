"""A folder in memory: what it is on, and how much of it chunks may take."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmkv.memory.machine
from lmkv.errors import ConfigError
from lmkv.memory import slab_files
from lmkv.memory.machine import check_in_memory, clamp_shared_memory, file_system_of

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
        command = ["mount", "-t", kind, *options, "lmkv-test", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=60)
        if done.returncode:
            pytest.skip(f"not possible here: {done.stderr.decode().strip()}")
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
    monkeypatch.setattr(slab_files, "promised_and_taken", lambda: (0, 0))


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
    with pytest.raises(ConfigError, match=r"hugetlbfs.*huge=within_size"):
        check_in_memory(str(mount("hugetlbfs")))


def test_a_device_that_is_not_mounted_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("22 1 0:999999 / /elsewhere rw - tmpfs tmpfs rw\n")
    assert file_system_of(str(tmp_path), tmp_path / "mounts") == ""


def test_the_size_of_dockers_own_is_named_at_the_start(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    folder = mount("tmpfs", "-o", "size=64m")
    assert clamp_shared_memory(str(folder), DOCKER // 2, 0) == DOCKER // 2
    assert not caplog.records
    assert clamp_shared_memory(str(folder), 1 << 40, 0) == int(0.9 * DOCKER)
    [warning] = warnings(caplog)
    assert "max_shared_memory_size cut from 1024.00 GiB to 0.06 GiB by the size of its file system" in warning
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
    monkeypatch.setattr(slab_files, "promised_and_taken", lambda: (60 * DOCKER, 10 * DOCKER))
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert clamp_shared_memory(folder, 100 * DOCKER, 10 * DOCKER) == int(0.8 * 120 * DOCKER) - 60 * DOCKER
    assert "available memory" in caplog.text
    monkeypatch.setattr(slab_files, "promised_and_taken", lambda: (200 * DOCKER, 0))
    assert clamp_shared_memory(folder, 100 * DOCKER, 0) == 0
