"""An InfiniStore server over TCP, in a network of its own."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from lmkv.backends.remote.base import RemoteOptions
from lmkv.backends.remote.infinistore import Connection, InfiniStoreBackend
from lmkv.errors import BackendUnavailable, CorruptChunkError
from lmkv.protocols import Backend, Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, in_threads, new_key, read_back, statuses
from tests.backends.remote.own_network import INFINISTORE, Server, infinistore_server
from tests.backends.remote.server_suite import (
    DAMAGES,
    GIVEN_UP,
    NAMESPACE,
    PRESENT,
    STORED,
    ServerSuite,
    assert_damage_fails,
)
from tests.kit import LIMIT, eventually, raised
from tests.servers import Proxy

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with infinistore_server(tmp_path_factory.mktemp("infinistore")) as server:
        yield server


def ask(what: Callable[[Connection], T]) -> T:
    """Over a connection of its own."""
    with closing(Connection(("localhost", INFINISTORE), time.monotonic() + LIMIT)) as server:
        return what(server)


def are_there(*names: str) -> list[bool]:
    return ask(lambda server: (server.ask(names), server.found(len(names)))[1])


def value_of(name: str) -> bytes:
    def get(server: Connection) -> bytes:
        value = bytearray(server.get(name) or 0)
        server.fill(memoryview(value))
        return bytes(value)

    return ask(get)


def put_value(name: str, value: bytes) -> None:
    ask(lambda server: server.delete([name]))
    assert ask(lambda server: server.put([(name, [memoryview(value)])]))


def payload_name(backend: InfiniStoreBackend, chunk: Chunk) -> str:
    """An entry begins with what its payload is called below its own name."""
    name = backend.name_of(chunk.key)
    return f"{name}/{value_of(name)[:8].hex()}"


def idle(backend: InfiniStoreBackend) -> list[Connection]:
    return backend._idle


class TestInfiniStoreSuite(ServerSuite):
    kind = InfiniStoreBackend
    url = f"infinistore://localhost:{INFINISTORE}/"

    @pytest.fixture(autouse=True)
    def _servers(self, server: Server) -> None:
        self.server = server

    def value_of(self, backend: Any, chunk: Chunk) -> bytes:
        """The payload's."""
        return value_of(payload_name(backend, chunk))

    def put(self, backend: Any, name: str, value: bytes) -> None:
        put_value(f"{name}/{value_of(name)[:8].hex()}", value)

    def test_an_entry_that_is_not_the_chunks_fails_and_can_be_replaced(self, backend: InfiniStoreBackend) -> None:
        assert_damage_fails(
            backend,
            lambda chunk: value_of(backend.name_of(chunk.key)),
            lambda chunk, value: put_value(backend.name_of(chunk.key), value),
            {
                **{what: DAMAGES[what] for what in ("cut", "longer", "another bit of the header", "foreign")},
                "beyond the memory": lambda value, other: value + bytes(17 << 20),
            },
        )

    def test_a_payload_that_was_evicted_is_a_miss_and_can_be_stored_again(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(9000)
        assert backend.write(chunk).status is STORED
        ask(lambda server: server.delete([payload_name(backend, chunk)]))
        assert read_back(backend, chunk) is None
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload

    def test_a_deleted_chunk_leaves_nothing(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(9000)
        assert backend.write(chunk).status is STORED
        names = payload_name(backend, chunk), backend.name_of(chunk.key)
        assert are_there(*names) == [True, True]
        backend.delete([chunk.key])
        assert are_there(*names) == [False, False]

    def test_a_chunk_that_is_being_written_is_not_there_and_ends_no_server(self, backend: InfiniStoreBackend) -> None:
        """The server takes a value for there that only begins to come, and ends when it is asked for."""
        chunk, into = chunk_of(32 << 20), memoryview(bytearray(32 << 20))
        with self.behind(30.0) as (proxy, slow):
            proxy.delay = 0.01
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(statuses, slow, [chunk])
                seen = set()
                while not written.done():
                    seen.add(backend.read(chunk.key, into).status)
                    backend.delete([new_key()])
            assert written.result() == [STORED]
            assert seen <= {ReadStatus.MISS, ReadStatus.HIT}
            assert ReadStatus.MISS in seen, "nobody asked while it was written"
        assert read_back(backend, chunk) == chunk.payload

    def test_a_writer_that_is_killed_leaves_a_chunk_that_can_be_written(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(32 << 20)
        with self.behind(30.0) as (proxy, slow):
            proxy.delay = 0.01
            with ThreadPoolExecutor(1) as pool:
                written = pool.submit(slow.write, chunk)
                eventually(lambda: proxy.forwarded > 1 << 20)
                # No byte more comes through.
                proxy.deaf = True
                proxy.cut()
            assert isinstance(written.result().error, BackendUnavailable)
        assert read_back(backend, chunk) is None
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload

    def test_lmcaches_url_is_the_same(self, backend: InfiniStoreBackend, caplog: pytest.LogCaptureFixture) -> None:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        with closing(InfiniStoreBackend(f"{self.url}?device=mlx5_0", NAMESPACE, RemoteOptions(timeout=10.0))) as other:
            assert "ignores the option device" in caplog.text
            assert read_back(other, chunk) == chunk.payload

    def test_infinistores_own_client_reads_and_writes_the_same_values(self, backend: InfiniStoreBackend) -> None:
        import infinistore

        theirs = infinistore.InfinityConnection(
            infinistore.ClientConfig(
                host_addr="127.0.0.1", service_port=INFINISTORE, connection_type=infinistore.TYPE_TCP, log_level="error"
            )
        )
        theirs.connect()
        chunk = chunk_of(70_001)
        assert backend.write(chunk).status is STORED
        name = payload_name(backend, chunk)
        value = np.frombuffer(theirs.tcp_read_cache(name), np.uint8).copy()
        assert bytes(value) == chunk.payload
        assert theirs.delete_keys([name]) == 1
        assert are_there(name) == [False]
        theirs.tcp_write_cache(name, value.ctypes.data, len(value))
        assert read_back(backend, chunk) == chunk.payload
        theirs.close()

    def test_a_full_server_drops_the_oldest(self, backend: InfiniStoreBackend) -> None:
        payload = memoryview(os.urandom(8 << 20))
        chunks = [Chunk(new_key(), payload) for _ in range(160)]
        assert set(statuses(backend, chunks)) == {STORED}
        found = [read_back(backend, chunk) for chunk in chunks]
        assert found[0] is None, "1 GiB was enough for 1.25"
        assert found[-1] == payload

    def test_a_chunk_larger_than_the_servers_memory_is_rejected(self, backend: InfiniStoreBackend) -> None:
        larger, chunk = Chunk(new_key(), memoryview(bytearray(1100 << 20))), chunk_of(100)
        written = backend.write(larger)
        assert written.status is WriteStatus.REJECTED
        assert "no memory" in written.reason
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload

    def test_a_value_that_comes_too_late_does_not_end_the_server(self, backend: InfiniStoreBackend) -> None:
        """It ends when a client closes its connection in the middle of a value."""
        chunk, small = chunk_of(32 << 20), chunk_of(100)
        assert statuses(backend, [chunk, small]) == [STORED] * 2
        with self.behind(0.5) as (proxy, slow):
            assert read_back(slow, small) == small.payload
            proxy.delay = 0.5
            read = slow.read(chunk.key, memoryview(bytearray(32 << 20)))
            assert isinstance(read.error, BackendUnavailable)
            proxy.delay = 0.0
            eventually(lambda: slow.read(chunk.key, memoryview(bytearray(32 << 20))).status is ReadStatus.HIT)
            eventually(lambda: slow.contains([small.key]) == [True] and not any(c.is_behind for c in idle(slow)))
        assert read_back(backend, chunk) == chunk.payload, "the server ended, or lost it"

    def test_a_connection_that_was_closed_is_made_anew(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(1 << 20)
        assert backend.write(chunk).status is STORED
        with self.behind(10.0) as (proxy, behind):
            for _ in range(3):
                assert read_back(behind, chunk) == chunk.payload
                proxy.cut()

    def test_a_server_far_away_is_asked_once_for_many_names(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        with self.behind(10.0) as (proxy, far):
            assert far.contains([chunk.key]) == [True]
            proxy.latency = 0.2
            started = time.monotonic()
            assert far.contains([*(new_key() for _ in range(400)), chunk.key]) == [False] * 400 + [True]
            assert time.monotonic() - started < 20, "80 s one by one"
            proxy.latency = 0.0

    def test_who_answers_but_is_no_infinistore_is_unavailable(self, backend: InfiniStoreBackend) -> None:
        """InfiniStore's own port for managing it, which speaks HTTP."""
        with closing(
            InfiniStoreBackend("infinistore://127.0.0.1:18080/", NAMESPACE, RemoteOptions(timeout=5.0))
        ) as other:
            raised(BackendUnavailable, "", other.contains, [new_key()])
            written = other.write(chunk_of(100))
            assert isinstance(written.error, BackendUnavailable)

    def test_many_threads_read_with_a_connection_each(self, backend: InfiniStoreBackend) -> None:
        chunks = [chunk_of(1 << 20) for _ in range(8)]
        assert statuses(backend, chunks) == [STORED] * 8
        in_threads(8, lambda index: [self.is_right(backend, chunks[index]) for _ in range(20)])
        assert len(idle(backend)) <= 32
        assert all(connection.in_step for connection in idle(backend))

    def test_a_value_of_another_length_leaves_the_connection_in_step(self, backend: InfiniStoreBackend) -> None:
        chunk = chunk_of(3 << 20)
        assert backend.write(chunk).status is STORED
        self.put(backend, backend.name_of(chunk.key), os.urandom(40 << 20))
        read = backend.read(chunk.key, memoryview(bytearray(3 << 20)))
        assert isinstance(read.error, CorruptChunkError)
        assert all(connection.in_step for connection in idle(backend))
        assert backend.contains([chunk.key]) == [True]

    def test_many_readers_of_two_engines_leave_the_server_well(self, backend: InfiniStoreBackend) -> None:
        """It takes a request that comes before it has noted that a value is sent for the one before, without end."""
        with closing(self.make(Path())) as other:
            # As many pieces as take its loop once around: the note comes last.
            chunks = [chunk_of(nbytes) for nbytes in (9 << 18, 65_200, 1 << 18)]
            assert statuses(backend, chunks) == [STORED] * 3

            def work(index: int) -> None:
                for number in range(150):
                    self.is_right((backend, other)[index % 2], chunks[(index + number) % 3])

            in_threads(8, work)

    def test_signals_do_not_move_a_deadline(self) -> None:
        with closing(InfiniStoreBackend(self.url, NAMESPACE, RemoteOptions(timeout=1.0))) as backend:
            chunk = chunk_of(100)
            eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
            given_up = threading.Event()

            def interrupt() -> None:
                while not given_up.wait(0.02):
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

            before = signal.signal(signal.SIGUSR1, lambda *_: None)
            interrupting = threading.Thread(target=interrupt)
            self.server.pause()
            try:
                interrupting.start()
                started = time.monotonic()
                read = backend.read(chunk.key, memoryview(bytearray(100)))
                assert isinstance(read.error, BackendUnavailable)
                assert time.monotonic() - started < GIVEN_UP
            finally:
                given_up.set()
                interrupting.join()
                self.server.resume()
                signal.signal(signal.SIGUSR1, before)
            eventually(lambda: read_back(backend, chunk) == chunk.payload)

    @pytest.mark.parametrize("nbytes", [404, 1 << 20])
    def test_half_an_answer_in_time_is_the_same_answers_half_later(
        self, backend: InfiniStoreBackend, nbytes: int
    ) -> None:
        # Its bytes read like answers that say that there is one.
        chunk = Chunk(new_key(), memoryview(struct.pack("<II", 200, 0) * nbytes)[:nbytes])
        assert backend.write(chunk).status is STORED
        with closing(HalfAnswers(INFINISTORE, struct.pack("<II", 200, nbytes))) as proxy:
            url, options = f"infinistore://127.0.0.1:{proxy.port}/", RemoteOptions(timeout=0.5)
            behind = InfiniStoreBackend(url, NAMESPACE, options)
            read = behind.read(chunk.key, memoryview(bytearray(nbytes)))
            assert isinstance(read.error, BackendUnavailable)
            proxy.go_on.set()
            eventually(lambda: behind.contains([new_key()]) == [False] and all(each.in_step for each in idle(behind)))
            for _ in range(5):
                assert behind.contains([new_key(), chunk.key, new_key()]) == [False, True, False]
            assert read_back(behind, chunk) == chunk.payload
            behind.close()

    def test_many_chunks_are_deleted_from_far_away(self, backend: InfiniStoreBackend) -> None:
        chunks = [chunk_of(100) for _ in range(60)]
        assert statuses(backend, chunks) == [STORED] * 60
        with self.behind(1.0) as (proxy, far):
            proxy.latency = 0.01
            far.delete([*(chunk.key for chunk in chunks), *(new_key() for _ in range(1000))])
            proxy.latency = 0.0
        assert not any(backend.contains([chunk.key for chunk in chunks]))

    @contextmanager
    def behind(self, timeout: float) -> Iterator[tuple[Proxy, InfiniStoreBackend]]:
        with closing(Proxy(INFINISTORE)) as proxy:
            options = RemoteOptions(timeout=timeout)
            with closing(InfiniStoreBackend(f"infinistore://127.0.0.1:{proxy.port}/", NAMESPACE, options)) as backend:
                yield proxy, backend

    @staticmethod
    def is_right(backend: Backend, chunk: Chunk) -> None:
        assert read_back(backend, chunk) == chunk.payload


class HalfAnswers(Proxy):
    """Keeps the second half of one answer back until it may `go_on`."""

    def __init__(self, target: int, answer: bytes) -> None:
        self.go_on = threading.Event()
        self._answer = answer
        super().__init__(target)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                half = len(self._answer) // 2 if data.startswith(self._answer) else 0
                if half:
                    sink.sendall(data[:half])
                    self.go_on.wait(60.0)
                sink.sendall(data[half:])
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
