"""A disk that lies, fills up, goes away and comes back: no wrong bytes are served, nothing is left over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend, chunkfile
from lmkv.backends.disk.fileio import HUGE
from lmkv.errors import BackendUnavailable, CorruptChunkError, NoSpaceError
from lmkv.medium import NAME as MARK
from lmkv.protocols import Chunk, Read, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, new_key, read_back, statuses
from tests.backends.disk.test_any_bytes import failing
from tests.kit import mounted_tmpfs, possible, raised

NAMESPACE = bytes(range(32))
STORED, FAILED = WriteStatus.STORED, WriteStatus.FAILED


def open_files() -> set[str]:
    """Files and folders that this process has open, without the one that lists them."""
    names: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {name for name in names if " /" in name and " /proc/" not in name}


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = open_files()
    yield
    # Files that other modules left open may be collected meanwhile.
    assert open_files() <= before


def files_of(backend: LocalDiskBackend) -> list[Path]:
    """Everything below the backend's folder that is no folder, temporaries and hidden files too, but its mark."""
    return sorted(path for path in Path(backend.path).rglob("*") if not path.is_dir() and path.name != MARK)


def try_read(backend: LocalDiskBackend, key: bytes, nbytes: int = 5000) -> tuple[Read, memoryview]:
    buffer = memoryview(bytearray(nbytes))
    return backend.read(key, buffer), buffer


