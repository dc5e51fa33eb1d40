"""A store on a disk that fails for real: it rejects and counts stores, serves the rest, and recovers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from lmkv.backends.disk import folder as usage
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.forked import Child, Tell
from tests.kit import LIMIT, mounted_tmpfs, possible
from tests.store.shared_store import CHUNK, KEYS, get, open_store, put

COST = CHUNK + 4096
CAPACITY = 20 * COST


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 30 chunks."""
    folder = tmp_path / "medium"
    folder.mkdir()
    with mounted_tmpfs(folder, f"size={30 * COST}"):
        yield folder


def mount(folder: Path, *options: str) -> None:
    possible("mount", *options, str(folder))


def refuse_changes(folder: Path) -> None:
    """Even to root. (The mount cannot become read-only: a file of the tier is open for writing.)"""
    possible("chattr", "-R", "+i", str(folder))


def allow_changes(folder: Path) -> None:
    possible("chattr", "-R", "-i", str(folder))


def store_one_by_one(store: TieredStore, keys: list[bytes]) -> None:
    for key in keys:
        put(store, [key])
        assert store.drain(LIMIT)
    store.drop(keys)


def served(store: TieredStore, keys: list[bytes]) -> int:
    """How many come from disk, each with its own bytes."""
    found = 0
    for key in keys:
        found += get(store, [key])
        store.drop([key])
    return found


def refused(store: TieredStore) -> int:
    disk = store.stats().tiers[1]
    return disk.write_rejects + disk.write_failures


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in {".kv1", ".tmp"})


def in_time(clock: ManualClock, true: Callable[[], bool], seconds: float = 20.0) -> None:
    """By the store's own clock: its breaker tries a tier that failed after a second, and later each time."""
    until = clock() + seconds
    while not true():
        assert clock() < until
        clock.advance(0.05)


def stores_again(store: TieredStore, keys: list[bytes]) -> bool:
    store_one_by_one(store, keys)
    return served(store, keys) == len(keys)


def test_a_disk_that_becomes_read_only_while_it_has_to_evict(medium: Path) -> None:
    clock = ManualClock()
    store = open_store(str(medium / "kv"), 1, CAPACITY, clock)
    store_one_by_one(store, KEYS[:20])
    refuse_changes(medium)
    store_one_by_one(store, KEYS[100:110])
    assert refused(store) == 10
    assert served(store, KEYS[100:110]) == 0
    # One victim was chosen, its file could not be deleted; none was evicted for the other nine.
    assert served(store, KEYS[:20]) == 19
    assert store.stats().tiers[1].used_bytes == 19 * COST
    assert on_disk(medium) == CAPACITY
    allow_changes(medium)
    in_time(clock, lambda: stores_again(store, KEYS[200:205]))
    store.close()
    assert on_disk(medium) == CAPACITY


