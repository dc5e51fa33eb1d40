"""Folders of other users below the same root, which a process may not read, or not delete from."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.protocols import WriteStatus
from lmkv.testing.backend_suite import chunk_of, read_back, statuses
from tests.forked import Child, Tell
from tests.store.shared_store import CHUNK, KEYS, get, open_store, put

NOBODY = 65534


def become_nobody() -> None:
    if not os.geteuid():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.fixture
def root(memory_path: Path) -> Path:
    """A folder for everybody, with a namespace that only its own user may read."""
    memory_path.chmod(0o1777)
    private = LocalDiskBackend(memory_path, bytes([9]) * 32)
    assert private.write(chunk_of(5000)).status is WriteStatus.STORED
    # Without root there is only one user here, and the folder is closed to that one, too.
    (memory_path / (b"\x09" * 32).hex()).chmod(0o700 if not os.geteuid() else 0)
    return memory_path


def list_twice(tell: Tell, root: str) -> None:
    become_nobody()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lmkv").addHandler(handler)
    own, beside = (LocalDiskBackend(root, bytes([name]) * 32) for name in (1, 2))
    chunk, other = chunk_of(5000), chunk_of(5000)
    assert own.write(chunk).status is beside.write(other).status is WriteStatus.STORED
    for _ in range(2):
        found = {item.key for batch in own.list_all() for item in batch}
        assert found == {chunk.key, beside.namespace + other.key}
    assert read_back(own, chunk) == chunk.payload
    tell(warnings)


def test_a_folder_that_may_not_be_read_is_left_out_of_the_listing(root: Path) -> None:
    with Child(list_twice, str(root)) as child:
        (warning,) = child.heard()
        assert str(root / (b"\x09" * 32).hex()) in warning
        assert child.ended() == 0


def restart(tell: Tell, root: str) -> None:
    become_nobody()
    for found in (0, 3):
        store = open_store(root, 1, 1 << 30)
        assert store.wait_indexed(20)
        tell(store.stats().tiers[1].chunks == found)
        put(store, KEYS[:3])
        assert store.drain(20)
        store.drop(KEYS[:3])
        tell(get(store, KEYS[:3]) == 3)
        store.close()


def test_a_store_finds_its_own_chunks_again_beside_such_a_folder(root: Path) -> None:
    with Child(restart, str(root)) as child:
        assert [child.heard() for _ in range(4)] == [True] * 4
        assert child.ended() == 0


def fill(tell: Tell, root: str) -> None:
    become_nobody()
    store = open_store(root, 1, 4 * (CHUNK + 4096))
    for key in KEYS[:8]:
        put(store, [key])
        assert store.drain(20)
    tell(store.stats().tiers[1].write_rejects)
    store.drop(KEYS)
    tell(get(store, KEYS[4:8]))
    store.close()


def test_chunks_that_may_be_read_but_not_deleted_are_neither_counted_nor_evicted(memory_path: Path) -> None:
    other = LocalDiskBackend(memory_path, bytes([9]) * 32)
    assert statuses(other, [chunk_of(CHUNK) for _ in range(4)]) == [WriteStatus.STORED] * 4
    memory_path.chmod(0o1777)
    for folder in (path := memory_path / other.namespace.hex(), *path.glob("??")):
        # As with `umask 022`. Without root there is only one user here, and the folders are closed to that one, too.
        folder.chmod(0o755 if not os.geteuid() else 0o555)
    with Child(fill, str(memory_path)) as child:
        assert [child.heard(), child.heard()] == [0, 4]
        assert child.ended() == 0
    assert len(list(memory_path.rglob("*.kv1"))) == 8
