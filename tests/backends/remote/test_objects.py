"""Object stores: the public suite over real servers and a folder, and what can happen to an object or a connection.

moto heeds `If-None-Match` and takes any key; rclone heeds keys, and overwrites; azurite heeds both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")


from lmkv.backends.remote.objects import ObjectStoreBackend
from lmkv.outcomes import WriteStatus
from lmkv.protocols import Backend
from lmkv.testing.backend_suite import BackendSuite, chunk_of, in_threads, read_back, statuses
from tests.servers import ObjectServer, object_server

NAMESPACE = bytes(range(32))
KINDS = ("moto", "rclone", "azurite")
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
USER, SECRET = ObjectServer.USER, ObjectServer.SECRET


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def backend_of(url: str, **options: Any) -> ObjectStoreBackend:
    return ObjectStoreBackend(url, NAMESPACE, **{"timeout": 20.0, "username": USER, "password": SECRET, **options})


class TestServerSuite(BackendSuite):
    @pytest.fixture(autouse=True)
    def _servers(self, server: ObjectServer) -> None:
        self.server = server

    def make(self, folder: Path) -> Backend:
        return backend_of(self.server.url(folder.name))

    def test_one_of_many_writers_of_a_key_stores_it(self, keeping: Backend) -> None:
        if self.server.kind != "rclone":
            super().test_one_of_many_writers_of_a_key_stores_it(keeping)
            return
        # It overwrites: several store it, and whatever is read is one writer's whole.
        chunk = chunk_of(50_000)
        results = in_threads(4, lambda _: statuses(keeping, [chunk])[0])
        assert STORED in results
        assert set(results) <= {STORED, PRESENT}
        assert read_back(keeping, chunk) == chunk.payload


class TestFolderSuite(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return backend_of(f"file://{folder}/a%20folder")
