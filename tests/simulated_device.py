"""A device without an accelerator, as difficult as a real one: for tests of copiers, and for trying tools.

Memory is host memory, and addresses are real. Whatever CUDA could do may happen here, and nothing else:

* queued work is done as late, and in as wild an order, as streams and events allow, and the copies of one
  call in any order; a stable source may be read at once or when it is the stream's turn;
* an event that is reached may not be seen to be for a while;
* a copy that crosses the border of a registration, or mixes registered with other host memory, is refused;
* a copy of host memory that is not registered blocks the caller until its stream is done;
* a stream takes a number of calls, and then blocks the caller until there is room;
* memory ends;
* an access outside the device's memory is an error that sticks: everything fails from then on.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from attrs import define

from lmkv.memory.copier import Event
from lmkv.memory.device import DeviceError, Spans, Stream, TimedEvent, Transfers

QUEUE = 256
STEP_SECONDS = 1e-6


@define(eq=False)
class _Range:
    first: int
    last: int

    def covers(self, address: int, nbytes: int) -> bool:
        return self.first <= address and address + nbytes <= self.last

    def meets(self, address: int, nbytes: int) -> bool:
        return self.first < address + nbytes and address < self.last


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.happened_at: float | None = None

    @property
    def happened(self) -> bool:
        return self.happened_at is not None

    def query(self) -> bool:
        self._device.run(self._device.rng.randrange(4))
        self._device.check()
        return self.happened and self._device.rng.random() < 0.7

    def wait(self) -> None:
        self._device.check()
        while not self.happened:
            assert self._device.run(1), "an event that can never happen is waited for"

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, SimulatedEvent)
        assert earlier.happened_at is not None
        assert self.happened_at is not None
        return self.happened_at - earlier.happened_at


class SimulatedStream:
    """A queue of things to do, events to wait for and events to let happen."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], object] | tuple[str, SimulatedEvent]] = deque()

    def record_event(self, *, timed: bool = False) -> TimedEvent:
        event = SimulatedEvent(self._device)
        self._put(("happens", event))
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self._put(("wait", event))

    def run(self, work: Callable[[], object]) -> None:
        self._put(work)
        # Some of it may be done at once, or long after.
        self._device.run(self._device.rng.randrange(3))

    def _put(self, item: Callable[[], object] | tuple[str, SimulatedEvent]) -> None:
        self._device.check()
        while len(self.queue) >= self._device.queue_limit:
            self._device.blocked += 1
            assert self._device.run(1), "a full stream waits for an event that can never happen"
        self.queue.append(item)

    @property
    def ready(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not (isinstance(head, tuple) and head[0] == "wait" and not head[1].happened)

    def step(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, tuple):
            head()
        elif head[0] == "happens":
            head[1].happened_at = self._device.now

    def drain(self) -> None:
        while self.queue:
            assert self._device.run(1), "a stream waits for an event that can never happen"


class SimulatedDevice:
    """A `Device`. Not thread-safe but for `register`, like the context of a real one.

    `favourite`: the stream that is served first whenever it can go on, None for a fair draw. `calls` and
    `copies`: transfers that were asked for. `blocked`: how often the caller had to wait.
    """

    def __init__(
        self, seed: int = 0, favourite: int | None = None, *, memory_bytes: int = 1 << 30, queue_limit: int = QUEUE
    ) -> None:
        self.rng = random.Random(seed)
        self.queue_limit = queue_limit
        self.now = 0.0
        self.streams = [SimulatedStream(self)]
        self.allocated = self.moves = self.calls = self.copies = self.blocked = 0
        self.registered: list[_Range] = []
        self._favourite = favourite
        self.memory_bytes = memory_bytes
        self.memory: list[_Range] = []
        self._owners: list[object] = []
        self._error = ""
        self._lock = threading.Lock()

    # -- as a program with tensors on the device sees it -----------------------------------------------------

    @property
    def compute(self) -> SimulatedStream:
        return self.streams[0]

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors, of the CPU, are on this device from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.memory.append(_Range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            self._owners.append(storage)

    def launch(self, work: Callable[[], object]) -> None:
        """Queue computation of the model, for some later time."""
        self.compute.run(work)

    def fail(self, why: str) -> None:
        """End the context: nothing that is queued is done, and every call raises."""
        self._error = why
        for stream in self.streams:
            stream.queue.clear()

    def check(self) -> None:
        if self._error:
            raise DeviceError(f"the device has failed: {self._error}")

    # -- Device ---------------------------------------------------------------------------------------------

    def stream(self, *, compute: bool = False) -> Stream:
        if compute:
            return self.compute
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    def allocate(self, nbytes: int) -> tuple[int, object]:
        self.check()
        if self.allocated + nbytes > self.memory_bytes:
            raise DeviceError(f"out of memory: {nbytes} bytes wanted, {self.memory_bytes - self.allocated} left")
        memory = np.full(nbytes, 0xEE, np.uint8)
        self.allocated += nbytes
        address = int(memory.ctypes.data)
        made = _Range(address, address + nbytes)
        self.memory.append(made)
        weakref.finalize(memory, self._free, made)
        return address, memory

    def _free(self, made: _Range) -> None:
        self.allocated -= made.last - made.first
        self.memory = [other for other in self.memory if other is not made]

    def move(self, spans: Spans, stream: Stream) -> None:
        self.moves += 1
        assert spans.nbytes % spans.word == 0
        assert not (spans.sources % spans.word).any()
        assert not (spans.targets % spans.word).any()
        for address in (*spans.sources.tolist(), *spans.targets.tolist()):
            if not self._on_device(address, spans.nbytes):
                self.fail(f"an illegal memory access at {address:#x}")
        self.check()
        pairs = zip(spans.sources.tolist(), spans.targets.tolist(), strict=True)
        self._launch(stream, [self._copy(source, target, spans.nbytes) for source, target in pairs])

    def transfer(self, transfers: Transfers, stream: Stream) -> None:
        self.check()
        assert stream is not self.compute, "transfers must not delay the computation's own stream"
        assert isinstance(stream, SimulatedStream)
        arrays = (transfers.sources.tolist(), transfers.targets.tolist(), transfers.sizes.tolist())
        copies = list(zip(*arrays, strict=True))
        self.calls += 1
        self.copies += len(copies)
        for source, target, nbytes in copies:
            self._check_transfer(source, target, nbytes, transfers.pinned)
        if transfers.pinned:
            self._launch(stream, [self._copy(*copy, early=transfers.stable) for copy in copies])
            return
        for copy in copies:
            self._launch(stream, [self._copy(*copy)])
            self.blocked += 1
            stream.drain()
            self.check()

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        self.check()
        with self._lock:
            if any(other.meets(address, nbytes) for other in self.registered):
                raise DeviceError("invalid argument: a part of this memory is registered already")
            made = _Range(address, address + nbytes)
            self.registered = [*self.registered, made]
        return lambda: self._unregister(made)

    def _unregister(self, made: _Range) -> None:
        assert not any(stream.queue for stream in self.streams), "memory is unregistered while copies are under way"
        with self._lock:
            self.registered = [other for other in self.registered if other is not made]
        self.check()

    def synchronize(self) -> None:
        while self.run(64):
            pass
        self.check()
        assert not any(stream.queue for stream in self.streams), "streams wait for each other for ever"

    # -- execution ------------------------------------------------------------------------------------------

    def _launch(self, stream: Stream, works: list[Callable[[], object]]) -> None:
        """Queue a call that does several things in any order."""
        assert isinstance(stream, SimulatedStream)
        self.rng.shuffle(works)
        stream.run(lambda: [work() for work in works])

    def _copy(self, source: int, target: int, nbytes: int, early: bool = False) -> Callable[[], object]:
        if early and self.rng.random() < 0.5:
            data = ctypes.string_at(source, nbytes)
            return lambda: ctypes.memmove(target, data, nbytes)
        return lambda: ctypes.memmove(target, source, nbytes)

    def _on_device(self, address: int, nbytes: int) -> bool:
        return any(memory.covers(address, nbytes) for memory in self.memory)

    def _check_transfer(self, source: int, target: int, nbytes: int, pinned: bool) -> None:
        on_device = [self._on_device(address, nbytes) for address in (source, target)]
        if sum(on_device) != 1:
            self.fail(f"a copy of {nbytes} bytes from {source:#x} to {target:#x} has not one side on the device")
            self.check()
        host = target if on_device[0] else source
        inside = any(registered.covers(host, nbytes) for registered in self.registered)
        if not inside and (pinned or any(registered.meets(host, nbytes) for registered in self.registered)):
            raise DeviceError(f"invalid argument: {nbytes} bytes of host memory are not in one registration")

    def run(self, steps: int) -> bool:
        """Do up to `steps` things that may be done now; False when there was nothing."""
        for _ in range(steps):
            ready = [stream for stream in self.streams if stream.ready]
            if not ready:
                return False
            first = self._favourite is not None and self.streams[self._favourite % len(self.streams)]
            (first if first in ready else self.rng.choice(ready)).step()
            self.now += STEP_SECONDS
        return True
