"""Several processes with one folder: together they keep within the capacity, and share what they have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from attrs import frozen

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.folder import PENDING_FILE, USAGE_FILE, Usage
from lmkv.backends.disk.root import Root
from lmkv.medium import NAME as MARK
from lmkv.protocols import Chunk, WriteStatus
from tests.forked import Child, Tell, barrier
from tests.kit import LIMIT, mounted_tmpfs
from tests.servers import stop
from tests.store.shared_store import CHUNK, KEYS, THREADS, get, open_store, payload, put, stop_halfway, take_part

COST = CHUNK + 4096
CAPACITY = 40 * COST
BOUND = CAPACITY + 3 * (THREADS + 1) * COST
"""Bytes that three processes may take: see docs/development/concurrency.md."""
COUNT = 4096
"""Bytes of the file with the count."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], int]]:
    """A file system of its own, whose use the kernel tells at one moment, where root may mount one."""
    folder.mkdir()

    def used() -> int:
        stats = os.statvfs(folder)
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize

    with mounted_tmpfs(folder, "size=64m"):
        yield used


def chunks_below(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*.kv1"):
        with suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


@frozen
class Use:
    """`most`: bytes of chunks at any moment, `left`: at the end. `reports`: what the processes tell."""

    most: int
    left: int
    reports: list[dict[str, int]]


def use_together(folder: Path, namespaces: tuple[int, ...], *, listing: bool = False) -> Use:
    """Have processes use the folder, watched all the time. They list it when they start, or all the time."""
    start = barrier(len(namespaces))
    with small_disk(folder) as used, ExitStack() as stack:
        processes = [
            stack.enter_context(Child(take_part, str(folder), name, seed, CAPACITY, listing, start))
            for seed, name in enumerate(namespaces)
        ]
        most = 0
        while any(process.alive for process in processes):
            most = max(most, used())
        most = max(most, used())
        assert list(folder.rglob("*.tmp")) == []
        reports = [process.heard() for process in processes]
        return Use(most - COUNT, chunks_below(folder), reports)


@pytest.mark.parametrize("namespaces", [(1, 1, 1), (1, 2, 3)], ids=["one namespace", "three"])
def test_together_they_keep_within_the_capacity(tmp_path: Path, namespaces: tuple[int, ...]) -> None:
    use = use_together(tmp_path / "kv", namespaces)
    assert CAPACITY <= use.most <= BOUND
    # Who makes room for a chunk that another one has just written leaves that room.
    assert CAPACITY - len(namespaces) * COST <= use.left <= CAPACITY
    # Not each: who comes when all is full knows nothing to evict before it lists again.
    assert sum(report["evictions"] for report in use.reports) > 500
    assert sum(report["hits"] for report in use.reports) > 100


def test_listings_in_the_middle_of_everything_lose_no_count(tmp_path: Path) -> None:
    """Chunks that are written behind a listing count. What is being deleted does not, and may be there."""
    use = use_together(tmp_path / "kv", (1, 2, 1, 2), listing=True)
    assert use.most <= CAPACITY + 4 * COST
    assert sum(report["evictions"] for report in use.reports) > 500
    assert min(report["listings"] for report in use.reports) > 20


def test_a_killed_process_leaves_no_wrong_count(tmp_path: Path) -> None:
    """It dies with room reserved for two chunks, again and again; the next one has all of the capacity."""
    for seed in range(4):
        with Child(stop_halfway, str(tmp_path), 1, seed, CAPACITY) as process:
            assert process.heard() == "halfway"
            assert process.kill() == -signal.SIGKILL
        assert len(list(tmp_path.rglob("*.tmp"))) >= 2
    store = open_store(str(tmp_path), 1, CAPACITY)
    for key in KEYS[:80]:
        put(store, [key])
        assert store.drain(LIMIT)
    assert store.stats().tiers[1].chunks == 40
    store.close()
    assert chunks_below(tmp_path) == CAPACITY


def test_a_listing_in_the_middle_of_a_deletion_subtracts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, other = (LocalDiskBackend(tmp_path, bytes([name]) * 32) for name in (1, 2))
    for key in KEYS[:3]:
        disk.reserve_bytes(COST)
        disk.write(Chunk(key, memoryview(payload(key))))
    unlink = os.unlink

    def unlink_and_list(path: str, **options: int) -> None:
        unlink(path, **options)
        list(other.list_all())

    monkeypatch.setattr(os, "unlink", unlink_and_list)
    assert disk.reclaim(KEYS[:1]) == COST
    assert disk.reserve_bytes(0) == 2 * COST


def test_what_another_process_deletes_first_is_subtracted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDiskBackend(tmp_path, bytes([1]) * 32)
    for key in KEYS[:2]:
        disk.reserve_bytes(COST)
        disk.write(Chunk(key, memoryview(payload(key))))
    unlink, evicted = os.unlink, []

    def too_late(path: str, **options: int) -> None:
        monkeypatch.undo()
        evicted.append(disk.reclaim(KEYS[:1]))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", too_late)
    assert [disk.reclaim(KEYS[:1]), *evicted] == [0, COST]
    assert disk.reserve_bytes(0) == COST


def test_what_is_reserved_in_the_middle_of_a_listing_counts(tmp_path: Path) -> None:
    usage = Usage(Root(str(tmp_path)))
    usage.reserve_bytes(100)
    usage.wrote(100)
    since = usage.listed_from()
    usage.reserve_bytes(10)
    usage.set(70, since)
    assert usage.reserve_bytes(0) == 80


def test_what_is_reserved_before_a_listing_and_written_behind_it_counts(tmp_path: Path) -> None:
    disk, other = (LocalDiskBackend(tmp_path, bytes([name]) * 32) for name in (1, 2))
    for _ in range(12):
        disk.reserve_bytes(COST)
    list(other.list_all())
    for key in KEYS[:12]:
        assert disk.write(Chunk(key, memoryview(payload(key)))).status is WriteStatus.STORED
    assert other.reserve_bytes(0) == chunks_below(tmp_path) == 12 * COST
    list(other.list_all())
    assert other.reserve_bytes(0) == 12 * COST, "each once"
    disk.reserve_bytes(COST)
    disk.release_bytes(COST)
    list(other.list_all())
    assert disk.reserve_bytes(0) == 12 * COST
    for each in (disk, other):
        each.close()
    assert sorted([path.name for path in tmp_path.iterdir() if path.is_file()]) == [MARK, USAGE_FILE]


def reserve_and_fork(tell: Tell, folder: str) -> None:
    """Reserve room, and fork a child that lives on: it has no part in what its parent has reserved."""
    disk = LocalDiskBackend(folder, bytes(32))
    disk.reserve_bytes(5 * COST)
    if not os.fork():
        # The child tells: by now it has closed its parent's files.
        tell((os.getppid(), os.getpid()))
        signal.alarm(int(LIMIT))
    signal.pause()


def test_what_a_process_had_reserved_when_it_was_killed_counts_no_longer(tmp_path: Path) -> None:
    other = LocalDiskBackend(tmp_path, bytes([1]) * 32)
    with Child(reserve_and_fork, str(tmp_path)) as process:
        parent, child = process.heard()
        list(other.list_all())
        assert other.reserve_bytes(0) == 5 * COST
        stop(parent)
        list(other.list_all())
        assert other.reserve_bytes(0) == 5 * COST, "it may go on"
        process.kill()
    list(other.list_all())
    os.kill(child, signal.SIGKILL)
    assert other.reserve_bytes(0) == 0
    assert sorted([path.name for path in tmp_path.iterdir() if path.is_file()]) == [MARK, USAGE_FILE]


@pytest.mark.parametrize("odd", ["pipe", "folder", "link", "short", "huge"])
def test_what_is_no_number_of_a_process_counts_nothing(tmp_path: Path, odd: str) -> None:
    disk, path = LocalDiskBackend(tmp_path, bytes(32)), tmp_path / f"{PENDING_FILE}1-2"
    makes: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to("/etc/passwd"),
        "short": lambda: path.write_bytes(b"\xff"),
        "huge": lambda: path.write_bytes(b"\xff" * 100),
    }
    makes[odd]()
    list(disk.list_all())
    assert disk.reserve_bytes(0) == 0


