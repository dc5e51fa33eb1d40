"""A disk that lies, fills up, goes away and comes back: no wrong bytes are served, nothing is left over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import chunkfile
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.fileio import HUGE
from lmkv.errors import BackendUnavailable, CorruptChunkError, NoSpaceError
from lmkv.medium import NAME as MARK
from lmkv.protocols import Chunk, Read, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, new_key, read_back, statuses
from tests.kit import mounted_tmpfs, raised

NAMESPACE = bytes(range(32))
PAYLOAD = os.urandom(5000)
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


def try_read(backend: LocalDiskBackend, key: bytes, nbytes: int = len(PAYLOAD)) -> tuple[Read, memoryview]:
    buffer = memoryview(bytearray(nbytes))
    return backend.read(key, buffer), buffer


class Specimen:
    """One stored chunk whose file can be broken and made whole again.

    `places`: where it is broken. Every byte if `thorough`: the ways to read differ in what they read at once,
    not in how they check it, so that for the others every 31st will do, and those around the edges.
    """

    def __init__(self, folder: Path, direct: Any, *, thorough: bool = False) -> None:
        self.backend = LocalDiskBackend(folder, NAMESPACE, direct=direct, segment_bytes=4096)
        self.key = new_key()
        self.backend.write(Chunk(self.key, memoryview(PAYLOAD), new_key(), bytes(400)))
        (self.path,) = files_of(self.backend)
        self.good = self.path.read_bytes()
        self.payload_end = 4096 + len(PAYLOAD)
        edges = [0, 4096, 8192, self.payload_end, len(self.good)]
        around = {edge + off for edge in edges for off in range(-3, 3)}
        everywhere = range(len(self.good))
        self.places = [at for at in everywhere if thorough or at % 31 == 0 or at in around]

    def check(self, data: bytes, *, must_fail: bool) -> None:
        """Put `data` in the file's place: it is served right, or refused as corrupt and set aside."""
        self.path.write_bytes(data)
        read, buffer = try_read(self.backend, self.key)
        if read.status is ReadStatus.HIT:
            assert buffer == PAYLOAD
            assert not must_fail
        else:
            assert read.status is ReadStatus.FAILED
            assert isinstance(read.error, CorruptChunkError)
            assert not self.path.exists()


@pytest.fixture(params=["off", "auto", "pieces"])
def specimen(request: pytest.FixtureRequest, tmp_path: Path, memory_path: Path) -> Specimen:
    if request.param == "off":
        return Specimen(memory_path, "off", thorough=True)
    if request.param == "pieces":
        request.getfixturevalue("in_pieces")
    return Specimen(tmp_path, "auto" if request.param == "auto" else "off")


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


# -- bytes that are not what they were ---------------------------------------------------------------------


def damages(good: bytes, places: list[int], payload_end: int) -> Iterator[tuple[bytes, bool]]:
    """What may lie in the file's place, and whether it must fail: only padding may be another and be served."""
    for at in places:
        yield good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :], at < payload_end
        yield good[:at], True
    for more in (1, 511, 4095, 4096, 4097, 8192, 1 << 20):
        yield good + good[:1] * more, True
    # A power cut leaves an unsynced file with its full length and any of its pages zero.
    pages = [good[at : at + 4096] for at in range(0, len(good), 4096)]
    for lost in range(1, 2 ** len(pages)):
        yield b"".join(bytes(4096) if lost >> index & 1 else page for index, page in enumerate(pages)), True


def test_any_damage_of_a_file_is_refused_or_harmless(specimen: Specimen) -> None:
    for data, must_fail in damages(specimen.good, specimen.places, specimen.payload_end):
        specimen.check(data, must_fail=must_fail)


def test_a_broken_chunk_that_cannot_be_set_aside_is_stored_again_too(tmp_path: Path) -> None:
    """As on a full disk, which takes no folder: it is removed."""
    obstacles: list[Callable[[Path], object]] = [Path.touch, lambda away: away.symlink_to(tmp_path), Path.mkdir]
    backend, chunk = LocalDiskBackend(tmp_path, NAMESPACE), chunk_of(5000)
    away = tmp_path / NAMESPACE.hex() / "quarantine"
    for put in obstacles:
        put(away)
        if put == Path.mkdir:
            away.chmod(0o777)
        backend.write(chunk)
        path = next(tmp_path.rglob("*.kv1"))
        path.write_bytes(path.read_bytes()[:-1])
        read, _ = try_read(backend, chunk.key)
        assert isinstance(read.error, CorruptChunkError)
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload
        away.rmdir() if put == Path.mkdir else away.unlink()


def test_what_can_be_neither_set_aside_nor_removed_is_no_chunk_that_is_present(tmp_path: Path) -> None:
    backend, chunk = LocalDiskBackend(tmp_path, NAMESPACE), chunk_of(5000)
    backend.write(chunk)
    (path,) = files_of(backend)
    path.unlink()
    (tmp_path / NAMESPACE.hex() / "quarantine").touch()
    (path / "full").mkdir(parents=True)
    written = backend.write(chunk)
    assert written.status is WriteStatus.FAILED
    (path / "full").rmdir()
    path.rmdir()
    assert backend.write(chunk).status is STORED


