"""A Mooncake store, in a network of its own: a master, a process that has its memory, and our clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.mooncake import MooncakeBackend
from lmkv.errors import BackendUnavailable
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, new_key, read_back, statuses
from tests.backends.remote.own_network import MOONCAKE, Mooncake, mooncake_servers
from tests.backends.remote.server_suite import GIVEN_UP, NAMESPACE, PRESENT, STORED
from tests.backends.remote.subprocess_suite import InSlab, SubprocessSuite, process_of
from tests.kit import LIMIT, eventually, raised


@pytest.fixture(scope="class")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake_servers(tmp_path_factory.mktemp("mooncake")) as servers:
        yield servers


class TestMooncakeSuite(SubprocessSuite):
    kind = MooncakeBackend
    url = f"mooncake://localhost:{MOONCAKE}/"

    @pytest.fixture(autouse=True)
    def _servers(self, mooncake: Mooncake) -> None:
        self.server, self.memory = mooncake.master, mooncake.memory

    def test_lmcaches_url_is_the_same(self, backend: MooncakeBackend) -> None:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        other = MooncakeBackend(self.url.replace("mooncake", "mooncakestore"), NAMESPACE, RemoteOptions(timeout=10.0))
        assert read_back(other, chunk) == chunk.payload
        other.close()

    @pytest.mark.slow("several of Mooncake's clients start")
    def test_a_segment_of_an_engine_is_its_stores_until_it_ends(self, mooncake: Mooncake) -> None:
        mooncake.memory.kill()
        chunk = chunk_of(1 << 20)
        with_segment = self.backend_of(f"?segment_size={64 << 20}")
        without = self.backend_of()
        try:
            # The master takes the memory of the process that was killed for there, for some seconds.
            eventually(lambda: with_segment.write(chunk).status in (STORED, PRESENT) and is_hit(without, chunk))
            with_segment.close()
            assert without.contains([chunk.key]) == [False], "it said that it leaves"
            assert without.read(chunk.key, memoryview(bytearray(1 << 20))).status is ReadStatus.MISS
        finally:
            for each in (with_segment, without):
                each.close()
            mooncake.memory.start()
        self.until_there_is_room()

    def test_names_that_are_long(self) -> None:
        backend, chunk = self.backend_of(prefix="é" * 500), chunk_of(100)
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        keys = [new_key() for _ in range(500)]
        keys[77] = chunk.key
        assert [index for index, found in enumerate(backend.contains(keys)) if found] == [77]
        backend.close()

    def test_a_master_that_does_not_answer_is_given_up_in_time_with_a_segment_too(self, mooncake: Mooncake) -> None:
        backend = self.backend_of(f"?segment_size={16 << 20}", timeout=1.0)
        mooncake.master.pause()
        try:
            for _ in range(2):
                started = time.monotonic()
                raised(BackendUnavailable, "", backend.contains, [new_key()])
                assert time.monotonic() - started < GIVEN_UP
        finally:
            mooncake.master.resume()
        eventually(lambda: succeeds(lambda: backend.contains([new_key()])))
        backend.close()
        self.until_there_is_room()

    def test_memory_that_does_not_answer_is_given_up_in_time(self, mooncake: Mooncake) -> None:
        self.until_there_is_room()
        backend, chunk = self.backend_of(timeout=1.0), chunk_of(1 << 20)
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        mooncake.memory.pause()
        try:
            started = time.monotonic()
            read = backend.read(chunk.key, memoryview(bytearray(1 << 20)))
            assert isinstance(read.error, BackendUnavailable)
            assert time.monotonic() - started < GIVEN_UP
        finally:
            mooncake.memory.resume()
        backend.close()
        self.until_there_is_room()

    def test_memory_that_is_killed_loses_its_chunks_and_no_more(self, mooncake: Mooncake) -> None:
        self.until_there_is_room()
        backend, chunk = self.backend_of(), chunk_of(1 << 20)
        assert backend.write(chunk).status is STORED
        mooncake.memory.kill()
        read = backend.read(chunk.key, memoryview(bytearray(1 << 20)))
        assert read.status is not ReadStatus.HIT
        mooncake.memory.start()
        eventually(lambda: backend.contains([chunk.key]) == [False])
        eventually(lambda: backend.write(chunk).status is STORED, "the master has heard of the memory")
        assert read_back(backend, chunk) == chunk.payload
        backend.close()

    def test_what_a_client_began_to_write_before_it_ended_is_neither_there_nor_stored(self, backend: Any) -> None:
        chunk = chunk_of(100)
        begin = f"""if True:
            import os, signal
            from mooncake.store import MooncakeDistributedStore
            store = MooncakeDistributedStore()
            assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:{MOONCAKE}")
            assert store.batch_put_session_start(["{backend.name_of(chunk.key)}"], [100]) == [0]
            os.kill(os.getpid(), signal.SIGKILL)
        """
        self.until_there_is_room()
        done = subprocess.run([sys.executable, "-c", begin], check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        written = backend.write(chunk)
        assert written.status is WriteStatus.REJECTED
        assert "another client" in written.reason
        assert backend.contains([chunk.key]) == [False]
        assert read_back(backend, chunk) is None

    def test_a_full_store_rejects_or_evicts_and_says_so(self, backend: Any) -> None:
        self.until_there_is_room()
        payload = memoryview(os.urandom(8 << 20))
        chunks = [Chunk(new_key(), payload) for _ in range(80)]
        written = [backend.write(chunk) for chunk in chunks]
        assert {each.status for each in written} <= {STORED, WriteStatus.REJECTED}
        assert all(each.reason for each in written if each.status is WriteStatus.REJECTED)
        found = [read_back(backend, chunk) for chunk in chunks]
        assert all(each in (None, payload) for each in found)
        assert None in found, "512 MB were enough for 640"
        assert payload in found
        late = chunk_of(8 << 20)
        eventually(lambda: backend.write(late).status in (STORED, PRESENT))

    def until_there_is_room(self) -> None:
        """The memory says that it is there, and the master gives none that is away any more."""
        backend = self.backend_of()

        def all_well() -> bool:
            chunks = [chunk_of(1 << 20) for _ in range(8)]
            return set(statuses(backend, chunks)) == {STORED} and all(is_hit(backend, chunk) for chunk in chunks)

        eventually(all_well)
        backend.close()


class MooncakeInSlab(InSlab, MooncakeBackend):
    __module__ = MooncakeBackend.__module__


class TestMooncakeInSlab(TestMooncakeSuite):
    """The same, with payloads that are moved without a copy."""

    kind = MooncakeInSlab


def test_nobody_else_reaches_the_registered_memory(mooncake: Mooncake) -> None:
    """Mooncake's client listens on every address and writes what it is told."""
    backend = MooncakeBackend(f"{TestMooncakeSuite.url}?clients=1", NAMESPACE, RemoteOptions(timeout=10.0))
    chunk = chunk_of(1 << 20)
    eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
    ports = listening(process_of(backend, chunk).pid)
    assert ports, "it needs no filter any more"
    for port in ports:
        raised(TimeoutError, "", socket.create_connection, ("127.0.0.1", port), 0.5)
    assert is_hit(backend, chunk)
    backend.close()
    with_segment = MooncakeBackend(
        f"{TestMooncakeSuite.url}?segment_size={16 << 20}", NAMESPACE, RemoteOptions(timeout=10.0)
    )
    assert with_segment.contains([chunk.key]) == [True]
    for port in listening(with_segment._segment._process.pid):
        socket.create_connection(("127.0.0.1", port), LIMIT).close()
    with_segment.close()


def succeeds(call: Callable[[], object]) -> bool:
    with suppress(BackendUnavailable):
        call()
        return True
    return False


def listening(pid: int) -> list[int]:
    """Ports of a process."""
    links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
    ]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


def is_hit(backend: MooncakeBackend, chunk: Chunk) -> bool:
    return backend.read(chunk.key, memoryview(bytearray(len(chunk.payload)))).status is ReadStatus.HIT
