"""`BackendSuite`: tests of the contract of `Backend` and its optional methods, for pytest."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import pytest

from lmkv.errors import BackendError, ClosedError
from lmkv.protocols import Backend, Chunk, ChunkKey, Listed, ListsKeys, Read, ReadStatus, SizesChunks, WriteStatus

T = TypeVar("T")
HIT, MISS, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.FAILED
STORED, PRESENT = WriteStatus.STORED, WriteStatus.PRESENT
LIMIT = 30.0


class Persistent(Backend, ListsKeys, Protocol):
    """A backend that can list its chunks, including the chunks that an earlier backend has stored."""


def new_key() -> ChunkKey:
    return os.urandom(32)


def chunk_of(nbytes: int, key: ChunkKey = b"") -> Chunk:
    return Chunk(key or new_key(), memoryview(os.urandom(nbytes)), parent=new_key(), tokens=bytes(range(64)))


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Return the results of `work(0)` to `work(count - 1)`. Each call runs in its own thread; all start at the same
    moment.
    """
    barrier = threading.Barrier(count)

    def start(index: int) -> T:
        barrier.wait(LIMIT)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


class BackendSuite:
    """Tests of the contract of `Backend`. Inherit from `BackendSuite`, define `make`, and run pytest.

    Tests of an optional method are skipped if the backend does not have the method. No test stores more than 2 MB.

    Attributes
    ----------
    keeps
        False if the backend may drop chunks at any time.
    sizes
        Lengths of payloads, in bytes, that the backend must store.

    Examples
    --------
    >>> from lmkv.backends import LocalDiskBackend
    >>> class TestMyBackend(BackendSuite):
    ...     def make(self, folder):
    ...         return LocalDiskBackend(folder, bytes(32))
    """

    keeps: ClassVar[bool] = True
    sizes: ClassVar[Sequence[int]] = (1, 100, 4095, 4096, 4097, 16384, 70001)

    def make(self, folder: Path) -> Backend:
        """Return a new backend that uses `folder`. A persistent backend finds the chunks of an earlier backend in the
        same folder.
        """
        raise NotImplementedError

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = self.make(tmp_path)
        yield backend
        backend.close()

    @pytest.fixture
    def keeping(self, backend: Backend) -> Backend:
        if not self.keeps:
            pytest.skip("this backend keeps nothing")
        return backend

    @pytest.fixture
    def persistent(self, keeping: Backend) -> Persistent:
        backend: Persistent = _skip_unless(keeping, ListsKeys)
        return backend

    # -- every backend ------------------------------------------------------------------------------------

    def test_it_is_a_backend_with_a_name(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert backend.name

    def test_an_unknown_key_is_a_miss(self, backend: Backend) -> None:
        key = new_key()
        assert backend.contains([key]) == [False]
        assert backend.read(key, memoryview(bytearray(100))).status is MISS

    def test_empty_batches_have_empty_results(self, backend: Backend) -> None:
        assert backend.contains([]) == []
        backend.delete([])

    def test_a_write_says_the_truth(self, backend: Backend) -> None:
        chunk = chunk_of(100)
        written = backend.write(chunk)
        there = written.status in (STORED, PRESENT)
        assert backend.contains([chunk.key]) == [there]
        assert read_back(backend, chunk) == (chunk.payload if there else None)
        assert (written.status is WriteStatus.FAILED) == (written.error is not None)
        assert there or written.reason

    def test_deleting_is_idempotent(self, backend: Backend) -> None:
        chunk = chunk_of(100)
        backend.write(chunk)
        for _ in range(2):
            backend.delete([chunk.key, new_key(), chunk.key])
            assert backend.contains([chunk.key]) == [False]
            assert read_back(backend, chunk) is None

    def test_closing_is_idempotent_and_final(self, backend: Backend) -> None:
        backend.close()
        backend.close()
        chunk, buffer = chunk_of(100), memoryview(bytearray(100))
        calls: list[Callable[[], Any]] = [
            lambda: backend.contains([chunk.key]),
            lambda: backend.read(chunk.key, buffer),
            lambda: backend.write(chunk),
            lambda: backend.delete([chunk.key]),
        ]
        if isinstance(backend, ListsKeys):
            calls.append(lambda: list(backend.list_keys()))
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    # -- backends that keep their chunks ------------------------------------------------------------------

    def test_what_was_written_is_read(self, keeping: Backend) -> None:
        chunks = [chunk_of(nbytes) for nbytes in self.sizes]
        assert statuses(keeping, chunks) == [STORED] * len(chunks)
        assert keeping.contains([chunk.key for chunk in chunks]) == [True] * len(chunks)
        for chunk in chunks:
            assert read_back(keeping, chunk) == chunk.payload

    def test_any_memory_will_do(self, keeping: Backend) -> None:
        """Payloads and read buffers may have odd addresses. A read changes no byte outside its buffer."""
        for nbytes in self.sizes:
            memory = memoryview(bytearray(os.urandom(nbytes + 20)))
            chunk = Chunk(new_key(), memory[7 : 7 + nbytes])
            assert keeping.write(chunk).status is STORED
            room = memoryview(bytearray(b"\xa5" * (nbytes + 20)))
            assert keeping.read(chunk.key, room[3 : 3 + nbytes]).status is HIT
            assert room == b"\xa5" * 3 + bytes(chunk.payload) + b"\xa5" * 17

    def test_an_existing_key_stays_as_it_is(self, keeping: Backend) -> None:
        chunk = chunk_of(5000)
        other = chunk_of(5000, chunk.key)
        assert keeping.write(chunk).status is STORED
        assert keeping.write(other).status is PRESENT
        assert read_back(keeping, chunk) == chunk.payload

    def test_a_deleted_key_can_be_written_again(self, keeping: Backend) -> None:
        chunk = chunk_of(5000)
        other = chunk_of(4000, chunk.key)
        assert keeping.write(chunk).status is STORED
        keeping.delete([chunk.key])
        assert keeping.write(other).status is STORED
        assert read_back(keeping, other) == other.payload

    @pytest.mark.parametrize("difference", [-1, 1, -4096, 4096, 4096 * 3])
    def test_a_wrong_length_fails_and_harms_nothing(self, keeping: Backend, difference: int) -> None:
        chunk = chunk_of(5000)
        assert keeping.write(chunk).status is STORED
        read = keeping.read(chunk.key, memoryview(bytearray(5000 + difference)))
        assert read.status is FAILED
        assert isinstance(read.error, BackendError)
        assert read_back(keeping, chunk) == chunk.payload

    def test_answers_come_in_the_order_of_the_keys(self, keeping: Backend) -> None:
        chunks = [chunk_of(nbytes) for nbytes in self.sizes]
        statuses(keeping, chunks[::2])
        assert keeping.contains([chunk.key for chunk in chunks]) == [index % 2 == 0 for index in range(len(chunks))]

    def test_the_callers_memory_is_the_callers_again(self, keeping: Backend) -> None:
        memory = bytearray(os.urandom(9000))
        chunk, original = Chunk(new_key(), memoryview(memory)), bytes(memory)
        assert keeping.write(chunk).status is STORED
        memory[:] = bytes(9000)
        buffer = memoryview(bytearray(9000))
        assert keeping.read(chunk.key, buffer).status is HIT
        assert buffer == original
        buffer[:] = bytes(9000)
        assert read_back(keeping, chunk) == memoryview(original)

    def test_many_threads_at_once(self, keeping: Backend) -> None:
        chunks = [chunk_of(3000 + index) for index in range(12)]

        def work(index: int) -> None:
            chooser = random.Random(index)
            for _ in range(25):
                chunk = chooser.choice(chunks)
                action = chooser.random()
                if action < 0.4:
                    assert keeping.write(chunk).status in (STORED, PRESENT)
                elif action < 0.5:
                    keeping.delete([chunk.key])
                else:
                    assert read_back(keeping, chunk) in (None, chunk.payload)

        in_threads(6, work)

    def test_one_of_many_writers_of_a_key_stores_it(self, keeping: Backend) -> None:
        for _ in range(5):
            chunk = chunk_of(50_000)

            def write(_: int, chunk: Chunk = chunk) -> WriteStatus:
                return keeping.write(chunk).status

            results = in_threads(4, write)
            assert sorted(result.value for result in results) == ["present"] * 3 + ["stored"]
            assert read_back(keeping, chunk) == chunk.payload

    # -- capabilities -------------------------------------------------------------------------------------

    def test_what_is_listed_is_what_is_there(self, persistent: Persistent) -> None:
        chunks = [chunk_of(nbytes) for nbytes in self.sizes]
        statuses(persistent, chunks)
        persistent.delete([chunks[0].key])
        assert listed(persistent) == sizes_of(persistent, chunks[1:])

    def test_a_new_backend_finds_what_the_old_one_kept(self, persistent: Persistent, tmp_path: Path) -> None:
        chunks = [chunk_of(nbytes) for nbytes in self.sizes]
        statuses(persistent, chunks)
        persistent.close()
        again: Persistent = _skip_unless(self.make(tmp_path), ListsKeys)
        try:
            assert listed(again) == sizes_of(again, chunks)
            for chunk in chunks:
                assert read_back(again, chunk) == chunk.payload
        finally:
            again.close()

    def test_chunks_take_at_least_their_payload(self, backend: Backend) -> None:
        if not isinstance(backend, SizesChunks):
            pytest.skip("not SizesChunks")
        taken = [backend.stored_bytes(nbytes) for nbytes in sorted(self.sizes)]
        assert taken == sorted(taken)
        assert all(got >= nbytes for got, nbytes in zip(taken, sorted(self.sizes), strict=True))


def statuses(backend: Backend, chunks: Sequence[Chunk]) -> list[WriteStatus]:
    """Write the chunks one after the other, and return the status of each write."""
    return [backend.write(chunk).status for chunk in chunks]


def read_back(backend: Backend, chunk: Chunk) -> memoryview | None:
    """Return the payload that the backend reads for the chunk, or None for a miss. The test fails if the read fails."""
    buffer = memoryview(bytearray(len(chunk.payload)))
    read = backend.read(chunk.key, buffer)
    assert isinstance(read, Read)
    assert read.status is not FAILED, read.error
    return buffer if read.status is HIT else None


def listed(backend: ListsKeys) -> dict[ChunkKey, int]:
    found: list[Listed] = [item for batch in backend.list_keys() for item in batch]
    assert len({item.key for item in found}) == len(found)
    return {item.key: item.nbytes for item in found}


def sizes_of(backend: Backend, chunks: Sequence[Chunk]) -> dict[ChunkKey, int]:
    """Return how many bytes the backend should need for each chunk: the payload, and any header or padding."""
    if isinstance(backend, SizesChunks):
        return {chunk.key: backend.stored_bytes(len(chunk.payload)) for chunk in chunks}
    return {chunk.key: len(chunk.payload) for chunk in chunks}


def _skip_unless(backend: Backend, capability: type) -> Any:
    """Return the backend if it has the optional methods of the protocol `capability`; otherwise skip the test."""
    if not isinstance(backend, capability):
        pytest.skip(f"not {capability.__name__}")
    return backend
