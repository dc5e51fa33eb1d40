"""Hostile files in a disk backend's folder: never wrong bytes, never a crash, never a large allocation."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from lmkv.backends.disk import LocalDiskBackend
from lmkv.errors import BackendError, CorruptChunkError
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from tests.pages import loaded_module
from tests.tables import every

make_attacks = loaded_module(Path(__file__).with_name("make_attacks.py"))
NAMESPACE, KEY, PAYLOAD = make_attacks.NAMESPACE, make_attacks.KEY, make_attacks.PAYLOAD
FILES = sorted(make_attacks.FOLDER.glob("*.kv1"))
HOSTILE = [path for path in FILES if path.stem != "sound"]


@pytest.fixture(params=["off", "auto"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> LocalDiskBackend:
    return LocalDiskBackend(tmp_path, NAMESPACE, direct=request.param)


def place_of(backend: LocalDiskBackend) -> Path:
    """Where the chunk's file lies, spelled out from docs/development/format.md."""
    place: Path = Path(backend.path) / NAMESPACE.hex() / KEY[:1].hex() / f"{KEY.hex()}.kv1"
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def assert_refused_then_replaced(backend: LocalDiskBackend) -> None:
    """The planted file is not served, and its key can be stored again and is then served."""
    buffer = memoryview(bytearray(len(PAYLOAD)))
    read = backend.read(KEY, buffer)
    assert read.status is ReadStatus.FAILED
    assert isinstance(read.error, BackendError)
    assert isinstance(read.error, CorruptChunkError) != os.path.lexists(place_of(backend))
    if isinstance(read.error, CorruptChunkError):
        assert backend.read(KEY, buffer).status is ReadStatus.MISS
        assert backend.contains([KEY]) == [False]
    assert_stored(backend)


def assert_stored(backend: LocalDiskBackend) -> None:
    buffer = memoryview(bytearray(len(PAYLOAD)))
    assert backend.write(Chunk(KEY, memoryview(PAYLOAD))).status is WriteStatus.STORED
    assert backend.read(KEY, buffer).status is ReadStatus.HIT
    assert buffer == PAYLOAD


def test_the_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    make_attacks.main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in FILES}
    assert len(HOSTILE) == len(make_attacks.ATTACKS) > 40


def test_the_generator_can_make_a_sound_file(backend: LocalDiskBackend) -> None:
    """Written by code that shares nothing with lmkv: what is read is the format, not the implementation."""
    shutil.copy(make_attacks.FOLDER / "sound.kv1", place_of(backend))
    buffer = memoryview(bytearray(len(PAYLOAD)))
    assert backend.read(KEY, buffer).status is ReadStatus.HIT
    assert buffer == PAYLOAD


def test_a_hostile_file_is_never_served(backend: LocalDiskBackend) -> None:
    """Nor is it in the way of its key. Listed it takes what it takes, whatever it says, and it costs no memory."""

    def plant(attack: Path) -> None:
        place_of(backend).unlink(missing_ok=True)
        shutil.copy(attack, place_of(backend))

    def check(attack: Path) -> None:
        plant(attack)
        found = [item for batch in backend.list_keys() for item in batch]
        assert [item.nbytes for item in found] == [attack.stat().st_size] * len(found)
        assert bool(found) == place_of(backend).exists(), "impossible files are removed"
        plant(attack)
        tracemalloc.start()
        try:
            assert_refused_then_replaced(backend)
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()
        plant(attack)
        # Written over without having been read first: stored, or present until one read has set it aside.
        if backend.write(Chunk(KEY, memoryview(PAYLOAD))).status is WriteStatus.PRESENT:
            assert_refused_then_replaced(backend)
        buffer = memoryview(bytearray(len(PAYLOAD)))
        assert backend.read(KEY, buffer).status is ReadStatus.HIT
        assert buffer == PAYLOAD

    every(HOSTILE, check)


def test_strange_names_are_left_alone(backend: LocalDiskBackend) -> None:
    """Files with names that are not lmkv's, other versions' above all, are neither listed nor counted nor removed."""
    place, digits = place_of(backend), KEY.hex()
    names = [
        *(digits, f"{digits}.kv", f"{digits}.kv2", f"{digits}.kv1.bak", f"{digits.upper()}.kv1", ".hidden", "..kv1"),
        *(f"{digits[:-2]}  .kv1", f"{digits[:-1]}.kv1", f"{digits[:-2]}g0.kv1", f"{'ff' + digits[2:]}.kv1", "x" * 255),
        "\u0661" * 64 + ".kv1",
    ]
    for name in names:
        shutil.copy(make_attacks.FOLDER / "sound.kv1", place.with_name(name))
    (place.parent / "folder.tmp").mkdir()
    (place.parent.parent / "zz-not-ours").mkdir()
    (place.parent.parent / "ab").touch()
    assert list(backend.list_keys()) == []
    assert sorted(path.name for path in place.parent.iterdir()) == sorted([*names, "folder.tmp"])
