"""vLLM's default mode offline: the engine and its worker in processes of their own, which must all end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import LIMIT, eventually
from tests.vllm.harness import engine, external_hits, prompt
from tests.vllm.offline_script import LENGTH
from tests.vllm.server import START_TIMEOUT, child_environment, kill_group, members, shared_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short: paths of sockets may not be long."""
    with tempfile.TemporaryDirectory(prefix="lmkv-") as folder:
        yield Path(folder)


def left_in(folder: Path) -> list[Path]:
    """What somebody left there, but for the sockets, which vLLM always leaves."""
    return [path for path in folder.iterdir() if not path.is_socket()]


@contextlib.contextmanager
def script(model: Path, folder: Path, temporary: Path, *words: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script in a process group of its own; its temporary files go to `temporary`. `more`: its environment."""
    command = [sys.executable, "-m", "tests.vllm.offline_script", model, folder / "result", *words]
    environment = child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", TMPDIR=str(temporary), **more)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait(LIMIT)


def log_of(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def result_of(folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((folder / "result").read_text())
    return answers


def has_result(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"the script ended with {process.returncode}\n{log_of(folder)}"
    return (folder / "result").exists()


def slabs(processes: list[int]) -> int:
    """Which of these processes map lmkv's slab."""
    count = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            count += "memfd:lmkv-slab" in Path(f"/proc/{pid}/maps").read_text()
    return count


def test_hits_equal_outputs_and_a_clean_exit(model: Path, tmp_path: Path, temporary: Path) -> None:
    with script(model, tmp_path, temporary) as process:
        process.wait(START_TIMEOUT)
        assert process.returncode == 0, log_of(tmp_path)
        eventually(lambda: not members(process.pid), "the end of the engine's processes")
    answers = result_of(tmp_path)
    assert [answers["cold"]["hit"], *(other["hit"] for other in answers["others"])] == [0] * 4
    assert answers["warm"]["hit"] == LENGTH - 1
    assert answers["warm"]["ids"] == answers["cold"]["ids"]
    assert (answers["workers"], answers["reset"], answers["emptied"]["hit"]) == ([None], True, 0)
    assert "Traceback" not in log_of(tmp_path)
    assert left_in(temporary) == []


def engine_of(group: int) -> int:
    """The engine's process: the one that vLLM calls so."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in members(group)}
    [engine] = [pid for pid, name in names.items() if name.startswith("VLLM::EngineCor")]
    return engine


def test_only_its_chunks_stay_when_main_process_and_engine_are_killed(
    model: Path, tmp_path: Path, temporary: Path
) -> None:
    disk = {"local_disk": f"file://{tmp_path / 'disk'}", "max_local_disk_size": 1.0, "disk_min_free": 0.0}
    settings = {f"LMKV_{name.upper()}": str(value) for name, value in disk.items()}
    with script(model, tmp_path, temporary, "stay", **settings) as process:
        eventually(lambda: has_result(tmp_path, process), "the script's result", START_TIMEOUT)
        answers = result_of(tmp_path)
        assert answers["emptied"]["hit"] == LENGTH - 1, "from disk: host memory was emptied"
        running = members(process.pid)
        assert slabs(running) == 2, "the engine and its worker map the slab"
        shared = shared_files(running)
        assert shared, "vLLM's own queues"
        # Without its main process vLLM 0.32's engine stays, with lmkv as without: it is killed too.
        for pid in (process.pid, engine_of(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.wait(LIMIT)
        eventually(lambda: not members(process.pid), f"the end of {members(process.pid)}")
    assert not [path for path in shared if path.exists()]
    assert left_in(temporary) == []
    # The past of this process is another one: it has written the model, and maybe run other engines.
    with engine(model, extra=disk) as other:
        assert other.store.wait_indexed(LIMIT)
        [output] = other.run([prompt(70, LENGTH)])
        assert external_hits(output) == LENGTH - 1
        assert list(output.outputs[0].token_ids) == answers["cold"]["ids"]
