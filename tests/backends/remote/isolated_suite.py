"""What holds for every store whose client lives in processes of its own."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import pytest

from lmkv.backends.remote.isolated import Client, IsolatedBackend
from lmkv.errors import BackendUnavailable
from lmkv.outcomes import ReadStatus
from lmkv.protocols import Chunk
from lmkv.testing.backend_suite import chunk_of, read_back, statuses
from tests.backends.remote.server_suite import PRESENT, STORED, ServerSuite, StoreSuite
from tests.kit import eventually
from tests.servers import stop


class ProcessSuite(StoreSuite):
    """What holds of the processes, whichever store they speak with."""

    kind: ClassVar[type[IsolatedBackend]]

    def test_chunks_larger_than_the_memory_between_the_processes(self, backend: Any) -> None:
        chunks = [chunk_of(20 << 20), chunk_of(100)]
        assert statuses(backend, chunks) == [STORED] * 2
        fresh = self.backend_of()
        for chunk in chunks:
            assert read_back(backend, chunk) == chunk.payload
            assert read_back(fresh, chunk) == chunk.payload
        fresh.close()

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
    def test_the_clients_process_may_end_or_hang(self, how: signal.Signals) -> None:
        backend = self.backend_of("?clients=1", timeout=1.0)
        chunk = chunk_of(100)
        eventually(lambda: statuses(backend, [chunk])[0] in (STORED, PRESENT))
        stop(process_of(backend, chunk).pid, how)
        (read,) = backend.read([(chunk.key, memoryview(bytearray(100)))])
        assert isinstance(read.error, BackendUnavailable)
        eventually(lambda: backend.read([(chunk.key, memoryview(bytearray(100)))])[0].status is ReadStatus.HIT)
        backend.close()

    def test_no_process_outlives_its_backend(self) -> None:
        backend = self.backend_of("?clients=2")
        chunks = [chunk_of(100) for _ in range(20)]
        backend.write(chunks)
        processes = {process_of(backend, chunk) for chunk in chunks}
        assert len(processes) == 2
        assert all(process.poll() is None for process in processes)
        backend.close()
        assert all(process.poll() is not None for process in processes)


class IsolatedSuite(ProcessSuite, ServerSuite):
    def value_of(self, backend: Any, chunk: Chunk) -> bytes:
        name = backend.name_of(chunk.key)
        with backend._client(name).value(name, 1 << 20) as value:
            return bytes(value)

    def put(self, backend: Any, name: str, value: bytes) -> None:
        client: Client = backend._client(name)
        client.ask("remove", [name])
        assert client.put(name, memoryview(value), memoryview(b"")) == "stored"


def process_of(backend: Any, chunk: Chunk) -> Any:
    return backend._client(backend.name_of(chunk.key))._process
