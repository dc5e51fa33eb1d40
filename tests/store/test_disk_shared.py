"""Several processes with one folder: together they keep within the capacity, and share what they have."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from attrs import frozen

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.backends.disk.root import Root
from lmkv.backends.disk.usage import Usage
from lmkv.protocols import Chunk
from tests.forked import Child, barrier
from tests.kit import LIMIT
from tests.store.shared_store import CHUNK, KEYS, THREADS, get, open_store, payload, put, stop_halfway, take_part

COST = CHUNK + 4096
CAPACITY = 40 * COST
BOUND = CAPACITY + 3 * (THREADS + 1) * COST
"""Bytes that three processes may take: see docs/concurrency.md."""
COUNT = 4096
"""Bytes of the file with the count."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[], int]]:
    """A file system of its own, whose use the kernel tells at one moment, where root may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "lmkv-test", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("only root may mount")

    def used() -> int:
        stats = os.statvfs(folder)
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize

    try:
        yield used
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=60)


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
    assert use.left == CAPACITY
    # Not each: who comes when all is full knows nothing to evict before it lists again.
    assert sum(report["evictions"] for report in use.reports) > 500
    assert sum(report["hits"] for report in use.reports) > 100


def test_listings_in_the_middle_of_everything_make_them_exceed_it_by_little(tmp_path: Path) -> None:
    use = use_together(tmp_path / "kv", (1, 2, 1), listing=True)
    assert use.most <= BOUND
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
    reserved = usage.reserved()
    usage.reserve_bytes(10)
    usage.set(70, reserved)
    assert usage.reserve_bytes(0) == 80


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
    store = open_store(str(tmp_path), 1, 4 * COST)
    for key in KEYS[:4]:
        put(store, [key])
        assert store.drain(LIMIT)
    store.drop(KEYS)
    (tier,) = store._tiers
    now = time.time()
    for number, key in enumerate(KEYS[:4]):
        used = now + 1e8 if number == ahead else now - 500 + 100 * number
        os.utime(disk._folder.path_of(key), (used, used))
    for again in range(2):
        tier.index.begin_listing()
        for batch in disk.list_all():
            tier.index.adopt(batch)
        tier.index.end_listing()
        if not again:
            os.utime(disk._folder.path_of(KEYS[0]))
    put(store, [KEYS[10]])
    assert store.drain(LIMIT)
    assert disk.contains(KEYS[:4]) == [True, False, True, True]
    store.close()
