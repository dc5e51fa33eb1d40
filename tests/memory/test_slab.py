"""The slab: slots, shared mappings, and the limits of a machine."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from attrs import evolve

import lmkv.backends.cpu
import lmkv.memory.machine
import lmkv.memory.slab
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.cli.report import interleaved
from lmkv.errors import ConfigError, UsageError
from lmkv.memory import slab
from lmkv.memory.machine import clamp_capacity
from lmkv.memory.slab import Slab, SlabMap, SlabRef, attach, slab_name, wait_for_slab
from lmkv.testing.backend_suite import in_threads
from tests.forked import Child, Tell
from tests.kit import LIMIT, eventually, median_ratio, raised

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
    with closing(Slab(SLOT, 5 * SLOT + 100, shared=shared)) as slab:
        assert (slab.num_slots, slab.free_slots, slab.nbytes) == (5, 5, 5 * SLOT)
        slots = [slab.allocate() for _ in range(5)]
        assert sorted(slot for slot in slots if slot is not None) == list(range(5))
        for slot in range(5):
            slab.view(slot)[:] = bytes([slot + 1]) * SLOT
        for slot in range(5):
            view = slab.view(slot)
            assert view == bytes([slot + 1]) * SLOT
            assert np.frombuffer(view, np.uint8).ctypes.data == slab.address + slot * SLOT
            assert not slab.address % 4096
            assert slab.view(slot, 10) == bytes([slot + 1]) * 10


def test_a_slab_says_what_it_is() -> None:
    slab = Slab(SLOT, 3 * SLOT, shared=True)
    slab.allocate()
    mapped = attach(slab.ref)
    assert repr(slab) == "<Slab: 2 of 3 slots of 8192 bytes are free>"
    assert repr(mapped) == "<SlabMap: 3 slots of 8192 bytes>"
    mapped.close()
    slab.close()


def test_a_slot_is_in_use_until_it_is_released() -> None:
    slab = Slab(SLOT, 2 * SLOT)
    first, second = slab.allocate(), slab.allocate()
    assert slab.allocate() is None
    assert first is not None
    slab.free(first)
    assert slab.allocate() == first
    assert second != first


def test_what_cannot_be_is_refused() -> None:
    slab = Slab(SLOT, 2 * SLOT)
    for slot in (0, -1, 2, 100):
        raised(UsageError, "not in use", slab.free, slot)
    assert slab.free_slots == 2
    for slot_bytes, capacity in ((0, 100), (-4096, 100), (100, 4096), (4096, 4095)):
        raised(UsageError, "", Slab, slot_bytes, capacity)
    raised(UsageError, "shared", lambda: slab.ref)


def test_acquiring_and_releasing_do_not_depend_on_how_much_is_in_use() -> None:
    """Looking through the slots in use would take a thousand times as long."""
    empty, full = Slab(4096, 20_000 * 4096), Slab(4096, 20_000 * 4096)
    for _ in range(19_999):
        full.allocate()

    def use(slab: Slab) -> None:
        for _ in range(1000):
            slot = slab.allocate()
            assert slot is not None
            slab.free(slot)

    times = interleaved({"full": lambda: use(full), "empty": lambda: use(empty)}, 5, clock=time.thread_time)
    assert median_ratio(times, "full", "empty") < 10


# -- sharing -------------------------------------------------------------------------------------------


def answer(tell: Tell, ref: SlabRef) -> None:
    mapped = attach(ref)
    mapped.view(2)[:4] = b"back"
    tell((mapped.num_slots, bytes(mapped.view(1)[:5])))


def test_another_process_sees_the_same_bytes() -> None:
    with closing(Slab(SLOT, 3 * SLOT, shared=True)) as slab:
        slab.view(1)[:5] = b"there"
        with Child(answer, slab.ref) as child:
            assert child.heard() == (3, b"there")
            assert child.ended() == 0
        assert bytes(slab.view(2)[:4]) == b"back"


def test_a_mapping_outlives_the_owner_and_no_file_is_left() -> None:
    slab = Slab(SLOT, SLOT, shared=True)
    ref = slab.ref
    slab.view(0)[:3] = b"abc"
    with closing(attach(ref)) as mapped:
        slab.close()
        assert bytes(mapped.view(0)[:3]) == b"abc"
        raised(OSError, "No such file", attach, ref)


def test_views_outlive_close() -> None:
    """A thread that hangs in a read must not find its memory unmapped."""
    slab = Slab(SLOT, SLOT)
    view = slab.view(0)
    slab.close()
    slab.close()
    view[:] = b"x" * SLOT
    assert view == b"x" * SLOT
    raised(IndexError, "", slab.view, 0)


# -- memory --------------------------------------------------------------------------------------------


def test_memory_is_taken_when_it_is_touched_or_populated_in_the_background() -> None:
    with closing(Slab(SLOT, 16 * MIB)) as slab:
        assert resident(slab) == 0
        slab.view(0)[0] = 1
        assert 0 < resident(slab) <= 2 * MIB
        slab.populate()
        eventually(lambda: resident(slab) == slab.nbytes)


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


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Give the host so many slots of memory, of which so many have been promised to others."""

    def give(available: int, promised: int) -> None:
        monkeypatch.setattr(lmkv.memory.machine, "available_ram", lambda: available * SLOT)
        monkeypatch.setattr(slab, "promised_and_taken", lambda: (promised * SLOT, 0))

    return give


