"""An InfiniStore server over TCP, in a network of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.backends.remote.infinistore import InfiniStoreBackend
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import chunk_of, new_key, read_back, statuses
from tests.backends.remote.isolated_suite import NAMESPACE, STORED, IsolatedSuite
from tests.backends.remote.own_network import Server, own_network
from tests.servers import missing

PORT = 22345
UVLOOP = os.environ.get("INFINISTORE_UVLOOP", "")
"""The server was built for uvloop 0.21: a folder that has it, where the environment's is another one."""

SERVER = """if True:
    import infinistore.server
    infinistore.server.prevent_oom = lambda: None  # not in every container
    infinistore.server.main()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("infinistore") is None:
        missing("infinistore", "pip install --no-deps infinistore")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([UVLOOP, os.environ.get("PYTHONPATH", "")])}
    uvloop = subprocess.run(
        [sys.executable, "-c", "import uvloop; print(uvloop.__version__)"],
        check=False,
        capture_output=True,
        text=True,
        env=env,
    )
    if not uvloop.stdout.startswith("0.21."):
        missing("infinistore", "needs uvloop 0.21: pip install --target DIR uvloop==0.21.0, INFINISTORE_UVLOOP=DIR")
    folder = tmp_path_factory.mktemp("infinistore")
    with own_network("infinistore"):
        server = Server(
            folder / "server.log",
            PORT,
            *(sys.executable, "-c", SERVER, "--service-port", str(PORT), "--manage-port", "18080"),
            *("--host", "127.0.0.1", "--prealloc-size", "1", "--log-level", "error"),
            env={**env, "LD_PRELOAD": str(device_in(folder))},
        )
        yield server
        server.kill()


def device_in(folder: Path) -> Path:
    """The server does not start without an RDMA device, not even for TCP: a library that says there is one."""
    library = folder / "rdma_device.so"
    source = Path(__file__).with_name("rdma_device.c")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        missing("infinistore", f"apt install gcc libibverbs-dev ({error})")
    return library


class TestInfiniStoreSuite(IsolatedSuite):
    kind = InfiniStoreBackend
    url = f"infinistore://localhost:{PORT}/"

    @pytest.fixture(autouse=True)
    def _servers(self, server: Server) -> None:
        self.server = server

    def test_lmcaches_url_is_the_same(self, backend: InfiniStoreBackend, caplog: pytest.LogCaptureFixture) -> None:
        chunk = chunk_of(100)
        assert statuses(backend, [chunk]) == [STORED]
        other = InfiniStoreBackend(f"{self.url}?device=mlx5_0", NAMESPACE, timeout=10.0)
        assert "device is not used" in caplog.text
        assert read_back(other, chunk) == chunk.payload
        other.close()

    def test_a_value_that_leaves_no_room_for_padding(self, backend: InfiniStoreBackend) -> None:
        room = 16 << 20
        for left in (0, 7, 8):
            chunk = chunk_of(room - backend.blobs.blob_bytes(0) - left)
            assert statuses(backend, [chunk]) == [STORED]
            assert read_back(backend, chunk) == chunk.payload

    def test_a_full_server_drops_the_oldest(self, backend: InfiniStoreBackend) -> None:
        payload = memoryview(os.urandom(8 << 20))
        chunks = [Chunk(new_key(), payload) for _ in range(160)]
        assert {written.status for written in backend.write(chunks)} == {STORED}
        found = [read_back(backend, chunk) for chunk in chunks]
        assert found[0] is None, "1 GiB was enough for 1.25"
        assert found[-1] == payload
