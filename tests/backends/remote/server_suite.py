"""Tests of stores that lmkv cannot trust with its own process or memory, beside the public suite."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmkv.backends.remote.base import RemoteOptions
from lmkv.errors import BackendUnavailable, ConfigError, CorruptChunkError
from lmkv.protocols import Backend, Chunk, ListsKeys, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import (
    BackendSuite,
    chunk_of,
    in_threads,
    listed,
    new_key,
    read_back,
    sizes_of,
    statuses,
)
from tests.backends.remote.own_network import Server
from tests.kit import eventually, raised

NAMESPACE = bytes(range(32))
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
GIVEN_UP = 10.0
"""Seconds that a call with a limit of one takes at most, however busy the machine."""


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "cut": lambda value, other: value[:-5],
    "longer": lambda value, other: value + b"more",
    "another bit of the header": lambda value, other: flipped(value, 100),
    "another bit of the payload": lambda value, other: flipped(value, 9000),
    "foreign": lambda value, other: b"somebody else's",
    "another chunk's": lambda value, other: other,
}
"""What may lie in the place of a value, made of it and of that of another chunk."""


def assert_damage_fails(
    backend: Any,
    get: Callable[[Chunk], bytes],
    put: Callable[[Chunk, bytes], object],
    damages: dict[str, Callable[[bytes, bytes], bytes]],
) -> None:
    """Each value that is not the chunk's fails, and can be replaced. `get` and `put`: past the backend."""
    for what, damage in damages.items():
        chunk, sound = chunk_of(9100), chunk_of(9100)
        assert statuses(backend, [chunk, sound]) == [STORED] * 2, what
        put(chunk, damage(get(chunk), get(sound)))
        assert_fails_and_can_be_replaced(backend, chunk, sound)


def assert_apart(backend: Any, others: list[Any]) -> None:
    """The others, which are closed, have other chunks under the same key, and list them alone."""
    chunk = chunk_of(500)
    assert backend.write(chunk).status is STORED
    for other in others:
        assert other.contains([chunk.key]) == [False]
        mine = chunk_of(600, chunk.key)
        assert other.write(mine).status is STORED
        assert not isinstance(other, ListsKeys) or listed(other) == sizes_of(other, [mine])
        other.close()
    assert read_back(backend, chunk) == chunk.payload
    assert not isinstance(backend, ListsKeys) or listed(backend) == sizes_of(backend, [chunk])


class StoreSuite:
    """Tests of names, of other engines and of the URL. Define `kind` and `url`."""

    kind: ClassVar[type[Any]]
    url: str

    @pytest.fixture
    def backend(self) -> Iterator[Any]:
        backend = self.backend_of()
        yield backend
        backend.close()

    def backend_of(self, query: str = "", **options: Any) -> Any:
        namespace = options.pop("namespace", NAMESPACE)
        return self.kind(self.url + query, namespace, RemoteOptions(**{"timeout": 10.0, **options}))

    def test_more_names_than_one_message_takes(self, backend: Any) -> None:
        chunk = chunk_of(100)
        backend.write(chunk)
        keys = [new_key() for _ in range(1500)]
        keys[777] = chunk.key
        assert [index for index, found in enumerate(backend.contains(keys)) if found] == [777]

    def test_two_engines_see_each_others_chunks(self, backend: Any) -> None:
        other = self.backend_of()
        for one, two in ((backend, other), (other, backend)):
            chunk = chunk_of(70_001)
            assert one.write(chunk).status is STORED
            assert two.contains([chunk.key]) == [True]
            assert read_back(two, chunk) == chunk.payload
            assert two.write(chunk).status is PRESENT
            two.delete([chunk.key])
            assert one.contains([chunk.key]) == [False]
        other.close()

    def test_other_namespaces_and_prefixes_are_other_chunks(self, backend: Any) -> None:
        assert_apart(backend, [self.backend_of(namespace=bytes(32)), self.backend_of(prefix="team*[a]:")])

    def test_a_fork_of_the_engine_asks_nothing_and_disturbs_nothing(self, backend: Any) -> None:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        child = os.fork()
        if not child:
            with suppress(BackendUnavailable):
                backend.contains([chunk.key])
                os._exit(1)
            backend.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert read_back(backend, chunk) == chunk.payload

    def test_a_bad_url_is_refused(self) -> None:
        scheme = self.url.partition("://")[0]
        for at in ("host", "host:port", "host:1/?sgement_size=1", "host:1/?clients=0", "host:1/?clients=x", ":1"):
            told = raised(ConfigError, "host", self.kind, f"{scheme}://cache:hunter2@{at}", NAMESPACE)
            assert "hunter2" not in told

    def test_what_it_does_not_have_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        self.backend_of(username="cache", password="hunter2", ttl=10).close()
        assert "does not support username, password, ttl" in caplog.text
        assert "hunter2" not in caplog.text


