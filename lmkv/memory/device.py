"""Copies between paged memory on a device and host memory. Streams and events order these copies.

`Device` is the interface to an accelerator. Tests simulate a device that executes queued work in any allowed order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.chunks.layout import KVLayout
from lmkv.errors import LmkvError
from lmkv.memory.copier import ChunkCopy, Event, by_layer, check_copies, check_fit
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap

logger = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]

STAGING_BYTES = 1 << 30
"""Default size of staging memory for stores: about the KV of a step, so that computation does not wait for stores."""


class DeviceError(LmkvError):
    """The device or its driver has failed, or has returned an error for a call."""


@frozen
class Spans:
    """Runs of bytes of equal length to copy: `nbytes` bytes from `sources[i]` to `targets[i]` for each index i."""

    sources: Addresses
    targets: Addresses
    nbytes: int

    @property
    def word(self) -> int:
        """The size of a word in bytes: the largest of 1, 2, 4 and 8 that divides `nbytes` and all addresses."""
        bits = self.nbytes | int(np.bitwise_or.reduce(self.sources) | np.bitwise_or.reduce(self.targets))
        return min(bits & -bits, 8)


@frozen
class Transfers:
    """Copies between host and device, all in one direction. The device may make the copies in any order.

    `pinned`: True if all host addresses are in registered memory, False if none is. `stable`: whether the sources do
    not change until all copies are done, so that the device may read the sources early.
    """

    sources: Addresses
    targets: Addresses
    sizes: Addresses
    pinned: bool
    stable: bool


class TimedEvent(Event, Protocol):
    """An event that measures time. `record_event(timed=True)` returns such an event."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Return how many seconds passed on the device from `earlier` to this event. Both events must be reached."""
        ...


class Stream(Protocol):
    """A queue of work that the device does in the order of the queue. Only events order the work of two streams."""

    def record_event(self, *, timed: bool = False) -> TimedEvent:
        """Return an event that is reached when all work queued so far is done."""
        ...

    def wait_for(self, event: Event) -> None:
        """Make all work that is queued from now on wait for `event`. The calling thread does not wait."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`, perhaps later, so that the torch operations that `work` launches are queued on this stream."""
        ...


class Device(Protocol):
    """An accelerator. Only these methods block: `synchronize`, `allocate`, and `transfer` of unregistered memory.

    A method may raise the error of an earlier call, and a failed device may raise in every call.
    """

    def stream(self, *, compute: bool = False) -> Stream:
        """Return a new stream. With `compute`, return the stream on which the model's computation is launched now."""
        ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Allocate memory on the device. Returns `(address, owner)`: the memory is freed when `owner` is deleted.

        The memory is outside vLLM's memory pools, because vLLM copies these pools to the host when the engine sleeps.
        """
        ...

    def move(self, spans: Spans, stream: Stream) -> None:
        """Copy any number of runs of equal length between places in the device's memory, in one call."""
        ...

    def transfer(self, transfers: Transfers, stream: Stream) -> None:
        """Copy runs of bytes between host and device. No run may cross the border between two registrations of host
        memory.
        """
        ...

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pin host memory, and return a function that unpins this memory. Raises DeviceError. Any thread may call this
        method.
        """
        ...

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        ...


class Ring:
    """Device memory that is used as a ring buffer. A region is used again once the work that used it has ended."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._address, self._owner = device.allocate(nbytes)
        self._next = 0
        self._uses: deque[tuple[int, int, Event]] = deque()

    def borrow(self, nbytes: int, stream: Stream) -> int:
        """Return the address of `nbytes` bytes, for work that is queued on `stream` from now on. The work waits until
        earlier uses of these bytes have ended.
        """
        start = self._next if self._next + nbytes <= self.nbytes else 0
        self._next = start + nbytes
        while any(low < self._next and start < high for low, high, _ in self._uses):
            # The oldest use is over first, whether or not it is the one that is in the way.
            stream.wait_for(self._uses.popleft()[2])
        return self._address + start

    def used_until(self, address: int, event: Event) -> None:
        """Keep the memory of the latest `borrow` in use until `event`. `address`: the result of this `borrow`."""
        self._uses.append((address - self._address, self._next, event))


