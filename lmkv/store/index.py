"""The index of a lower tier: the keys of the tier's chunks, their sizes, and the number of used bytes.

A key is absent, being written, or stored. A stored key whose chunk could not be read is *distrusted*: its bytes still
count, but requests do not find the chunk. Distrust ends when the chunk is written again, or when a listing or lookup
of the medium finds the chunk. A *tombstone* is a key that is never served again, although its bytes are still on the
medium. While these bytes are being deleted, the tombstone is *reclaimed*. Only an absent key, a distrusted key or a
tombstone can be written, so that old bytes are never taken for new ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby

from attrs import define, field

from lmkv.chunks.hashing import KEY_BYTES
from lmkv.protocols import ChunkKey, Listed, Policy
from lmkv.store.guards import Content, Freezer, GuardedPolicy, StoreObserver
from lmkv.store.health import Stored


class Victims(dict[ChunkKey, int]):
    """Chunks to delete from the backend, and their sizes in bytes. Only one thread may delete these chunks.

    `room`: how many bytes larger the chunks are than the write that replaces them. Until the chunks are deleted, these
    bytes count as used.
    """

    room = 0


@define(eq=False)
class ScanGuard:
    """The keys that have changed since a scan of the medium (a listing or a lookup) started.

    For these keys, the results of the scan are stale. `valid`: False after `TierIndex.clear`; then no result of the
    scan may be indexed.
    """

    changed: set[ChunkKey] = field(factory=set)
    valid: bool = True


class TierIndex:
    """The keys of a lower tier's chunks, with their sizes and the order of eviction. The caller holds the store's lock.

    `used`: bytes of the chunks that are stored or being written, never more than `capacity`. The bytes of tombstones
    (deleted keys) do not count, because they are deleted before other bytes are written in their place.

    `other_namespace`: how many of the chunks belong to other namespaces (see `SharesCapacity`); the tier evicts such
    chunks like all others. `name`: the tier's name, which `observers` receive.
    """

    def __init__(
        self, policy: Policy, capacity: int | None, name: str = "", observers: Sequence[StoreObserver] = ()
    ) -> None:
        self.order = GuardedPolicy(policy, name, self._content, self._freed, self._has)
        self.capacity = capacity
        self.used = self.other_namespace = 0
        self.clearing = False
        """Whether all chunks are being deleted, even unindexed ones. Meanwhile nothing is written."""
        self._name = name
        self._observers = observers
        self._sizes: dict[ChunkKey, int] = {}
        self._distrusted: set[ChunkKey] = set()
        self._rewriting: dict[ChunkKey, int] = {}
        self._writing: dict[ChunkKey, int] = {}
        self._reading: set[ChunkKey] = set()
        # A write that ends without an answer may lie in a buffer on its way to the store. Without a clear it does no
        # harm: its bytes are those of its key. After a clear the same key stands for new bytes.
        self.unanswered: set[ChunkKey] = set()
        """Keys of writes that the backend has not answered."""
        self.suspect: set[ChunkKey] = set()
        """Keys under which bytes from before a clear may still appear, until this process has stored them again."""
        self._tombstones: dict[ChunkKey, int] = {}
        self._reclaiming: set[ChunkKey] = set()
        self._reclaiming_bytes = 0
        self._scans: list[ScanGuard] = []
        self._listing: ScanGuard | None = None
        self._unseen: dict[ChunkKey, int] = {}
        """Sizes of stored chunks that the listing under way has not found yet. `_sizes` has all other stored chunks.

        A copy of all keys would keep the scheduler waiting, for 0.1 s with three million keys.
        """
        self._last_used, self._newest = math.inf, 0.0
        self._freezer = Freezer()

    def __repr__(self) -> str:
        of = "" if self.capacity is None else f" of {self.capacity}"
        deleted = len(self._tombstones) + len(self._reclaiming)
        return f"<TierIndex: {len(self)} chunks, {self.used}{of} bytes, {deleted} to be deleted>"

    @property
    def policy(self) -> Policy:
        return self.order.policy

    def __contains__(self, key: ChunkKey) -> bool:
        return (key in self._sizes or key in self._unseen) and key not in self._distrusted

    def __len__(self) -> int:
        return len(self._sizes) + len(self._unseen)

    def first(self) -> ChunkKey | None:
        """Return the key of any stored chunk, or None. During a listing, only chunks found so far count."""
        return next(iter(self._sizes), None)

    def sizes(self) -> dict[ChunkKey, int]:
        """Return the size in bytes of each stored chunk, including distrusted (unreadable) chunks. Takes O(chunks)
        time.
        """
        return self._unseen | self._sizes

    def snapshot(self) -> Stored:
        """Return the keys in each state: stored, being written, deleted. Takes O(chunks) time."""
        keys = self._writing, self._rewriting, self._tombstones, self._reclaiming
        return Stored(self.sizes(), self._reclaiming_bytes, *map(frozenset, keys))

    def _has(self, key: ChunkKey) -> bool:
        return key in self._sizes or key in self._unseen

    def begin_read(self, key: ChunkKey) -> None:
        """Keep a stored chunk from eviction until `end_read`."""
        self._reading.add(key)
        self.order.hold(key)

    def end_read(self, key: ChunkKey) -> None:
        """Allow the eviction of a chunk again after a read, which counts as a use. Other threads may have removed the
        chunk.
        """
        self._reading.discard(key)
        if self._has(key):
            self.order.release(key)

    # -- writing ------------------------------------------------------------------------------------------

    def knows(self, key: ChunkKey) -> bool:
        """Return whether the key is being written, or stored and not distrusted (unreadable)."""
        return key in self or key in self._writing

    def begin_write(
        self, key: ChunkKey, nbytes: int, protect: Callable[[], frozenset[ChunkKey]] = frozenset
    ) -> Victims | None:
        """Reserve capacity for a chunk. Returns the chunks that the caller must delete before it writes.

        After the deletion, the caller passes the returned chunks to `reclaimed`. Returns None if there is not enough
        capacity, if the index `knows` the chunk, or while old bytes of this key are being deleted. `protect`: a
        function that returns the keys that must not be evicted.
        """
        if self.clearing or self.knows(key) or key in self._reclaiming:
            return None
        if key in self._distrusted:
            self._rewriting[key] = self._sizes.get(key) or self._unseen[key]
            self.discard(key)
        evicted = self._evict(self.used + self._reclaiming_bytes + nbytes, protect)
        if evicted is None:
            self._end_rewriting(key, stored=False, wanted=True)
            return None
        self._writing[key] = nbytes
        self.used += nbytes
        self._tombstones |= evicted
        if key in self.suspect:
            self._tombstones.setdefault(key, 0)
        # A chunk that is written over its own bytes does not use the room of the victims.
        return self.take_tombstones(max(0, nbytes - self._rewriting.get(key, 0)))

    def evict_more(self, nbytes: int, protect: Callable[[], frozenset[ChunkKey]]) -> Victims | None:
        """Evict chunks of at least `nbytes` bytes, although the tier's capacity does not require an eviction.

        Returns the evicted chunks, or None if too few chunks can be evicted.
        """
        evicted = self._evict_bytes(nbytes, protect)
        if evicted is None:
            return None
        self._tombstones |= evicted
        return self.take_tombstones()

    def end_write(
        self, key: ChunkKey, nbytes: int, *, stored: bool, wanted: bool = True, parent: ChunkKey = b""
    ) -> None:
        """Note the result of a write. A chunk that is `stored` and `wanted` is indexed.

        `wanted`: False if the chunk was removed meanwhile. A stored chunk then becomes a tombstone, so that its bytes
        are deleted.
        """
        self._writing.pop(key, None)
        self._note(key)
        self.used -= nbytes
        self._end_rewriting(key, stored=stored, wanted=wanted)
        if stored and wanted:
            self._add(key, nbytes, parent)
        elif stored:
            self._tombstones[key] = nbytes

    def _end_rewriting(self, key: ChunkKey, *, stored: bool, wanted: bool) -> None:
        """Note the result of writing a distrusted chunk again. If the write has failed, the old copy is indexed
        again.
        """
        nbytes = self._rewriting.pop(key, None)
        if nbytes is None or stored:
            return
        if wanted:
            self._add(key, nbytes)
            self.distrust(key)
        else:
            self._tombstones[key] = nbytes

    def _evict(self, needed: int, protect: Callable[[], frozenset[ChunkKey]]) -> dict[ChunkKey, int] | None:
        if self.capacity is None or needed <= self.capacity:
            return {}
        return self._evict_bytes(needed - self.capacity, protect)

    def _evict_bytes(self, nbytes: int, protect: Callable[[], frozenset[ChunkKey]]) -> dict[ChunkKey, int] | None:
        victims = self.order.evict(nbytes, protect())
        return None if victims is None else {key: self._drop(key) for key in victims}

    def _add(self, key: ChunkKey, nbytes: int, parent: ChunkKey = b"") -> None:
        self._add_all((key,), nbytes, (parent,))

    def _add_all(self, keys: Sequence[ChunkKey], nbytes: int, parents: Sequence[ChunkKey]) -> None:
        """Add chunks of `nbytes` bytes each to the index and to the policy; see `Policy.insert_chain`."""
        self.order.insert_chain(keys, nbytes, parents)
        # In the order of the policy, which may have to be made anew of them.
        self._sizes.update(dict.fromkeys(reversed(keys), nbytes))
        self.used += nbytes * len(keys)
        for key in keys:
            self.other_namespace += _is_other_namespace(key)
            self._tell_stored(key)
        self._freezer.added(len(keys), len(self))

    def _tell_stored(self, key: ChunkKey) -> None:
        for observer in self._observers:
            observer.stored(self._name, key)

    def _tell_removed(self, key: ChunkKey) -> None:
        for observer in self._observers:
            observer.removed(self._name, key)

    def _drop(self, key: ChunkKey) -> int:
        self._note(key)
        if key in self:
            self._tell_removed(key)
        self._distrusted.discard(key)
        nbytes = self._sizes.pop(key, 0) or self._unseen.pop(key)
        self.used -= nbytes
        self.other_namespace -= _is_other_namespace(key)
        return nbytes

    # -- removing -----------------------------------------------------------------------------------------

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk, because the backend does not have it."""
        if self._has(key):
            self._drop(key)
            self.order.discard(key)

    def distrust(self, key: ChunkKey) -> None:
        """Mark a chunk as distrusted: its bytes may be right, but a read has failed."""
        if key in self:
            self._tell_removed(key)
            self._distrusted.add(key)

    def _trust(self, key: ChunkKey) -> None:
        """Let requests find a distrusted chunk again, because a scan has seen the chunk on the medium."""
        if key in self._distrusted:
            self._distrusted.discard(key)
            self._tell_stored(key)

    def mark_deleted(self, keys: Iterable[ChunkKey], *, unknown: bool = False) -> None:
        """Turn chunks into tombstones. Requests no longer find such chunks, and their bytes are deleted later.

        `unknown`: whether keys that are not indexed become tombstones as well.
        """
        for key in keys:
            if self._has(key):
                # First: bytes that nobody knows of would be found again one day.
                self._tombstones[key] = self._sizes.get(key) or self._unseen[key]
                self._drop(key)
                self.order.discard(key)
            elif unknown and not self._is_deleted(key) and key not in self._writing:
                self._note(key)
                self._tombstones[key] = 0

    def clear(self) -> Collection[ChunkKey]:
        """Mark all chunks as deleted, even unindexed ones, except the chunks of other namespaces. Returns the indexed
        keys.

        Also ends a running listing.
        """
        stored = {key: nbytes for key, nbytes in self.sizes().items() if not _is_other_namespace(key)}
        self.mark_deleted(stored)
        self.suspect |= self.unanswered
        self.unanswered.clear()
        self.clearing = True
        for scan in self._scans:
            scan.valid = False
        self.end_listing()
        return stored

    def take_tombstones(self, replaced_by: int = 0) -> Victims:
        """Return all tombstones (deleted keys). The caller must delete their bytes.

        `replaced_by`: the size in bytes of the write that will follow, which is subtracted from the result's `room`.
        """
        victims, self._tombstones = Victims(self._tombstones), {}
        self._reclaiming.update(victims)
        victims.room = max(0, sum(victims.values()) - replaced_by)
        self._reclaiming_bytes += victims.room
        return victims

    def reclaimed(self, victims: Victims, ok: bool) -> None:
        """Note that the bytes of `victims` are deleted. If not `ok`, the deletion has failed, and must be tried
        again.
        """
        self._reclaiming.difference_update(victims)
        for key in victims:
            self._note(key)
        self._reclaiming_bytes -= victims.room
        if not ok:
            self._tombstones |= victims

    # -- scans of the medium ------------------------------------------------------------------------------

    def begin_scan(self) -> ScanGuard | None:
        """Start to record which keys change during a scan of the medium. Returns None while all chunks are being
        deleted.
        """
        if self.clearing:
            return None
        self._scans.append(ScanGuard())
        return self._scans[-1]

    def end_scan(self, scan: ScanGuard) -> None:
        if scan in self._scans:
            self._scans.remove(scan)

    def _note(self, key: ChunkKey) -> None:
        for scan in self._scans:
            scan.changed.add(key)

    def add_found(self, sizes: Mapping[ChunkKey, int], scan: ScanGuard) -> None:
        """Index chunks that a lookup has found, up to the capacity. `sizes`: the bytes of each chunk."""
        if not scan.valid:
            return
        for key, nbytes in sizes.items():
            self._trust(key)
            if self._refuse_late(key, nbytes):
                continue
            if self._is_new(key, scan):
                self._add_if_it_fits(key, nbytes)

    def _add_if_it_fits(self, key: ChunkKey, nbytes: int) -> bool:
        evicted = self._evict(self.used + self._reclaiming_bytes + nbytes, frozenset)
        if evicted is not None:
            self._add(key, nbytes)
            self._tombstones |= evicted
        return evicted is not None

    def _is_new(self, key: ChunkKey, scan: ScanGuard) -> bool:
        return not (self.knows(key) or key in scan.changed or self._is_deleted(key))

    def _refuse_late(self, key: ChunkKey, nbytes: int) -> bool:
        """Mark a key as deleted if its bytes may be from before a `clear`. Returns whether the key is marked."""
        if key not in self.suspect or self.knows(key):
            return False
        if key not in self._reclaiming:
            self._tombstones[key] = nbytes
        return True

    def _is_deleted(self, key: ChunkKey) -> bool:
        return key in self._tombstones or key in self._reclaiming

    def begin_listing(self) -> bool:
        """Begin a listing of the medium. Returns False while all chunks are being deleted."""
        self._listing = self.begin_scan()
        if self._listing is None:
            return False
        self._unseen, self._sizes = self._sizes, {}
        self._last_used = self._newest or math.inf
        return True

    def adopt(self, found: Sequence[Listed]) -> bool:
        """Index chunks that a listing has found, least recently used first. Chunks beyond the capacity are deleted
        later.

        Returns False if `clear` was called since the listing began. The caller then stops the listing.
        """
        if self._listing is None:
            return False
        now, sizes, unseen, last_used = time.time(), self._sizes, self._unseen, self._last_used
        new: dict[ChunkKey, int] = {}
        for item in found:
            key, used = item.key, item.last_used
            if key in unseen:
                sizes[key] = unseen.pop(key)
            if self._distrusted:
                self._trust(key)
            # A time in the future is no use, and must not hide the uses of other chunks.
            if used > now:
                used = 0.0
            if used > self._newest:
                self._newest = used
            # Empty chunks as well: a read finds them damaged, and then they can be stored again.
            nbytes = max(item.nbytes, 1)
            if key in sizes or key in new:
                if used > last_used:
                    # Used since the last listing, perhaps by another process. Those before it were used earlier.
                    self._adopt(new)
                    new.clear()
                    self.order.touch([key])
            elif not self._refuse_late(key, nbytes) and self._is_new(key, self._listing):
                new[key] = nbytes
        self._adopt(new)
        return True

    def _adopt(self, new: Mapping[ChunkKey, int]) -> None:
        """Index new chunks. `new`: the size of each chunk in bytes, least recently used first."""
        fit = self.capacity is None or self.used + self._reclaiming_bytes + sum(new.values()) <= self.capacity
        if fit:
            # One call for all of a size: a listing holds the lock that the scheduler waits for.
            for nbytes, keys in groupby(new, new.__getitem__):
                each = list(keys)[::-1]
                self._add_all(each, nbytes, [b""] * len(each))
            return
        for key, nbytes in new.items():
            if not self._add_if_it_fits(key, nbytes):
                self._tombstones[key] = nbytes

    def forget_unseen(self, most: int) -> bool:
        """Remove from the index up to `most` chunks that the listing has not found, because other processes have
        deleted them.

        Chunks that were stored after the listing began stay. Returns True while there may be more chunks to forget.
        """
        for _ in range(min(most, len(self._unseen))):
            key, self._sizes[key] = self._unseen.popitem()
            if self._listing is not None and key not in self._listing.changed:
                self.discard(key)
        return bool(self._unseen)

    def end_listing(self) -> None:
        """End a listing, complete or not."""
        if self._listing is not None:
            self.end_scan(self._listing)
        if self._unseen:
            # The listing has failed, or everything was cleared.
            self._unseen |= self._sizes
            self._sizes, self._unseen = self._unseen, {}
        self._listing = None

    # -- after an exception -------------------------------------------------------------------------------

    def recount(self, reading: Collection[ChunkKey]) -> None:
        """Recount bytes and chunks after an interrupted change. `reading`: the keys that are being read."""
        for key in self._sizes.keys() & self._unseen.keys():
            del self._unseen[key]
        sizes = self.sizes()
        self.used = sum(sizes.values()) + sum(self._writing.values())
        self.other_namespace = sum(map(_is_other_namespace, sizes))
        self._distrusted &= sizes.keys()
        self._reading = set(reading)
        self.order.rebuild()

    def _content(self) -> Content:
        # The newest were stored last; chunks not listed yet were stored before the listing.
        chains = (((key,), nbytes, (b"",)) for key, nbytes in self.sizes().items())
        return Content(chains, [key for key in self._reading if self._has(key)])

    def _freed(self, keys: Sequence[ChunkKey]) -> int:
        sizes = [self._sizes.get(key) or self._unseen.get(key, 0) for key in keys]
        return sum(sizes) if all(sizes) and self._reading.isdisjoint(keys) else 0


def _is_other_namespace(key: ChunkKey) -> bool:
    return len(key) > KEY_BYTES
