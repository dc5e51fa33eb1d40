"""The primary tier: which chunk is in which slot, who refers to it, and what may be evicted.

Entries: absent -> WRITING (reserved) or LOADING (promoted) -> READY -> absent; docs/concurrency.md has the
table. Nothing here locks, waits, copies or calls back: the store calls it all under its own lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

from attrs import asdict, define, field

from lmkv.chunks.hashing import TailKey
from lmkv.errors import UsageError
from lmkv.memory.slab import Slab
from lmkv.protocols import ChunkKey, Tier
from lmkv.store.tiers.iopool import AfterLock, Job
from lmkv.store.tiers.observer import StoreObserver
from lmkv.store.tiers.payloads import Payloads
from lmkv.store.tiers.prefixes import PrefixIndex
from lmkv.store.tiers.stats import TierCounters, TierStats

_TAIL_SHARE = 8
"""One slot in so many may be a tail's: most of such a slot is not used."""


class State(Enum):
    """State of an entry. An absent chunk has no entry."""

    WRITING = "writing"
    LOADING = "loading"
    READY = "ready"


class Waiter(Protocol):
    """What waits for an entry to be filled: a promotion, as seen from below."""

    def on_entry_done(self, entry: Entry, after: AfterLock) -> None:
        """Locked. The entry is READY, or was removed unfilled."""
        ...


@define(eq=False)
class Entry:
    """One chunk of the primary tier. Changed only under the store's lock.

    `refs`: leases, reservations, running I/O, promotions and pins that refer to the slot. `removed`: out of
    the index for good; the slot is freed with the last reference. `flushing`: evicted, and being copied to
    lower tiers first. `in_policy`: known to the policy. `prefetches`: how many of the references are
    prefetches. `load`: the read that will fill it, until it begins. `waiters`: promotions to tell when it is
    filled. `origin`: what it continues (see `KeyChain.origin`), empty when it is to be found by its key only.
    `prefetched`: brought by a prefetch, and not leased since.
    """

    key: ChunkKey = field(repr=bytes.hex)
    slot: int
    state: State
    parent: ChunkKey = field(default=b"", repr=bytes.hex)
    tokens: bytes = field(default=b"", repr=False)
    origin: bytes = field(default=b"", repr=False)
    refs: int = 1
    removed: bool = False
    flushing: bool = False
    in_policy: bool = False
    prefetches: int = 0
    prefetched: bool = False
    load: Job | None = None
    waiters: tuple[Waiter, ...] = field(default=(), repr=False)

    @property
    def ready(self) -> bool:
        return self.state is State.READY and not self.removed


# Looking a member up in its enum takes as long as everything else that is done with it here.
_WRITING, _LOADING, _READY = State.WRITING, State.LOADING, State.READY


@runtime_checkable
class HostBackend(Protocol):
    """A backend whose chunks lie in slots of host memory that one store may take over."""

    def take_slab(self) -> Slab: ...


