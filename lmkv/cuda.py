"""Copies between a CUDA device and the slab, on streams of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lmkv.copier import ChunkCopy, Event, check_fit
from lmkv.layout import KVLayout
from lmkv.pages import PagedMemory
from lmkv.slab import SlabMap

logger = logging.getLogger(__name__)

_REGISTER_PIECE = 1 << 30
"""One registration of hundreds of GiB fails; pieces do not."""


class PinnedSlab:
    """Registers a mapped slab with the device driver, so that copies run at full speed beside the CPU.

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


class _StreamEvent:
    """A recorded event that keeps the staging memory alive until the copy is done."""

    def __init__(self, event: torch.cuda.Event, staging: object) -> None:
        self._event = event
        self._staging = staging

    def query(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CUDACopier:
    """Stores gather on the compute stream and leave the device on a stream of their own.

    Gathering in stream order means that the source blocks may be reused as soon as the call returns. Loads
    run on the compute stream, so that whatever is launched next sees the blocks filled.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> None:
        check_fit(memory, layout, slab)
        self._memory = memory
        self._spans = [layout.span(rank, index) for index in range(len(layout.layers))]
        self._slots = torch.from_numpy(slab.array)
        self._device = memory.device
        self._pinned = PinnedSlab(slab, self._device)
        self._store_stream = torch.cuda.Stream(self._device)

    def _runs(self, copies: Sequence[ChunkCopy], group: int) -> list[tuple[int, int, list[int]]]:
        return [(copy.slot, copy.runs[group].first, copy.runs[group].blocks) for copy in copies]

    def _ids(self, runs: Sequence[tuple[int, int, list[int]]]) -> torch.Tensor:
        blocks = [block for _, _, run in runs for block in run]
        return torch.tensor(blocks, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def _slot_parts(
        self, index: int, width: int, runs: Sequence[tuple[int, int, list[int]]]
    ) -> list[tuple[torch.Tensor, int]]:
        """For each run, the flat bytes of its pages in its slot, and how many pages."""
        offset, _ = self._spans[index]
        parts = []
        for slot, first, blocks in runs:
            start = offset + first * width
            parts.append((self._slots[slot, start : start + len(blocks) * width], len(blocks)))
        return parts

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        staged = []
        compute = torch.cuda.current_stream(self._device)
        ids = {group: self._ids(self._runs(copies, group)) for group in set(self._memory.groups)}
        for row, group in zip(self._memory.rows, self._memory.groups, strict=True):
            staged.append(row.index_select(0, ids[group]))
        self._store_stream.wait_stream(compute)
        with torch.cuda.stream(self._store_stream):
            for index, (pages, group) in enumerate(zip(staged, self._memory.groups, strict=True)):
                pages.record_stream(self._store_stream)
                start = 0
                for part, count in self._slot_parts(index, pages.shape[1], self._runs(copies, group)):
                    part.copy_(pages[start : start + count].view(-1), non_blocking=True)
                    start += count
            event = torch.cuda.Event()
            event.record(self._store_stream)
        return _StreamEvent(event, staged)

    def load(self, copies: Sequence[ChunkCopy]) -> Event:
        ids = {group: self._ids(self._runs(copies, group)) for group in set(self._memory.groups)}
        for index, (row, group) in enumerate(zip(self._memory.rows, self._memory.groups, strict=True)):
            width = row.shape[1]
            pages = torch.empty((len(ids[group]), width), dtype=torch.uint8, device=self._device)
            start = 0
            for part, count in self._slot_parts(index, width, self._runs(copies, group)):
                pages[start : start + count].view(-1).copy_(part, non_blocking=True)
                start += count
            row.index_copy_(0, ids[group], pages)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _StreamEvent(event, ids)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pinned.close()