class ServerSuite(StoreSuite, BackendSuite, ABC):
    """Define `server`, too, the program that the store is lost with, and how a test changes its values."""

    server: Server

    def make(self, folder: Path) -> Backend:
        backend: Backend = self.backend_of()
        return backend

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Any]:
        backend = self.make(tmp_path)
        yield backend
        backend.close()

    def test_a_value_that_is_not_the_chunk_fails_and_can_be_replaced(self, backend: Any) -> None:
        assert_damage_fails(
            backend,
            lambda chunk: self.value_of(backend, chunk),
            lambda chunk, value: self.put(backend, backend.name_of(chunk.key), value),
            {**DAMAGES, "beyond the memory": lambda value, other: value + bytes(17 << 20)},
        )

    @abstractmethod
    def value_of(self, backend: Any, chunk: Chunk) -> bytes:
        """The value in the store."""

    @abstractmethod
    def put(self, backend: Any, name: str, value: bytes) -> None:
        """Put a value into the store, whatever is there."""

    def test_a_server_that_is_killed_is_unavailable_until_it_is_back(self, backend: Any) -> None:
        chunk = chunk_of(100)
        assert backend.write(chunk).status is STORED
        self.server.kill()
        try:
            assert_unavailable(backend, chunk)
        finally:
            self.server.start()
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        assert read_back(backend, chunk) == chunk.payload

    def test_a_server_that_dies_while_values_are_read_serves_no_wrong_byte(self) -> None:
        """The process with the client may die of it; this one does not."""
        backend = self.backend_of(timeout=2.0)
        chunks = [chunk_of(1 << 20) for _ in range(8)]
        eventually(lambda: set(statuses(backend, chunks)) == {PRESENT})
        killed, reads = [], []

        def work(index: int) -> None:
            if index == 0:
                try:
                    eventually(lambda: len(reads) >= 8, "values are read")
                    self.server.kill()
                finally:
                    killed.append(True)
            while not killed:
                for chunk in chunks[index:]:
                    into = memoryview(bytearray(len(chunk.payload)))
                    read = backend.read(chunk.key, into)
                    reads.append(read)
                    assert read.status is not ReadStatus.HIT or into == chunk.payload
                    if read.status is ReadStatus.FAILED:
                        assert isinstance(read.error, BackendUnavailable), read.error

        try:
            in_threads(4, work)
        finally:
            self.server.start()
        eventually(lambda: backend.write(chunks[0]).status in (STORED, PRESENT))
        assert read_back(backend, chunks[0]) == chunks[0].payload
        backend.close()

    def test_a_server_that_does_not_answer_is_given_up_in_time(self) -> None:
        backend, chunk = self.backend_of(timeout=1.0), chunk_of(100)
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        self.server.pause()
        try:
            for _ in range(2):  # with a connection, and without one
                started = time.monotonic()
                assert_unavailable(backend, chunk)
                assert time.monotonic() - started < 3 * GIVEN_UP
        finally:
            self.server.resume()
        eventually(lambda: backend.write(chunk).status in (STORED, PRESENT))
        # It answers again, if not yet each time within the second that is left to it.
        eventually(lambda: can_read(backend, chunk))
        assert read_back(backend, chunk) == chunk.payload
        backend.close()

    def test_nobody_listens(self) -> None:
        scheme = self.url.partition("://")[0]
        backend = self.kind(f"{scheme}://127.0.0.1:9/", NAMESPACE, RemoteOptions(timeout=5.0))
        started = time.monotonic()
        assert_unavailable(backend, chunk_of(100))
        assert time.monotonic() - started < 3 * GIVEN_UP
        backend.close()


def can_read(backend: Any, chunk: Chunk) -> bool:
    read = backend.read(chunk.key, memoryview(bytearray(len(chunk.payload))))
    return read.status is not ReadStatus.FAILED


def assert_unavailable(backend: Any, chunk: Chunk) -> list[str]:
    """Assert that every call says so; returns the errors' texts."""
    with pytest.raises(BackendUnavailable) as asked:
        backend.contains([chunk.key])
    read = backend.read(chunk.key, memoryview(bytearray(len(chunk.payload))))
    assert isinstance(read.error, BackendUnavailable)
    written = backend.write(chunk_of(100))
    assert isinstance(written.error, BackendUnavailable)
    return [repr(asked.value), str(read.error), str(written.error)]


def assert_fails_and_can_be_replaced(backend: Any, chunk: Chunk, sound: Chunk) -> None:
    """The chunk's value is not the chunk's, and fails; that of `sound` is served."""
    read = backend.read(chunk.key, memoryview(bytearray(len(chunk.payload))))
    assert read.status is ReadStatus.FAILED
    assert isinstance(read.error, CorruptChunkError)
    assert read_back(backend, sound) == sound.payload, "the connection is clean again"
    backend.delete([chunk.key])
    assert backend.write(chunk).status is STORED
    assert read_back(backend, chunk) == chunk.payload
