"""The public suite over every backend that lmkv ships, and what is particular to each of them."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lmkv.backends.adapters import AsyncAdapter, AsyncFileBackend, NullBackend, WrapperBackend
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend, chunkfile
from lmkv.cli.report import interleaved
from lmkv.errors import BackendError, BackendUnavailable, ClosedError, ConfigError, UsageError
from lmkv.medium import NAME as MARK
from lmkv.protocols import (
    MISS,
    STORED,
    Backend,
    Chunk,
    ChunkKey,
    Listed,
    ListsKeys,
    Read,
    ReadStatus,
    RegistersMemory,
    Shared,
    SizesChunks,
    WriteStatus,
    Written,
)
from lmkv.testing import ManualClock
from lmkv.testing.backend_suite import BackendSuite, chunk_of, listed, new_key, read_back, statuses
from lmkv.testing.faults import FaultyBackend
from tests.backends.remote.folder_store import FolderBackend
from tests.forked import python
from tests.kit import LIMIT, chain, eventually, get, lower, median_ratio, mounted_tmpfs, put_below, raised, small_store
from tests.pages import ROOT

T = TypeVar("T")
NAMESPACE = bytes(range(32))
CAPABILITIES = (ListsKeys, RegistersMemory, SizesChunks, Shared)


def page_aligned(nbytes: int, fill: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    memory[: len(fill)] = fill
    return memory


def has_direct_io(folder: Path) -> bool:
    backend = LocalDiskBackend(folder, NAMESPACE)
    backend.close()
    return backend.direct_io


class TestDiskDirect(BackendSuite):
    def make(self, folder: Path) -> Backend:
        if not has_direct_io(folder):
            pytest.skip(f"no O_DIRECT in {folder}")
        return LocalDiskBackend(folder, NAMESPACE, direct="on", segment_bytes=8192)


class TestDiskPageCache(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, direct="off", segment_bytes=8192)


class TestSharedMemory(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, segment_bytes=8192, direct="off", shared=True, name="shared_memory")


class TestDiskInPieces(BackendSuite):
    """With chunks of more than one piece: what others do from 4 MiB on."""

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunkfile, "PIECE", 8192)
        monkeypatch.setattr(chunkfile, "SMALL", 4096)

    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, segment_bytes=4096)


class TestDiskDurable(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return LocalDiskBackend(folder, NAMESPACE, sync="full")


class TestCPU(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return CPUPinnedBackend(64 * 73728, 73728)


class TestNull(BackendSuite):
    keeps = False

    def make(self, folder: Path) -> Backend:
        return NullBackend()


class TestWrappedDisk(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return WrapperBackend(LocalDiskBackend(folder, NAMESPACE))


class TestWrappedCPU(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return WrapperBackend(CPUPinnedBackend(64 * 73728, 73728))


class TestFaultlessFaulty(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return FaultyBackend(LocalDiskBackend(folder, NAMESPACE))


class TestAsyncFiles(BackendSuite):
    def make(self, folder: Path) -> Backend:
        return AsyncAdapter(AsyncFileBackend(folder / "chunks"))


# -- disk ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["off", "auto"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> LocalDiskBackend:
    return LocalDiskBackend(tmp_path, NAMESPACE, direct=request.param, segment_bytes=8192)


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARK)


def only_file(folder: Path) -> Path:
    (path,) = files_below(folder)
    return path


def test_the_listing_of_the_folder_is_what_the_format_says(disk: LocalDiskBackend, tmp_path: Path) -> None:
    chunk = chunk_of(5000)
    disk.write(chunk)
    path = only_file(tmp_path)
    assert path.relative_to(tmp_path).parts == (NAMESPACE.hex(), chunk.key[:1].hex(), f"{chunk.key.hex()}.kv1")
    assert path.stat().st_size == disk.stored_bytes(5000) == 4096 + 8192
    assert [folder.stat().st_mode & 0o777 for folder in list(path.parents)[:2]] == [0o700] * 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_aligned_memory_in_every_combination(disk: LocalDiskBackend) -> None:
    """Aligned or not, written and read: O_DIRECT and the page cache see the same files."""
    for nbytes in (4096, 8192, 12288, 20000):
        for skew_in in (0, 512):
            source = page_aligned(nbytes + 4096, os.urandom(nbytes + 4096))
            chunk = Chunk(new_key(), source[skew_in : skew_in + nbytes])
            assert disk.write(chunk).status is WriteStatus.STORED
            for skew_out in (0, 512):
                room = page_aligned(nbytes + 4096)
                into = room[skew_out : skew_out + nbytes]
                assert disk.read(chunk.key, into).status is ReadStatus.HIT
                assert into == chunk.payload


def test_the_least_recently_used_comes_first(disk: LocalDiskBackend, tmp_path: Path) -> None:
    chunks = [chunk_of(100) for _ in range(3)]
    statuses(disk, chunks)
    for age, chunk in zip((300, 200, 100), chunks, strict=True):
        path = next(tmp_path.rglob(f"{chunk.key.hex()}.kv1"))
        os.utime(path, (0, time.time() - age))
    assert list(listed(disk)) == [chunk.key for chunk in chunks]
    before = time.time()
    read_back(disk, chunks[0])
    assert list(listed(disk)) == [chunks[1].key, chunks[2].key, chunks[0].key]
    (first,) = [item for batch in disk.list_keys() for item in batch if item.key == chunks[0].key]
    # A file system may know the time a little less finely than Python.
    assert before - 1 < first.last_used <= time.time()


def test_a_chunk_in_use_is_touched_once_a_minute(disk: LocalDiskBackend, tmp_path: Path) -> None:
    chunk = chunk_of(100)
    disk.write(chunk)
    # A clock that was ahead leaves times in the future.
    for age, touched in ((chunkfile.TOUCH_EVERY - 30, False), (chunkfile.TOUCH_EVERY + 1, True), (-1e8, True)):
        used = time.time() - age
        os.utime(only_file(tmp_path), (used, used))
        read_back(disk, chunk)
        assert (abs(only_file(tmp_path).stat().st_mtime - used) > 1) == touched


def test_min_free_rejects_before_it_writes(tmp_path: Path) -> None:
    clock, stats = ManualClock(), os.statvfs(tmp_path)
    far_too_much = stats.f_blocks * stats.f_frsize * 2
    full = LocalDiskBackend(tmp_path, NAMESPACE, min_free=far_too_much, clock=clock)
    chunk = chunk_of(100)
    written = full.write(chunk)
    assert written.status is WriteStatus.REJECTED
    assert "less than disk_min_free is free" in written.reason
    assert files_below(tmp_path) == []
    modest = LocalDiskBackend(tmp_path, NAMESPACE, min_free=1, clock=clock)
    assert modest.write(chunk).status is WriteStatus.STORED
    written = full.write(chunk)
    assert written.status is WriteStatus.PRESENT


def test_free_space_counts_what_was_written_since_it_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two questions to the kernel the backend's own chunks count, so a burst cannot overshoot."""
    clock = ManualClock()
    asked: list[float] = []
    one_more = os.statvfs(tmp_path)

    def statvfs(folder: str) -> Any:
        asked.append(clock())
        return one_more

    monkeypatch.setattr(os, "statvfs", statvfs)
    free = one_more.f_bavail * one_more.f_frsize
    backend = LocalDiskBackend(tmp_path, NAMESPACE, min_free=free - 3 * 8192, clock=clock)
    assert statuses(backend, [chunk_of(100) for _ in range(5)]) == [WriteStatus.STORED] * 3 + [WriteStatus.REJECTED] * 2
    assert len(asked) == 1
    clock.advance(1)
    assert backend.write(chunk_of(100)).status is WriteStatus.STORED
    assert len(asked) == 2


