"""Handles with which callers wait: for promotions of chunks into host memory, and for lookups in shared tiers."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from attrs import define, field

from lmkv.errors import ClosedError
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.entries import Entry
from lmkv.store.guards import Waker, attempt
from lmkv.store.iopool import Deferred, Job, Priority
from lmkv.store.tier import LowerTier

logger = logging.getLogger(__name__)

_CALLBACK_FAILED = "lmkv: the callback %r of a promotion failed: %r; lmkv continues"


@define(eq=False, repr=False)
class Handle:
    """Lets callers wait for the end of work that other threads do. Thread-safe."""

    done: bool = field(init=False, default=False)
    """Whether the work is finished."""
    _bell: Waker = field(init=False, factory=Waker)
    _callbacks: deque[Callable[[], None]] = field(init=False, factory=deque)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the work is finished, for at most `timeout` seconds. Returns whether the work is finished."""
        return self._bell.wait_for(lambda: self.done, timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the thread that finishes the work, or now if the work is finished. `callback` must not
        block.
        """
        self._callbacks.append(callback)
        if self.done:
            self._call_back()

    def finish(self) -> None:
        """Mark the work as finished. Called by the thread that does the work, without the store's lock. Idempotent."""
        self.done = True
        self._bell.ring()
        self._call_back()

    def _call_back(self) -> None:
        with suppress(IndexError):
            while True:
                # `popleft` gives each callback to one thread.
                callback = self._callbacks.popleft()
                attempt(callback, partial(logger.error, _CALLBACK_FAILED, callback))


@define(eq=False, repr=False)
class Promotion(Handle):
    """The handle that `TieredStore.promote` returns for chunks that are being read into host memory.

    Notes
    -----
    The chunks of a promotion stay in host memory until `release`. If several promotions need a chunk, the chunk is read
    once. When the promotion is `done`, its first `ready` chunks can be leased. Thread-safe. Only the store changes the
    attributes.
    """

    _release: Callable[[Promotion], None]
    _is_forked: Callable[[], bool]
    entries: list[Entry] = field(init=False, factory=list)
    origins: list[str] = field(init=False, factory=list)
    """For each entry, the tier that had its chunk when the promotion asked for it."""
    delivered: dict[str, tuple[int, float]] = field(init=False, factory=dict)
    """For each tier, the number of bytes that have arrived from the tier, and the time when its last chunk arrived."""
    failed_at: int | None = field(init=False, default=None)
    """The index of the first chunk that will never arrive, or None."""
    released: bool = field(init=False, default=False)

    def __repr__(self) -> str:
        state = "released" if self.released else "done" if self.done else "under way"
        return f"<Promotion {state}: {self.ready} of {len(self)} chunks ready>"

    def __len__(self) -> int:
        """Return the number of chunks in the promotion, from the first key on. The reads of some chunks may still
        fail.
        """
        return len(self.entries) if self.failed_at is None else self.failed_at

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self.entries[: len(self)]]

    @property
    def ready(self) -> int:
        """Number of chunks, from the first one on, that are in host memory now."""
        for count, entry in enumerate(self.entries[: len(self)]):
            if not entry.ready:
                return count
        return len(self)

    @property
    def sources(self) -> dict[str, int]:
        """For each tier name, the number of the promotion's chunks that were in this tier when the promotion needed
        them.
        """
        return dict(Counter(self.origins))

    @property
    def arrived(self) -> dict[str, int]:
        """For each tier name, the number of the `ready` chunks that came from this tier."""
        return dict(Counter(self.origins[: self.ready]))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the promotion is done, for at most `timeout` seconds. Returns whether the promotion is done.

        Raises ClosedError in a forked child, which has no threads that could finish it.
        """
        if not self.done and self._is_forked():
            raise ClosedError("a forked process cannot wait for a promotion of its parent process")
        return super().wait(timeout)

    def release(self) -> None:
        """Allow the eviction of the chunks. Idempotent.

        Also cancels the reads that have not begun, unless another promotion needs them.
        """
        self._release(self)


@define(eq=False, repr=False)
class SharedLookup(Handle):
    """A search for chunks in shared tiers, which `TieredStore.look_up_shared` starts.

    The search asks one tier after the other, fastest first, for the chunks that no earlier tier has, and for all
    `states`. The search ends when all tiers have answered or failed. Without `states`, the search also ends as soon as
    all chunks are found. Thread-safe.

    `states`: keys of the saved states of recurrent layers. `on_done`: a function that is called once, without the
    store's lock. `seconds`: how long the search took, measured with `clock`.
    """

    _keys: Sequence[ChunkKey]
    _states: Sequence[ChunkKey]
    _tiers: Sequence[LowerTier]
    _on_done: Callable[[Deferred], None]
    _clock: Clock
    _started: float = field(init=False)
    seconds: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._started = self._clock()

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        return f"<SharedLookup {state}: {len(self._keys)} chunks in {', '.join(tier.name for tier in self._tiers)}>"

    def job(self) -> Job:
        return self._job(self._keys, self._tiers)

    def _job(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier]) -> Job:
        """Return a job that asks the first of `tiers`, and then queues a job for the other tiers."""
        work, refused = partial(self._ask, unknown, tiers), partial(self._go_on, unknown, tiers[1:])
        return Job(work, Priority.LOAD, refused, tiers[0].name)

    def _ask(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier], after: Deferred) -> None:
        try:
            if unknown:
                unknown = unknown[tiers[0].look_up(unknown) :]
            if self._states:
                tiers[0].look_up(self._states, each=True)
        finally:
            self._go_on(unknown, tiers[1:], after)

    def _go_on(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier], after: Deferred) -> None:
        if tiers and (unknown or self._states):
            after.jobs.append(self._job(unknown, tiers))
        else:
            self._end(after)

    def _end(self, after: Deferred) -> None:
        self.seconds = self._clock() - self._started
        self.finish()
        after.callbacks.append(self._on_done)
