"""The part of an accelerator that copiers use, and staging memory on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.errors import LmkvError
from lmkv.memory.copier import Event
from lmkv.memory.paged import PagedMemory

Addresses = npt.NDArray[np.int64]

STAGING_BYTES = 1 << 30
"""Staging memory for stores: about the KV of a step's prompt tokens, so that the computation waits for none."""


class DeviceError(LmkvError):
    """The device, or its driver, refused something or failed."""


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


@frozen
class Transfers:
    """Copies between host and device, all in one direction and in no order among themselves.

    The host's side of each lies inside one registration (`pinned`), or outside all of them. `stable`: the
    sources do not change until all is done, so that they may be read before it is the stream's turn.
    """

    sources: Addresses
    targets: Addresses
    sizes: Addresses
    pinned: bool
    stable: bool


class TimedEvent(Event, Protocol):
    """An event that was marked with `timed`."""

    def seconds_since(self, earlier: TimedEvent) -> float:
        """Seconds on the device between the two, once both are reached."""
        ...


class Stream(Protocol):
    """A queue of work for the device, done in order. Work on two streams is ordered by events alone."""

    def mark(self, *, timed: bool = False) -> TimedEvent:
        """An event that is reached when all that was queued until now is done."""
        ...

    def wait_for(self, event: Event) -> None:
        """Work that is queued from now on begins after `event`. Does not block the calling thread."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` has torch do. It may be called later."""
        ...


class Device(Protocol):
    """An accelerator. Only `synchronize`, `allocate`, and `transfer` of unregistered memory block.

    A call may raise the error of an earlier one, and a device that has failed may go on raising.
    """

    def stream(self, *, compute: bool = False) -> Stream:
        """A new stream, or the one that the model's computation is being launched on."""
        ...

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Address of new memory on the device, and the object that owns it: it is freed with that object.

        The memory is not in a pool that the caller has begun: vLLM copies its pools to the host when the engine sleeps.
        """
        ...

    def move(self, spans: Spans, stream: Stream) -> None:
        """Copy from device to device, any number of runs at once."""
        ...

    def transfer(self, transfers: Transfers, stream: Stream) -> None:
        """Copy between host and device. A run that crosses the border of a registration is an error."""
        ...

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pin host memory; returns a call that unpins it. Raises DeviceError. From any thread."""
        ...

    def synchronize(self) -> None:
        """Block until all that was queued is done."""
        ...


class Ring:
    """Memory on the device that is given out in turn, and again once its last use is over."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self._address, self._owner = device.allocate(nbytes)
        self._next = 0
        self._uses: deque[tuple[int, int, Event]] = deque()

    def take(self, nbytes: int, stream: Stream) -> int:
        """The address of `nbytes`, for work that is queued on `stream` from now on."""
        start = self._next if self._next + nbytes <= self.nbytes else 0
        self._next = start + nbytes
        while any(low < self._next and start < high for low, high, _ in self._uses):
            # The oldest use is over first, whether or not it is the one that is in the way.
            stream.wait_for(self._uses.popleft()[2])
        return self._address + start

    def used_until(self, address: int, event: Event) -> None:
        """The memory that was taken last, at `address`, may be reused after `event`."""
        self._uses.append((address - self._address, self._next, event))


class Staging:
    """One rank's streams and staging memory, and its kernels, compiled. It needs no slab.

    `nbytes`: staging memory for stores. Loads have a quarter as much, which they reuse in the order of their stream.
    `ring` and `loading` exist until `drop`, and again after `take`. Raises the device's exceptions.
    """

    def __init__(self, device: Device, memory: PagedMemory, nbytes: int = STAGING_BYTES) -> None:
        self.device = device
        self.batch_bytes = max(nbytes // 4, *(row.shape[1] for row in memory.rows))
        self.ring_bytes = max(nbytes, self.batch_bytes)
        self.take()
        self.incoming, self.outgoing = device.stream(), device.stream()
        for row in memory.rows:
            # The first launch compiles a kernel, for seconds: now, and not while a request waits.
            address = np.array([row.data_ptr()], np.int64)
            device.move(Spans(address, np.array([self.loading], np.int64), row.shape[1]), self.incoming)
        device.synchronize()

    def mark(self) -> Event:
        """The end of the computation that was launched until now."""
        return self.device.stream(compute=True).mark()

    def take(self) -> None:
        """Allocate the memory, unless that is done."""
        if not hasattr(self, "loading"):
            self.ring = Ring(self.device, self.ring_bytes)
            self.loading, self._owner = self.device.allocate(self.batch_bytes)

    def drop(self) -> None:
        """Free the memory, once all copies have ended. Raises the device's exceptions."""
        self.device.synchronize()
        if hasattr(self, "loading"):
            del self.ring, self.loading, self._owner