class Staging:
    """The streams, staging memory and compiled kernels of one rank. They can be made before the slab exists.

    `nbytes`: size of the staging memory for stores (`ring`). The staging memory for loads (`loading`) has a quarter of
    this size. `free` deletes `ring` and `loading`, and `allocate` makes them again. Raises the device's exceptions.
    """

    def __init__(self, device: Device, memory: PagedMemory, nbytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.batch_bytes = max(nbytes // 4, *(row.shape[1] for row in memory.rows))
        self.ring_bytes = max(nbytes, self.batch_bytes)
        self.allocate()
        self.incoming, self.outgoing = device.stream(), device.stream()
        for row in memory.rows:
            # The first launch compiles a kernel, for seconds: now, and not while a request waits.
            address = np.array([row.data_ptr()], np.int64)
            device.move(Spans(address, np.array([self.loading], np.int64), row.shape[1]), self.incoming)
        device.synchronize()

    def record_event(self) -> Event:
        """Return an event that is reached when all computation launched until now has ended."""
        return self.device.stream(compute=True).record_event()

    def allocate(self) -> None:
        """Allocate the staging memory, unless it is already allocated."""
        if not hasattr(self, "loading"):
            self.ring = Ring(self.device, self.ring_bytes)
            self.loading, self._owner = self.device.allocate(self.batch_bytes)

    def free(self) -> None:
        """Wait for all copies, and then free the staging memory. Raises the device's exceptions."""
        self.device.synchronize()
        if hasattr(self, "loading"):
            del self.ring, self.loading, self._owner


# -- the slab, pinned -------------------------------------------------------------------------------------------


PIECE_BYTES = 32 << 20
"""Bytes per registration. On an H100, a kernel launch waits 1.5 ms for a registration of 32 MiB, and 5 ms for 128
MiB.
"""


class PinnedSlab:
    """Maps one rank's part of a slab, and registers (pins) this part with the device, piece by piece.

    Copies of a piece that is not registered yet are slower, and block the calling thread. `part`: offset and size in
    bytes of the rank's part in each slot. `turn`: see `SlabMap.spans`. `threads`: the number of threads that register
    memory; with 0, only calls of `pin_next` register memory.
    """

    def __init__(
        self,
        device: Device,
        slab: SlabMap,
        part: tuple[int, int] | None = None,
        turn: tuple[int, int] = (0, 1),
        *,
        threads: int = 1,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._device, self._slab, self._address = device, slab, slab.address
        self._pieces = slab.spans(part or (0, slab.slot_bytes), piece_bytes, turn)
        self._pinned: npt.NDArray[np.bool_] = np.zeros(slab.num_slots, np.bool_)
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, name="lmkv-pin", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<PinnedSlab: {int(self._pinned.sum())} of {self._slab.num_slots} slots>"

    def holds(self, hosts: Addresses) -> npt.NDArray[np.bool_]:
        """Return for each address in `hosts` whether the slab is registered at this address."""
        pinned: npt.NDArray[np.bool_] = self._pinned[(hosts - self._address) // self._slab.slot_bytes]
        return pinned

    def _run(self) -> None:
        # Not at a lower priority: it holds locks of the driver, for which threads that launch kernels wait.
        while self.pin_next():
            pass

    def pin_next(self) -> bool:
        """Map and register the next piece. Returns False if no piece is left, or if registration was stopped or has
        failed before.
        """
        with self._lock:
            piece = None if self._stop.is_set() else next(self._pieces, None)
        if piece is None:
            return False
        try:
            # A registration would fault the pages in as well, one by one and under locks of the driver.
            self._slab.prefault(*piece)
            self._register(*piece)
        except Exception as error:
            # Any error is harmless: copies of unpinned memory are correct.
            self._stop.set()
            message = "lmkv: the driver pinned only a part of host memory, %r; copies of the rest are slower: %s"
            logger.warning(message, self, error, exc_info=not isinstance(error, DeviceError))
        return True

    def _register(self, offset: int, nbytes: int) -> None:
        self._undo.append(self._device.register(self._address + offset, nbytes))
        first, last = offset // self._slab.slot_bytes, (offset + nbytes - 1) // self._slab.slot_bytes
        self._pinned[first : last + 1] = True

    def wait(self) -> None:
        """Wait until the threads that register memory have ended."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Stop registering memory."""
        self._stop.set()
        self.wait()

    def close(self) -> None:
        """Unregister all memory. No copy may be running. Idempotent."""
        # Afterwards `_undo` is complete: nothing stays registered that is unmapped next.
        self.stop()
        while self._undo:
            # A failed device refuses this as well; its registrations end with the process.
            with contextlib.suppress(Exception):
                self._undo.pop()()


def pinning_threads(ranks: int) -> int:
    """Return how many threads each of `ranks` ranks uses to map and register memory: at least one. All ranks together
    use at most a quarter of the cores, or one thread each.
    """
    return max(1, min(4, (os.cpu_count() or 1) // 4 // ranks))


DIRECT_BYTES = 512 << 10
"""Smallest page size in bytes for loads without staging memory: one transfer per page then costs less than a second
copy.
"""


@frozen
class _DevicePlane:
    """A plane (an array of pages) on the device: block `b` has `nbytes` bytes at `address + b * stride`. In a slot, the
    plane's pages begin at `offset`.
    """

    address: int
    offset: int
    stride: int
    nbytes: int
    group: int
    layers: range


@frozen
class _PlaneSet:
    """Planes with the same block table, stride and page size, so that the addresses of all their pages are computed
    together.
    """

    addresses: Addresses
    offsets: Addresses
    stride: int
    nbytes: int
    group: int

    def pages(self, alike: Sequence[ChunkCopy], slots: Addresses) -> _Pages:
        """Return the pages of copies that differ only in their blocks and slots. `slots`: the address of each copy's
        slot.
        """
        blocks = np.array([copy.runs[self.group].blocks for copy in alike], np.int64)
        numbers = alike[0].runs[self.group].first + np.arange(blocks.shape[1])
        device = self.addresses[:, None] + blocks[:, None] * self.stride
        host = slots[:, None, None] + self.offsets[:, None] + numbers * self.nbytes
        return _Pages(device.ravel(), host.ravel(), self.nbytes)


@frozen
class _Pages:
    """Pages of one size: for each page an address on the device and an address on the host."""

    device: Addresses
    host: Addresses
    page_bytes: int

    def part(self, first: int, last: int) -> _Pages:
        return _Pages(self.device[first:last], self.host[first:last], self.page_bytes)


@frozen
class LoadEvent:
    """The event of a load. Once the event is reached, `seconds` is the time that the device needed for the copies."""

    begun: TimedEvent
    ended: TimedEvent

    @property
    def seconds(self) -> float:
        return self.ended.seconds_since(self.begun)

    def query(self) -> bool:
        return self.ended.query()

    def wait(self) -> None:
        self.ended.wait()


class DeviceCopier:
    """The copier for paged memory on a device, with staging memory on the same device.

    `store` first gathers pages in staging memory, on the compute stream. So the blocks of these pages may be
    overwritten as soon as the call returns. On a separate stream, `store` then transfers the gathered pages to the
    slots. So a chunk crosses the bus as one run of bytes, and one call transfers many chunks. `load` does the reverse,
    but transfers large pages directly to their blocks. If all staging memory is in use, the device waits for earlier
    transfers, but the calling thread does not wait.
    """

    def __init__(
        self,
        staging: Staging,
        memory: PagedMemory,
        layout: KVLayout,
        slab: SlabMap,
        rank: int = 0,
        turn: tuple[int, int] = (0, 1),
        *,
        direct_bytes: int = DIRECT_BYTES,
        pins: PinnedSlab | None = None,
    ) -> None:
        check_fit(memory, layout, slab)
        self.num_layers = memory.num_layers
        self._staging, self._device, self._slab = staging, staging.device, slab
        self._direct_bytes, self._address = direct_bytes, slab.address
        planes = [
            _DevicePlane(row.data_ptr(), layout.span(rank, index)[0], row.stride(0), row.shape[1], group, layers)
            for index, (row, group, layers) in enumerate(zip(memory.rows, memory.groups, memory.layers, strict=True))
        ]
        self._all = _sets(planes)
        self._to_load, self._to_store = (list(map(_sets, part)) for part in by_layer(planes, self.num_layers))
        self._num_blocks = memory.num_blocks
        threads = pinning_threads(layout.num_ranks * turn[1])
        self.pins = pins or PinnedSlab(self._device, slab, layout.segment(rank), turn, threads=threads)

    def __repr__(self) -> str:
        return f"<DeviceCopier: {self.num_layers} layers, {self._staging.ring_bytes} bytes of staging, {self.pins}>"

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
        compute, outgoing, ring = self._device.stream(compute=True), self._staging.outgoing, self._staging.ring
        with self._idle_after_failure():
            for batch in _batches(self._pages(copies, planes), self._staging.batch_bytes):
                # If an earlier transfer still reads this memory, the computation waits for it.
                address = ring.borrow(sum(pages.host.size * pages.page_bytes for pages in batch), compute)
                for pages, staged in _staged(batch, address):
                    self._device.move(Spans(pages.device, staged, pages.page_bytes), compute)
                # The compute stream does not wait for `outgoing`: computation overlaps the transfer.
                outgoing.wait_for(compute.record_event())
                self._transfer(*self._runs(batch, address), outgoing, loads=False)
                ring.used_until(address, outgoing.record_event())
            return outgoing.record_event()

    # -- loading ------------------------------------------------------------------------------------------

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        self._check(copies)
        event = next(self._load(copies, [self._all], after))
        if not overlap:
            self._device.stream(compute=True).wait_for(event.ended)
        return event

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        self._check(copies)
        return self._load_layers(copies)

    def _load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        # All are queued with the first: later layers are copied while the model computes with earlier ones.
        for event in list(self._load(copies, self._to_load)):
            self._device.stream(compute=True).wait_for(event.ended)
            yield event

    def _load(
        self, copies: Sequence[ChunkCopy], parts: Sequence[Sequence[_PlaneSet]], after: Event | None = None
    ) -> Iterator[LoadEvent]:
        """Fill the planes of one element of `parts` after the other, and yield an event for each element."""
        incoming = self._staging.incoming
        with self._idle_after_failure():
            # Computation that was launched before may still use the blocks.
            incoming.wait_for(after or self._staging.record_event())
            begun = incoming.record_event(timed=True)
            for part in parts:
                self._fill(list(self._pages(copies, part)))
                yield LoadEvent(begun, incoming.record_event(timed=True))

    def _fill(self, parts: Sequence[_Pages]) -> None:
        """Load pages from the slots: large pages directly into their blocks, other pages through staging memory."""
        incoming, address = self._staging.incoming, self._staging.loading
        large = [pages for pages in parts if pages.page_bytes >= self._direct_bytes]
        small = (pages for pages in parts if pages.page_bytes < self._direct_bytes)
        if large:
            hosts, devices = (np.concatenate([getattr(pages, side) for pages in large]) for side in ("host", "device"))
            self._transfer(hosts, devices, _sizes(large), incoming, loads=True)
        for batch in _batches(small, self._staging.batch_bytes):
            # The same staging memory as in the batch before: one stream keeps the order.
            self._transfer(*self._runs(batch, address), incoming, loads=True)
            for pages, staged in _staged(batch, address):
                self._device.move(Spans(staged, pages.device, pages.page_bytes), incoming)

    @contextlib.contextmanager
    def _idle_after_failure(self) -> Iterator[None]:
        """If the `with` block raises, wait for the copies that are already queued, so that their slots and blocks may
        be reused.
        """
        try:
            yield
        except Exception:
            # A device that has failed for good does nothing any more, and raises again.
            with contextlib.suppress(Exception):
                self._device.synchronize()
            raise

    # -- addresses ----------------------------------------------------------------------------------------

    def _pages(self, copies: Sequence[ChunkCopy], planes: Sequence[_PlaneSet]) -> Iterator[_Pages]:
        for alike in _alike(copies) if len(planes) == 1 else ([copy] for copy in copies):
            slots = self._address + np.array([copy.slot for copy in alike], np.int64) * self._slab.slot_bytes
            for part in planes:
                if alike[0].runs[part.group].blocks:
                    yield part.pages(alike, slots)

    def _runs(self, batch: Sequence[_Pages], address: int) -> tuple[Addresses, Addresses, Addresses]:
        """Join pages that are adjacent on the host to runs. Return the runs' host addresses, staging addresses (from
        `address` on) and sizes.

        A run never crosses the end of a slot, because the border of a registration may be there.
        """
        hosts, sizes = np.concatenate([pages.host for pages in batch]), _sizes(batch)
        begins = (hosts[1:] != (hosts + sizes)[:-1]) | ((hosts[1:] - self._address) % self._slab.slot_bytes == 0)
        first = np.flatnonzero(np.concatenate([[True], begins]))
        return hosts[first], address + (np.cumsum(sizes) - sizes)[first], np.add.reduceat(sizes, first)

    def _transfer(self, hosts: Addresses, devices: Addresses, sizes: Addresses, stream: Stream, *, loads: bool) -> None:
        """Transfer runs with one call for pinned memory and one for other memory."""
        sources, targets = (hosts, devices) if loads else (devices, hosts)
        pinned = self.pins.holds(hosts)
        for state in (True, False):
            these = pinned == state
            if these.any():
                # The slots of a load are leased: nobody writes to them.
                transfers = Transfers(sources[these], targets[these], sizes[these], state, stable=loads)
                self._device.transfer(transfers, stream)

    def close(self, *, process_ends: bool = False) -> None:
        """Wait for all copies, and unpin the slab. Raises the device's exceptions.

        With `process_ends`, leave the unpinning to the kernel, because vLLM ends a worker before unpinning would be
        done.
        """
        try:
            self._device.synchronize()
        finally:
            self.pins.stop() if process_ends else self.pins.close()


def _sets(planes: Iterable[_DevicePlane]) -> list[_PlaneSet]:
    """Group neighbouring planes with the same block table, stride and page size."""
    sets = []
    for kind, same in groupby(planes, lambda plane: (plane.stride, plane.nbytes, plane.group)):
        addresses, offsets = np.array([(plane.address, plane.offset) for plane in same], np.int64).T
        sets.append(_PlaneSet(addresses, offsets, *kind))
    return sets


def _alike(copies: Sequence[ChunkCopy]) -> list[list[ChunkCopy]]:
    """Group neighbouring copies whose runs have the same first page and the same length."""
    return [list(same) for _, same in groupby(copies, lambda copy: [(run.first, len(run.blocks)) for run in copy.runs])]


def _sizes(batch: Sequence[_Pages]) -> Addresses:
    """Return the size in bytes of each page of a batch."""
    return np.repeat([pages.page_bytes for pages in batch], [pages.host.size for pages in batch]).astype(np.int64)


def _batches(parts: Iterable[_Pages], room: int) -> Iterator[list[_Pages]]:
    """Yield the pages of `parts` in batches of at most `room` bytes."""
    batch: list[_Pages] = []
    left = room
    for pages in parts:
        done = 0
        while done < pages.host.size:
            fit = left // pages.page_bytes
            if not fit:
                yield batch
                batch, left = [], room
                continue
            batch.append(pages.part(done, done + fit))
            left -= batch[-1].host.size * pages.page_bytes
            done += fit
    if batch:
        yield batch


def _staged(batch: Sequence[_Pages], address: int) -> Iterator[tuple[_Pages, Addresses]]:
    """Group the pages of a batch by size. Yield each group with the addresses of its pages in the staging memory that
    begins at `address`.
    """
    sizes = _sizes(batch)
    places = address + np.cumsum(sizes) - sizes
    devices, hosts = (np.concatenate([getattr(pages, side) for pages in batch]) for side in ("device", "host"))
    for size in dict.fromkeys(pages.page_bytes for pages in batch):
        same = sizes == size
        yield _Pages(devices[same], hosts[same], size), places[same]
