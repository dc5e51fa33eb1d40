"""Moving pages between paged memory and slots: the only code that touches a model's KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.errors import UsageError
from lmkv.layout import KVLayout
from lmkv.pages import PagedMemory
from lmkv.slab import SlabMap

Array = npt.NDArray[Any]
_P = TypeVar("_P")


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
    """Copies between one rank's paged memory and its segment of the slots. Not thread-safe.

    All calls come from the thread that launches the computation, and are ordered with it: stores come after
    what was launched before, loads before what is launched next.
    """

    @property
    def num_layers(self) -> int: ...

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        """Blocks into slots. The blocks may be used again as soon as the call returns."""
        ...

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False) -> Event:
        """Slots into blocks. With `overlap` beside the computation, which reads them after the event only."""
        ...

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """`store`, a layer with each `next`, which comes once the layer's computation was launched."""
        ...

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """`load`, a layer with each `next`; following layers may be on their way already."""
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
    layers: range
    take: Callable[[Array, list[int], Array], None]


class CPUCopier:
    """Paged memory in host memory: one numpy call per chunk and plane, at the speed of memcpy.

    `np.take(..., out=..., mode="clip")` and fancy assignment were measured to reach a contiguous copy;
    torch's indexed copies lose 15 to 40 %, and more threads only fight over the cores.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> None:
        check_fit(memory, layout, slab)
        self.num_layers = memory.num_layers
        self._planes: list[_Plane] = []
        planes = zip(memory.rows, memory.groups, memory.layers, strict=True)
        for index, (row, group, layers) in enumerate(planes):
            offset, nbytes = layout.span(rank, index)
            word = _words(np.gcd.reduce([row.shape[1], row.stride(0), offset, row.data_ptr()]))
            pages: Array = row.numpy().view(word)
            part: Array = slab.array[:, offset : offset + nbytes].view(word)
            slots = part.reshape(slab.num_slots, -1, pages.shape[1])
            take = _take if pages.flags.c_contiguous else _take_apart
            self._planes.append(_Plane(pages, slots, group, layers, take))
        self._num_slots = slab.num_slots
        self._limits = {plane.group: len(plane.pages) for plane in reversed(self._planes)}

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        self._check(copies)
        return self._store(copies, self._planes)

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False) -> Event:
        self._check(copies)
        return self._load(copies, self._planes)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        planes = by_layer(self._planes, self.num_layers, lambda plane: plane.layers.stop - 1)
        return (self._store(copies, part) for part in planes)

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        planes = by_layer(self._planes, self.num_layers, lambda plane: plane.layers.start)
        return (self._load(copies, part) for part in planes)

    @staticmethod
    def _store(copies: Sequence[ChunkCopy], planes: Sequence[_Plane]) -> Event:
        for plane in planes:
            for copy in copies:
                run = copy.runs[plane.group]
                if run.blocks:
                    out = plane.slots[copy.slot, run.first : run.first + len(run.blocks)]
                    plane.take(plane.pages, run.blocks, out)
        return DONE

    @staticmethod
    def _load(copies: Sequence[ChunkCopy], planes: Sequence[_Plane]) -> Event:
        for plane in planes:
            for copy in copies:
                run = copy.runs[plane.group]
                if run.blocks:
                    filled = plane.slots[copy.slot, run.first : run.first + len(run.blocks)]
                    plane.pages[run.blocks] = filled
        return DONE

    def _check(self, copies: Sequence[ChunkCopy]) -> None:
        check_copies(copies, self._num_slots, self._limits)

    def close(self) -> None:
        self._planes.clear()


def by_layer(planes: Sequence[_P], num_layers: int, layer_of: Callable[[_P], int]) -> list[list[_P]]:
    """The planes due with each layer: of several fused layers, the first to load and the last to store."""
    due: list[list[_P]] = [[] for _ in range(num_layers)]
    for plane in planes:
        due[layer_of(plane)].append(plane)
    return due


def check_copies(copies: Sequence[ChunkCopy], num_slots: int, limits: Mapping[int, int]) -> None:
    """Before the first byte moves: raise UsageError for slots and blocks that do not exist.

    They would become copies of others. `limits`: how many blocks there are, by block table.
    """
    for copy in copies:
        if not 0 <= copy.slot < num_slots:
            raise UsageError(f"slot {copy.slot} is not within {num_slots} slots")
        for group, limit in limits.items():
            blocks = copy.runs[group].blocks
            if blocks and (min(blocks) < 0 or max(blocks) >= limit):
                raise UsageError(f"block ids {min(blocks)}..{max(blocks)} are not within {limit} blocks")


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
    from lmkv.cuda import make_cuda_copier

    return make_cuda_copier(memory, layout, slab, rank)
