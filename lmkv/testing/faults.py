"""Backends and copiers made slow, unreliable or silent, and the same way again for the same seed."""

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

from lmkv.backends.wrapper import WrapperBackend
from lmkv.errors import BackendError, BackendUnavailable
from lmkv.memory.copier import ChunkCopy, Copier, Event
from lmkv.outcomes import Read, Written
from lmkv.protocols import Backend, Chunk, ChunkKey

T = TypeVar("T")
Item = TypeVar("Item")

VERBS = frozenset({"contains", "read", "write", "delete", "list_keys"})
COPIES = frozenset({"store", "load"})


def _check_verbs(verbs: frozenset[str], known: frozenset[str]) -> None:
    if unknown := verbs - known:
        raise ValueError(f"no such verbs: {sorted(unknown)}")


class FaultyBackend(WrapperBackend):
    """Injects faults into the calls of `verbs`.

    `error_rate`: chance of each key of a read or write, and of each other call, to fail. `latency`: seconds
    before each call. `fail_call(n)` fails the n-th call from now, `black_hole()` swallows calls until
    `release()`. Reads and writes fail by value, the other verbs raise; both with `BackendUnavailable`.
    `calls` counts the calls by verb, `faults` what was injected.

    Locks: `_lock` guards the random numbers and the counts; nobody sleeps or forwards under it.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        latency: float = 0.0,
        verbs: frozenset[str] = VERBS,
        max_hold: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        _check_verbs(verbs, VERBS)
        self.error_rate = error_rate
        self.latency = latency
        self.verbs = verbs
        self.max_hold = max_hold
        self.calls: Counter[str] = Counter()
        self.faults = 0
        self._random = random.Random(seed)
        self._sleep = sleep
        self._failing: dict[int, int] = {}
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._released.set()

    def fail_call(self, nth: int = 1, errno: int = EIO) -> None:
        """Make the `nth` call from now on (1 is the next) fail as the operating system would."""
        with self._lock:
            self._failing[self._counted() + nth] = errno

    def black_hole(self) -> None:
        """Answer no call until `release`; those that wait longer than `max_hold` seconds fail."""
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def around(self, verb: str, call: Callable[[], T]) -> T:
        error = self._enter(verb) or self._draw(verb)
        if error:
            raise error
        return call()

    def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        return self._some("read", items, [key for key, _ in items], self.inner.read, Read.failed)

    def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        return self._some("write", chunks, [c.key for c in chunks], self.inner.write, Written.failed)

    def _some(
        self,
        verb: str,
        items: Sequence[Item],
        keys: Sequence[ChunkKey],
        forward: Callable[[list[Item]], list[T]],
        failed: Callable[[BackendError], T],
    ) -> list[T]:
        """Forward the items that are spared, and put the results back into request order."""
        whole_call = self._enter(verb)
        errors = [whole_call or self._draw(verb, key) for key in keys]
        spared = [item for item, error in zip(items, errors, strict=True) if error is None]
        results = iter(forward(spared) if spared or not items else [])
        return [failed(error) if error else next(results) for error in errors]

    def _enter(self, verb: str) -> BackendError | None:
        """Count a call, delay it, and say whether all of it fails."""
        with self._lock:
            self.calls[verb] += 1
            errno = self._failing.pop(self._counted(), None)
        if verb not in self.verbs:
            return None
        if self.latency:
            self._sleep(self.latency)
        if not self._released.wait(self.max_hold):
            return self._fault(verb, b"", "it fell into a black hole")
        return self._fault(verb, b"", os.strerror(errno)) if errno else None

    def _draw(self, verb: str, key: ChunkKey = b"") -> BackendError | None:
        if verb not in self.verbs or not self.error_rate:
            return None
        with self._lock:
            unlucky = self._random.random() < self.error_rate
        return self._fault(verb, key, "an injected error") if unlucky else None

    def _fault(self, verb: str, key: ChunkKey, reason: str) -> BackendError:
        with self._lock:
            self.faults += 1
        return BackendUnavailable(self.name, verb, key.hex(), reason)

    def _counted(self) -> int:
        """Locked."""
        return sum(self.calls.values())


class FaultyCopier:
    """A copier whose calls of `verbs`, by layers or not, fail with the chance of `error_rate`.

    They fail when half of their chunks, or some of the layers, are copied. With the chance of `late_rate` a
    call that did its work is reported as still running, a few times over. `faults` counts the failures. Not
    thread-safe, as no copier is.
    """

    def __init__(
        self,
        inner: Copier,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        late_rate: float = 0.0,
        verbs: frozenset[str] = COPIES,
    ) -> None:
        _check_verbs(verbs, COPIES)
        self.error_rate = error_rate
        self.late_rate = late_rate
        self.verbs = verbs
        self.faults = 0
        self._inner = inner
        self._random = random.Random(seed)

    @property
    def num_layers(self) -> int:
        return self._inner.num_layers

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        return self._copy("store", self._inner.store, copies)

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False) -> Event:
        return self._copy("load", partial(self._inner.load, overlap=overlap), copies)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self._between_layers("store", self._inner.store_layers(copies))

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self._between_layers("load", self._inner.load_layers(copies))

    def close(self) -> None:
        self._inner.close()

    def _copy(
        self, verb: str, copy: Callable[[Sequence[ChunkCopy]], Event], copies: Sequence[ChunkCopy]
    ) -> Event:
        if self._unlucky(verb):
            copy(copies[: len(copies) // 2])
            raise self._fault()
        event = copy(copies)
        return _Late(event, self._random.randint(1, 5)) if self._random.random() < self.late_rate else event

    def _between_layers(self, verb: str, events: Iterator[Event]) -> Iterator[Event]:
        fatal = self._random.randrange(self.num_layers) if self._unlucky(verb) else None
        for layer, event in enumerate(events):
            if layer == fatal:
                raise self._fault()
            yield event

    def _unlucky(self, verb: str) -> bool:
        return verb in self.verbs and self._random.random() < self.error_rate

    def _fault(self) -> OSError:
        self.faults += 1
        return OSError(EIO, "an injected error")


class _Late:
    """Says for a while that it has not happened yet."""

    def __init__(self, event: Event, times: int) -> None:
        self._event = event
        self._times = times

    def query(self) -> bool:
        self._times -= 1
        return self._times < 0 and self._event.query()

    def wait(self) -> None:
        self._times = 0
        self._event.wait()