class PrimaryTier:
    """`retain`: False makes the slots mere staging: a chunk is removed with its last reference.

    `spans`: see `Payloads`. A tail fills a part of its slot only, so that a share of the slots is theirs at most.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        retain: bool = True,
        spans: Callable[[int], Sequence[slice]] | None = None,
        observers: Sequence[StoreObserver] = (),
    ) -> None:
        if not isinstance(tier.backend, HostBackend):
            raise UsageError(f"the primary tier must be in host memory; {tier.name!r} has no slab")
        if tier.admission is not None:
            raise UsageError("the primary tier admits every chunk: give the admission to a lower tier")
        self.name = tier.name
        self.backend = tier.backend
        self.slab = tier.backend.take_slab()
        self.policy = tier.policy
        self.slot_bytes = self.slab.slot_bytes
        self.entries: dict[ChunkKey, Entry] = {}
        self.counters = TierCounters()
        self.referenced = self.writing = self.loading = self.flushing = 0
        self._retain = retain
        self._observers = observers
        self.payloads = Payloads(self.slot_bytes, spans or (lambda tokens: [slice(0, self.slot_bytes)]))
        self.prefixes = PrefixIndex()
        self._tails: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._max_tails = max(1, self.slab.num_slots // _TAIL_SHARE)

    def __repr__(self) -> str:
        free, of = self.slab.free_slots, self.slab.num_slots
        return f"<PrimaryTier {self.name!r}: {len(self.entries)} chunks, {free} of {of} slots free>"

    def leading_ready(self, keys: Iterable[ChunkKey]) -> list[Entry]:
        """The entries of the leading keys that are READY."""
        found = []
        for entry in map(self.entries.get, keys):
            if entry is None or entry.state is not _READY:
                break
            found.append(entry)
        return found

    def touch_tail(self, key: ChunkKey) -> None:
        """Note the use of a chunk among the tails, if it is one."""
        if key in self._tails:
            self._tails.move_to_end(key)

    def use_prefetched(self, entry: Entry) -> None:
        """Count the first use of a chunk that a prefetch has brought."""
        self.counters.prefetch_hits += 1
        entry.prefetched = False

    # -- references ---------------------------------------------------------------------------------------

    def ref(self, entry: Entry) -> None:
        """One more reference: until the last is dropped it is not evicted, nor its slot reused."""
        if not entry.refs:
            self.referenced += 1
            self.policy.hold(entry.key)
        elif entry.flushing:
            # It is wanted again while it is being copied to a lower tier: it stays.
            self._end_flush(entry)
        entry.refs += 1

    def unref(self, entry: Entry) -> None:
        """Drop one reference. A chain's are dropped tail first: the head is used last, and evicted last."""
        entry.refs -= 1
        if entry.refs:
            return
        self.referenced -= 1
        if entry.removed:
            self.slab.free(entry.slot)
        elif entry.flushing or not self._retain:
            self.remove(entry)
        elif entry.in_policy:
            self.policy.release(entry.key)
        else:
            entry.in_policy = True
            self.policy.insert(entry.key, self.slot_bytes, entry.parent)

    # -- entries ------------------------------------------------------------------------------------------

    def enter(
        self, key: ChunkKey, slot: int, state: State, parent: ChunkKey = b"", tokens: bytes = b"", origin: bytes = b""
    ) -> Entry:
        """A new entry, whose only reference is that of the writer or the load that fills it."""
        entry = self.entries[key] = Entry(key, slot, state, parent, tokens, origin)
        if type(key) is TailKey:
            self._tails[key] = entry
        self.referenced += 1
        if state is _WRITING:
            self.writing += 1
        else:
            self.loading += 1
        return entry

    def mark_ready(self, entry: Entry) -> None:
        """Its bytes are complete. What filled it still refers to it."""
        if not entry.removed:
            if entry.state is _WRITING:
                self.writing -= 1
            else:
                self.loading -= 1
            if entry.origin:
                self.prefixes.add(entry.origin, entry.tokens, entry.key)
            for observer in self._observers:
                observer.stored(self.name, entry.key)
        entry.state = _READY

    def remove(self, entry: Entry) -> None:
        """Take it out of the index, filled or not; its slot is freed with its last reference. Idempotent."""
        if entry.removed:
            return
        entry.removed = True
        del self.entries[entry.key]
        if entry.state is _WRITING:
            self.writing -= 1
        elif entry.state is _LOADING:
            self.loading -= 1
        else:
            self._note_removed(entry)
        if type(entry.key) is TailKey:
            del self._tails[entry.key]
        if entry.in_policy:
            self.policy.discard(entry.key)
        if entry.flushing:
            self._end_flush(entry)
        if not entry.refs:
            self.slab.free(entry.slot)

    def _note_removed(self, entry: Entry) -> None:
        """An entry that was READY is not found any more."""
        self.counters.prefetch_expired += entry.prefetched
        if entry.origin:
            self.prefixes.discard(entry.origin, entry.tokens, entry.key)
        for observer in self._observers:
            observer.removed(self.name, entry.key)

    def make_room_for_tail(self) -> bool:
        """Whether another tail may have a slot. The one that was used longest ago gives way if need be."""
        if len(self._tails) < self._max_tails:
            return True
        oldest = next((entry for entry in self._tails.values() if not entry.refs), None)
        if oldest is not None:
            self.remove(oldest)
        return oldest is not None

    def drop_shorter_tails(self, entry: Entry) -> None:
        """Remove the tails that are prefixes of a READY entry."""
        if entry.ready:
            for key in list(self.prefixes.shorter(entry.origin, entry.tokens)):
                if key in self._tails and not self.entries[key].refs:
                    self.remove(self.entries[key])

    # -- eviction -----------------------------------------------------------------------------------------

    def victims(self, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset(), slots: int = 1) -> Sequence[Entry]:
        """What the policy evicts for so many slots, perhaps nothing; the caller removes or flushes it."""
        evicted = self.policy.evict(slots * self.slot_bytes, protect)
        entries = [self.entries[key] for key in evicted or ()]
        for entry in entries:
            entry.in_policy = False
        self.counters.evictions += len(entries)
        return entries

    def begin_flush(self, victim: Entry) -> None:
        """Keep a victim until its flush, its only reference, has ended; longer if it is leased."""
        victim.flushing = True
        victim.refs = 1
        self.referenced += 1
        self.flushing += 1

    def _end_flush(self, entry: Entry) -> None:
        entry.flushing = False
        self.flushing -= 1

    # -- all of it ----------------------------------------------------------------------------------------

    def clear(self) -> list[ChunkKey]:
        """Remove everything; returns the keys. Referenced slots keep their bytes until unreferenced."""
        keys = list(self.entries)
        for entry in list(self.entries.values()):
            self.remove(entry)
        return keys

    def stats(self) -> TierStats:
        return TierStats(
            **asdict(self.counters),
            name=self.name,
            chunks=len(self.entries) - self.writing - self.loading,
            used_bytes=(self.slab.num_slots - self.slab.free_slots) * self.slot_bytes,
            capacity_bytes=self.slab.num_slots * self.slot_bytes,
        )