def test_more_tokens_than_there_is_room_for_are_left_out(tmp_path: Path) -> None:
    backend = LocalDiskBackend(tmp_path, NAMESPACE, chunk_tokens=4)
    chunk = Chunk(new_key(), memoryview(b"x" * 10), tokens=bytes(4000))
    assert backend.write(chunk).status is WriteStatus.STORED
    assert only_file(tmp_path).stat().st_size == backend.stored_bytes(10)
    assert read_back(backend, chunk) == chunk.payload


@pytest.mark.parametrize("nbytes", [4 << 20, 5 << 20, (9 << 20) + 12288, (9 << 20) + 777])
def test_chunks_of_real_size(disk: LocalDiskBackend, nbytes: int) -> None:
    chunk = Chunk(new_key(), page_aligned(nbytes, os.urandom(nbytes)))
    assert disk.write(chunk).status is WriteStatus.STORED
    slot = page_aligned(nbytes)
    assert disk.read(chunk.key, slot).status is ReadStatus.HIT
    assert slot == chunk.payload


def test_settings_of_another_writer_do_not_matter(tmp_path: Path) -> None:
    """Its namespace does."""
    writer = LocalDiskBackend(tmp_path, NAMESPACE, segment_bytes=4096, chunk_tokens=4000)
    reader, other = LocalDiskBackend(tmp_path, NAMESPACE, segment_bytes=65536), LocalDiskBackend(tmp_path, bytes(32))
    chunk = chunk_of(30_000)
    writer.write(chunk)
    assert read_back(reader, chunk) == chunk.payload
    assert reader.write(chunk).status is WriteStatus.PRESENT
    assert other.contains([chunk.key]) == [False]
    assert listed(other) == {}


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    bad: dict[str, list[Any]] = {
        "sync": ["always"],
        "direct": ["maybe"],
        "segment_bytes": [1000, 1 << 30],
        "namespace": [b"short"],
    }
    for name, values in bad.items():
        for value in values:
            given = {"namespace": NAMESPACE, name: value}
            raised(ConfigError, name, LocalDiskBackend, tmp_path, **given)


