"""Tests of every store whose client lives in processes of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from attrs import evolve

from lmkv.backends.remote.subprocess_backend import ClientProcess, SubprocessBackend
from lmkv.errors import BackendUnavailable
from lmkv.memory.slab import Slab
from lmkv.protocols import Chunk, ChunkKey, ReadStatus, Written
from lmkv.testing.backend_suite import chunk_of, read_back, statuses
from tests.backends.remote.server_suite import PRESENT, STORED, ServerSuite, StoreSuite
from tests.kit import eventually
from tests.servers import stop

FREE = 0xA5
"""Each byte of a slot that was used and is free."""


class ProcessSuite(StoreSuite):
    """Tests of the processes, whichever store they speak with."""

    kind: ClassVar[type[SubprocessBackend]]

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
        backend, chunk = self.backend_of("?clients=1", timeout=1.0), chunk_of(100)
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        stop(process_of(backend, chunk).pid, how)
        read = backend.read(chunk.key, memoryview(bytearray(100)))
        assert isinstance(read.error, BackendUnavailable)
        eventually(lambda: backend.read(chunk.key, memoryview(bytearray(100))).status is ReadStatus.HIT)
        backend.close()

    def test_no_process_outlives_its_backend(self) -> None:
        backend = self.backend_of("?clients=2")
        chunks = [chunk_of(100) for _ in range(20)]
        statuses(backend, chunks)
        processes = {process_of(backend, chunk) for chunk in chunks}
        assert len(processes) == 2
        assert all(process.poll() is None for process in processes)
        backend.close()
        assert all(process.poll() is not None for process in processes)


class SubprocessSuite(ProcessSuite, ServerSuite):
    def value_of(self, backend: Any, chunk: Chunk) -> bytes:
        name = backend.name_of(chunk.key)
        with client_of(backend, name).value(name, 0, memoryview(b"?")) as (nbytes, fill):
            value = bytearray(nbytes)
            fill(memoryview(value))
            return bytes(value)

    def put(self, backend: Any, name: str, value: bytes) -> None:
        client = client_of(backend, name)
        client.ask("remove", [name])
        assert client.put(name, memoryview(value)[:1], memoryview(value)[1:]) == "stored"


def client_of(backend: Any, name: str) -> ClientProcess:
    return backend._client(name)  # type: ignore[no-any-return]


def process_of(backend: Any, chunk: Chunk) -> Any:
    return client_of(backend, backend.name_of(chunk.key))._process


class InSlab(SubprocessBackend):
    """A mixin: the backend's payloads go through slots of a registered slab, which nobody else writes to."""

    def _set_up(self, options: dict[str, Any]) -> None:
        super()._set_up(options)
        self._slab, self._slots = Slab(32 << 20, 2 << 30, shared=True), threading.Lock()
        self.register_memory(self._slab.descriptor, self._slab.address, self._slab.nbytes)
        self._freed: dict[int, int] = {}

    @contextmanager
    def _slot(self, nbytes: int) -> Iterator[memoryview]:
        with self._slots:
            slot = self._slab.allocate()
        assert slot is not None
        try:
            yield self._slab.view(slot, nbytes)
        finally:
            self._slab.array[slot, :nbytes] = FREE
            with self._slots:
                self._freed[slot] = max(nbytes, self._freed.get(slot, 0))
                self._slab.free(slot)

    def _put(self, name: str, chunk: Chunk) -> Written:
        with self._slot(len(chunk.payload)) as slot:
            slot[:] = chunk.payload
            return super()._put(name, evolve(chunk, payload=slot))

    def _get(self, key: ChunkKey, name: str, into: memoryview) -> bool:
        with self._slot(len(into)) as slot:
            found: bool = super()._get(key, name, slot)
            into[:] = slot
            return found

    def _disconnect(self) -> None:
        super()._disconnect()
        late = [slot for slot, nbytes in self._freed.items() if (self._slab.array[slot, :nbytes] != FREE).any()]
        self._slab.close()
        assert not late, "nothing arrives in a slot that is free"