@pytest.fixture(params=["off", "auto", "pieces"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> LocalDiskBackend:
    if request.param == "pieces":
        request.getfixturevalue("in_pieces")
    return LocalDiskBackend(tmp_path, NAMESPACE, direct="auto" if request.param == "auto" else "off")


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two pages are written and read as those of many megabytes are."""
    monkeypatch.setattr(chunkfile, "PIECE", 4096)
    monkeypatch.setattr(chunkfile, "SMALL", 0)


@pytest.mark.parametrize("huge", [True, False], ids=["through huge pages", "at once"])
@pytest.mark.parametrize("nbytes", [HUGE, HUGE + 4096, 2 * HUGE, 2 * HUGE + 5000])
def test_large_pieces_are_read_right_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool, nbytes: int
) -> None:
    monkeypatch.setattr(chunkfile, "has_huge_pages", lambda: huge)
    backend, payload = LocalDiskBackend(tmp_path, NAMESPACE), memoryview(os.urandom(nbytes))
    chunk, buffer = Chunk(new_key(), payload), memoryview(mmap.mmap(-1, nbytes))
    backend.write(chunk)
    assert backend.read(chunk.key, buffer).status is ReadStatus.HIT
    assert buffer == payload
    staged = "piece" in backend._files._scratch._pieces
    assert staged == (huge and backend.direct_io)
    (path,) = files_of(backend)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 4096)
        file.write(bytes([payload[-(nbytes % 4096 or 4096)] ^ 1]))
    buffer[:] = bytes(nbytes)
    read = backend.read(chunk.key, buffer)
    assert isinstance(read.error, CorruptChunkError)
    if staged and nbytes % HUGE == 0:
        assert buffer[-HUGE:] == bytes(HUGE), "a piece is verified before it is copied"


# -- every system call may fail ----------------------------------------------------------------------------

WRITE_CALLS = ["open", "pwritev", "fdatasync", "link", "fsync"]
ERRNOS: dict[int, type[Exception]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), NoSpaceError),
    **dict.fromkeys((errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM), BackendUnavailable),
}


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", WRITE_CALLS)
def test_a_failing_write_leaves_nothing(tmp_path: Path, call: str, code: int) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE, sync="full")
    before, chunk = chunk_of(5000), chunk_of(5000)
    backend.write(before)
    kept = files_of(backend)
    for after in range(4):
        with failing(call, code, after):
            written = backend.write(chunk)
        if written.status is STORED:
            backend.delete([chunk.key])
            continue
        assert written.status is FAILED
        assert type(written.error) is ERRNOS[code]
        assert written.error.key == chunk.key.hex()
        assert files_of(backend) == kept
    assert backend.write(chunk).status is STORED
    assert read_back(backend, before) == before.payload
    assert read_back(backend, chunk) == chunk.payload


@pytest.mark.parametrize("sync", ["none", "data"])
def test_a_medium_that_is_full_halfway_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Any) -> None:
    """A short write, then ENOSPC: what a kernel does at the end of a disk."""
    backend = LocalDiskBackend(tmp_path, NAMESPACE, sync=sync, direct="off")
    pwritev = os.pwritev
    room = 6000

    def fill(fd: int, views: list[memoryview], at: int) -> int:
        if at >= room:
            raise OSError(errno.ENOSPC, "full")
        return pwritev(fd, [views[0][: room - at]], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fill)
        written = backend.write(chunk_of(9000))
    assert isinstance(written.error, NoSpaceError)
    assert files_of(backend) == []


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_chunk_on_a_bad_sector_is_replaced_when_it_is_stored_again(backend: LocalDiskBackend, call: str) -> None:
    """It would block its next store for ever. Until then it stays: the error may have been one of the moment."""
    chunk = chunk_of(5000)
    backend.write(chunk)
    (path,) = files_of(backend)
    with failing(call, errno.EIO):
        read, _ = try_read(backend, chunk.key)
    assert isinstance(read.error, BackendUnavailable)
    before = path.stat()
    backend.reserve_bytes(before.st_size)
    with failing("pwritev", errno.EIO):
        assert backend.write(chunk).status is FAILED
    assert path.stat().st_ino == before.st_ino
    backend.reserve_bytes(before.st_size)
    assert statuses(backend, [chunk, chunk]) == [STORED, WriteStatus.PRESENT]
    assert path.stat().st_ino != before.st_ino
    assert read_back(backend, chunk) == chunk.payload
    assert backend.reserve_bytes(0) == before.st_size, "what it replaced takes nothing any more"
    backend.close()
    assert files_of(backend) == [Path(backend.path) / ".lmkv-use", path]


def test_one_bad_key_of_a_batch_is_its_own_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    chunks = [chunk_of(100) for _ in range(4)]
    real = os.link

    def link(source: str, path: str, **options: Any) -> None:
        if chunks[1].key.hex() in path:
            raise OSError(errno.EIO, "bad")
        real(source, path, **options)

    monkeypatch.setattr(os, "link", link)
    assert statuses(backend, chunks) == [STORED, FAILED, STORED, STORED]


def test_deleting_goes_on_after_a_failure_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    chunks = [chunk_of(100) for _ in range(3)]
    statuses(backend, chunks)
    real = os.unlink

    def unlink(path: str, **options: Any) -> None:
        if chunks[0].key.hex() in path:
            raise OSError(errno.EROFS, "read-only")
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    raised(NoSpaceError, "", backend.delete, [chunk.key for chunk in chunks])
    assert backend.contains([chunk.key for chunk in chunks]) == [True, False, False]


# -- real media --------------------------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, mounted for real; needs root."""
    folder = tmp_path / "medium"
    folder.mkdir()
    if request.param == "tmpfs":
        with mounted_tmpfs(folder, "size=8m,nr_inodes=400"):
            yield folder
        return
    image = tmp_path / "image"
    possible("truncate", "-s", "8m", image)
    possible("mkfs.ext4", "-q", "-m", "0", "-N", "800", image)
    possible("mount", "-o", "loop", image, folder)
    yield folder
    subprocess.run(["umount", "-l", folder], check=False, timeout=60)


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_filled_to_the_brim(medium: Path, direct: Any) -> None:
    """Four threads fill it: what says STORED is there, the rest left nothing, and room is used again."""
    backend = LocalDiskBackend(medium / "kv", NAMESPACE, direct=direct)
    chunks = [chunk_of(200_000 + index) for index in range(60)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(backend.write, chunks))
    stored = [chunk for chunk, result in zip(chunks, results, strict=True) if result.status is STORED]
    assert 20 < len(stored) < 45
    for result in results:
        assert result.status is STORED or isinstance(result.error, NoSpaceError)
    assert listed(backend) == {chunk.key: backend.stored_bytes(len(chunk.payload)) for chunk in stored}
    assert len(files_of(backend)) == len(stored)
    for chunk in stored:
        assert read_back(backend, chunk) == chunk.payload
    backend.delete([chunk.key for chunk in stored[:5]])
    lost = [chunk for chunk in chunks if chunk not in stored][:3]
    assert statuses(backend, lost) == [STORED] * 3


def test_no_inodes_left(medium: Path) -> None:
    """Small files use up the inodes first, folders among them."""
    backend = LocalDiskBackend(medium / "kv", NAMESPACE)
    chunks = [chunk_of(10) for _ in range(900)]
    results = statuses(backend, chunks)
    stored = [chunk for chunk, result in zip(chunks, results, strict=True) if result is STORED]
    assert 50 < len(stored) < 900
    assert len(files_of(backend)) == len(stored) == len(listed(backend))


def test_min_free_keeps_its_distance_from_the_brim(medium: Path) -> None:
    backend = LocalDiskBackend(medium / "kv", NAMESPACE, min_free=3 << 20)
    results = [backend.write(chunk_of(200_000)) for _ in range(40)]
    assert {result.status for result in results} == {STORED, WriteStatus.REJECTED}
    stats = os.statvfs(medium)
    assert stats.f_bavail * stats.f_frsize >= (3 << 20) - 300_000


def test_a_read_only_remount_and_back(medium: Path) -> None:
    backend = LocalDiskBackend(medium / "kv", NAMESPACE)
    old, new = chunk_of(5000), chunk_of(5000)
    backend.write(old)
    possible("mount", "-o", "remount,ro", medium)
    written = backend.write(new)
    assert isinstance(written.error, NoSpaceError)
    raised(NoSpaceError, "", backend.delete, [old.key])
    assert read_back(backend, old) == old.payload
    assert list(listed(backend)) == [old.key]
    reader = LocalDiskBackend(medium / "kv", NAMESPACE)
    assert read_back(reader, old) == old.payload
    possible("mount", "-o", "remount,rw", medium)
    assert backend.write(new).status is STORED
    backend.delete([old.key])
    assert list(listed(reader)) == [new.key]


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root without its powers: what it may not do now is refused for real."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    backend, chunk = LocalDiskBackend(tmp_path / "kv", NAMESPACE), chunk_of(5000)
    backend.write(chunk)
    with as_nobody():
        written = backend.write(chunk_of(5000))
        read, _ = try_read(backend, chunk.key)
        raised(BackendUnavailable, "", lambda: list(backend.list_keys()))
        raised(BackendUnavailable, "", backend.delete, [chunk.key])
        raised(BackendUnavailable, "", LocalDiskBackend, tmp_path / "another", NAMESPACE)
    assert isinstance(written.error, BackendUnavailable)
    assert isinstance(read.error, BackendUnavailable)
    assert backend.write(chunk_of(5000)).status is STORED
    assert read_back(backend, chunk) == chunk.payload


def test_a_folder_that_was_made_immutable(tmp_path: Path) -> None:
    backend = LocalDiskBackend(tmp_path / "kv", NAMESPACE)
    chunk, more = chunk_of(5000), new_key()
    backend.write(chunk)
    (path,) = files_of(backend)
    beside = chunk_of(5000, chunk.key[:1] + more[1:])
    possible("chattr", "+i", path.parent)
    try:
        written = backend.write(beside)
        assert isinstance(written.error, BackendUnavailable)
        assert read_back(backend, chunk) == chunk.payload
    finally:
        possible("chattr", "-i", path.parent)
    assert backend.write(beside).status is STORED


# -- temporaries -------------------------------------------------------------------------------------------


def test_only_abandoned_temporaries_are_swept(tmp_path: Path) -> None:
    backend, chunk = LocalDiskBackend(tmp_path, NAMESPACE), chunk_of(100)
    backend.write(chunk)
    folder = files_of(backend)[0].parent
    dead, live, other_namespace = (folder / ".1-aa.tmp", folder / f".{os.getpid()}-bb.tmp", folder / "notes.tmp")
    probe = folder.parent / ".1-cc.tmp"
    for path in (dead, live, other_namespace, probe):
        path.write_bytes(b"half a chu")
    with live.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert list(listed(backend)) == [chunk.key]
        assert not dead.exists()
        assert not probe.exists()
        assert live.exists()
        assert other_namespace.exists()
    listed(backend)
    assert not live.exists()


def test_a_temporary_that_was_swept_by_mistake_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between making a file and locking it: another process sweeps, the writer starts over."""
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    backend.write(chunk_of(100))
    real = os.link
    swept: list[str] = []

    def link(source: str, path: str, **options: Any) -> None:
        if not swept:
            swept.append(source)
            os.unlink(source, dir_fd=options["src_dir_fd"])
        real(source, path, **options)

    monkeypatch.setattr(os, "link", link)
    chunk = chunk_of(5000)
    assert backend.write(chunk).status is STORED
    assert read_back(backend, chunk) == chunk.payload
    assert len(swept) == 1


def test_failing_again_and_again_leaks_nothing(medium: Path) -> None:
    """Descriptors, memory of the medium, and files, on a disk that is full all the time."""
    backend = LocalDiskBackend(medium / "kv", NAMESPACE)
    while backend.write(chunk_of(400_000)).status is STORED:
        pass
    kept, free = files_of(backend), os.statvfs(medium).f_bfree
    chunk = chunk_of(4_000_000)
    for _ in range(300):
        assert isinstance(backend.write(chunk).error, NoSpaceError)
    assert files_of(backend) == kept
    assert os.statvfs(medium).f_bfree >= free - 64
