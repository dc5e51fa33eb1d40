"""Shared lookups: shared tiers are asked in the background for chunks that other processes stored there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        return Job(self._run, Priority.LOAD, self._end)

    def _run(self, after: AfterLock) -> None:
        """Ask the tiers, on an I/O thread."""
        unknown = self._keys
        try:
            for tier in self._tiers:
                if not unknown:
                    break
                unknown = unknown[tier.look_up(unknown) :]
            for tier in self._tiers if self._states else ():
                tier.look_up(self._states, each=True)
        finally:
            self._end(after)

    def _end(self, after: AfterLock) -> None:
        self.seconds = self._clock() - self._started
        self.done = True
        self._bell.ring()
        after.calls.append(self._on_done)
