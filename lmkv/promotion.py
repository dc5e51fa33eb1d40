"""Promotions: chunks on their way from lower tiers into the primary one, and who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmkv.protocols import ChunkKey

if TYPE_CHECKING:
    from lmkv.claims import Entry
    from lmkv.tiered import TieredStore


class Promotion:
    """The leading chunks of a request that are, or will soon be, in the primary tier; held until `release`.

    One load serves every promotion that wants its chunk. Complete when nothing is under way any more: then
    `ready` chunks from the first can be leased. Thread-safe.
    """

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._entries: list[Entry] = []
        self._sources: dict[str, int] = {}
        self._pending = 0
        self._broken_at: int | None = None
        self._event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._released = False
        self.prefetched = 0
        """Slots that this promotion fills as a prefetch: they count against the store's prefetch share."""

    def __len__(self) -> int:
        """Chunks that were found, from the first; not all need arrive."""
        return len(self._entries) if self._broken_at is None else self._broken_at

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self._entries[: len(self)]]

    @property
    def ready(self) -> int:
        """Chunks, from the first, that are in the primary tier by now. Final once `done`."""
        return self._store._leading_ready(self._entries[: len(self)])

    @property
    def sources(self) -> dict[str, int]:
        """Chunks by the name of the tier that has them, at the time of asking for the promotion."""
        return dict(self._sources)

    @property
    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done, at most `timeout` seconds. Returns `done`."""
        return self._event.wait(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back once done (at once if it is), on whichever thread finishes it. Must not block."""
        with self._store._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def release(self) -> None:
        """Let go of the chunks; loads that nobody else waits for still end in the primary tier. Idempotent."""
        self._store._end_promotion(self)

    def _finish(self) -> None:
        with self._store._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
