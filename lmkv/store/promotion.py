"""A promotion: chunks on their way from lower tiers into the primary tier, and who waits for them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from lmkv.errors import ClosedError
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.shared_lookup import SharedLookup
from lmkv.store.tiers.iopool import AfterLock, Priority
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.primary import Entry

logger = logging.getLogger(__name__)


class Promotion:
    """The leading chunks of a request that are, or will soon be, in the primary tier.

    They are referenced until `release`. One load serves every promotion that wants its chunk. Done when
    nothing is under way any more: then the first `ready` chunks can be leased. Thread-safe.
    """

    def __init__(
        self,
        priority: Priority,
        lock: threading.Lock,
        release: Callable[[Promotion], None],
        chain: Sequence[ChunkKey] = (),
        clock: Clock = time.monotonic,
    ) -> None:
        self.priority = priority
        self.chain = chain
        """All that the request wants, of which this may be the beginning."""
        self._lock = lock
        self._release = release
        self._entries: list[Entry] = []
        self._sources: list[str] = []
        self._clock = clock
        self._awaited: dict[Entry, str] = {}
        """Those of its entries that are not filled yet, each with its source."""
        self.delivered: dict[str, tuple[int, float]] = {}
        """By tier: how many chunks have come from it, and when the last one did."""
        self._failed_at: int | None = None
        self._done = threading.Event()
        self._process = os.getpid()
        self._callbacks: list[Callable[[], None]] = []
        self.released = False
        self.waiting_keys: Sequence[ChunkKey] = ()
        """Locked. Keys that wait for `shared_lookup`, or for slots while chunks are flushed."""
        self.shared_lookup: SharedLookup | None = None

    def __repr__(self) -> str:
        state = "released" if self.released else "done" if self.done else "under way"
        return f"<Promotion {state}: {self.ready} of {len(self)} chunks ready>"

    def __len__(self) -> int:
        """Leading chunks that were found; not all of them need arrive."""
        return len(self._entries) if self._failed_at is None else self._failed_at

    @property
    def keys(self) -> list[ChunkKey]:
        return [entry.key for entry in self._entries[: len(self)]]

    @property
    def ready(self) -> int:
        """Leading chunks that are in the primary tier by now."""
        for count, entry in enumerate(self._entries[: len(self)]):
            if not entry.ready:
                return count
        return len(self)

    @property
    def sources(self) -> dict[str, int]:
        """Chunks by the name of the tier that had them when the promotion was asked for."""
        return dict(Counter(self._sources))

    @property
    def arrived(self) -> dict[str, int]:
        """The chunks that are `ready`, likewise."""
        return dict(Counter(self._sources[: self.ready]))

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done, at most `timeout` seconds. Returns `done`.

        Raises ClosedError in a forked child, where nobody will bring it about.
        """
        if not self.done and os.getpid() != self._process:
            raise ClosedError("a promotion belongs to the process that this one was forked from")
        return self._done.wait(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back once done (at once if it is), on whichever thread finishes it. Must not block."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def release(self) -> None:
        """Drop the references. Reads that nobody else wants are skipped unless begun. Idempotent."""
        self._release(self)

    # -- for the promoter ---------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether one of its chunks will never arrive."""
        return self._failed_at is not None

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    @locked
    def add(self, entry: Entry, source: str) -> None:
        """Its next chunk, already referenced for it."""
        self._entries.append(entry)
        self._sources.append(source)
        if not entry.ready:
            entry.waiters += (self,)
            self._awaited[entry] = source

    @locked
    def on_entry_done(self, entry: Entry, after: AfterLock) -> None:
        """An entry that it waits for is READY, or was removed unfilled."""
        source = self._awaited.pop(entry)
        if entry.ready:
            count, _ = self.delivered.get(source, (0, 0.0))
            self.delivered[source] = count + 1, self._clock()
        else:
            self._failed_at = min(self._entries.index(entry), len(self))
        self.finish_if_complete(after)

    @locked
    def finish_if_complete(self, after: AfterLock) -> None:
        if not self._awaited and not self.waiting_keys:
            after.calls.append(self._finish)

    def _finish(self, after: AfterLock) -> None:
        """Not locked. Idempotent."""
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # the other callbacks are others'
                logger.exception("lmkv: a done callback of a promotion failed; it was %r", callback)
