"""Copies between paged memory on a device and the slab, ordered by streams and events.

This module computes addresses and the order of transfers. What a device does is behind `Device`, so that
tests can simulate every order in which a device may execute what was queued.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define, frozen

from lmkv.chunks.layout import KVLayout
from lmkv.memory.copier import DONE, ChunkCopy, Event, by_layer, check_copies, check_fit
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

Addresses = npt.NDArray[np.int64]

BUFFERS = 2
"""Staging buffers of each direction: one is filled while the other is emptied."""

BUFFER_BYTES = 32 << 20
"""Least size of a staging buffer, which always has room for one rank's part of a chunk."""

DIRECT_BYTES = 256 << 10
"""Pages of this size and larger are loaded without staging: a transfer each costs less than a second copy."""


@frozen
class Spans:
    """Equally long runs of bytes to copy: `nbytes` from each of `sources` to the same place in `targets`."""

    sources: Addresses
    targets: Addresses
    nbytes: int

    @property
    def word(self) -> int:
        """The widest word, up to 8 bytes, that all addresses and the length are multiples of."""
        bits = self.nbytes | int(np.bitwise_or.reduce(self.sources) | np.bitwise_or.reduce(self.targets))
        return min(bits & -bits, 8)


class Stream(Protocol):
    """A queue of work for the device, done in order. Work on two streams is ordered by events alone."""

    def mark(self) -> Event:
        """An event that is reached when all that was queued until now is done."""
        ...

    def wait_for(self, event: Event) -> None:
        """What is queued from now on begins after `event`. Does not block the calling thread."""
        ...


