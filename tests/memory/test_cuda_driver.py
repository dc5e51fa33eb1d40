"""How `CUDADevice` calls the driver: through its real bindings, a driver of C functions that copy host memory."""

from __future__ import annotations

import ctypes
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmkv.memory.cuda import CUDADevice, _CUDAStream
from lmkv.memory.device import DeviceError, Transfers
from tests.tables import raised

POINTER, SIZE, STATUS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
SINGLE = ctypes.CFUNCTYPE(STATUS, ctypes.c_uint64, ctypes.c_uint64, SIZE, POINTER)
BATCH = ctypes.CFUNCTYPE(STATUS, POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE, POINTER, POINTER)
FIND = ctypes.CFUNCTYPE(STATUS, ctypes.c_char_p, POINTER, ctypes.c_int, ctypes.c_uint64, POINTER)
QUEUE = 0x5EED


class Driver:
    """Copies at once. `status`: what a call for many copies returns, after the first of them; None: an old driver."""

    def __init__(self, status: int | None = 0) -> None:
        self.status, self.single_status = status, 0
        self.singles, self.batches = 0, list[tuple[int, int]]()
        self.cuMemcpyAsync = SINGLE(self._copy)
        self._batch = BATCH(self._copy_batch)
        self.cuGetProcAddress_v2 = FIND(self._find)

    def _copy(self, target: int, source: int, nbytes: int, queue: int) -> int:
        assert queue == QUEUE
        self.singles += 1
        ctypes.memmove(target, source, nbytes)
        return self.single_status

    def _copy_batch(self, *given: Any) -> int:
        targets, sources, sizes, count, attributes, starts, kinds, failed, queue = given
        assert (kinds, ctypes.c_size_t.from_address(starts).value, queue) == (1, 0, QUEUE)
        assert failed
        self.batches.append((count, ctypes.c_uint.from_address(attributes).value))
        for at in range(count if not self.status else 1):
            target, source, nbytes = (
                ctypes.c_uint64.from_address(array + 8 * at).value for array in (targets, sources, sizes)
            )
            ctypes.memmove(target, source, nbytes)
        return self.status or 0

    def _find(self, name: bytes, function: int, version: int, flags: int, found: int) -> int:
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        if self.status is None:
            return 500
        ctypes.c_void_p.from_address(function).value = ctypes.cast(self._batch, POINTER).value
        return 0


class Copies:
    """Three runs of bytes, some way apart, from one array to another."""

    def __init__(self, driver: Driver) -> None:
        self.device = CUDADevice(torch.device("cuda:0"), driver)
        self.stream: Any = _CUDAStream(SimpleNamespace(cuda_stream=QUEUE))  # type: ignore[arg-type]
        self.source = np.arange(300, dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def transfer(self, *, pinned: bool = True, stable: bool = False) -> bool:
        """Whether just these bytes were copied."""
        self.target.fill(0)
        starts, sizes = np.array([5, 120, 260]), np.array([10, 100, 1])
        ends = (self.source.ctypes.data + starts, self.target.ctypes.data + starts)
        self.device.transfer(Transfers(*ends, sizes, pinned, stable), self.stream)
        wanted = np.zeros_like(self.source)
        for start, size in zip(starts, sizes, strict=True):
            wanted[start : start + size] = self.source[start : start + size]
        return bool((wanted == self.target).all())


def test_all_copies_are_one_call() -> None:
    driver = Driver()
    copies = Copies(driver)
    assert copies.transfer()
    assert copies.transfer(stable=True)
    assert (driver.singles, driver.batches) == (0, [(3, 1), (3, 3)]), "in the stream's order, or in any"
    assert copies.transfer(pinned=False)
    assert (driver.singles, len(driver.batches)) == (3, 2), "memory that is not pinned may be in none"


def test_a_driver_that_refuses_many_copies_in_one_call_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(status=801)
    copies = Copies(driver)
    with caplog.at_level(logging.WARNING, "lmkv"):
        assert all(copies.transfer() for _ in range(5))
    assert (len(driver.batches), driver.singles) == (1, 15)
    [record] = caplog.records
    assert "CUDA error 801" in record.getMessage()


@pytest.mark.parametrize("has_lookup", [True, False])
def test_an_old_driver_copies_one_by_one(has_lookup: bool) -> None:
    driver: Any = Driver(status=None)
    if not has_lookup:
        del driver.cuGetProcAddress_v2
    assert Copies(driver).transfer()
    assert driver.singles == 3


def test_a_copy_that_the_driver_refuses_is_an_error() -> None:
    driver = Driver(status=700)
    driver.single_status = 700
    raised(DeviceError, "CUDA error 700", lambda: Copies(driver).transfer())
