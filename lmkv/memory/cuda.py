"""CUDA as a `Device`: torch's streams and memory, the driver's transfers, and a Triton kernel."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import frozen

from lmkv.chunks.layout import KVLayout
from lmkv.errors import LmkvError
from lmkv.memory.copier import DONE, Event
from lmkv.memory.device_copier import Addresses, DeviceCopier, Spans, Stream
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

logger = logging.getLogger(__name__)

_REGISTER_PIECE = 1 << 30
"""Bytes per registration: one of hundreds of GiB would fail."""

_BATCH = 32
"""Fewest transfers for which one call for all of them is tried."""

_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read in the stream's order, not before."""


class CUDAError(LmkvError):
    """A call of the CUDA driver failed."""


class PinnedSlab:
    """Registers a slab with the driver (pins it), so that transfers are asynchronous and at full speed.

    This takes seconds for a large slab and is done in the background. What is not registered, yet or because
    the driver refuses, is pageable memory: slower to copy, and just as correct.
    """

    def __init__(self, slab: SlabMap, device: torch.device) -> None:
        self._slab = slab
        self._device = device
        self._pieces: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._register, name="lmkv-pin", daemon=True)
        self._thread.start()

    def _register(self) -> None:
        torch.cuda.set_device(self._device)
        runtime: Any = torch.cuda.cudart()
        for offset in range(0, self._slab.nbytes, _REGISTER_PIECE):
            if self._stop.is_set():
                return
            address = self._slab.address + offset
            nbytes = min(_REGISTER_PIECE, self._slab.nbytes - offset)
            status = int(runtime.cudaHostRegister(address, nbytes, 0))
            if status:
                logger.warning(
                    "lmkv: the driver pinned %d of %d bytes of the CPU tier (error %d); copies of the rest "
                    "are slower. Check ulimit -l, or lower max_local_cpu_size",
                    offset,
                    self._slab.nbytes,
                    status,
                )
                return
            self._pieces.append(address)

    def close(self) -> None:
        """Unregister what is registered. No copy may be under way. Idempotent."""
        self._stop.set()
        # Afterwards `_pieces` is complete: nothing stays registered that is unmapped next.
        self._thread.join()
        runtime: Any = torch.cuda.cudart()
        while self._pieces:
            runtime.cudaHostUnregister(self._pieces.pop())


@frozen
class _CUDAEvent:
    event: torch.cuda.Event

    def query(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


@frozen
class _CUDAStream:
    stream: torch.cuda.Stream

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return _CUDAEvent(event)

    def wait_for(self, event: Event) -> None:
        if event is not DONE:
            assert isinstance(event, _CUDAEvent)
            self.stream.wait_event(event.event)


class CUDADevice:
    """One CUDA device, which pins the slab from its construction until `close`."""

    def __init__(self, device: torch.device, slab: SlabMap) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._driver.cuMemcpyAsync.argtypes = (address, address, size, pointer)
        self._pinned = PinnedSlab(slab, device)

    def stream(self, *, compute: bool = False) -> Stream:
        if compute:
            return _CUDAStream(torch.cuda.current_stream(self._device))
        return _CUDAStream(torch.cuda.Stream(self._device))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # torch may give out memory that work queued on the compute stream still uses, and orders only that
        # stream after it; this memory is used on other streams, too.
        torch.cuda.current_stream(self._device).synchronize()
        return memory.data_ptr(), memory

    def move(self, spans: Spans, stream: Stream) -> None:
        from lmkv.memory.kernels import launch_move

        assert isinstance(stream, _CUDAStream)
        with torch.cuda.stream(stream.stream):
            sources, targets = self._uploaded(spans.sources), self._uploaded(spans.targets)
            launch_move(sources, targets, spans.nbytes, spans.word)

    def _uploaded(self, addresses: Addresses) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(addresses)).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def transfer(self, spans: Spans, stream: Stream) -> None:
        assert isinstance(stream, _CUDAStream)
        queue = stream.stream.cuda_stream
        batched = _batched_copy() if len(spans.sources) >= _BATCH else None
        # One call may fail for memory that is not pinned yet; single copies work with it.
        if batched is not None and batched(spans, queue):
            return
        for source, target in zip(spans.sources.tolist(), spans.targets.tolist(), strict=True):
            status = self._driver.cuMemcpyAsync(target, source, spans.nbytes, queue)
            if status:
                raise CUDAError(f"cuMemcpyAsync of {spans.nbytes} bytes failed with driver error {status}")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._pinned.close()


def _copy_batch(function: Any, spans: Spans, queue: int) -> bool:
    """Queue all copies in one call; False when the driver refused, and queued none."""
    sources, targets = np.ascontiguousarray(spans.sources), np.ascontiguousarray(spans.targets)
    sizes = np.full(len(sources), spans.nbytes, np.uint64)
    # CUmemcpyAttributes: the access order, two hints of a type and an id each, flags.
    attributes = (ctypes.c_uint * 6)(_IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    copies = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes)
    options = ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed)
    return bool(function(*copies, *options, queue) == 0)


@functools.cache
def _batched_copy() -> Callable[[Spans, int], bool] | None:
    """`_copy_batch` with `cuMemcpyBatchAsync` as CUDA 12.8 defines it; None with an older driver."""
    driver = ctypes.CDLL("libcuda.so.1")
    function, found = ctypes.c_void_p(), ctypes.c_int()
    status = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(function), 12080, ctypes.c_uint64(0), ctypes.byref(found)
    )
    if status or not function.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return functools.partial(_copy_batch, kind(function.value))


def make_cuda_copier(memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> DeviceCopier:
    """Raises UsageError when they do not fit, and what torch or the driver raises without such a device."""
    return DeviceCopier(CUDADevice(memory.device, slab), memory, layout, slab, rank)