def test_what_another_model_left_makes_room(tmp_path: Path) -> None:
    """The oldest is evicted first, whatever its namespace; clearing one's own leaves the rest alone."""
    old = open_store(str(tmp_path), 1, CAPACITY)
    for key in KEYS[:40]:
        put(old, [key])
        assert old.drain(LIMIT)
    old.close()
    new = open_store(str(tmp_path), 2, CAPACITY)
    assert new.stats().tiers[1].chunks == 0
    assert new.stats().tiers[1].used_bytes == CAPACITY
    for key in KEYS[:30]:
        put(new, [key])
        assert new.drain(LIMIT)
    new.drop(KEYS)
    assert get(new, KEYS[:10]) == 10
    assert chunks_below(tmp_path) == CAPACITY
    new.clear()
    assert new.drain(LIMIT)
    new.close()
    assert chunks_below(tmp_path) == 10 * COST
    listed = LocalDiskBackend(tmp_path, bytes([1]) * 32).list_keys()
    left = [found.key for batch in listed for found in batch]
    assert len(left) == 10


@pytest.mark.parametrize("ahead", [None, 3], ids=["", "beside one from the future"])
def test_a_chunk_that_another_process_uses_is_not_the_oldest(tmp_path: Path, ahead: int | None) -> None:
    disk = LocalDiskBackend(tmp_path, bytes([1]) * 32)
    path_of = disk._folder.path_of
    with closing(open_store(str(tmp_path), 1, 4 * COST)) as store:
        for key in KEYS[:4]:
            put(store, [key])
            assert store.drain(LIMIT)
        store.drop(KEYS)
        (tier,) = store._tiers
        now = time.time()
        for number, key in enumerate(KEYS[:4]):
            used = now + 1e8 if number == ahead else now - 500 + 100 * number
            os.utime(path_of(key), (used, used))
        for again in range(2):
            tier.index.begin_listing()
            for batch in disk.list_all():
                tier.index.adopt(batch)
            tier.index.end_listing()
            if not again:
                os.utime(path_of(KEYS[0]))
        put(store, [KEYS[10]])
        assert store.drain(LIMIT)
        assert disk.contains(KEYS[:4]) == [True, False, True, True]
