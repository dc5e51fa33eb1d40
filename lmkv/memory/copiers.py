"""The copier for paged memory on the host, and `make_copier`, which chooses the copier for a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from lmkv.chunks.layout import KVLayout
from lmkv.errors import UsageError
from lmkv.memory.copier import DONE, ChunkCopy, Copier, Event, by_layer, check_copies, check_fit
from lmkv.memory.device import STAGING_BYTES, DeviceCopier, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

Array = npt.NDArray[Any]

_FREE_SHARE = 4
"""Staging memory takes at most 1/4 of the free memory of a device, because the model's graphs need memory as well."""


def _words(nbytes: int) -> np.dtype[np.generic]:
    """Return the widest unsigned integer type with a size that divides `nbytes`: numpy copies wide words at the speed
    of memcpy.
    """
    return np.dtype(next(f"u{size}" for size in (8, 4, 2, 1) if nbytes % size == 0))


@frozen
class _HostPlane:
    """One plane (an array of pages): its pages in paged memory, shape [block, word], and in all slots, [slot, page,
    word].
    """

    pages: Array
    slots: Array
    group: int
    layers: range


_PageRuns = dict[int, list[tuple[int, slice, npt.NDArray[np.intp]]]]
"""For each block table, the copies: a slot, the slice of the slot's pages to copy, and the block of each page."""


class CPUCopier:
    """The copier for paged memory on the host, with one numpy call per chunk and plane (array of pages).

    numpy's `take` with "clip", and its indexed assignment, are as fast as a contiguous copy, whereas torch's indexed
    copies are 15 to 40 % slower. More threads would only compete for the same memory.
    """

    def __init__(self, memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> None:
        check_fit(memory, layout, slab)
        self.num_layers = memory.num_layers
        self._planes: list[_HostPlane] = []
        planes = zip(memory.rows, memory.groups, memory.layers, strict=True)
        for index, (row, group, layers) in enumerate(planes):
            offset, nbytes = layout.span(rank, index)
            word = _words(np.gcd.reduce([row.shape[1], row.stride(0), offset, row.data_ptr()]))
            pages: Array = row.numpy().view(word)
            part: Array = slab.array[:, offset : offset + nbytes].view(word)
            slots = part.reshape(slab.num_slots, -1, pages.shape[1])
            self._planes.append(_HostPlane(pages, slots, group, layers))
        self._to_load, self._to_store = by_layer(self._planes, self.num_layers)
        self._num_slots = slab.num_slots
        self._num_blocks = memory.num_blocks

    def __repr__(self) -> str:
        return f"<CPUCopier: {self.num_layers} layers in {len(self._planes)} planes>"

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        return _store(self._planes, self._pages(copies))

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        return _load(self._planes, self._pages(copies))

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        pages = self._pages(copies)
        return (_store(planes, pages) for planes in self._to_store)

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        pages = self._pages(copies)
        return (_load(planes, pages) for planes in self._to_load)

    def _pages(self, copies: Sequence[ChunkCopy]) -> _PageRuns:
        """Return the pages to copy, by block table; all layers have the same. Raises UsageError as `check_copies`
        does.
        """
        pages: _PageRuns = {}
        for group, ids in check_copies(copies, self._num_slots, self._num_blocks).items():
            # One array for all copies, because Python's share of the time counts where pages are small.
            blocks, begin = np.array(ids, np.intp), 0
            pages[group] = []
            for copy in copies:
                first, count = copy.runs[group].first, len(copy.runs[group].blocks)
                if count:
                    pages[group].append((copy.slot, slice(first, first + count), blocks[begin : begin + count]))
                    begin += count
        return pages

    def close(self, *, process_ends: bool = False) -> None:
        for planes in (self._planes, *self._to_load, *self._to_store):
            planes.clear()


def _store(planes: Sequence[_HostPlane], pages: _PageRuns) -> Event:
    for plane in planes:
        if plane.pages.flags.c_contiguous:
            for slot, part, blocks in pages[plane.group]:
                plane.pages.take(blocks, 0, plane.slots[slot, part], "clip")
            continue
        # `take` would first make a contiguous copy of all pages, which is as large as the paged memory.
        for slot, part, blocks in pages[plane.group]:
            for page, block in zip(plane.slots[slot, part], blocks, strict=True):
                page[:] = plane.pages[block]
    return DONE


def _load(planes: Sequence[_HostPlane], pages: _PageRuns) -> Event:
    for plane in planes:
        for slot, part, blocks in pages[plane.group]:
            plane.pages[blocks] = plane.slots[slot, part]
    return DONE


# -- for any device ---------------------------------------------------------------------------------------


def check_device(kind: str) -> None:
    """Raise UsageError if lmkv has no copier for devices of type `kind`, or if "cuda" means a ROCm device in this
    torch.
    """
    if kind not in ("cpu", "cuda") or (kind == "cuda" and torch.version.hip):
        what = "an AMD GPU" if kind == "cuda" else f"a device of type {kind!r}"
        raise UsageError(f"lmkv supports CPUs and NVIDIA GPUs, not {what}")


def make_staging(memory: PagedMemory, nbytes: int = STAGING_BYTES) -> Staging | None:
    """Make the streams and the staging memory of a copier on the device of `memory`.

    Returns None for a CPU, which needs neither streams nor staging memory.

    Raises UsageError for a device without a copier, and torch's exceptions for the device.
    """
    check_device(memory.device.type)
    if memory.device.type == "cpu":
        return None
    from lmkv.memory.cuda import CUDADevice

    free, _ = torch.cuda.mem_get_info(memory.device)
    return Staging(CUDADevice(memory.device), memory, min(nbytes, free // _FREE_SHARE))


def make_copier(
    memory: PagedMemory,
    layout: KVLayout,
    slab: SlabMap,
    rank: int = 0,
    staging: Staging | None = None,
    turn: tuple[int, int] = (0, 1),
) -> Copier:
    """Make a copier for the device of `memory`, and begin to map the rank's part of the slab in the background.

    `turn`: see `SlabMap.spans`. Raises UsageError if memory, layout and slab do not fit together, and torch's
    exceptions for the device.
    """
    staging = staging or make_staging(memory)
    if staging is not None:
        return DeviceCopier(staging, memory, layout, slab, rank, turn)
    copier = CPUCopier(memory, layout, slab, rank)
    slab.populate(layout.segment(rank), turn)
    return copier
