"""Copies pages between paged memory on the host and slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.chunks.layout import KVLayout
from lmkv.memory.copier import DONE, ChunkCopy, Event, by_layer, check_copies, check_fit
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

Array = npt.NDArray[Any]


def _words(nbytes: int) -> np.dtype[np.generic]:
    """The widest integer whose size divides `nbytes`: numpy copies rows of int64 at the speed of memcpy."""
    return np.dtype(next(f"u{size}" for size in (8, 4, 2, 1) if nbytes % size == 0))


@frozen
class _Plane:
    """A plane's `pages` [block, word], and its part of every slot `slots` [slot, page, word]."""

    pages: Array
    slots: Array
    group: int
    layers: range


_Pages = tuple[int, slice, npt.NDArray[np.intp]]
"""A slot, pages in it, and the block of each."""


class CPUCopier:
    """The copier for paged memory on the host: one numpy call per chunk and plane.

    `take` with "clip" into an array and indexed assignment are as fast as a contiguous copy, where
    torch's indexed copies are 15 to 40 % slower. More threads would only compete for the same memory.
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
            self._planes.append(_Plane(pages, slots, group, layers))
        self._to_load = by_layer(self._planes, self.num_layers, lambda plane: plane.layers.start)
        self._to_store = by_layer(self._planes, self.num_layers, lambda plane: plane.layers.stop - 1)
        self._num_slots = slab.num_slots
        self._num_blocks = memory.num_blocks

    def __repr__(self) -> str:
        return f"<CPUCopier: {self.num_layers} layers in {len(self._planes)} planes>"

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        self._check(copies)
        return self._store(copies, self._planes)

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        self._check(copies)
        return self._load(copies, self._planes)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        return (self._store(copies, planes) for planes in self._to_store)

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        return (self._load(copies, planes) for planes in self._to_load)

    @staticmethod
    def _store(copies: Sequence[ChunkCopy], planes: Sequence[_Plane]) -> Event:
        for plane, runs in _by_plane(copies, planes):
            if plane.pages.flags.c_contiguous:
                for slot, pages, blocks in runs:
                    plane.pages.take(blocks, 0, plane.slots[slot, pages], "clip")
                continue
            # `take` would first make a contiguous copy of all pages, which is as large as the paged memory.
            for slot, pages, blocks in runs:
                for part, block in zip(plane.slots[slot, pages], blocks, strict=True):
                    part[:] = plane.pages[block]
        return DONE

    @staticmethod
    def _load(copies: Sequence[ChunkCopy], planes: Sequence[_Plane]) -> Event:
        for plane, runs in _by_plane(copies, planes):
            for slot, pages, blocks in runs:
                plane.pages[blocks] = plane.slots[slot, pages]
        return DONE

    def _check(self, copies: Sequence[ChunkCopy]) -> None:
        check_copies(copies, self._num_slots, self._num_blocks)

    def close(self, *, process_ends: bool = False) -> None:
        for planes in (self._planes, *self._to_load, *self._to_store):
            planes.clear()


def _by_plane(copies: Sequence[ChunkCopy], planes: Sequence[_Plane]) -> Iterator[tuple[_Plane, list[_Pages]]]:
    """The runs of each plane. They are made once for all planes of a group: Python's part counts beside small pages."""
    groups: dict[int, list[_Pages]] = {}
    for group in {plane.group for plane in planes}:
        runs = ((copy.slot, copy.runs[group]) for copy in copies)
        groups[group] = [
            (slot, slice(run.first, run.first + len(run.blocks)), np.array(run.blocks, np.intp))
            for slot, run in runs
            if run.blocks
        ]
    return ((plane, groups[plane.group]) for plane in planes)
