"""Injects faults into backends and copiers: errors, delays and calls that hang. A seed makes the faults
reproducible.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from errno import EIO
from functools import partial
from typing import TypeVar

from attrs import define, field

from lmkv.backends.adapters import WrapperBackend
from lmkv.errors import BackendError, BackendUnavailable
from lmkv.memory.copier import ChunkCopy, Copier, Event
from lmkv.protocols import Backend, Chunk, ChunkKey, Read, Written

T = TypeVar("T")

VERBS = frozenset({"contains", "read", "write", "delete", "list_keys"})
COPIES = frozenset({"store", "load"})


def _known(verbs: frozenset[str]) -> Callable[[object, object, frozenset[str]], None]:
    def check(_: object, __: object, given: frozenset[str]) -> None:
        if unknown := given - verbs:
            raise ValueError(f"no such verbs: {sorted(unknown)}; there are {sorted(verbs)}")

    return check


@define(eq=False, repr=False, slots=False)
class FaultyBackend(WrapperBackend):
    """Injects faults into calls of another backend.

    Parameters
    ----------
    inner
        The backend that gets the calls.
    seed
        Seed of the random numbers: the same seed and calls give the same faults.
    error_rate
        Probability that a call fails.
    latency
        Seconds to wait before each call.
    verbs
        The names of the methods with faults.
    max_hold
        Longest time in seconds that a call waits after `black_hole`; then the call fails.
    sleep
        The function that waits for `latency` seconds.

    Raises
    ------
    ValueError
        A verb is unknown.

    Notes
    -----
    Thread-safe. `fail_call(n)` makes the n-th call from now on fail. After `black_hole()`, calls wait until
    `release()`. Reads and writes return the error, and other methods raise the error. The error is always a
    `BackendUnavailable`. `calls` counts the calls of each method, and `faults` counts the injected faults.

    Examples
    --------
    >>> from lmkv.backends.adapters import NullBackend
    >>> backend = FaultyBackend(NullBackend())
    >>> backend.fail_call()
    >>> backend.read(bytes(32), memoryview(bytearray(4))).status, backend.faults
    (<ReadStatus.FAILED: 'failed'>, 1)
    """

    inner: Backend
    _seed: int = field(default=0, kw_only=True)
    error_rate: float = field(default=0.0, kw_only=True)
    latency: float = field(default=0.0, kw_only=True)
    verbs: frozenset[str] = field(default=VERBS, kw_only=True, validator=_known(VERBS))
    max_hold: float = field(default=60.0, kw_only=True)
    _sleep: Callable[[float], None] = field(default=time.sleep, kw_only=True)
    calls: Counter[str] = field(factory=Counter, init=False)
    faults: int = field(default=0, init=False)
    _failing: dict[int, int] = field(factory=dict, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        super().__init__(self.inner)
        self._random = random.Random(self._seed)
        self._released = threading.Event()
        self._released.set()

    def fail_call(self, nth: int = 1, errno: int = EIO) -> None:
        """Make the `nth` call from now on (1 for the next call) fail with the error `errno` of the operating system."""
        with self._lock:
            self._failing[self._counted() + nth] = errno

    def black_hole(self) -> None:
        """Make all calls of `verbs` wait until `release`. A call that waits longer than `max_hold` seconds fails."""
        self._released.clear()

    def release(self) -> None:
        """End the effect of `black_hole`: waiting calls continue, and later calls do not wait."""
        self._released.set()

    def around(self, verb: str, call: Callable[[], T]) -> T:
        if error := self._error_of(verb):
            raise error
        return call()

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        error = self._error_of("read", key)
        return Read.failed(error) if error else self.inner.read(key, into)

    def write(self, chunk: Chunk) -> Written:
        error = self._error_of("write", chunk.key)
        return Written.failed(error) if error else self.inner.write(chunk)

    def _error_of(self, verb: str, key: ChunkKey = b"") -> BackendError | None:
        """Count and delay a call. Returns the error to inject, or None if the call should succeed."""
        with self._lock:
            self.calls[verb] += 1
            errno = self._failing.pop(self._counted(), None)
        if verb not in self.verbs:
            return None
        if self.latency:
            self._sleep(self.latency)
        if not self._released.wait(self.max_hold):
            return self._fault(verb, key, "it fell into a black hole")
        if errno:
            return self._fault(verb, key, os.strerror(errno))
        with self._lock:
            unlucky = self.error_rate and self._random.random() < self.error_rate
        return self._fault(verb, key, "an injected error") if unlucky else None

    def _fault(self, verb: str, key: ChunkKey, reason: str) -> BackendError:
        with self._lock:
            self.faults += 1
        return BackendUnavailable(self.name, verb, key.hex(), reason)

    def _counted(self) -> int:
        """Return the number of calls so far. The caller holds `_lock`."""
        return sum(self.calls.values())


@define(eq=False, repr=False, slots=False)
class FaultyCopier:
    """Injects faults into calls of another copier (which copies KV between GPU and host memory).

    Parameters
    ----------
    inner
        The copier that gets the calls.
    seed
        Seed of the random numbers: the same seed and calls give the same faults.
    error_rate
        Probability that a call raises `OSError` after it has copied half of its chunks or some of its layers.
    late_rate
        Probability that the event of a copy reports "not finished", up to five times, after the copy has finished.
    verbs
        The calls that get faults: "store", "load" or both.

    Raises
    ------
    ValueError
        A verb is unknown.

    Notes
    -----
    `faults` counts the failures. Not thread-safe, like all copiers.

    Examples
    --------
    >>> import torch
    >>> from lmkv.memory.copier import ChunkCopy, Run
    >>> from lmkv.memory.copiers import make_copier
    >>> from lmkv.memory.paged import PagedMemory
    >>> from lmkv.memory.slab import Slab
    >>> memory = PagedMemory.of([torch.zeros(4, 16)])
    >>> layout = memory.layout(chunk_size=16, block_sizes=[16])
    >>> slab = Slab(layout.slot_bytes, layout.slot_bytes)
    >>> copier = FaultyCopier(make_copier(memory, layout, slab), error_rate=1.0)
    >>> copier.store([ChunkCopy(0, (Run(0, [2]),))])
    Traceback (most recent call last):
        ...
    OSError: [Errno 5] an injected error
    """

    _inner: Copier
    _seed: int = field(default=0, kw_only=True)
    error_rate: float = field(default=0.0, kw_only=True)
    late_rate: float = field(default=0.0, kw_only=True)
    verbs: frozenset[str] = field(default=COPIES, kw_only=True, validator=_known(COPIES))
    faults: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._random = random.Random(self._seed)

    @property
    def num_layers(self) -> int:
        return self._inner.num_layers

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        return self._copy("store", self._inner.store, copies)

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        return self._copy("load", partial(self._inner.load, overlap=overlap, after=after), copies)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self._between_layers("store", self._inner.store_layers(copies))

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self._between_layers("load", self._inner.load_layers(copies))

    def close(self, *, process_ends: bool = False) -> None:
        self._inner.close(process_ends=process_ends)

    def _copy(self, verb: str, copy: Callable[[Sequence[ChunkCopy]], Event], copies: Sequence[ChunkCopy]) -> Event:
        if self._unlucky(verb):
            # Like a copier's own failure: nothing of it goes on.
            copy(copies[: len(copies) // 2]).wait()
            raise self._fault()
        event = copy(copies)
        return _Late(event, self._random.randint(1, 5)) if self._random.random() < self.late_rate else event

    def _between_layers(self, verb: str, events: Iterator[Event]) -> Iterator[Event]:
        fatal = self._random.randrange(self.num_layers) if self._unlucky(verb) else None
        for layer, event in enumerate(events):
            if layer == fatal:
                event.wait()
                raise self._fault()
            yield event

    def _unlucky(self, verb: str) -> bool:
        return verb in self.verbs and self._random.random() < self.error_rate

    def _fault(self) -> OSError:
        self.faults += 1
        return OSError(EIO, "an injected error")


@define(eq=False)
class _Late:
    """The event of a finished copy, which first reports a few times that the copy is not finished."""

    _event: Event
    _times: int

    def query(self) -> bool:
        self._times -= 1
        return self._times < 0 and self._event.query()

    def wait(self) -> None:
        self._times = 0
        self._event.wait()
