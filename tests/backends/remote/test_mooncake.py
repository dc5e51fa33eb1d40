"""A Mooncake store, in a network of its own: a master, a process that has its memory, and our clients."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from lmkv.backends.remote.mooncake import MooncakeBackend
from lmkv.testing.backend_suite import chunk_of, read_back, statuses
from tests.backends.remote.isolated_suite import NAMESPACE, STORED, IsolatedSuite
from tests.backends.remote.own_network import Server, own_network
from tests.servers import missing

MASTER, MEMORY = 50151, 50152


@frozen
class Mooncake:
    master: Server
    memory: Server


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        missing("mooncake", "pip install mooncake-transfer-engine-non-cuda")
    programs, logs = Path(str(spec.origin)).parent, tmp_path_factory.mktemp("mooncake")
    with own_network("mooncake"):
        master = Server(
            logs / "master.log",
            MASTER,
            *(str(programs / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={MASTER}"),
            *("--metrics_host=127.0.0.1", "--metrics_port=9103", "--default_kv_lease_ttl=500"),
        )
        memory = memory_of(programs, logs, MEMORY)
        yield Mooncake(master, memory)
        for each in (memory, master):
            each.kill()


def memory_of(programs: Path, logs: Path, port: int) -> Server:
    return Server(
        logs / "memory.log",
        port,
        *(str(programs / "mooncake_client"), "--host=127.0.0.1", f"--port={port}", "--metadata_server=P2PHANDSHAKE"),
        *(f"--master_server_address=127.0.0.1:{MASTER}", "--global_segment_size=512 MB"),
    )


class TestMooncakeSuite(IsolatedSuite):
    kind = MooncakeBackend
    url = f"mooncake://127.0.0.1:{MASTER}/"

    @pytest.fixture(autouse=True)
    def _servers(self, mooncake: Mooncake) -> None:
        self.server, self.memory = mooncake.master, mooncake.memory

    def test_lmcaches_url_is_the_same(self, backend: MooncakeBackend) -> None:
        chunk = chunk_of(100)
        assert statuses(backend, [chunk]) == [STORED]
        other = MooncakeBackend(self.url.replace("mooncake", "mooncakestore"), NAMESPACE, timeout=10.0)
        assert read_back(other, chunk) == chunk.payload
        other.close()