# -- every system call may fail ----------------------------------------------------------------------------

WRITE_CALLS = ["open", "pwritev", "fdatasync", "link", "fsync"]
ERRNOS: dict[int, type[Exception]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS), NoSpaceError),
    **dict.fromkeys((errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOMEM), BackendUnavailable),
}


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, after: int = 0) -> Iterator[None]:
    """`os.<name>` fails with `code`, once `after` calls went well."""
    real: Callable[..., Any] = getattr(os, name)
    calls = iter(range(1 << 30))

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) < after:
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", WRITE_CALLS)
def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE, sync="full")
    before, chunk = chunk_of(5000), chunk_of(5000)
    backend.write(before)
    kept = files_of(backend)
    for after in range(4):
        with failing(monkeypatch, call, code, after):
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


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_a_failing_read_harms_no_file(specimen: Specimen, monkeypatch: Any, call: str, code: int) -> None:
    with failing(monkeypatch, call, code):
        read, _ = try_read(specimen.backend, specimen.key)
    assert read.status is ReadStatus.FAILED
    assert not isinstance(read.error, CorruptChunkError)
    assert try_read(specimen.backend, specimen.key)[0].status is ReadStatus.HIT


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_chunk_on_a_bad_sector_is_replaced_when_it_is_stored_again(
    specimen: Specimen, monkeypatch: Any, call: str
) -> None:
    """It would block its next store for ever. Until then it stays: the error may have been one of the moment."""
    with failing(monkeypatch, call, errno.EIO):
        read, _ = try_read(specimen.backend, specimen.key)
    assert isinstance(read.error, BackendUnavailable)
    before = specimen.path.stat()
    specimen.backend.reserve_bytes(before.st_size)
    chunk = Chunk(specimen.key, memoryview(PAYLOAD))
    with failing(monkeypatch, "pwritev", errno.EIO):
        assert specimen.backend.write(chunk).status is FAILED
    assert specimen.path.stat().st_ino == before.st_ino
    specimen.backend.reserve_bytes(before.st_size)
    assert statuses(specimen.backend, [chunk, chunk]) == [STORED, WriteStatus.PRESENT]
    assert specimen.path.stat().st_ino != before.st_ino
    assert read_back(specimen.backend, chunk) == PAYLOAD
    assert specimen.backend.reserve_bytes(0) == before.st_size, "what it replaced takes nothing any more"
    specimen.backend.close()
    assert files_of(specimen.backend) == [Path(specimen.backend.path) / ".lmkv-use", specimen.path]


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


def run(*command: object) -> None:
    words = [str(part) for part in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"not possible here: {' '.join(words)}: {done.stderr.strip()}")


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
    run("truncate", "-s", "8m", image)
    run("mkfs.ext4", "-q", "-m", "0", "-N", "800", image)
    run("mount", "-o", "loop", image, folder)
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
    run("mount", "-o", "remount,ro", medium)
    written = backend.write(new)
    assert isinstance(written.error, NoSpaceError)
    raised(NoSpaceError, "", backend.delete, [old.key])
    assert read_back(backend, old) == old.payload
    assert list(listed(backend)) == [old.key]
    reader = LocalDiskBackend(medium / "kv", NAMESPACE)
    assert read_back(reader, old) == old.payload
    run("mount", "-o", "remount,rw", medium)
    assert backend.write(new).status is STORED
    backend.delete([old.key])
    assert list(listed(reader)) == [new.key]


def test_a_removed_folder_and_its_return(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    backend, chunk = LocalDiskBackend(root, NAMESPACE), chunk_of(5000)
    backend.write(chunk)
    shutil.rmtree(root)
    assert isinstance(backend.write(chunk).error, BackendUnavailable)
    assert read_back(backend, chunk) is None
    assert backend.contains([chunk.key]) == [False]
    assert listed(backend) == {}
    backend.delete([chunk.key])
    assert not root.exists()
    root.mkdir()
    # What is lmkv's is made again at once.
    for folder in (root / NAMESPACE.hex(), root / NAMESPACE.hex() / chunk.key[:1].hex()):
        assert backend.write(chunk).status is STORED
        assert read_back(backend, chunk) == chunk.payload
        shutil.rmtree(folder)
    assert backend.write(chunk).status is STORED


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
    run("chattr", "+i", path.parent)
    try:
        written = backend.write(beside)
        assert isinstance(written.error, BackendUnavailable)
        assert read_back(backend, chunk) == chunk.payload
    finally:
        run("chattr", "-i", path.parent)
    assert backend.write(beside).status is STORED


def test_a_file_where_a_folder_belongs(tmp_path: Path) -> None:
    backend, chunk = LocalDiskBackend(tmp_path, NAMESPACE), chunk_of(5000)
    obstacle = tmp_path / NAMESPACE.hex() / chunk.key[:1].hex()
    obstacle.touch()
    written = backend.write(chunk)
    assert isinstance(written.error, BackendUnavailable)
    assert try_read(backend, chunk.key)[0].status is ReadStatus.MISS
    assert listed(backend) == {}
    obstacle.unlink()
    assert backend.write(chunk).status is STORED


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
