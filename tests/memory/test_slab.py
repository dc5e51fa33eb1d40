"""The slab: slots, shared mappings, and the limits of a machine."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmkv.memory.slab
from lmkv.cli.measure.timing import interleaved, median_ratio
from lmkv.errors import ConfigError, UsageError
from lmkv.memory.slab import Slab, SlabMap, SlabRef, attach, available_ram, clamp_capacity
from tests.forked import Child, Tell
from tests.kit import LIMIT, eventually

SLOT = 8192
MIB = 1 << 20


def resident(slab: Slab) -> int:
    """How many of its bytes the kernel has given memory to."""
    pages = (ctypes.c_ubyte * (slab.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(slab.address, slab.nbytes, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


# -- slots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_slots_are_separate_and_aligned(shared: bool) -> None:
    slab = Slab(SLOT, 5 * SLOT + 100, shared=shared)
    assert (slab.num_slots, slab.free_slots, slab.nbytes) == (5, 5, 5 * SLOT)
    slots = [slab.acquire() for _ in range(5)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(5))
    for slot in range(5):
        slab.view(slot)[:] = bytes([slot + 1]) * SLOT
    for slot in range(5):
        view = slab.view(slot)
        assert view == bytes([slot + 1]) * SLOT
        assert np.frombuffer(view, np.uint8).ctypes.data == slab.address + slot * SLOT
        assert not slab.address % 4096
        assert slab.view(slot, 10) == bytes([slot + 1]) * 10
    slab.close()


def test_a_slab_says_what_it_is() -> None:
    slab = Slab(SLOT, 3 * SLOT, shared=True)
    slab.acquire()
    mapped = attach(slab.ref)
    assert repr(slab) == "<Slab: 2 of 3 slots of 8192 bytes are free>"
    assert repr(mapped) == "<SlabMap: 3 slots of 8192 bytes>"
    mapped.close()
    slab.close()


def test_a_slot_is_in_use_until_it_is_released() -> None:
    slab = Slab(SLOT, 2 * SLOT)
    first, second = slab.acquire(), slab.acquire()
    assert slab.acquire() is None
    assert first is not None
    slab.release(first)
    assert slab.acquire() == first
    assert second != first


@pytest.mark.parametrize("slot", [0, -1, 2, 100])
def test_what_is_not_in_use_cannot_be_released(slot: int) -> None:
    slab = Slab(SLOT, 2 * SLOT)
    with pytest.raises(UsageError, match="not in use"):
        slab.release(slot)
    assert slab.free_slots == 2


def test_acquiring_and_releasing_do_not_depend_on_how_much_is_in_use() -> None:
    """Looking through the slots in use would take a thousand times as long."""
    empty, full = Slab(4096, 20_000 * 4096), Slab(4096, 20_000 * 4096)
    for _ in range(19_999):
        full.acquire()

    def use(slab: Slab) -> None:
        for _ in range(1000):
            slot = slab.acquire()
            assert slot is not None
            slab.release(slot)

    times = interleaved({"full": lambda: use(full), "empty": lambda: use(empty)}, 5, clock=time.thread_time)
    assert median_ratio(times, "full", "empty") < 10


@pytest.mark.parametrize(("slot_bytes", "capacity"), [(0, 100), (-4096, 100), (100, 4096), (4096, 4095)])
def test_a_slab_that_cannot_be_is_refused(slot_bytes: int, capacity: int) -> None:
    with pytest.raises(UsageError):
        Slab(slot_bytes, capacity)


# -- sharing -------------------------------------------------------------------------------------------


def answer(tell: Tell, ref: SlabRef) -> None:
    mapped = attach(ref)
    mapped.view(2)[:4] = b"back"
    tell((mapped.num_slots, bytes(mapped.view(1)[:5])))


def test_another_process_sees_the_same_bytes() -> None:
    slab = Slab(SLOT, 3 * SLOT, shared=True)
    slab.view(1)[:5] = b"there"
    with Child(answer, slab.ref) as child:
        assert child.heard() == (3, b"there")
        assert child.ended() == 0
    assert bytes(slab.view(2)[:4]) == b"back"
    slab.close()


def test_a_mapping_outlives_the_owner_and_no_file_is_left() -> None:
    slab = Slab(SLOT, SLOT, shared=True)
    ref = slab.ref
    slab.view(0)[:3] = b"abc"
    mapped = attach(ref)
    slab.close()
    assert bytes(mapped.view(0)[:3]) == b"abc"
    with pytest.raises(OSError, match="No such file"):
        attach(ref)
    mapped.close()


def test_a_private_slab_cannot_be_shared() -> None:
    with pytest.raises(UsageError, match="shared"):
        _ = Slab(SLOT, SLOT).ref


def test_views_outlive_close() -> None:
    """A thread that hangs in a read must not find its memory unmapped."""
    slab = Slab(SLOT, SLOT)
    view = slab.view(0)
    slab.close()
    slab.close()
    view[:] = b"x" * SLOT
    assert view == b"x" * SLOT
    with pytest.raises(IndexError):
        slab.view(0)


# -- memory --------------------------------------------------------------------------------------------


def test_memory_is_taken_when_it_is_touched_or_populated_in_the_background() -> None:
    slab = Slab(SLOT, 16 * MIB)
    assert resident(slab) == 0
    slab.view(0)[0] = 1
    assert 0 < resident(slab) <= 2 * MIB
    slab.populate()
    eventually(lambda: resident(slab) == slab.nbytes)
    slab.close()


class Patient(threading.Event):
    """A pause lasts until the end is near, however short it was to be."""

    pauses = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses += 1
        return super().wait(LIMIT)


def test_closing_ends_the_populating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.memory.slab, "_PIECE", SLOT)
    slab = Slab(SLOT, 100 * SLOT)
    stop = slab._stop = Patient()
    slab.populate()
    eventually(lambda: stop.pauses > 0)
    slab.close()
    assert stop.pauses == 1
    assert not any(thread.name.startswith("lmkv-populate") for thread in threading.enumerate())


def _files(folder: Path, available: int, limit: str = "max", current: int = 0, cache: int = 0) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    (folder / "meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n")
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache // 2}\nactive_file {cache // 2}\n")
    return {"meminfo": folder / "meminfo", "cgroup": folder}


def test_available_memory_is_the_least_of_what_the_limits_leave(tmp_path: Path) -> None:
    assert available_ram(**_files(tmp_path, 64 * MIB)) == 64 * MIB
    assert available_ram(**_files(tmp_path, 64 * MIB, str(100 * MIB), 90 * MIB)) == 10 * MIB
    assert available_ram(**_files(tmp_path, 64 * MIB, str(100 * MIB), 10 * MIB)) == 64 * MIB
    assert available_ram(**_files(tmp_path, 64 * MIB, str(100 * MIB), 101 * MIB)) == 0


def test_page_cache_is_not_in_the_way(tmp_path: Path) -> None:
    """A model's weights that were read from disk fill a container's limit, and make room at once."""
    assert available_ram(**_files(tmp_path, 64 * MIB, str(100 * MIB), 99 * MIB, 50 * MIB)) == 51 * MIB


def test_without_any_of_the_files_there_is_an_answer(tmp_path: Path) -> None:
    assert available_ram(tmp_path / "none", tmp_path) > 0


def test_capacity_is_cut_to_the_machine_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmkv.memory.slab, "available_ram", lambda: 100 * SLOT)
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert clamp_capacity(50 * SLOT + 1, SLOT) == 50 * SLOT
        assert not caplog.records
        assert clamp_capacity(1000 * SLOT, SLOT) == 80 * SLOT
    (record,) = caplog.records
    assert "available memory" in record.getMessage()


def test_a_tier_without_room_for_a_chunk_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.memory.slab, "available_ram", lambda: SLOT)
    with pytest.raises(ConfigError, match=r"max_local_cpu_size.*available memory.*chunk_size"):
        clamp_capacity(10 * SLOT, SLOT)


def test_pinned_memory_is_limited_by_the_locked_memory_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limit(which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_MEMLOCK
        return 5 * SLOT + 1, 5 * SLOT + 1

    monkeypatch.setattr(resource, "getrlimit", limit)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert clamp_capacity(10 * SLOT, SLOT) == 10 * SLOT
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert clamp_capacity(10 * SLOT, SLOT, pinned=True) == 5 * SLOT
    assert "ulimit -l" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert clamp_capacity(10 * SLOT, SLOT, pinned=True) == 10 * SLOT


def test_a_map_counts_only_whole_slots() -> None:
    mapped: Any = SlabMap(-1, 3 * SLOT, SLOT)
    assert (mapped.num_slots, mapped.array.shape) == (3, (3, SLOT))
    mapped.close()
