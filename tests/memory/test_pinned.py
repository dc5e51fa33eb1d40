"""PinnedSlab: what is registered when, on a device that knows the borders of registrations."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from lmkv.memory.device import DeviceError, PinnedSlab, pinning_threads
from lmkv.memory.slab import Slab, SlabMap
from tests.simulated_device import SimulatedDevice

SLOT = 3 * 4096


class Populated(SimulatedDevice):
    """Refuses what has no memory yet: a registration would map it page by page, under locks of the driver."""

    slab: Slab
    touched: set[int]

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        first = address - self.slab.address
        assert {first // 4096, (first + nbytes - 1) // 4096} <= self.touched
        return super().register(address, nbytes)


class Watched(Slab):
    """Notes the pages that were populated."""

    def __init__(self, slots: int) -> None:
        super().__init__(SLOT, slots * SLOT)
        self.touched: set[int] = set()

    def prefault(self, offset: int, nbytes: int) -> bool:
        self.touched.update(range(offset // 4096, -(-(offset + nbytes) // 4096)))
        return super().prefault(offset, nbytes)


@contextmanager
def pinned(device: SimulatedDevice, slab: Slab, *part: Any, **options: Any) -> Iterator[PinnedSlab]:
    """At the end both are closed, and nothing is registered any more."""
    pins = PinnedSlab(device, slab, *part, **options)
    yield pins
    pins.close()
    assert not device.registered
    slab.close()


def borders(device: SimulatedDevice, slab: Slab) -> list[tuple[int, int]]:
    return sorted((found.first - slab.address, found.last - slab.address) for found in device.registered)


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_of_whole_slots_are_populated_and_then_registered(threads: int) -> None:
    slab, device = Watched(8), Populated()
    device.slab, device.touched = slab, slab.touched
    # No multiple of slots, and no power of two.
    with pinned(device, slab, threads=threads, piece_bytes=3 * SLOT + 5000) as pins:
        pins.wait()
        assert borders(device, slab) == [(0, 3 * SLOT), (3 * SLOT, 6 * SLOT), (6 * SLOT, 8 * SLOT)]
        assert repr(pins) == "<PinnedSlab: 8 of 8 slots>"
        pins.close()


def test_each_rank_registers_its_part_of_every_slot() -> None:
    slab, device = Slab(SLOT, 4 * SLOT), SimulatedDevice()
    with pinned(device, slab, (5000, 3000)) as pins:
        pins.wait()
        assert borders(device, slab) == [(at * SLOT + 5000, at * SLOT + 8000) for at in range(4)]


def test_what_is_pinned_is_known_slot_by_slot() -> None:
    slab, device = Slab(SLOT, 4 * SLOT), SimulatedDevice()
    hosts = slab.address + np.array([0, SLOT - 1, 2 * SLOT - 1, 2 * SLOT, 4 * SLOT - 1])
    with pinned(device, slab, threads=0, piece_bytes=2 * SLOT) as pins:
        assert pins.holds(hosts).tolist() == [False] * 5
        assert pins.pin_next()
        assert pins.holds(hosts).tolist() == [True, True, True, False, False]
        assert pins.pin_next()
        assert pins.holds(hosts).all()
        assert not pins.pin_next()
    slab = Slab(SLOT, 100 * SLOT)
    with pinned(device, slab, threads=0, piece_bytes=SLOT) as pins:
        assert pins.pin_next()
        pins.close()
        assert not pins.pin_next(), "closing ends it"


@pytest.mark.parametrize(("error", "after"), [(DeviceError("out of memory"), 2), (RuntimeError("never began"), 0)])
def test_a_driver_that_refuses_is_asked_no_more(error: Exception, after: int, caplog: pytest.LogCaptureFixture) -> None:
    class Full(SimulatedDevice):
        def register(self, address: int, nbytes: int) -> Callable[[], None]:
            if len(self.registered) == after:
                raise error
            return super().register(address, nbytes)

    with caplog.at_level(logging.WARNING, "lmkv"), pinned(Full(), Slab(SLOT, 5 * SLOT), piece_bytes=SLOT) as pins:
        pins.wait()
        assert not pins.pin_next()
    [record] = caplog.records
    assert f"<PinnedSlab: {after} of 5 slots>" in record.getMessage()
    assert str(error) in caplog.text


def test_ranks_with_the_same_part_populate_a_share_of_it_each_and_pin_all_of_it() -> None:
    """As with the KV of MLA under tensor parallelism: one copy, which every rank loads."""
    with closing(Slab(SLOT, 16 * SLOT)) as slab:
        populated: list[int] = []
        touched: set[int] = set()

        class Counting(SlabMap):
            rank = 0

            def prefault(self, offset: int, nbytes: int) -> bool:
                pages = set(range(offset // 4096, (offset + nbytes) // 4096))
                populated[self.rank] += len(pages - touched)
                touched.update(pages)
                return super().prefault(offset, nbytes)

        devices, pins = [], []
        for rank in range(4):
            mapped = Counting(-1, slab.nbytes, SLOT)
            mapped.rank = rank
            populated.append(0)
            devices.append(SimulatedDevice())
            pins.append(PinnedSlab(devices[-1], mapped, turn=(rank, 4), threads=0, piece_bytes=2 * SLOT))
        for _ in range(slab.num_slots // 2):
            assert all(each.pin_next() for each in pins), "in turns"
        assert populated == [slab.nbytes // 4096 // 4] * 4
        assert {repr(each) for each in pins} == {"<PinnedSlab: 16 of 16 slots>"}
        for each in pins:
            each.close()


def test_a_thread_that_pins_has_the_priority_of_the_process() -> None:
    """It holds locks of the driver, which the thread that launches kernels waits for."""
    found = []

    class Watched(SimulatedDevice):
        def register(self, address: int, nbytes: int) -> Callable[[], None]:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().register(address, nbytes)

    with pinned(Watched(), Slab(SLOT, 2 * SLOT)) as pins:
        pins.wait()
        assert set(found) == {os.getpriority(os.PRIO_PROCESS, os.getpid())}


def test_ranks_share_the_cores() -> None:
    assert 1 <= pinning_threads(8) <= pinning_threads(1) <= 4