class Device(Protocol):
    """What `DeviceCopier` needs of an accelerator. Nothing blocks but `synchronize`."""

    def stream(self, *, compute: bool = False) -> Stream:
        """A new stream, or the one that the model's computation is being launched on."""
        ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of new memory on the device, and the object that owns it."""
        ...

    def move(self, spans: Spans, stream: Stream) -> None:
        """Copy from device to device, any number of runs at once."""
        ...

    def transfer(self, spans: Spans, stream: Stream) -> None:
        """Copy between host and device, in either direction."""
        ...

    def synchronize(self) -> None:
        """Block until all that was queued is done."""
        ...

    def close(self) -> None: ...


@frozen
class _Plane:
    """A plane: `nbytes` of block `b` are at `address + b * stride`; its part of a slot begins at `offset`."""

    address: int
    offset: int
    stride: int
    nbytes: int
    group: int
    layers: range


@frozen
class _PlaneSet:
    """Planes of one block table with pages of one size, whose addresses are computed together."""

    addresses: Addresses
    offsets: Addresses
    stride: int
    nbytes: int
    group: int


@frozen
class _Pages:
    """A chunk's pages: addresses on the device [plane, page], and of each plane's run on the host [plane]."""

    pages: Addresses
    host: Addresses
    page_bytes: int

    @property
    def run_bytes(self) -> int:
        return int(self.pages.shape[1]) * self.page_bytes

    @property
    def nbytes(self) -> int:
        return self.pages.size * self.page_bytes


@define(eq=False)
class _Buffer:
    """Staging memory on the device. `free`: the event after which its last use is over."""

    address: int
    memory: object
    free: Event = DONE


class DeviceCopier:
    """The copier for paged memory on a device, by way of staging memory there.

    A store gathers pages into staging memory on the compute stream, so that their blocks may be overwritten
    as soon as it returns, and transfers them to the slot on a stream of its own; a load is the reverse. A
    chunk thus crosses the bus as one run of bytes, whatever the size of its pages. Staging memory is bounded:
    when all of it is in use the device waits for its own transfers, the calling thread does not.
    """

    def __init__(
        self,
        device: Device,
        memory: PagedMemory,
        layout: KVLayout,
        slab: SlabMap,
        rank: int = 0,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        check_fit(memory, layout, slab)
        self.num_layers = memory.num_layers
        self._device, self._slab, self._slots = device, slab, slab.address
        self._buffer_bytes = max(buffer_bytes, layout.rank_bytes)
        self._direct_bytes = direct_bytes
        planes = [
            _Plane(row.data_ptr(), layout.span(rank, index)[0], row.stride(0), row.shape[1], group, layers)
            for index, (row, group, layers) in enumerate(zip(memory.rows, memory.groups, memory.layers, strict=True))
        ]
        self._all = _sets(planes)
        self._to_load = list(map(_sets, by_layer(planes, self.num_layers, lambda plane: plane.layers.start)))
        self._to_store = list(map(_sets, by_layer(planes, self.num_layers, lambda plane: plane.layers.stop - 1)))
        self._num_blocks = memory.num_blocks
        self._incoming, self._outgoing = device.stream(), device.stream()
        self._load_buffers = _Buffers(device, self._buffer_bytes)
        self._store_buffers = _Buffers(device, self._buffer_bytes)

    def __repr__(self) -> str:
        return f"<DeviceCopier: {self.num_layers} layers, staging buffers of {self._buffer_bytes} bytes>"

    def _check(self, copies: Sequence[ChunkCopy]) -> None:
        check_copies(copies, self._slab.num_slots, self._num_blocks)

    # -- storing ------------------------------------------------------------------------------------------

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        self._check(copies)
        return self._store(copies, self._all)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        return (self._store(copies, planes) for planes in self._to_store)

    def _store(self, copies: Sequence[ChunkCopy], planes: Sequence[_PlaneSet]) -> Event:
        compute, outgoing = self._device.stream(compute=True), self._outgoing
        with self._idle_after_failure():
            for batch in self._batches(copies, planes):
                buffer = self._store_buffers.take()
                # The transfer of what it had before may still be reading it.
                compute.wait_for(buffer.free)
                for pages, staging, nbytes in _moves(batch, buffer.address):
                    self._device.move(Spans(pages, staging, nbytes), compute)
                # The compute stream does not wait for `outgoing`: computation overlaps the transfer.
                outgoing.wait_for(compute.mark())
                for host, staged, nbytes in _runs(batch, buffer.address):
                    self._device.transfer(_one(staged, host, nbytes), outgoing)
                buffer.free = outgoing.mark()
                self._store_buffers.give_back(buffer)
            return outgoing.mark()

    # -- loading ------------------------------------------------------------------------------------------

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False) -> Event:
        self._check(copies)
        target = self._incoming if overlap else self._device.stream(compute=True)
        return next(self._load(copies, [self._all], target))

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        return self._load(copies, self._to_load, self._device.stream(compute=True))

    def _load(
        self, copies: Sequence[ChunkCopy], parts: Sequence[Sequence[_PlaneSet]], target: Stream
    ) -> Iterator[Event]:
        """Fill the planes of one part after the other on `target`, while those of later parts are fetched."""
        with self._idle_after_failure():
            yield from self._begin_loads(copies, parts, target)

    def _begin_loads(
        self, copies: Sequence[ChunkCopy], parts: Sequence[Sequence[_PlaneSet]], target: Stream
    ) -> Iterator[Event]:
        # What was launched until now may still read the blocks, and `_fetch` may write to them directly.
        self._incoming.wait_for(self._device.stream(compute=True).mark())
        coming = deque((number, batch) for number, part in enumerate(parts) for batch in self._batches(copies, part))
        fetched: deque[tuple[int, list[_Pages], _Buffer]] = deque()
        try:
            for number in range(len(parts)):
                while coming or fetched:
                    while coming and (not fetched or self._load_buffers.has_one):
                        part, batch = coming.popleft()
                        fetched.append((part, *self._fetch(batch)))
                    if fetched[0][0] != number:
                        break
                    self._place(*fetched.popleft()[1:], target)
                yield target.mark()
        finally:
            for _, _, buffer in fetched:
                self._load_buffers.give_back(buffer)

    def _fetch(self, batch: Sequence[_Pages]) -> tuple[list[_Pages], _Buffer]:
        """Transfer large pages to their blocks, and the others to a staging buffer; returns these two."""
        buffer, incoming = self._load_buffers.take(), self._incoming
        # The moves out of it may not be done yet.
        incoming.wait_for(buffer.free)
        small = [pages for pages in batch if pages.page_bytes < self._direct_bytes]
        for pages in batch:
            if pages.page_bytes >= self._direct_bytes:
                sources = pages.host[:, None] + np.arange(pages.pages.shape[1]) * pages.page_bytes
                self._device.transfer(Spans(sources.ravel(), pages.pages.ravel(), pages.page_bytes), incoming)
        for host, staged, nbytes in _runs(small, buffer.address):
            self._device.transfer(_one(host, staged, nbytes), incoming)
        buffer.free = incoming.mark()
        return small, buffer

    def _place(self, batch: Sequence[_Pages], buffer: _Buffer, target: Stream) -> None:
        """Move pages from a staging buffer to their blocks."""
        # Also when nothing was staged: it is the event of the direct transfers, too.
        target.wait_for(buffer.free)
        for pages, staging, nbytes in _moves(batch, buffer.address):
            self._device.move(Spans(staging, pages, nbytes), target)
        buffer.free = target.mark()
        self._load_buffers.give_back(buffer)

    @contextlib.contextmanager
    def _idle_after_failure(self) -> Iterator[None]:
        """Wait for what a failed copy has queued: its slots and blocks may be given to others next."""
        try:
            yield
        except Exception:
            self._device.synchronize()
            raise

    # -- what moves ---------------------------------------------------------------------------------------

    def _batches(self, copies: Sequence[ChunkCopy], planes: Sequence[_PlaneSet]) -> Iterator[list[_Pages]]:
        """The pages of all copies, in batches that fit a buffer."""
        batch: list[_Pages] = []
        room = self._buffer_bytes
        for pages in self._pages(copies, planes):
            if pages.nbytes > room:
                yield batch
                batch, room = [], self._buffer_bytes
            batch.append(pages)
            room -= pages.nbytes
        if batch:
            yield batch

    def _pages(self, copies: Sequence[ChunkCopy], planes: Sequence[_PlaneSet]) -> Iterator[_Pages]:
        for copy in copies:
            slot = self._slots + copy.slot * self._slab.slot_bytes
            for part in planes:
                run = copy.runs[part.group]
                if run.blocks:
                    blocks = np.asarray(run.blocks, np.int64)
                    yield _Pages(
                        part.addresses[:, None] + blocks * part.stride,
                        slot + part.offsets + run.first * part.nbytes,
                        part.nbytes,
                    )

    def close(self) -> None:
        self._device.synchronize()
        self._device.close()


class _Buffers:
    """Staging buffers of one direction, allocated when they are first needed."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._free: deque[_Buffer] = deque()
        self._made = 0

    @property
    def has_one(self) -> bool:
        return bool(self._free) or self._made < BUFFERS

    def take(self) -> _Buffer:
        """The buffer that was given back first. Only concurrent loads by layers need more than `BUFFERS`."""
        if not self._free or self._made < BUFFERS:
            self._made += 1
            return _Buffer(*self._device.allocate(self._nbytes))
        return self._free.popleft()

    def give_back(self, buffer: _Buffer) -> None:
        self._free.append(buffer)


