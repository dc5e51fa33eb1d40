"""`SharedMemoryBackend`: files read into several pieces of memory at once, checked as any other read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.fileio import OpenFiles, ShortReadError, cut
from lmkv.backends.disk.shared_memory import SharedMemoryBackend
from lmkv.errors import BackendError, CorruptChunkError, UsageError
from lmkv.outcomes import ReadStatus
from lmkv.protocols import Chunk, InMemory
from tests.forked import files_open_in

KEYS = [bytes([number]) * 32 for number in range(4)]
LENGTH = 3 * 4096 + 100


def payload(number: int, length: int = LENGTH) -> bytes:
    return bytes((number * 31 + at * 7) % 251 for at in range(length))


@pytest.fixture
def backend(memory_path: Path) -> SharedMemoryBackend:
    found = SharedMemoryBackend(memory_path, bytes(32), segment_bytes=4096)
    for number, key in enumerate(KEYS):
        found.write(Chunk(key, memoryview(payload(number))))
    return found


def pieces(lengths: Sequence[int]) -> list[memoryview]:
    """Pieces of memory of these lengths, and one for the rest of a payload."""
    return [memoryview(bytearray(length)) for length in (*lengths, LENGTH - sum(lengths))]


def file_of(backend: LocalDiskBackend, key: bytes) -> Path:
    return next(Path(backend.path).rglob(f"{key.hex()}.kv1"))


@given(views=st.lists(st.binary(max_size=30), max_size=8), nbytes=st.integers(1, 20))
def test_cut_gives_all_bytes_in_pieces_of_that_size(views: list[bytes], nbytes: int) -> None:
    found = [b"".join(piece) for piece in cut(map(memoryview, views), nbytes)]
    whole = b"".join(views)
    assert found == [whole[at : at + nbytes] for at in range(0, len(whole), nbytes)]


@pytest.mark.parametrize("lengths", [[], [1], [4096, 4096], [5000, 0, 3], [4] * 3000])
def test_a_chunk_is_read_into_pieces_of_any_length(backend: SharedMemoryBackend, lengths: list[int]) -> None:
    into = [pieces(lengths) for _ in KEYS]
    results = backend.read_scattered(list(zip(KEYS, into, strict=True)))
    assert [result.status for result in results] == [ReadStatus.HIT] * len(KEYS)
    assert [b"".join(each) for each in into] == [payload(number) for number in range(len(KEYS))]


def test_it_ends_with_the_first_chunk_that_is_missing(backend: SharedMemoryBackend) -> None:
    backend.delete(KEYS[1:2])
    results = backend.read_scattered([(key, pieces([10])) for key in KEYS])
    assert [result.status for result in results] == [ReadStatus.HIT, ReadStatus.MISS]


def test_it_ends_with_the_first_chunk_that_is_damaged_and_removes_its_file(backend: SharedMemoryBackend) -> None:
    for number in (1, 2):
        file = file_of(backend, KEYS[number])
        data = bytearray(file.read_bytes())
        data[-4096 - 50] ^= 1
        file.write_bytes(data)
    results = backend.read_scattered([(key, pieces([10])) for key in KEYS])
    assert [result.status for result in results] == [ReadStatus.HIT, ReadStatus.FAILED]
    assert isinstance(results[1].error, CorruptChunkError)
    assert "segment 2 does not match its checksum" in str(results[1].error)
    assert backend.contains(KEYS) == [True, False, True, True]


def test_a_file_that_is_cut_off_while_it_is_open_is_damaged(backend: SharedMemoryBackend) -> None:
    """A mapped file would end the process here."""
    file = file_of(backend, KEYS[2])
    with backend._folder.place_of(KEYS[2]) as (folder, name), OpenFiles() as files:
        read = backend._files.opened(folder, name, KEYS[2], pieces([]), files)
        os.truncate(file, 6000)
        with pytest.raises(ShortReadError):
            read()


def test_memory_of_another_length_is_told(backend: SharedMemoryBackend) -> None:
    (result,) = backend.read_scattered([(KEYS[0], pieces([])[:0])])
    assert result.status is ReadStatus.FAILED
    assert type(result.error) is BackendError
    assert "the memory 0" in str(result.error)
    assert backend.contains(KEYS) == [True] * len(KEYS)
    with pytest.raises(UsageError):
        backend.read_scattered([(b"short", pieces([]))])


def test_all_that_was_opened_is_closed(backend: SharedMemoryBackend) -> None:
    file_of(backend, KEYS[2]).write_bytes(b"damaged")
    for lengths in ([10], [10, 20]):
        assert backend.read_scattered([(key, pieces(lengths)) for key in KEYS])[0].status is ReadStatus.HIT
        assert files_open_in(os.getpid(), Path(backend.path)) == []
    with file_of(backend, KEYS[0]).open("rb"):
        assert len(files_open_in(os.getpid(), Path(backend.path))) == 1, "what is open is found"


def test_no_folder_is_entered_by_a_link(backend: SharedMemoryBackend) -> None:
    """Not even to the right file: there is no folder then."""
    inner = file_of(backend, KEYS[1]).parent
    elsewhere = inner.rename(Path(backend.path) / "elsewhere")
    inner.symlink_to(elsewhere)
    results = backend.read_scattered([(key, pieces([10])) for key in KEYS])
    assert [result.status for result in results] == [ReadStatus.HIT, ReadStatus.MISS]
    assert (elsewhere / f"{KEYS[1].hex()}.kv1").exists()


@pytest.mark.parametrize("which", ["the namespace's folder", "the inner folder"])
def test_no_folder_is_entered_that_anybody_may_write_to(backend: SharedMemoryBackend, which: str) -> None:
    inner = file_of(backend, KEYS[0]).parent
    (inner if which == "the inner folder" else inner.parent).chmod(0o777)
    (result,) = backend.read_scattered([(KEYS[0], pieces([10])), (KEYS[1], pieces([10]))])
    assert result.status is ReadStatus.FAILED
    assert "chmod o-w" in str(result.error)


def test_its_place_crosses_processes(backend: SharedMemoryBackend) -> None:
    assert isinstance(backend, InMemory)
    assert not isinstance(LocalDiskBackend(backend.path, bytes(32)), InMemory)
    reader = SharedMemoryBackend.at(pickle.loads(pickle.dumps(backend.place)))
    into = pieces([100])
    assert reader.read_scattered([(KEYS[3], into)])[0].status is ReadStatus.HIT
    assert b"".join(into) == payload(3)


def test_nothing_is_read_in_place_with_an_authentication_key_or_from_a_disk(memory_path: Path) -> None:
    assert SharedMemoryBackend(memory_path, bytes(32), authentication_key=bytes(32)).place is None
    on_disk = SharedMemoryBackend(memory_path, bytes(32))
    on_disk.in_memory = False
    assert on_disk.place is None
