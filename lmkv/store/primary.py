"""Host memory as a tier: the slot and the references of each chunk, and whether the chunk may be evicted.

A chunk starts absent, becomes WRITING (reserved) or LOADING (promoted), then READY, and at the end absent again;
docs/development/concurrency.md has the table. The store calls this module while it holds its lock. Therefore this
module never takes a lock, waits, or copies KV.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Protocol, runtime_checkable

from attrs import asdict

from lmkv.chunks.hashing import StateKey, TailKey
from lmkv.errors import UsageError
from lmkv.memory.slab import Slab
from lmkv.protocols import ChunkKey, Policy, Tier
from lmkv.store.entries import Entry, LimitedEntries, Payloads, PrefixIndex, State, shares
from lmkv.store.guards import Content, Freezer, GuardedPolicy, StoreObserver
from lmkv.store.health import TierCounters, TierStats

# A member's lookup in its enum takes as long as all other work on it here.
_WRITING, _LOADING, _READY = State.WRITING, State.LOADING, State.READY
_refs = attrgetter("refs")


@runtime_checkable
class HostMemory(Protocol):
    """A backend that keeps chunks in slots of host memory, and lets a store manage these slots. The first tier of a
    store must have such a backend.
    """

    def take_slab(self) -> Slab: ...


class PrimaryTier:
    """The chunks in host memory.

    `retain`: False if host memory is only a buffer, which drops a chunk as soon as nothing uses the chunk. `spans`,
    `sizes`: see `Payloads`. `shares`: by key type, the limited entries of recurrent states and of tails (the tokens
    after a prompt's last whole chunk).
    """

    def __init__(
        self,
        tier: Tier,
        *,
        retain: bool = True,
        spans: Callable[[int], Sequence[slice]] | None = None,
        sizes: Sequence[int] = (),
        observers: Sequence[StoreObserver] = (),
    ) -> None:
        if not isinstance(tier.backend, HostMemory):
            raise UsageError(f"the first tier must be host memory (CPUPinnedBackend), not {tier.backend!r}")
        if tier.admission is not None:
            raise UsageError("host memory stores every chunk: set `admission` for a lower tier only")
        self.name = tier.name
        self.backend = tier.backend
        self.slab = tier.backend.take_slab()
        self.order = GuardedPolicy(tier.policy, tier.name, self._content, self._freed, self._has)
        self.slot_bytes = self.slab.slot_bytes
        self.entries: dict[ChunkKey, Entry] = {}
        self.counters = TierCounters()
        self.referenced = self.writing = self.loading = self.flushing = 0
        self.prioritized: Counter[type] = Counter()
        """Number of slots that pins and prefetches keep, by the type of the keys."""
        self._retain = retain
        self._observers = observers
        self._freezer = Freezer()
        self.payloads = Payloads(self.slot_bytes, spans or (lambda tokens: [slice(0, self.slot_bytes)]), sizes)
        self.prefixes = PrefixIndex()
        self.shares = shares(self.slab.num_slots)
        self.tails, self.states = self.shares[TailKey], self.shares[StateKey]

    def __repr__(self) -> str:
        free, of = self.slab.free_slots, self.slab.num_slots
        return f"<PrimaryTier {self.name!r}: {len(self.entries)} chunks, {free} of {of} slots free>"

    @property
    def policy(self) -> Policy:
        return self.order.policy

    def slots_for_claims(self, kind: type) -> int:
        """Return how many more slots pins and prefetches may keep for keys of type `kind`.

        The kinds are whole chunks, tails (the tokens after a prompt's last whole chunk) and recurrent states.

        An eighth of the slots for each kind of key is left to loads and stores.
        """
        slots: int = self.slab.num_slots
        left = slots - max(1, slots // 8) - self.prioritized.total()
        if kind in self.shares:
            limit = self.shares[kind].limit
            left = min(left, limit - limit // 8 - self.prioritized[kind])
        return max(0, left)

    def slots_of(self, share: float, kind: type) -> int:
        """Return the fraction `share` (0 to 1) of the slots for keys of type `kind`, at least 1 slot if `share` is not
        0.
        """
        slots = self.shares[kind].limit if kind in self.shares else self.slab.num_slots
        return max(1, int(slots * share)) if share > 0 else 0

    def part_of(self, key: ChunkKey, parent: ChunkKey = b"") -> tuple[str, float]:
        """Return a chunk's tenant and the tenant's fraction of the slots, 0 to 1. Without quotas: `("", 1.0)`."""
        return self.order.part_of(key, parent)

    def leading_ready(self, keys: Iterable[ChunkKey]) -> list[Entry]:
        """Return the entries of `keys`, from the first key up to the first entry that is not READY."""
        found = []
        for entry in map(self.entries.get, keys):
            if entry is None or entry.state is not _READY:
                break
            found.append(entry)
        return found

    def use(self, entries: Sequence[Entry]) -> None:
        """Add a reference to each of a prompt's READY entries, and count a hit for each entry."""
        for entry in entries:
            self.ref(entry)
            if entry.prefetched:
                self.counters.prefetch_hits += 1
                entry.prefetched = False
        self._touch_shares(entries)
        self.counters.hits += len(entries)

    def _touch_shares(self, entries: Sequence[Entry]) -> None:
        """Mark a prompt's tail or states, which are the last of `entries`, as just used."""
        for entry in reversed(entries):
            share = self.shares.get(type(entry.key))
            if share is None:
                break
            share.touch(entry.key)

    # -- references ---------------------------------------------------------------------------------------

    def ref(self, entry: Entry) -> None:
        """Add a reference to an entry. An entry with references is not evicted."""
        if not entry.refs:
            self.referenced += 1
            if type(entry.key) in self.shares:
                self.shares[type(entry.key)].hold(entry.key)
            self.order.hold(entry.key)
        elif entry.flushing:
            # Wanted again while it is copied to a lower tier: it stays.
            self._end_flush(entry)
        entry.refs += 1

    def unref(self, entry: Entry) -> None:
        """Remove one reference. For a prompt, call `unref` for the last chunk first, so that the first chunk is evicted
        last.
        """
        entry.refs -= 1
        if entry.refs:
            return
        self.referenced -= 1
        if entry.removed:
            self.slab.free(entry.slot)
            return
        if entry.flushing or not self._retain:
            self.remove(entry)
            return
        if type(entry.key) in self.shares:
            self.shares[type(entry.key)].release(entry.key)
        if entry.in_policy:
            self.order.release(entry.key)
        else:
            entry.in_policy = True
            self.order.insert_chain((entry.key,), self.slot_bytes, (entry.parent,))

    def unref_chain(self, entries: Sequence[Entry]) -> None:
        """Remove one reference from each of a prompt's entries, given first to last, with one call of the policy."""
        keys: list[ChunkKey] = []
        parents: list[ChunkKey] = []
        rest: list[Entry] = []
        for entry in entries:
            usual = entry.refs == 1 and not (entry.in_policy or entry.removed or entry.flushing) and self._retain
            if not usual or type(entry.key) in self.shares:
                rest.append(entry)
            else:
                # `unref` for the most frequent case, inlined as below.
                entry.refs = 0
                entry.in_policy = True
                keys.append(entry.key)
                parents.append(entry.parent)
        self.referenced -= len(keys)
        self.order.insert_chain(keys, self.slot_bytes, parents)
        for entry in reversed(rest):
            self.unref(entry)

    # -- entries ------------------------------------------------------------------------------------------

    def enter(
        self, key: ChunkKey, slot: int, state: State, parent: ChunkKey = b"", tokens: bytes = b"", origin: bytes = b""
    ) -> Entry:
        """Create an entry with one reference, which belongs to the writer or load that fills the slot."""
        entry = self.entries[key] = Entry(key, slot, state, parent, tokens, origin)
        if type(key) is not bytes and type(key) in self.shares:
            self.shares[type(key)].add(entry, *self.part_of(key, parent))
        self.referenced += 1
        if state is _WRITING:
            self.writing += 1
        else:
            self.loading += 1
        return entry

    def mark_chain_ready(self, entries: Sequence[Entry]) -> None:
        """Mark a prompt's entries as READY. Removes unused tails (incomplete chunks) that these entries replace: the
        tokens of such a tail are a prefix of an entry's tokens.
        """
        written = 0
        for entry in entries:
            if entry.origin or entry.removed or entry.state is not _WRITING:
                self.mark_ready(entry)
                # A READY entry replaces the tails that are prefixes of it.
                shorter = self.prefixes.shorter(entry.origin, entry.tokens) if entry.origin and entry.ready else ()
                for key in list(shorter):
                    if key in self.tails and not self.entries[key].refs:
                        self.remove(self.entries[key])
            else:
                # `mark_ready` for the most frequent case, inlined: storing spends much of its time here.
                entry.state = _READY
                written += 1
                for observer in self._observers:
                    observer.stored(self.name, entry.key)
        self.writing -= written
        self._freezer.added(written, len(self.entries))

    def mark_ready(self, entry: Entry) -> None:
        """Mark an entry as READY: its slot is filled. The writer or load that filled the slot keeps its reference."""
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
        """Remove an entry from the index, even an unfilled one. Its slot is freed when it has no references.
        Idempotent.
        """
        if entry.removed:
            return
        entry.removed = True
        del self.entries[entry.key]
        if entry.state is _WRITING:
            self.writing -= 1
        elif entry.state is _LOADING:
            self.loading -= 1
        else:
            # It was found until now.
            self.counters.prefetch_expired += entry.prefetched
            if entry.origin:
                self.prefixes.discard(entry.origin, entry.tokens, entry.key)
            for observer in self._observers:
                observer.removed(self.name, entry.key)
        if type(entry.key) is not bytes and type(entry.key) in self.shares:
            self.shares[type(entry.key)].discard(entry.key)
        if entry.in_policy:
            self.order.discard(entry.key)
        if entry.flushing:
            self._end_flush(entry)
        if not entry.refs:
            self.slab.free(entry.slot)

    # -- eviction -----------------------------------------------------------------------------------------

    def victims(self, protect: frozenset[ChunkKey] | set[ChunkKey] = frozenset(), slots: int = 1) -> Sequence[Entry]:
        """Choose entries to evict for `slots` slots. Returns no entry if too few can be evicted.

        The caller removes these entries, or flushes (writes) them to lower tiers.
        """
        evicted = self.order.evict(slots * self.slot_bytes, protect)
        entries = [self.entries[key] for key in evicted or ()]
        for entry in entries:
            entry.in_policy = False
        self.counters.evictions += len(entries)
        return entries

    def evict(self, protect: frozenset[ChunkKey] | set[ChunkKey], slots: int) -> None:
        """Evict entries and free their slots, `slots` in number. Evicts nothing if too few entries can be evicted."""
        entries, observers, free = self.entries, self._observers, []
        evicted = self.order.evict(slots * self.slot_bytes, protect) or ()
        for key in evicted:
            victim = entries[key]
            victim.in_policy = False
            if victim.origin or victim.prefetched or type(key) is not bytes:
                self.remove(victim)
            else:
                # `remove` for the most frequent case, inlined: storing spends much of its time here.
                victim.removed = True
                del entries[key]
                free.append(victim.slot)
                for observer in observers:
                    observer.removed(self.name, key)
        self.counters.evictions += len(evicted)
        self.slab.free(*free)

    def evict_from(self, share: LimitedEntries, key: ChunkKey) -> Entry | None:
        """Choose an entry of `share` (all tails or all states) to evict for the new `key`. None if all are in use.

        The caller removes the entry, or flushes (writes) it to lower tiers.
        """
        victim = share.oldest_unused(self.part_of(key)[0])
        if victim is not None and victim.in_policy:
            victim.in_policy = False
            self.order.discard(victim.key)
            self.counters.evictions += 1
        return victim

    def begin_flush(self, victim: Entry) -> None:
        """Keep an evicted entry until lower tiers have its bytes. If a request leases the entry meanwhile, the entry
        stays.
        """
        victim.flushing = True
        victim.refs = 1
        if type(victim.key) in self.shares:
            self.shares[type(victim.key)].hold(victim.key)
        self.referenced += 1
        self.flushing += 1

    def _end_flush(self, entry: Entry) -> None:
        entry.flushing = False
        self.flushing -= 1

    # -- all of it ----------------------------------------------------------------------------------------

    def clear(self) -> list[ChunkKey]:
        """Remove all entries, and return their keys. A slot with references is freed after its last reference is
        removed.
        """
        keys = list(self.entries)
        for entry in list(self.entries.values()):
            self.remove(entry)
        return keys

    def recount(self, refs: Mapping[Entry, int], filled: Collection[Entry]) -> None:
        """Recount entries, references and free slots after an interrupted change.

        `refs`: the number of references to each entry. `filled`: entries that a writer or load is still filling. If an
        exception interrupts the recount, call `recount` again.
        """
        entries = {}
        for key, entry in self.entries.items():
            entry.refs = refs.get(entry, 0)
            entry.flushing = entry.flushing and entry.refs > 0
            usable = entry.state is _READY or entry in filled
            if usable and not entry.removed and (self._retain or entry.refs > 0):
                entries[key] = entry
                entry.in_policy = entry.state is _READY and not entry.flushing
            elif entry.state is _READY:
                for observer in self._observers:
                    observer.removed(self.name, key)
        for entry in self.entries.values():
            entry.removed = entry.key not in entries
        gone = [entry for entry in refs if entry.removed]
        for entry in gone:
            entry.refs = refs[entry]
        slots = {entry.slot for entry in (*entries.values(), *gone)}
        self.entries = entries
        self.slab.recount(slots)
        self.prefixes = PrefixIndex()
        for entry in entries.values():
            if entry.ready and entry.origin:
                self.prefixes.add(entry.origin, entry.tokens, entry.key)
        for kind, share in self.shares.items():
            share.clear()
            for entry in entries.values():
                if type(entry.key) is kind:
                    share.add(entry, *self.part_of(entry.key, entry.parent))
        self.referenced = sum(entry.refs > 0 for entry in entries.values()) + len(gone)
        self.writing = sum(entry.state is _WRITING for entry in entries.values())
        self.loading = sum(entry.state is _LOADING for entry in entries.values())
        self.flushing = sum(entry.flushing for entry in entries.values())
        self.order.rebuild()

    def _content(self) -> Content:
        known = [entry for entry in self.entries.values() if entry.in_policy]
        return Content(self._chains(known), [entry.key for entry in known if entry.refs])

    def _chains(self, entries: Iterable[Entry]) -> Iterator[tuple[Sequence[ChunkKey], int, Sequence[ChunkKey]]]:
        """Yield arguments of `Policy.insert_chain` for each run of consecutive chunks of one prompt."""
        keys: list[ChunkKey] = []
        parents: list[ChunkKey] = []
        for entry in entries:
            if keys and entry.parent != keys[-1]:
                yield keys, self.slot_bytes, parents
                keys, parents = [], []
            keys.append(entry.key)
            parents.append(entry.parent)
        if keys:
            yield keys, self.slot_bytes, parents

    def _has(self, key: ChunkKey) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.in_policy

    def _freed(self, keys: Sequence[ChunkKey]) -> int:
        found = list(map(self.entries.get, keys))
        return 0 if None in found or any(map(_refs, found)) else len(found) * self.slot_bytes

    def stats(self) -> TierStats:
        states = self.states.count_ready()
        return TierStats(
            **asdict(self.counters),
            name=self.name,
            chunks=len(self.entries) - self.writing - self.loading - states,
            states=states,
            used_bytes=(self.slab.num_slots - self.slab.free_slots) * self.slot_bytes,
            capacity_bytes=self.slab.num_slots * self.slot_bytes,
        )
