"""`Catalog` tells which tier has which chunk. `TierScanner` keeps the index of a tier equal to the tier's content.

The scanner lists a tier at the start. Meanwhile the store already serves the indexed chunks. If other processes change
a tier, the scanner lists the tier repeatedly, to find new chunks and to forget deleted ones. If a shared backend cannot
list its chunks, the index forgets each chunk after a while. A request that needs a forgotten chunk looks the chunk up
again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from attrs import define, frozen

from lmkv.chunks.hashing import state_keys
from lmkv.protocols import ChunkKey, ListsKeys, Policy, Presence, SharesCapacity
from lmkv.store.guards import GuardedObserver, StoreObserver, Waker, attempt, locked
from lmkv.store.promoter import Promoter
from lmkv.store.tier import LowerTier, Operation, first_tier_with
from lmkv.store.writes import StoreComponent

T = TypeVar("T")

INTERVAL = 10.0
"""Seconds between listings of a shared tier, with 20 % jitter so that processes do not evict in lockstep."""

_PROBES = 5
"""Probes of a failing tier per `INTERVAL`."""

_SHARE = 0.01
"""Largest share of the time spent on listings."""

_BATCH_KEYS = 32
"""Number of chunks that are indexed while the lock is held once, for some 0.06 ms."""
PAUSE_SECONDS = 5e-5
"""Pause in seconds between batches, so that other threads get the GIL. Without the pause, each thread waits 5 ms for
the GIL.
"""


@define(eq=False, repr=False)
class Catalog(StoreComponent):
    """Tells which tiers have which chunks, and notifies observers of changes. A catalog changes no tier itself.
    Thread-safe.
    """

    _promoter: Promoter
    _observers: list[StoreObserver]

    def lookup(self, keys: Sequence[ChunkKey]) -> list[Presence]:
        """Return the `Presence` of each chunk, in the order of `keys`."""
        with self._lock:
            return [self.presence(key) for key in keys]

    @locked
    def presence(self, key: ChunkKey) -> Presence:
        entry = self._primary.entries.get(key)
        if entry is not None and not self._promoter.is_stuck(entry):
            return Presence.READY if entry.ready else Presence.PENDING
        return Presence.LOWER if first_tier_with(self._tiers, key) else Presence.MISS

    def count_prefix(self, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """Return `(ready, found)`: how many chunks from `keys[0]` on are in host memory, and how many are in some tier.

        Each count ends before the first missing chunk.
        """
        with self._lock:
            ready = len(self._primary.leading_ready(keys))
            return ready, self.count_found(keys, ready)

    @locked
    def count_found(self, keys: Sequence[ChunkKey], found: int = 0) -> int:
        """Return how many chunks from `keys[0]` on are in some tier. The count ends before the first missing chunk.

        The first `found` chunks are not looked up, because the caller knows that they are in some tier. A chunk counts
        as missing if its only tier cannot be read now, even if a load from this tier into host memory has begun.
        """
        entries, hangs = self._primary.entries, self._promoter.is_stuck
        indexes = [tier.index for tier in self._tiers if tier.usable]
        for key in keys[found:]:
            entry = entries.get(key)
            if (entry is None or hangs(entry)) and not any(key in index for index in indexes):
                break
            found += 1
        return found

    @locked
    def unknown(self, keys: Sequence[ChunkKey], states: int) -> tuple[Sequence[ChunkKey], Sequence[ChunkKey]]:
        """Return `(chunk keys, state keys)`: the chunks and states to look for in shared tiers.

        The chunk keys are those of the first chunk that no index has, and of all later chunks. The state keys are those
        of missing states after the last chunk that has all its states. `states`: the number of state entries after each
        chunk.
        """
        behind: list[ChunkKey] = []
        for key in reversed(keys):
            missing = [state for state in state_keys(key, states) if not self.count_found([state])]
            if not missing:
                break
            behind += missing
        return keys[self.count_found(keys) :], behind

    def count_stored(self, keys: Sequence[ChunkKey]) -> int:
        """Return how many chunks from `keys[0]` on are stored in some tier. The count ends before the first chunk that
        is missing, or that is still being stored or loaded.
        """
        with self._lock:
            entries = self._primary.entries
            indexes = [tier.index for tier in self._tiers if tier.usable]
            for count, key in enumerate(keys):
                entry = entries.get(key)
                if not (entry and entry.ready) and not any(key in index for index in indexes):
                    return count
        return len(keys)

    def longest_prefix(self, origin: bytes, tokens: bytes) -> tuple[ChunkKey, int]:
        """Return `(key, count)` for the chunk in host memory whose tokens have the longest common prefix with `tokens`.

        `count`: the number of tokens in the common prefix. `tokens`: token ids as little-endian uint32. `origin`: only
        chunks with this `KeyChain.origin` are compared. Returns `(b"", 0)` if no chunk has a common prefix.
        """
        with self._lock:
            return self._primary.prefixes.longest(origin, tokens)

    def sizes(self) -> list[tuple[str, int, Policy]]:
        """Return the name, capacity in bytes and policy of each tier that has a capacity; host memory comes first."""
        own = (self._primary.name, self._primary.slab.num_slots * self._primary.slot_bytes, self._primary.policy)
        lower = [(tier.name, tier.index.capacity, tier.index.policy) for tier in self._tiers]
        return [own, *((name, nbytes, policy) for name, nbytes, policy in lower if nbytes is not None)]

    def tier_of(self, key: ChunkKey) -> str | None:
        """Return the name of the fastest lower tier that stores the chunk, or None if no lower tier does."""
        with self._lock:
            tier = first_tier_with(self._tiers, key)
            return tier.name if tier else None

    def by_tier(self, keys: Sequence[ChunkKey]) -> dict[str | None, tuple[int, int]]:
        """Return `{tier name: (chunks, bytes)}`: how much a read of `keys` would take from each lower tier.

        Chunks that no lower tier stores count under None. The tiers are in the order of their first chunks in `keys`.
        """
        found: dict[str | None, tuple[int, int]] = {}
        with self._lock:
            for key in keys:
                tier = first_tier_with(self._tiers, key)
                name = tier.name if tier is not None else None
                count, nbytes = found.get(name, (0, 0))
                found[name] = count + 1, nbytes + self._primary.payloads.nbytes(key)
        return found

    def unavailable_in(self, key: ChunkKey) -> str | None:
        """Return the name of a lower tier that stores the chunk but cannot be read now, or None."""
        with self._lock:
            return next((tier.name for tier in self._tiers if key in tier.index and not tier.usable), None)

    def drain_latencies(self) -> list[tuple[str, Operation, float]]:
        """Return `(tier, operation, seconds)` for each successful read and write since the last call.

        Only the latest 1,000 reads and writes of each tier are kept.
        """
        with self._lock:
            drained = [(tier.name, *each) for tier in self._tiers for each in tier.times]
            for tier in self._tiers:
                tier.times.clear()
        return drained

    def add_observer(self, observer: StoreObserver) -> None:
        """Notify `observer` of chunks that enter and leave tiers from now on.

        `replay_to` reports the chunks that tiers already have.
        """
        with self._lock:
            self._observers.append(GuardedObserver(observer))

    def replay_to(self, observer: StoreObserver, keys: Sequence[ChunkKey]) -> list[bool]:
        """Call `observer.stored` for each chunk in `keys` and each tier that has the chunk.

        Returns one bool for each key: whether any tier has the chunk.
        """
        with self._lock:
            return [self._replay_to(observer, key) for key in keys]

    @locked
    def _replay_to(self, observer: StoreObserver, key: ChunkKey) -> bool:
        entry = self._primary.entries.get(key)
        names = [self._primary.name] if entry is not None and entry.ready else []
        names += [tier.name for tier in self._tiers if key in tier.index]
        for name in names:
            observer.stored(name, key)
        return bool(names)


@frozen
class HitFinder:
    """Finds hits in the indexes of the tiers. A hit consists of the stored chunks at the start of a prompt.

    In a model with recurrent layers, a hit can end only at a boundary: after a chunk with stored states. `states`: the
    number of state entries at each boundary; with 0, a hit may end after any chunk. In the methods, `chain` means the
    keys of a prompt's chunks. Thread-safe.
    """

    _catalog: Catalog
    states: int

    def with_states(self, chain: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return `chain` and the keys of the states after its last chunk: together the keys of one hit."""
        return [*chain, *(state_keys(chain[-1], self.states) if chain and self.states else ())]

    def without_states(self, entries: int) -> int:
        """Return the number of chunks in a hit of `entries` entries; the last `self.states` entries are states."""
        return max(0, entries - self.states)

    def last_with_states(self, chain: Sequence[ChunkKey], first: int = 0, *, ready: bool = False) -> int:
        """Return the number of chunks up to the last chunk in `chain` with all its states stored, or 0.

        `ready`: whether the states must be in host memory. A result of at most `first` chunks counts as 0.
        """
        for end in range(len(chain), first, -1):
            counts = self._catalog.count_prefix(state_keys(chain[end - 1], self.states))
            if counts[0 if ready else 1] == self.states:
                return end
        return 0

    def stored_hit(self, chain: Sequence[ChunkKey], first: int = 0) -> list[ChunkKey]:
        """Return the keys of the longest hit, with chunks from any tier.

        With recurrent layers, a hit must have more than `first` chunks.
        """
        stored = chain[: self._catalog.count_prefix(chain)[1]]
        return self.with_states(stored[: self.last_with_states(stored, first)] if self.states else stored)

    def ready_hit(self, chain: Sequence[ChunkKey], first: int = 0) -> list[ChunkKey]:
        """Return the keys of the longest hit that is completely in host memory.

        With recurrent layers, a hit must have more than `first` chunks.
        """
        here = chain[: self._catalog.count_prefix(chain)[0]]
        return self.with_states(here[: self.last_with_states(here, first, ready=True)] if self.states else here)

    def keys_to_promote(self, chain: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys to promote for a prompt: all of `chain`. With recurrent layers, only the longest hit, because
        chunks without states at their end are useless.
        """
        return self.stored_hit(chain) if self.states else list(chain)


class TierScanner:
    """Lists the chunks of one tier on a separate thread.

    `listed`: whether at least one listing has finished. `bell`: rings when a listing has finished.
    """

    def __init__(self, tier: LowerTier, lock: threading.Lock, interval: float = INTERVAL) -> None:
        self._tier = tier
        self._lock = lock
        self._interval = interval
        self._stop = threading.Event()
        self.listed, self.bell = False, Waker()
        self._thread = threading.Thread(target=self._run, name=f"lmkv-index-{tier.name}", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop the thread. Waits at most `timeout` seconds for a running listing. Idempotent."""
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
            # Without a listing, `_list` has only waited.
            lists = isinstance(self._tier.backend, ListsKeys)
            before, took = took, time.monotonic() - started if lists else 0.0
            # The shorter of two: a single slow listing, often the first, must not delay the next for minutes.
            self._wait(max(self._interval * random.uniform(0.8, 1.2), min(before, took) / _SHARE))

    def _wait(self, seconds: float) -> None:
        """Wait for `seconds`. Meanwhile call `LowerTier.probe`, which tests a failing tier, five times per interval."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stop.wait(min(left, self._interval / _PROBES)):
            self._tier.probe()

    def _failed(self, error: Exception) -> bool:
        with self._lock:
            self._tier.index.end_listing()
        self._tier.note_unlisted(error)
        return False

    def _list(self) -> bool:
        """List the tier once. Returns False if the tier must be listed again later."""
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
        for batch in backend.list_all() if isinstance(backend, SharesCapacity) else backend.list_keys():
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
