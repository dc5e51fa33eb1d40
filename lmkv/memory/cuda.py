"""CUDA as a `Device`: torch's streams and memory, the driver's transfers, and one Triton kernel."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
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
"""One registration of hundreds of GiB fails; pieces do not."""

_BATCH = 32
"""From so many transfers on, one call for all of them is tried."""

_IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there."""


class CUDAError(LmkvError):
    """The driver refused a call."""


class PinnedSlab:
    """Registers a mapped slab with the driver, so that copies run at full speed beside the CPU.

    In pieces and in the background: a large tier takes seconds, and until its turn comes, as when the driver
    refuses, memory stays pageable: slower to copy, and just as correct.
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
                    "lmkv: the driver pinned %d of %d bytes of the CPU tier (error %d); the rest is copied "
                    "at pageable speed",
                    offset,
                    self._slab.nbytes,
                    status,
                )
                return
            self._pieces.append(address)

    def close(self) -> None:
        """Unregister what is registered. No copy may be under way. Idempotent."""
        self._stop.set()
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
    """One CUDA device. `pinned`: the slab's registration, ended with the device's use."""

    def __init__(self, device: torch.device, slab: SlabMap) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuMemcpyAsync.argtypes = (
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_size_t,
            ctypes.c_void_p,
        )
        self._pinned = PinnedSlab(slab, device)

    def stream(self, *, compute: bool = False) -> Stream:
        if compute:
            return _CUDAStream(torch.cuda.current_stream(self._device))
        return _CUDAStream(torch.cuda.Stream(self._device))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Made on the compute stream, and used on others for as long as it lives.
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
        # It may refuse memory that is not pinned yet, which single copies take.
        if batched is not None and batched(spans, queue):
            return
        for source, target in zip(spans.sources.tolist(), spans.targets.tolist(), strict=True):
            status = self._driver.cuMemcpyAsync(target, source, spans.nbytes, queue)
            if status:
                raise CUDAError(f"cuMemcpyAsync failed with error {status} of the CUDA driver")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._pinned.close()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class _BatchedCopy:
    """`cuMemcpyBatchAsync` as CUDA 12.8 defined it: any number of copies for one call."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, spans: Spans, queue: int) -> bool:
        """Whether the driver took them, which it does all or none."""
        sources, targets = np.ascontiguousarray(spans.sources), np.ascontiguousarray(spans.targets)
        sizes = np.full(len(sources), spans.nbytes, np.uint64)
        attributes, first, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        status: int = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            queue,
        )
        return status == 0


@functools.cache
def _batched_copy() -> _BatchedCopy | None:
    """None where the driver is older than CUDA 12.8."""
    driver = ctypes.CDLL("libcuda.so.1")
    function, found = ctypes.c_void_p(), ctypes.c_int()
    status = driver.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync", ctypes.byref(function), 12080, ctypes.c_uint64(0), ctypes.byref(found)
    )
    if status or not function.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(
        ctypes.c_uint, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    return _BatchedCopy(kind(function.value))


def make_cuda_copier(memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> DeviceCopier:
    """Raises what torch raises where there is no such device."""
    return DeviceCopier(CUDADevice(memory.device, slab), memory, layout, slab, rank)
