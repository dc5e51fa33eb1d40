"""Shared lookups: shared tiers are asked in the background for chunks that other processes stored there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiers.bell import Bell
from lmkv.store.tiers.jobs import AfterLock, Job, Priority
from lmkv.store.tiers.lower import LowerTier


@define(eq=False, repr=False)
class SharedLookup:
    """Asks shared tiers for the leading chunks of some keys; made by `TieredStore.look_up_shared`.

    Each tier, fastest first, is asked for the keys that the tiers before it do not have. Done when all chunks are
    found, or all tiers have answered or failed. Thread-safe.

    `states`: keys of states behind these chunks, which are asked for too and may be missing.

    `on_done`: called once, without the lock. `seconds`: how long it took, by the `clock`.
    """

    _keys: Sequence[ChunkKey]
    _states: Sequence[ChunkKey]
    _tiers: Sequence[LowerTier]
    _on_done: Callable[[AfterLock], None]
    _clock: Clock
    _started: float = field(init=False)
    seconds: float = field(init=False, default=0.0)
    done: bool = field(init=False, default=False)
    _bell: Bell = field(init=False, factory=Bell)

    def __attrs_post_init__(self) -> None:
        self._started = self._clock()

    def __repr__(self) -> str:
        state = "done" if self.done else "under way"
        return f"<SharedLookup {state}: {len(self._keys)} chunks in {', '.join(tier.name for tier in self._tiers)}>"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done, at most `timeout` seconds. Returns `done`."""
        return self._bell.wait_for(lambda: self.done, timeout)

    def job(self) -> Job:
        return self._job(self._keys, self._tiers)

    def _job(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier]) -> Job:
        """Ask the first of these tiers, on a thread of its own; after it the others."""
        work, refused = partial(self._ask, unknown, tiers), partial(self._go_on, unknown, tiers[1:])
        return Job(work, Priority.LOAD, refused, tiers[0].name)

    def _ask(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier], after: AfterLock) -> None:
        try:
            if unknown:
                unknown = unknown[tiers[0].look_up(unknown) :]
            if self._states:
                tiers[0].look_up(self._states, each=True)
        finally:
            self._go_on(unknown, tiers[1:], after)

    def _go_on(self, unknown: Sequence[ChunkKey], tiers: Sequence[LowerTier], after: AfterLock) -> None:
        if tiers and (unknown or self._states):
            after.jobs.append(self._job(unknown, tiers))
        else:
            self._end(after)

    def _end(self, after: AfterLock) -> None:
        self.seconds = self._clock() - self._started
        self.done = True
        self._bell.ring()
        after.calls.append(self._on_done)