def _sets(planes: Iterable[_Plane]) -> list[_PlaneSet]:
    """Neighbouring planes of one block table, stride and page size in one set."""
    sets = []
    for kind, same in groupby(planes, lambda plane: (plane.stride, plane.nbytes, plane.group)):
        addresses, offsets = np.array([(plane.address, plane.offset) for plane in same], np.int64).T
        sets.append(_PlaneSet(addresses, offsets, *kind))
    return sets


def _moves(batch: Sequence[_Pages], address: int) -> Iterator[tuple[Addresses, Addresses, int]]:
    """`(pages, staging, bytes of each)`: where each page is in the staging memory at `address`."""
    by_size: dict[int, list[tuple[Addresses, Addresses]]] = {}
    for pages in batch:
        staging = address + np.arange(pages.pages.size) * pages.page_bytes
        by_size.setdefault(pages.page_bytes, []).append((pages.pages.ravel(), staging))
        address += pages.nbytes
    for nbytes, parts in by_size.items():
        yield (np.concatenate([part for part, _ in parts]), np.concatenate([staging for _, staging in parts]), nbytes)


def _runs(batch: Sequence[_Pages], address: int) -> Iterator[tuple[int, int, int]]:
    """`(host, staging, bytes)`: the same, in the longest runs that are contiguous on the host."""
    start = end = 0
    for pages in batch:
        for host in pages.host.tolist():
            if host != end:
                if end > start:
                    yield start, address, end - start
                    address += end - start
                start = end = host
            end += pages.run_bytes
    if end > start:
        yield start, address, end - start


def _one(source: int, target: int, nbytes: int) -> Spans:
    return Spans(np.array([source], np.int64), np.array([target], np.int64), nbytes)
