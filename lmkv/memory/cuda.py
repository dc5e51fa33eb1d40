"""`CUDADevice`: a CUDA device for copiers, with torch's streams and memory, driver transfers, and a Triton kernel."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from attrs import frozen

from lmkv.memory.copier import Event
from lmkv.memory.device import DeviceError, Spans, Stream, TimedEvent, Transfers

logger = logging.getLogger(__name__)

_IN_STREAM_ORDER, _ANY_ORDER = 1, 3
"""Values of CUmemcpySrcAccessOrder: the device reads the source in the order of the stream, or at any time after the
call.
"""


@frozen
class _CUDAEvent:
    event: torch.cuda.Event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, _CUDAEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


@frozen
class _CUDAStream:
    stream: torch.cuda.Stream

    def record_event(self, *, timed: bool = False) -> TimedEvent:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.stream)
        return _CUDAEvent(event)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _CUDAEvent)
        self.stream.wait_event(event.event)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.stream):
            work()


class CUDADevice:
    """One CUDA device. The constructor raises OSError if there is no CUDA driver. `driver`: the driver's library; tests
    pass a replacement.
    """

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self._device = device
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._driver.cuMemcpyAsync.argtypes = (address, address, size, pointer)
        self._batched = batched_copy(self._driver)

    def stream(self, *, compute: bool = False) -> Stream:
        if compute:
            return _CUDAStream(torch.cuda.current_stream(self._device))
        return _CUDAStream(torch.cuda.Stream(self._device))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        # On a separate thread, for which no caller has begun a memory pool.
        with ThreadPoolExecutor(1) as thread:
            memory = thread.submit(lambda: torch.empty(nbytes, dtype=torch.uint8, device=self._device)).result()
        # torch may hand out memory in use by work queued on one stream, and orders only that stream after it. Other
        # streams use this memory as well.
        self.synchronize()
        return memory.data_ptr(), memory

    def move(self, spans: Spans, stream: Stream) -> None:
        from lmkv.memory.kernels import launch_move

        assert isinstance(stream, _CUDAStream)
        with torch.cuda.stream(stream.stream):
            addresses = torch.from_numpy(np.stack([spans.sources, spans.targets])).pin_memory()
            sources, targets = addresses.to(self._device, non_blocking=True).unbind()
            launch_move(sources, targets, spans.nbytes, spans.word)

    def transfer(self, transfers: Transfers, stream: Stream) -> None:
        assert isinstance(stream, _CUDAStream)
        queue = stream.stream.cuda_stream
        if self._batched is not None and transfers.pinned:
            status = self._batched(transfers, queue)
            if not status:
                return
            # Single copies work, or raise with a reason. They repeat the part of the batch in the queue.
            self._batched = None
            logger.warning(
                "lmkv: the NVIDIA driver refuses batched copies (CUDA error %d); copies take more time from now on; a "
                "newer driver may help",
                status,
            )
        copies = (transfers.targets.tolist(), transfers.sources.tolist(), transfers.sizes.tolist())
        for target, source, nbytes in zip(*copies, strict=True):
            _check(self._driver.cuMemcpyAsync(target, source, nbytes, queue), f"a copy of {nbytes} bytes of KV")

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            _check(int(runtime.cudaHostRegister(address, nbytes, 0)), f"pinning {nbytes} bytes of host memory")
        return lambda: _check(int(runtime.cudaHostUnregister(address)), "unpinning host memory")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _check(status: int, what: str) -> None:
    if status:
        raise DeviceError(f"{what} failed with CUDA error {status}")


def _copy_batch(function: Any, transfers: Transfers, queue: int) -> int:
    """Queue all copies in one call, and return the driver's status code (0 for success)."""
    arrays = [np.ascontiguousarray(array) for array in (transfers.targets, transfers.sources, transfers.sizes)]
    # CUmemcpyAttributes: the access order, two hints of a type and an id each, flags.
    attributes = (ctypes.c_uint * 6)(_ANY_ORDER if transfers.stable else _IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    copies = *(array.ctypes.data for array in arrays), len(arrays[0])
    options = ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed)
    return int(function(*copies, *options, queue))


def batched_copy(driver: Any) -> Callable[[Transfers, int], int] | None:
    """Return a function that queues many copies in one call and returns a status code. Return None if the driver is
    older than CUDA 12.8.
    """
    function, found = ctypes.c_void_p(), ctypes.c_int()
    find = getattr(driver, "cuGetProcAddress_v2", None)
    if find is None:
        return None
    status = find(b"cuMemcpyBatchAsync", ctypes.byref(function), 12080, ctypes.c_uint64(0), ctypes.byref(found))
    if status or not function.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return functools.partial(_copy_batch, kind(function.value))
