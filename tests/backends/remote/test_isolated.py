"""Clients in processes of their own, over a folder; over real servers in test_mooncake and test_infinistore."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.testing.backend_suite import chunk_of
from tests.backends.remote.folder_store import FolderBackend, NoClientBackend
from tests.backends.remote.isolated_suite import ProcessSuite, process_of
from tests.backends.remote.server_suite import NAMESPACE, assert_unavailable
from tests.kit import eventually


class TestProcesses(ProcessSuite):
    kind = FolderBackend

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.url = "folder://host:1/"

    def backend_of(self, query: str = "", **options: object) -> FolderBackend:
        return super().backend_of(f"{query or '?clients=1'}&folder={self.folder}", **options)  # type: ignore[no-any-return]

    def test_processes_leave_when_their_engine_is_killed(self) -> None:
        program = """if True:
            import os, signal, sys
            from lmkv.testing.backend_suite import chunk_of
            from tests.backends.remote.folder_store import FolderBackend
            backend = FolderBackend(sys.argv[1], bytes(32), timeout=10.0)
            print(*(written.status.value for written in backend.write([chunk_of(100) for _ in range(20)])))
            print(*(client._process.pid for client in backend._clients), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
        done = subprocess.run(
            [sys.executable, "-c", program, f"{self.url}?folder={self.folder}"],
            check=False,
            capture_output=True,
            text=True,
        )
        stored, pids = done.stdout.splitlines()
        assert set(stored.split()) == {"stored"}
        assert len(pids.split()) == 2
        for pid in pids.split():
            eventually((self.folder / f"left-{pid}").exists, "it leaves the store")
            eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "it ends")  # type: ignore[misc]

    def test_options_are_in_no_arguments(self, backend: FolderBackend) -> None:
        """Everybody on a machine sees those."""
        chunk = chunk_of(100)
        backend.write([chunk])
        arguments = Path(f"/proc/{process_of(backend, chunk).pid}/cmdline").read_bytes()
        assert b"folder_store" in arguments
        assert bytes(self.folder) not in arguments

    def test_a_client_that_is_not_installed_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"lmkv_has_no_such_client: pip install 'lmkv\[none\]'"):
            NoClientBackend(self.url, NAMESPACE)

    def test_a_process_that_cannot_start_is_unavailable(self) -> None:
        """Its module has no Engine."""
        backend = WithoutEngine(f"{self.url}?folder={self.folder}", NAMESPACE, timeout=10.0)
        assert_unavailable(backend, chunk_of(100))
        backend.close()


class WithoutEngine(FolderBackend):
    pass
