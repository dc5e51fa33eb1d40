"""A promotion: chunks on their way from lower tiers into the primary one, and who waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from lmkv.protocols import ChunkKey
from lmkv.store.tiers.iopool import Deferred, Priority
from lmkv.store.tiers.primary import Entry

logger = logging.getLogger(__name__)


class Promotion:
    """The leading chunks of a request that are, or will soon be, in the primary tier; held until `release`.

    One load serves every promotion that wants its chunk. Complete when nothing is under way any more: then
    `ready` chunks from the first can be leased. Thread-safe.
    """

    def __init__(
        self, priority: Priority, lock: threading.Lock, release: Callable[[Promotion], None]
    ) -> None:
        self.priority = priority
        self._lock = lock
        self._release = release
        self._entries: list[Entry] = []
        self._sources: dict[str, int] = {}
        self._unfinished = 0
        self._failed_at: int | None = None
        self._done = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.released = False
        self.waiting_keys: Sequence[ChunkKey] = ()
        """Locked. Keys that it has found no slots for yet, while other chunks are being copied down."""

    def __len__(self) -> int:
        """Chunks that were found, from the first; not all need arrive."""
        return len(self._entries) if self._failed_at is None else self._failed_at

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self._entries[: len(self)]]

    @property
    def ready(self) -> int:
        """Chunks, from the first, that are in the primary tier by now."""
        for count, entry in enumerate(self._entries[: len(self)]):
            if not entry.ready:
                return count
        return len(self)

    @property
    def sources(self) -> dict[str, int]:
        """Chunks by the name of the tier that had them, at the time of asking for the promotion."""
        return dict(self._sources)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done, at most `timeout` seconds. Returns `done`."""
        return self._done.wait(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back once done (at once if it is), on whichever thread finishes it. Must not block."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def release(self) -> None:
        """Let go of the chunks. Reads that have not begun and nobody else wants are left out. Idempotent."""
        self._release(self)

    # -- for the promoter: all locked ---------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether one of its chunks will never come."""
        return self._failed_at is not None

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    def add(self, entry: Entry, source: str) -> None:
        """The next chunk of it, which is held for it."""
        self._entries.append(entry)
        self._sources[source] = self._sources.get(source, 0) + 1
        if not entry.ready:
            entry.waiters += (self,)
            self._unfinished += 1

    def on_entry_done(self, entry: Entry, deferred: Deferred) -> None:
        """An entry that it waits for is READY, or will never be."""
        self._unfinished -= 1
        if not entry.ready:
            self._failed_at = min(self._entries.index(entry), len(self))
        self.finish_if_complete(deferred)

    def finish_if_complete(self, deferred: Deferred) -> None:
        if not self._unfinished and not self.waiting_keys:
            deferred.after.append(self._finish)

    # -- without the lock ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("lmkv: a callback of a promotion failed")
