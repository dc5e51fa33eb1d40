"""Moving pages between paged memory and slots: the only code that touches a model's KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.errors import UsageError
from lmkv.layout import KVLayout
from lmkv.pages import PagedMemory
from lmkv.slab import SlabMap

Array = npt.NDArray[Any]


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


def _take(pages: Array, blocks: list[int], out: Array) -> None:
    np.take(pages, blocks, axis=0, out=out, mode="clip")


def _take_apart(pages: Array, blocks: list[int], out: Array) -> None:
    # np.take would first make a contiguous copy of all pages, as large as the whole KV memory.
    for place, block in enumerate(blocks):
        out[place] = pages[block]


@frozen
class _Plane:
    """One layer's rows as words, its part of every slot `[slot, page, word]`, and how pages are gathered."""

    pages: Array
    slots: Array
    group: int
    take: Callable[[Array, list[int], Array], None]


class CPUCopier:
    """Paged memory in host memory: one numpy call per chunk and plane, at the speed of memcpy.

    `np.take(..., out=..., mode="clip")` and fancy assignment were measured to reach a contiguous copy;
    torch's indexed copies lose 15 to 40 %, and more threads only fight over the cores.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> None:
        check_fit(memory, layout, slab)
        self._planes: list[_Plane] = []
        for index, (row, group) in enumerate(zip(memory.rows, memory.groups, strict=True)):
            offset, nbytes = layout.span(rank, index)
            word = _words(np.gcd.reduce([row.shape[1], row.stride(0), offset, row.data_ptr()]))
            pages: Array = row.numpy().view(word)
            part: Array = slab.array[:, offset : offset + nbytes].view(word)
            slots = part.reshape(slab.num_slots, -1, pages.shape[1])
            take = _take if pages.flags.c_contiguous else _take_apart
            self._planes.append(_Plane(pages, slots, group, take))
        self._num_slots = slab.num_slots
        self._limits = {plane.group: len(plane.pages) for plane in reversed(self._planes)}

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        self._check(copies)
        for plane in self._planes:
            for copy in copies:
                run = copy.runs[plane.group]
                if run.blocks:
                    out = plane.slots[copy.slot, run.first : run.first + len(run.blocks)]
                    plane.take(plane.pages, run.blocks, out)
        return DONE

    def load(self, copies: Sequence[ChunkCopy]) -> Event:
        self._check(copies)
        for plane in self._planes:
            for copy in copies:
                run = copy.runs[plane.group]
                if run.blocks:
                    filled = plane.slots[copy.slot, run.first : run.first + len(run.blocks)]
                    plane.pages[run.blocks] = filled
        return DONE

    def _check(self, copies: Sequence[ChunkCopy]) -> None:
        """Before the first byte moves. Blocks and slots that do not exist would become copies of others."""
        for copy in copies:
            if not 0 <= copy.slot < self._num_slots:
                raise UsageError(f"slot {copy.slot} is not within {self._num_slots} slots")
            for group, limit in self._limits.items():
                blocks = copy.runs[group].blocks
                if blocks and (min(blocks) < 0 or max(blocks) >= limit):
                    raise UsageError(f"block ids {min(blocks)}..{max(blocks)} are not within {limit} blocks")

    def close(self) -> None:
        self._planes.clear()


def check_fit(memory: PagedMemory, layout: KVLayout, slab: SlabMap) -> None:
    """Raise UsageError unless the memory, the layout and the slab describe the same chunk."""
    pages = [row.shape[1] for row in memory.rows]
    if pages != [layer.page_bytes for layer in layout.layers]:
        raise UsageError("the registered KV tensors do not have the page sizes of the layout")
    if layout.chunk_bytes > slab.slot_bytes:
        raise UsageError(f"chunks of {layout.chunk_bytes} bytes do not fit slots of {slab.slot_bytes}")


def make_copier(memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> Copier:
    """The copier for where the memory is."""
    if memory.device.type == "cpu":
        return CPUCopier(memory, layout, slab, rank)
    from lmkv.cuda import CUDACopier

    return CUDACopier(memory, layout, slab, rank)
