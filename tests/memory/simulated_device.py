"""A device that does what it was given as late, and in as wild an order, as streams and events allow.

Memory is host memory, and addresses are real. Whatever order CUDA could choose may happen here, and no other.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable

import numpy as np

from lmkv.memory.copier import DONE, Event
from lmkv.memory.device_copier import Spans, Stream


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.happened = False

    def query(self) -> bool:
        self._device.run(self._device.rng.randrange(4))
        return self.happened

    def wait(self) -> None:
        while not self.happened:
            assert self._device.run(1), "an event that can never happen is waited for"


class SimulatedStream:
    """Queued: things to do, events to wait for, events to let happen."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], object] | tuple[str, SimulatedEvent]] = deque()

    def mark(self) -> Event:
        event = SimulatedEvent(self._device)
        self.queue.append(("happens", event))
        return event

    def wait_for(self, event: Event) -> None:
        if event is not DONE:
            assert isinstance(event, SimulatedEvent)
            self.queue.append(("wait", event))

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        # Some of it may be done at once, or long after.
        self._device.run(self._device.rng.randrange(3))

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
            head[1].happened = True


class SimulatedDevice:
    """`favourite`: the stream that is served first whenever it can go on, None for a fair draw."""

    def __init__(self, seed: int, favourite: int | None = None) -> None:
        self.rng = random.Random(seed)
        self._favourite = favourite
        self.streams = [SimulatedStream(self)]
        self.allocated = 0
        self.transfers = self.moves = 0
        self.closed = False

    @property
    def compute(self) -> SimulatedStream:
        return self.streams[0]

    def stream(self, *, compute: bool = False) -> Stream:
        if compute:
            return self.compute
        self.streams.append(SimulatedStream(self))
        return self.streams[-1]

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = np.full(nbytes, 0xEE, np.uint8)
        self.allocated += nbytes
        return int(memory.ctypes.data), memory

    def move(self, spans: Spans, stream: Stream) -> None:
        self.moves += 1
        self._copy(spans, stream)

    def transfer(self, spans: Spans, stream: Stream) -> None:
        self.transfers += len(spans.sources)
        assert stream is not self.streams[0], "transfers must not delay the computation's own stream"
        self._copy(spans, stream)

    @staticmethod
    def _copy(spans: Spans, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        assert spans.nbytes % spans.word == 0
        for source, target in zip(spans.sources.tolist(), spans.targets.tolist(), strict=True):
            stream.do(lambda target=target, source=source: ctypes.memmove(target, source, spans.nbytes))

    def run(self, steps: int) -> bool:
        """Do up to so many things that may be done now; False when there was nothing."""
        for _ in range(steps):
            ready = [stream for stream in self.streams if stream.ready]
            if not ready:
                return False
            first = self._favourite is not None and self.streams[self._favourite % len(self.streams)]
            (first if first in ready else self.rng.choice(ready)).step()
        return True

    def synchronize(self) -> None:
        while self.run(64):
            pass
        assert not any(stream.queue for stream in self.streams), "streams wait for each other for ever"

    def close(self) -> None:
        self.closed = True
