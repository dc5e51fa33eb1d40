"""Moving pages between paged memory and slots: the only code that touches a model's KV bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.errors import UsageError
from lmkv.layout import KVLayout
from lmkv.pages import PagedMemory
from lmkv.slab import SlabMap


@frozen
class Run:
    """Consecutive pages of a chunk, from `first`, and the blocks that hold them."""

    first: int
    blocks: list[int]


@frozen
class ChunkCopy:
    """One chunk's share of a copy order: a slot, and for each block table the run of pages to move."""

    slot: int
    runs: tuple[Run, ...]


class Event(Protocol):
    """When a copy has been done. `query` never blocks."""

    def query(self) -> bool: ...

    def wait(self) -> None: ...


class Done:
    """The event of a copy that was finished when its call returned."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE = Done()


class Copier(Protocol):
    """Copies between one rank's paged memory and its segment of the slots. Not thread-safe."""

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        """Blocks into slots, ordered after the computation that writes the blocks."""
        ...

    def load(self, copies: Sequence[ChunkCopy]) -> Event:
        """Slots into blocks, ordered before the computation that reads the blocks."""
        ...

    def close(self) -> None: ...


def _words(nbytes: int) -> np.dtype[np.generic]:
    """The widest integer that divides `nbytes`: numpy moves int64 rows at the speed of memcpy."""
    return np.dtype(next(f"u{size}" for size in (8, 4, 2, 1) if nbytes % size == 0))


class CPUCopier:
    """Paged memory in host memory: one numpy call per chunk and plane, at the speed of memcpy.

    `np.take(..., out=..., mode="clip")` and fancy assignment were measured to reach a contiguous copy;
    torch's indexed copies lose 15 to 40 %, and more threads only fight over the cores.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> None:
        check_fit(memory, layout, slab)
        self._planes: list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic], int, int, int]] = []
        for index, (row, group) in enumerate(zip(memory.rows, memory.groups, strict=True)):
            offset, nbytes = layout.span(rank, index)
            word = _words(np.gcd.reduce([row.shape[1], row.stride(0), offset, row.data_ptr()]))
            pages = row.numpy().view(word)
            slots = slab.array[:, offset : offset + nbytes].view(word)
            self._planes.append((pages, slots, pages.shape[1], group, pages.shape[0]))

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        for pages, slots, width, group, limit in self._planes:
            for copy in copies:
                run = copy.runs[group]
                if run.blocks:
                    start = run.first * width
                    out = slots[copy.slot, start : start + len(run.blocks) * width].reshape(-1, width)
                    _check_blocks(run.blocks, limit)
                    np.take(pages, run.blocks, axis=0, out=out, mode="clip")
        return DONE

    def load(self, copies: Sequence[ChunkCopy]) -> Event:
        for pages, slots, width, group, limit in self._planes:
            for copy in copies:
                run = copy.runs[group]
                if run.blocks:
                    start = run.first * width
                    _check_blocks(run.blocks, limit)
                    pages[run.blocks] = slots[copy.slot, start : start + len(run.blocks) * width].reshape(
                        -1, width
                    )
        return DONE

    def close(self) -> None:
        self._planes.clear()


def check_fit(memory: PagedMemory, layout: KVLayout, slab: SlabMap) -> None:
    """Raise UsageError unless the memory, the layout and the slab describe the same chunk."""
    pages = [row.shape[1] for row in memory.rows]
    if pages != [layer.page_bytes for layer in layout.layers]:
        raise UsageError("the registered KV tensors do not have the page sizes of the layout")
    if layout.chunk_bytes > slab.slot_bytes:
        raise UsageError(f"chunks of {layout.chunk_bytes} bytes do not fit slots of {slab.slot_bytes}")


def _check_blocks(blocks: Sequence[int], limit: int) -> None:
    # np.take clips silently: a block that does not exist must not become a copy of another one.
    if min(blocks) < 0 or max(blocks) >= limit:
        raise UsageError(f"block ids {min(blocks)}..{max(blocks)} are outside the registered {limit} blocks")


def make_copier(memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> Copier:
    """The copier for where the memory is."""
    if memory.device.type == "cpu":
        return CPUCopier(memory, layout, slab, rank)
    from lmkv.cuda import CUDACopier

    return CUDACopier(memory, layout, slab, rank)