@pytest.mark.parametrize("min_free", [0, 10 * COST], ids=["no space", "min_free"])
def test_a_disk_that_is_full_before_the_capacity_is_keeps_the_newest(medium: Path, min_free: int) -> None:
    """Whoever fills it: the tier's own chunks, then another program that takes half of what they have."""
    clock = ManualClock()
    with closing(open_store(str(medium / "kv"), 1, 100 * COST, clock, min_free=min_free)) as store:
        store_one_by_one(store, KEYS[:60])
        disk = store.stats().tiers[1]
        assert 15 < disk.chunks <= (30 * COST - min_free) // COST
        assert disk.evictions >= 25
        assert served(store, KEYS[50:60]) >= 9
        assert on_disk(medium) == disk.used_bytes == disk.chunks * COST
        (medium / "other").write_bytes(bytes((30 * COST - on_disk(medium)) * 3 // 4))
        clock.advance(1)  # the free bytes are asked for again
        store_one_by_one(store, KEYS[100:130])
        assert served(store, KEYS[120:130]) >= 9
        assert on_disk(medium) == store.stats().tiers[1].used_bytes


def test_a_full_disk_whose_deletions_free_nothing_keeps_the_chunks_that_it_has(
    medium: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others have the files open, so that their bytes stay: one is deleted in vain, and one after each pause."""
    clock = ManualClock()
    with closing(open_store(str(medium / "kv"), 1, 100 * COST, clock)) as store:
        store_one_by_one(store, KEYS[:20])
        with ExitStack() as others:
            for path in medium.rglob("*.kv1"):
                others.enter_context(path.open("rb"))
            free = os.statvfs(medium)
            (medium / "other").write_bytes(bytes(free.f_bavail * free.f_frsize))
            store_one_by_one(store, KEYS[100:140])
            assert len(list(medium.rglob("*.kv1"))) == 19
            clock.advance(1)
            store_one_by_one(store, KEYS[140:150])
            assert served(store, KEYS[:20]) == 18
        said = [each for each in caplog.messages if "No space left" in each]
        assert len(said) == 1, "once a minute"
        (medium / "other").unlink()
        in_time(clock, lambda: stores_again(store, KEYS[200:205]))


def test_a_folder_that_is_removed_and_made_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    clock = ManualClock()
    store = open_store(str(root), 1, CAPACITY, clock)
    store_one_by_one(store, KEYS[:20])
    shutil.rmtree(root)
    store_one_by_one(store, KEYS[100:110])
    assert refused(store) == 10
    assert served(store, KEYS[:20]) == 0
    assert not root.exists()
    root.mkdir()
    in_time(clock, lambda: stores_again(store, KEYS[200:205]))
    store.close()
    assert on_disk(root) == store_bytes(root)


@pytest.mark.parametrize("inner", [".", "kv"])
@pytest.mark.parametrize("back", ["the same mount", "another number"])
def test_a_medium_that_is_no_longer_mounted_gets_nothing_on_the_disk_below(
    medium: Path, tmp_path: Path, inner: str, back: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, kept = ManualClock(), tmp_path / "kept"
    store = open_store(str(medium / inner), 1, CAPACITY, clock)
    store_one_by_one(store, KEYS[:10])
    kept.mkdir()
    mount(kept, "--bind", str(medium))
    try:
        subprocess.run(["umount", "-l", str(medium)], check=True)
        store_one_by_one(store, KEYS[100:110])
        assert (refused(store), served(store, KEYS[:10])) == (10, 0)
        for number in range(40):
            clock.advance(3)
            store_one_by_one(store, KEYS[110 + number : 111 + number])
        assert list(medium.iterdir()) == []
        if back == "the same mount":
            mount(medium, "--bind", str(kept))
        else:
            mount(medium, "-t", "tmpfs", "-o", f"size={30 * COST}", "lmkv-test")
            subprocess.run(["cp", "-a", f"{kept}/.", str(medium)], check=True)
        in_time(clock, lambda: stores_again(store, KEYS[200:205]), 5.0)
        assert served(store, KEYS[:10]) == 10, "none of its chunks was forgotten"
        said = [each for each in caplog.messages if "mount that file system again" in each]
        assert 1 <= len(said) <= 3, "once a minute at most, of reads and writes"
    finally:
        store.close()
        subprocess.run(["umount", "-l", str(kept)], check=False)


def test_another_medium_than_at_the_opening_is_neither_written_to_nor_read(medium: Path, tmp_path: Path) -> None:
    """As one that is mounted after the start: the chunks of before are below it."""
    root = tmp_path / "late"
    clock = ManualClock()
    with closing(open_store(str(root), 1, CAPACITY, clock)) as store:
        store_one_by_one(store, KEYS[:10])
        mount(root, "--bind", str(medium))
        try:
            store_one_by_one(store, KEYS[100:110])
            assert (refused(store), served(store, KEYS[:10])) == (10, 0)
            assert list(root.iterdir()) == []
        finally:
            subprocess.run(["umount", "-l", str(root)], check=True)
        in_time(clock, lambda: stores_again(store, KEYS[200:205]))
        assert served(store, KEYS[:10]) == 10


def store_bytes(root: Path) -> int:
    """The chunks that a new store finds there."""
    store = open_store(str(root), 1, CAPACITY)
    used = store.stats().tiers[1].used_bytes
    store.close()
    return used


def clear_until_killed(tell: Tell, folder: str) -> None:
    store = open_store(folder, 1, CAPACITY)
    for key in KEYS[:20]:
        put(store, [key])
        assert store.drain(LIMIT)
    left = iter(range(7))

    def unlink(path: str, **options: int) -> None:
        if next(left, None) is None:
            tell("half")
            threading.Event().wait()
        os.remove(path, **options)

    pytest.MonkeyPatch().setattr(os, "unlink", unlink)
    store.clear()
    store.drain(LIMIT)


def test_a_kill_in_the_middle_of_clear(tmp_path: Path) -> None:
    """Chunks whose files were not deleted yet are served again, with the right bytes, and can be cleared for good."""
    with Child(clear_until_killed, str(tmp_path)) as child:
        assert child.heard() == "half"
    store = open_store(str(tmp_path), 1, CAPACITY)
    assert served(store, KEYS[:20]) == 13 == store.stats().tiers[1].chunks
    store.clear()
    assert served(store, KEYS[:20]) == 0
    assert store.drain(LIMIT)
    assert on_disk(tmp_path) == 0
    assert stores_again(store, KEYS[:20])
    store.close()
    assert on_disk(tmp_path) == CAPACITY


def test_a_corrupt_file_that_cannot_be_set_aside_is_not_forgotten(medium: Path) -> None:
    """No file stays that no index knows: it is deleted as soon as the disk takes writes."""
    clock = ManualClock()
    with closing(open_store(str(medium / "kv"), 1, CAPACITY, clock)) as store:
        store_one_by_one(store, KEYS[:2])
        (path,) = medium.rglob(f"{KEYS[0].hex()}.kv1")
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        refuse_changes(medium)
        assert served(store, KEYS[:2]) == 1
        assert path.exists()
        allow_changes(medium)
        in_time(clock, lambda: stores_again(store, KEYS[5:6]))
        assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"x", bytes([255]) * 16, bytes([255]) * 99], ids=repr)
def test_a_count_that_is_nonsense_is_set_right(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lmkv-use").write_bytes(content)
    store = open_store(str(tmp_path), 1, CAPACITY)
    assert stores_again(store, KEYS[:20])
    store_one_by_one(store, KEYS[20:40])
    store.close()
    assert on_disk(tmp_path) == CAPACITY


def test_a_count_that_is_locked_or_that_is_no_file_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_PATIENCE", 0.01)
    with closing(open_store(str(tmp_path), 1, CAPACITY)) as store:
        count = tmp_path / ".lmkv-use"
        with count.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert stores_again(store, KEYS[:3])
        count.unlink()
        os.mkfifo(count)
        assert stores_again(store, KEYS[3:6])
