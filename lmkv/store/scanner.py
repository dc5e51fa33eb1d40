"""Keeps the index of a persistent tier equal to its backend's content, on a thread of its own.

A tier is listed at the start; chunks that are indexed already are served meanwhile. A tier that other processes
change is listed again and again, to find their chunks and to forget deleted ones. Chunks of a shared backend that
cannot list are forgotten after one or two intervals, and asked for again when a request wants them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from lmkv.protocols import ListsKeys, SharesRoom
from lmkv.store.guards import Bell, attempt
from lmkv.store.tier import LowerTier

T = TypeVar("T")

INTERVAL = 10.0
"""Seconds between listings of a shared tier, with 20 % jitter so that processes do not evict in lockstep."""

_PROBES = 5
"""Probes of a failing tier per `INTERVAL`."""

_SHARE = 0.01
"""Largest share of the time spent on listings."""

_BATCH_KEYS = 32
"""Chunks that are indexed under one hold of the lock: some 0.06 ms."""
PAUSE_SECONDS = 5e-5
"""Pause between batches, so that other threads get the GIL. Without it they wait 5 ms for it again and again."""


class TierScanner:
    """Lists one tier on a thread of its own. `lock`: the store's. `listed`: one has ended, and the `bell` rang."""

    def __init__(self, tier: LowerTier, lock: threading.Lock, interval: float = INTERVAL) -> None:
        self._tier = tier
        self._lock = lock
        self._interval = interval
        self._stop = threading.Event()
        self.listed, self.bell = False, Bell()
        self._thread = threading.Thread(target=self._run, name=f"lmkv-index-{tier.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread, waiting at most `timeout` seconds for a listing under way. Idempotent."""
        self._stop.set()
        # Wake everybody who waits for the listing.
        self._end_listing()
        self._thread.join(timeout)

    def _end_listing(self) -> None:
        self.listed = True
        self.bell.ring()

    def _run(self) -> None:
        took = 0.0
        while not self._stop.is_set():
            started = time.monotonic()
            # Twice, because a log handler may raise as well.
            done = attempt(lambda: attempt(self._list, self._failed), lambda error: False)
            if done:
                self._end_listing()
                if not self._tier.shared:
                    return
            before, took = took, time.monotonic() - started
            # The shorter of two: a single slow listing, often the first, must not delay the next for minutes.
            self._wait(max(self._interval * random.uniform(0.8, 1.2), min(before, took) / _SHARE))

    def _wait(self, seconds: float) -> None:
        """Wait, and meanwhile probe a tier that fails."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stop.wait(min(left, self._interval / _PROBES)):
            self._tier.probe()

    def _failed(self, error: Exception) -> bool:
        with self._lock:
            self._tier.index.end_listing()
        self._tier.note_unlisted(error)
        return False

    def _list(self) -> bool:
        """List the tier once. False if it must be listed later."""
        index, backend = self._tier.index, self._tier.backend
        if index.clearing:
            self._tier.delete_all()
        with self._lock:
            if not index.begin_listing():
                return False
        if not isinstance(backend, ListsKeys):
            self._end_listing()
            self._wait(self._interval)
            self._forget_vanished()
            return True
        for batch in backend.list_all() if isinstance(backend, SharesRoom) else backend.list_keys():
            for part in _parts(batch):
                with self._lock:
                    if not index.adopt(part):
                        return True
                time.sleep(PAUSE_SECONDS)
            self._tier.reclaim()
            if self._stop.is_set():
                return False
        self._forget_vanished()
        return True

    def _forget_vanished(self) -> None:
        more = True
        while more:
            with self._lock:
                more = self._tier.index.forget_unseen(_BATCH_KEYS)
        with self._lock:
            self._tier.index.end_listing()


def _parts(items: Sequence[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while part := list(islice(iterator, _BATCH_KEYS)):
        yield part