def test_misuse_is_told_and_nothing_is_written(disk: LocalDiskBackend, tmp_path: Path) -> None:
    for chunk in (
        *(Chunk(b"short", memoryview(b"x")), Chunk(bytes(32), memoryview(b""))),
        *(Chunk(bytes(32), memoryview(b"x"), parent=b"short"), Chunk(bytes(32), memoryview(b"x"), tokens=b"odd")),
    ):
        raised(UsageError, "", disk.write, chunk)
    assert files_below(tmp_path) == []


def test_direct_io_is_insisted_on_or_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    raised(ConfigError, "O_DIRECT", LocalDiskBackend, tmp_path, NAMESPACE, direct="on")
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    assert not backend.direct_io
    chunk = Chunk(new_key(), page_aligned(8192, os.urandom(8192)))
    assert backend.write(chunk).status is WriteStatus.STORED
    assert read_back(backend, chunk) == chunk.payload


@pytest.mark.parametrize("most", [1, 1000, 4096, 6000])
def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The kernel may stop anywhere, in the middle of a view too."""

    def cut(views: list[memoryview]) -> list[memoryview]:
        left, kept = most, []
        for view in views:
            kept.append(view[:left])
            left -= len(kept[-1])
        return [view for view in kept if len(view)]

    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, cut(views), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, cut(views), at))
    backend = LocalDiskBackend(tmp_path, NAMESPACE, direct="off")
    chunk = chunk_of(9000)
    assert backend.write(chunk).status is WriteStatus.STORED
    assert read_back(backend, chunk) == chunk.payload


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    backend = LocalDiskBackend(tmp_path, NAMESPACE)
    chunk = chunk_of(9000)
    assert statuses(backend, [chunk, chunk_of(9000, chunk.key)]) == [WriteStatus.STORED, WriteStatus.PRESENT]
    assert read_back(backend, chunk) == chunk.payload
    assert len(files_below(tmp_path)) == 1


@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_what_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Any) -> None:
    """data: the bytes before the name; full: then the name, and the folders that had to be made for it."""
    backend = LocalDiskBackend(tmp_path, NAMESPACE, sync=sync)
    log: list[str] = []
    fdatasync, fsync, link = os.fdatasync, os.fsync, os.link

    def logged(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(os, "fdatasync", logged("data", fdatasync))
    monkeypatch.setattr(os, "fsync", logged("folder", fsync))
    monkeypatch.setattr(os, "link", logged("name", link))
    key = new_key()
    statuses(backend, [chunk_of(100, key), chunk_of(100, key[:1] + bytes(31))])
    expected = {
        "none": ["name", "name"], "data": ["data", "name"] * 2,
        "full": ["folder", "folder"] + ["data", "name", "folder"] * 2,
    }  # fmt: skip
    assert log == expected[sync]


def test_ten_thousand_chunks_are_listed_at_once(memory_path: Path) -> None:
    """In a few times the CPU time in which the kernel lists as many names and sizes."""
    backend, payload = LocalDiskBackend(memory_path, NAMESPACE, direct="off"), memoryview(b"x")
    keys = {new_key() for _ in range(10_000)}
    for key in keys:
        backend.write(Chunk(key, payload))
    assert listed(backend).keys() == keys

    def bare() -> None:
        for folder in os.scandir(Path(backend.path) / NAMESPACE.hex()):
            for entry in os.scandir(folder.path):
                entry.stat(follow_symlinks=False)

    times = interleaved({"lmkv": lambda: listed(backend), "bare": bare}, 5, clock=time.thread_time)
    assert median_ratio(times, "lmkv", "bare") < 6


def test_backends_say_what_they_are(tmp_path: Path) -> None:
    disk = LocalDiskBackend(tmp_path, NAMESPACE, direct="off", name="ssd")
    assert repr(disk) == f"<LocalDiskBackend 'ssd': {tmp_path / NAMESPACE.hex()}, direct_io=False>"
    assert repr(WrapperBackend(disk)) == f"WrapperBackend({disk!r})"
    assert (disk.shared, LocalDiskBackend(tmp_path, NAMESPACE, shared=True).shared) == (False, True)
    with closing(AsyncAdapter(AsyncFileBackend(tmp_path / "files"), deadline=5.0)) as adapter:
        assert repr(adapter) == f"AsyncAdapter(AsyncFileBackend('{tmp_path}/files'), deadline=5.0)"


def test_an_exit_in_a_coroutine_ends_its_own_call_alone(tmp_path: Path) -> None:
    class Exits(AsyncFileBackend):
        exits = True

        async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
            if self.exits:
                self.exits = False
                raise SystemExit(1)
            return await super().contains(keys)

    adapter = AsyncAdapter(Exits(tmp_path / "files"), deadline=LIMIT)
    raised(SystemExit, "", adapter.contains, [bytes(32)])
    assert adapter.contains([bytes(32)]) == [False]
    adapter.close()
    assert not any(thread.name.startswith("lmkv-aio") for thread in threading.enumerate())


# -- wrappers and faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [WrapperBackend, FaultyBackend])
def test_a_wrapper_has_the_capabilities_of_its_inner(tmp_path: Path, make: Any) -> None:
    registering = FolderBackend(f"folder://host:1/?folder={tmp_path}", NAMESPACE)
    for inner in (NullBackend(), registering, LocalDiskBackend(tmp_path, NAMESPACE, shared=True)):
        wrapped = make(make(inner))
        assert wrapped.name == inner.name
        for capability in CAPABILITIES:
            assert isinstance(wrapped, capability) == isinstance(inner, capability)
    assert wrapped.shared is True
    assert wrapped.stored_bytes(5000) == inner.stored_bytes(5000)  # type: ignore[union-attr]


def test_a_wrapper_sees_every_call(tmp_path: Path) -> None:
    seen: list[str] = []

    class Logging(WrapperBackend):
        def around(self, verb: str, call: Any) -> Any:
            seen.append(verb)
            return call()

    wrapped: Any = Logging(LocalDiskBackend(tmp_path, NAMESPACE))
    chunk = chunk_of(100)
    wrapped.write(chunk)
    wrapped.contains([chunk.key])
    read_back(wrapped, chunk)
    list(wrapped.list_keys())
    wrapped.delete([chunk.key])
    assert seen == ["write", "contains", "read", "list_keys", "delete"]


def test_faults_hit_some_calls_and_repeat_with_the_seed(tmp_path: Path) -> None:
    chunks = [chunk_of(100) for _ in range(40)]

    def run(seed: int, folder: str) -> list[WriteStatus]:
        faulty = FaultyBackend(LocalDiskBackend(tmp_path / folder, NAMESPACE), seed=seed, error_rate=0.5)
        results = statuses(faulty, chunks)
        there = faulty.inner.contains([chunk.key for chunk in chunks])
        assert there == [result is WriteStatus.STORED for result in results]
        assert faulty.faults == results.count(WriteStatus.FAILED)
        return results

    first = run(1, "a")
    assert set(first) == {WriteStatus.STORED, WriteStatus.FAILED}
    assert run(1, "b") == first
    assert run(2, "c") != first


def test_the_nth_call_fails_as_told(tmp_path: Path) -> None:
    faulty, chunk = FaultyBackend(LocalDiskBackend(tmp_path, NAMESPACE)), chunk_of(100)
    faulty.fail_call(2, errno.EIO)
    assert faulty.write(chunk).status is WriteStatus.STORED
    read = faulty.read(chunk.key, memoryview(bytearray(100)))
    assert read.status is ReadStatus.FAILED
    assert isinstance(read.error, BackendUnavailable)
    assert os.strerror(errno.EIO) in str(read.error)
    assert read_back(faulty, chunk) == chunk.payload
    faulty.fail_call()
    raised(BackendUnavailable, "", faulty.delete, [chunk.key])


def test_latency_is_slept_and_only_for_the_chosen_verbs() -> None:
    slept: list[float] = []
    faulty = FaultyBackend(NullBackend(), latency=0.5, verbs=frozenset({"read"}), sleep=slept.append)
    faulty.contains([new_key()])
    assert slept == []
    faulty.read(new_key(), memoryview(bytearray(1)))
    assert slept == [0.5]
    raised(ValueError, "raed", lambda: FaultyBackend(NullBackend(), verbs=frozenset({"raed"})))


def test_a_black_hole_holds_calls_until_it_is_released() -> None:
    faulty = FaultyBackend(NullBackend())
    faulty.black_hole()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(faulty.contains, [new_key()])
        eventually(lambda: faulty.calls["contains"] == 1)
        assert not answer.done()
        faulty.release()
        assert answer.result(LIMIT) == [False]
    faulty.max_hold = 0.0
    faulty.black_hole()
    read = faulty.read(new_key(), memoryview(bytearray(1)))
    assert read.status is ReadStatus.FAILED


# -- asynchronous backends -----------------------------------------------------------------------------


class HangingAsync:
    """Never answers, and writes into its buffers long after it was given up."""

    name = "hanging"

    def __init__(self) -> None:
        self.begun = 0
        self.kept: list[memoryview] = []

    async def _hang(self) -> None:
        self.begun += 1
        await asyncio.Event().wait()

    async def contains(self, keys: Any) -> list[bool]:
        await self._hang()
        return []

    async def read(self, key: ChunkKey, into: memoryview) -> Read:
        self.kept.append(into)
        await self._hang()
        return MISS

    async def write(self, chunk: Chunk) -> Written:
        self.kept.append(chunk.payload)
        await self._hang()
        return STORED

    async def delete(self, keys: Any) -> None:
        raise ValueError("a bug in the backend")

    async def close(self) -> None: ...


@pytest.fixture
def hanging() -> Iterator[AsyncAdapter]:
    adapter = AsyncAdapter(HangingAsync(), deadline=LIMIT)
    yield adapter
    adapter.close()
    assert not any(thread.name.startswith("lmkv-aio") for thread in threading.enumerate())


def given_up(adapter: AsyncAdapter, call: Callable[[], T]) -> T:
    """The answer of a call whose deadline passes after the backend has begun with it."""
    adapter.deadline = 0.01
    inner: Any = adapter.inner
    before = inner.begun
    while True:
        answer = call()
        if inner.begun > before:
            adapter.deadline = LIMIT
            return answer


def test_a_missed_deadline_of_a_read_or_write_is_a_value(hanging: AsyncAdapter) -> None:
    chunk = chunk_of(10)
    hanging.deadline = 0.0
    for result in (hanging.read(chunk.key, memoryview(bytearray(10))), hanging.write(chunk)):
        assert result.status in (ReadStatus.FAILED, WriteStatus.FAILED)
        assert isinstance(result.error, BackendUnavailable)
        assert result.error.key == chunk.key.hex()
    raised(BackendUnavailable, "", hanging.contains, [chunk.key])
    hanging.deadline = LIMIT


def test_a_coroutine_that_was_given_up_cannot_reach_the_callers_memory(hanging: AsyncAdapter) -> None:
    slot = memoryview(bytearray(10))
    given_up(hanging, lambda: hanging.read(new_key(), slot))
    given_up(hanging, lambda: hanging.write(Chunk(new_key(), slot)))
    read_buffer, *_, payload = hanging.inner.kept  # type: ignore[attr-defined]
    read_buffer[:] = b"late bytes"
    assert slot == bytes(10)
    slot[:] = b"next chunk"
    assert payload == bytes(10)


def test_bugs_of_an_async_backend_come_through(hanging: AsyncAdapter) -> None:
    raised(ValueError, "a bug", hanging.delete, [new_key()])


def test_the_adapters_thread_is_named_and_joined() -> None:
    inner = HangingAsync()
    adapter = AsyncAdapter(inner, deadline=LIMIT)
    assert "lmkv-aio-hanging" in {thread.name for thread in threading.enumerate()}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(adapter.contains, [new_key()])
        eventually(lambda: inner.begun == 1)
        adapter.close()
        raised(ClosedError, "", call.result, LIMIT)
    assert "lmkv-aio-hanging" not in {thread.name for thread in threading.enumerate()}


def test_an_asynchronous_listing_can_be_left_half_way() -> None:
    ended: list[str] = []

    class Endless(HangingAsync):
        async def list_keys(self) -> AsyncIterator[list[Listed]]:
            try:
                while True:
                    yield [Listed(new_key(), 1)]
            finally:
                ended.append("here")

    adapter: Any = AsyncAdapter(Endless())
    listing = adapter.list_keys()
    assert len(next(listing)) == len(next(listing)) == 1
    adapter.close()
    assert ended == ["here"]
    raised(ClosedError, "", next, listing)


# -- asynchronous files --------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Any]:
    adapter = AsyncAdapter(AsyncFileBackend(tmp_path / "chunks"))
    yield adapter
    adapter.close()


def test_files_that_are_no_chunks_are_left_alone(files: Any, tmp_path: Path) -> None:
    chunk = chunk_of(100)
    files.write(chunk)
    for name in ("0123456789abcdef.tmp", "notes.txt", "notes.chunk"):
        (tmp_path / "chunks" / name).write_bytes(b"x")
    assert listed(files) == {chunk.key: 100}
    assert len(files_below(tmp_path)) == 4


def test_files_are_not_written_below_a_medium_that_is_no_longer_mounted(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path):
        adapter, chunk = AsyncAdapter(AsyncFileBackend(tmp_path / "chunks")), chunk_of(100)
        assert adapter.write(chunk).status is WriteStatus.STORED
    for path in (tmp_path / "chunks", tmp_path / "elsewhere"):
        assert isinstance(adapter.write(chunk).error, BackendUnavailable)
        assert isinstance(adapter.read(chunk.key, memoryview(bytearray(100))).error, BackendUnavailable)
        for ask in (lambda: adapter.contains([chunk.key]), lambda: list(adapter.list_keys())):
            raised(BackendUnavailable, "mount that file system again", ask)
        path.mkdir()
    assert files_below(tmp_path) == []
    adapter.close()


def test_what_the_medium_refuses_is_told(files: Any, tmp_path: Path) -> None:
    """A folder in the file's place, then no folder at all."""
    chunk = chunk_of(100)
    obstacle = tmp_path / "chunks" / f"{chunk.key.hex()}.chunk"
    obstacle.mkdir()
    raised(BackendError, "delete failed", files.delete, [chunk.key])
    read = files.read(chunk.key, memoryview(bytearray(100)))
    assert read.status is ReadStatus.FAILED
    shutil.rmtree(tmp_path / "chunks")
    assert files.write(chunk).status is WriteStatus.FAILED
    assert read_back(files, chunk) is None
    assert listed(files) == {}
    files.delete([chunk.key])