def test_capacity_is_cut_to_the_machine_with_one_line(
    host: Callable[[int, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    host(100, 0)
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert clamp_capacity(50 * SLOT + 1, SLOT) == 50 * SLOT
        assert not caplog.records
        assert clamp_capacity(1000 * SLOT, SLOT) == 80 * SLOT
    (record,) = caplog.records
    assert "available memory" in record.getMessage()
    host(1, 0)
    raised(ConfigError, r"max_local_cpu_size.*available memory.*chunk_size", clamp_capacity, 10 * SLOT, SLOT)
    host(1000, 5000)
    assert clamp_capacity(3 * SLOT - 1, SLOT) == 2 * SLOT, "a small slab is given all the same"
    raised(ConfigError, "other engines on this host may take", clamp_capacity, 4 * SLOT, SLOT)


def test_the_limit_of_locked_memory_is_none_of_ours() -> None:
    """The driver pins memory without asking for it, and a server that is not root often has 8 MiB."""
    old = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (5 * SLOT, old[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 1000)
            assert clamp_capacity(10 * SLOT, SLOT) == 10 * SLOT
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, old)


# -- several engines on a host ---------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 slots of memory are free before the first slab, and 80 of them are for slabs."""
    mine = f"-{os.getpid()}."

    def files() -> Iterator[tuple[str, str, os.stat_result]]:
        return (found for found in slab_files_now() if mine in found[1])

    slab_files_now = slab.slab_files
    monkeypatch.setattr(slab, "slab_files", files)
    monkeypatch.setattr(lmkv.memory.machine, "available_ram", lambda: 100 * SLOT - slab.promised_and_taken()[1])


def my_slab(slots: int) -> Slab:
    return Slab(SLOT, slots * SLOT, shared=True, engine=f"test-{os.getpid()}")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("populated", [False, True])
def test_engines_that_start_together_get_equal_shares(populated: bool) -> None:
    """The first may have populated its slab when the second one looks, or not."""
    share = clamp_capacity(1000 * SLOT, SLOT, engines=2)
    assert share == 40 * SLOT
    with closing(my_slab(40)) as first:
        if populated:
            assert first.prefault(0, first.nbytes)
            assert slab.promised_and_taken() == (40 * SLOT, 40 * SLOT)
        assert clamp_capacity(1000 * SLOT, SLOT, engines=2) == share


@pytest.mark.usefixtures("machine")
def test_what_another_engine_has_not_taken_yet_is_its_own() -> None:
    first = my_slab(70)
    assert clamp_capacity(1000 * SLOT, SLOT) == 10 * SLOT
    second = my_slab(10)
    raised(ConfigError, "lower max_local_cpu_size of all engines on this host", clamp_capacity, 1000 * SLOT, SLOT)
    first.close()
    second.close()


def test_slabs_are_sized_and_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two engines would see the same free memory, and neither the other's slab."""
    locked: list[bool] = []

    def is_locked() -> bool:
        with Child(try_to_lock, slab._lock_file()) as other:
            return not other.heard()

    class Watched(Slab):
        def __init__(self, *args: Any, **options: Any) -> None:
            locked.append(is_locked())
            super().__init__(*args, **options)

    def clamp(*args: Any, **options: Any) -> int:
        locked.append(is_locked())
        return clamp_capacity(*args, **options)

    monkeypatch.setattr(lmkv.backends.cpu, "Slab", Watched)
    monkeypatch.setattr(lmkv.backends.cpu, "clamp_capacity", clamp)
    CPUPinnedBackend(SLOT, SLOT, shared=True).close()
    assert locked == [True, True]
    eventually(lambda: not is_locked(), "another test may be making a slab")


def try_to_lock(tell: Tell, path: str) -> None:
    with open(path, "rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell(False)
        else:
            tell(True)


def fork_while_making(tell: Tell) -> None:
    """Fork a child that lives for a minute while a slab is being made, and wait to be killed."""
    with slab.one_at_a_time():
        if not (pid := os.fork()):
            signal.alarm(int(LIMIT))
            signal.pause()
        tell(pid)
        signal.pause()


@pytest.mark.parametrize("killed", [True, False])
def test_a_child_that_was_forked_meanwhile_has_no_lock(
    killed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its parent was killed in the middle, or goes on: who has the lock is the parent alone."""
    with Child(fork_while_making) as parent:
        pid = parent.heard()
        try:
            if killed:
                parent.kill()
            else:
                monkeypatch.setattr(slab, "_PATIENCE", 0.01)
            with slab.one_at_a_time():
                assert os.kill(pid, 0) is None
        finally:
            os.kill(pid, signal.SIGKILL)
    assert ("another process has locked the file" in caplog.text) == (not killed), caplog.text


def make_in_a_child(tell: Tell) -> None:
    """A child that was forked while a thread had the lock makes a slab of its own."""
    entered, leave = threading.Event(), threading.Event()

    def make() -> None:
        with slab.one_at_a_time():
            entered.set()
            leave.wait(LIMIT)

    slab._PATIENCE = 0.01
    thread = threading.Thread(target=make)
    thread.start()
    assert entered.wait(LIMIT)
    if not (pid := os.fork()):
        with slab.one_at_a_time():
            os._exit(7)
    tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    leave.set()
    thread.join(LIMIT)


def test_a_child_does_not_wait_for_threads_that_it_lacks() -> None:
    with Child(make_in_a_child) as parent:
        assert parent.heard() == 7


def test_two_threads_make_their_slabs_one_after_the_other() -> None:
    """The kernel's lock is the process's: it keeps no other thread out."""
    inside, most, lock = 0, 0, threading.Lock()

    def make(_: int) -> None:
        nonlocal inside, most
        with slab.one_at_a_time():
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.001)
            with lock:
                inside -= 1

    in_threads(20, make)
    assert most == 1


# -- whose slab it is --------------------------------------------------------------------------------------


def test_another_file_under_the_same_number_is_not_mapped() -> None:
    """In another container, or once the owner has ended, the same path may be another engine's slab."""
    slab, other = my_slab(2), my_slab(2)
    raised(FileNotFoundError, "is not host memory lmkv-slab-test-", attach, evolve(slab.ref, path=other.ref.path))
    raised(FileNotFoundError, "is not host memory", attach, evolve(slab.ref, path="/dev/null"))
    slab.close()
    other.close()


def test_a_slab_is_found_by_the_name_of_its_engine() -> None:
    engine = f"test-{os.getpid()}"
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(wait_for_slab, engine, SLOT, stop)
        other = Slab(SLOT, SLOT, shared=True, engine=f"{engine}1")
        slab = my_slab(3)
        assert search.result(LIMIT) == slab.ref
    two = my_slab(3)
    assert lmkv.memory.slab.find_file(engine) is None, "either of them may be the one"
    for made in (slab, other, two):
        made.close()
    stop.set()
    assert wait_for_slab(engine, SLOT, stop) is None


def test_a_slab_is_found_only_by_who_has_its_layout() -> None:
    engine, stop = f"test-{os.getpid()}", threading.Event()
    layouts = [KVLayout(8, (LayerPages(page, 2),)) for page in (64, 72)]
    assert layouts[0].slot_bytes == layouts[1].slot_bytes
    with closing(Slab(layouts[0].slot_bytes, 4096, shared=True, engine=slab_name(engine, layouts[0]))) as slab:
        assert wait_for_slab(slab_name(engine, layouts[0]), 4096, stop) == slab.ref
        assert lmkv.memory.slab.find_file(slab_name(engine, layouts[1])) is None


def test_processes_with_the_same_part_begin_at_different_places() -> None:
    with closing(Slab(SLOT, 8 * SLOT)) as slab:
        pieces = [list(slab.spans((0, SLOT), 2 * SLOT, (rank, 2))) for rank in range(2)]
        assert [found[0][0] for found in pieces] == [0, 4 * SLOT]
        assert sorted(pieces[0]) == sorted(pieces[1])


def test_each_rank_populates_its_part_alone() -> None:
    size = 64 * 4096
    slab = Slab(size, 8 * size)
    slab.populate((size // 4, size // 2))
    eventually(lambda: resident(slab) >= slab.nbytes // 2)
    slab.close()
    assert list(slab.spans((size // 4, size // 2), 1 << 30))[1] == (size + size // 4, size // 2)
    slab = Slab(size, 8 * size)
    assert list(slab.spans((0, size), 3 * size)) == [(0, 3 * size), (3 * size, 3 * size), (6 * size, 2 * size)]
    assert slab.prefault(5000, 10)
    assert resident(slab) <= 2 * 4096
    slab.close()


def test_a_map_counts_only_whole_slots() -> None:
    mapped: Any = SlabMap(-1, 3 * SLOT, SLOT)
    assert (mapped.num_slots, mapped.array.shape) == (3, (3, SLOT))
    mapped.close()
