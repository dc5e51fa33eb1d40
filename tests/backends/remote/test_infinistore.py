"""An InfiniStore server over TCP, in a network of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lmkv.backends.remote.infinistore import InfiniStoreBackend
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import chunk_of, new_key, read_back, statuses
from tests.backends.remote.isolated_suite import NAMESPACE, STORED, IsolatedSuite
from tests.backends.remote.own_network import INFINISTORE, Server, infinistore_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with infinistore_server(tmp_path_factory.mktemp("infinistore")) as server:
        yield server


class TestInfiniStoreSuite(IsolatedSuite):
    kind = InfiniStoreBackend
    url = f"infinistore://localhost:{INFINISTORE}/"

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

    def test_padding_counts_as_stored(self, backend: InfiniStoreBackend) -> None:
        assert backend.stored_bytes(100) == 256 << 10
        assert backend.stored_bytes(256 << 10) == 512 << 10

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