def test_a_link_that_leads_to_itself_ends_no_listing(files: Any, tmp_path: Path) -> None:
    chunk, other = chunk_of(100), chunk_of(100)
    assert files.write(chunk).status is WriteStatus.STORED
    link = tmp_path / "chunks" / f"{other.key.hex()}.chunk"
    link.symlink_to(link.name)
    assert chunk.key in listed(files)
    assert files.read(other.key, memoryview(bytearray(100))).status is ReadStatus.FAILED


def test_files_are_listed_in_the_order_of_their_writing(files: Any, tmp_path: Path) -> None:
    chunks = [chunk_of(100) for _ in range(3)]
    statuses(files, chunks)
    for age, chunk in zip((100, 300, 200), chunks, strict=True):
        os.utime(tmp_path / "chunks" / f"{chunk.key.hex()}.chunk", (0, 1e9 - age))
    assert list(listed(files)) == [chunks[1].key, chunks[2].key, chunks[0].key]


def test_an_asynchronous_tier_is_found_again_after_a_restart(tmp_path: Path) -> None:
    keys = chain("restart", 5)
    for restarted in (False, True):
        store = small_store(8, lower(AsyncAdapter(AsyncFileBackend(tmp_path))))
        assert store.wait_indexed(LIMIT)
        if not restarted:
            put_below(store, keys)
        assert get(store, keys) == [0] * 5
        store.close()


def test_the_example_prints_what_it_says() -> None:
    assert "retrieved 768 tokens: equal" in python(ROOT, "examples/aiofiles_backend.py")
