"""The index of a lower tier: its keys, their sizes, and how much of its capacity they take.

A key is absent, being written, stored, a tombstone (never served again, its bytes still there) or being
reclaimed (its bytes are being deleted). Only an absent key or a tombstone can be written, so that old bytes
never pass for new ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from lmkv.chunks.hashing import KEY_BYTES
from lmkv.protocols import ChunkKey, Listed, Policy

Victims = dict[ChunkKey, int]
"""Chunks to delete from the backend, and their sizes. Given out to one deleter at a time."""


class TierIndex:
    """Keys, sizes and order of a lower tier. No lock inside: the store calls it under its own.

    `used`: bytes of the chunks that are held and being written, never more than `capacity`. Tombstones are
    deleted before anything is written in its place, so the medium holds no more than that either.

    `other_namespace`: how many of the chunks belong to other namespaces (`SharesRoom`); they are evicted in
    turn with the rest.
    """

    def __init__(self, policy: Policy, capacity: int | None) -> None:
        self.policy = policy
        self.capacity = capacity
        self.used = self.other_namespace = 0
        self.clearing = False
        """All is to be deleted, what was never indexed included: nothing is written until that is done."""
        self._sizes: dict[ChunkKey, int] = {}
        self._writing: set[ChunkKey] = set()
        self._tombstones: Victims = {}
        self._reclaiming: set[ChunkKey] = set()
        self._reclaiming_bytes = 0
        self._changed: set[ChunkKey] | None = None
        self._unseen: Victims = {}
        self._last_used, self._newest = math.inf, 0.0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def begin_read(self, key: ChunkKey) -> None:
        """Keep a held chunk from eviction while it is being read."""
        self.policy.acquire(key)

    def end_read(self, key: ChunkKey) -> None:
        """It has been read, which counts as a use; it may be gone by now."""
        if key in self._sizes:
            self.policy.release(key)

    # -- writing ------------------------------------------------------------------------------------------

    def knows(self, key: ChunkKey) -> bool:
        """Whether the key is here or on its way."""
        return key in self._sizes or key in self._writing

    def begin_write(
        self, key: ChunkKey, nbytes: int, protect: Callable[[], frozenset[ChunkKey]] = frozenset
    ) -> Victims | None:
        """Take room for a chunk; None when there is none, or the key's last bytes are not gone yet.

        Returns what to delete before writing, then to be given to `reclaimed`. `protect` is asked, once
        eviction is needed, which keys it must spare.
        """
        if self.clearing or self.knows(key) or key in self._reclaiming:
            return None
        evicted = self._evict(self.used + self._reclaiming_bytes + nbytes, protect)
        if evicted is None:
            return None
        self._writing.add(key)
        self.used += nbytes
        self._tombstones |= evicted
        return self.take_tombstones(nbytes)

    def evict_more(self, nbytes: int, protect: Callable[[], frozenset[ChunkKey]]) -> Victims | None:
        """Victims beyond what the index itself has use for; None when there are not that many."""
        evicted = self._evict_bytes(nbytes, protect)
        if evicted is None:
            return None
        self._tombstones |= evicted
        return self.take_tombstones()

    def end_write(self, key: ChunkKey, nbytes: int, *, stored: bool, wanted: bool = True) -> None:
        """What has been stored is held from now on, or tombstones if nobody wants it any more."""
        self._writing.discard(key)
        self._note(key)
        self.used -= nbytes
        if stored and wanted:
            self._add(key, nbytes)
        elif stored:
            self._tombstones[key] = nbytes

    def _evict(self, needed: int, protect: Callable[[], frozenset[ChunkKey]]) -> Victims | None:
        if self.capacity is None or needed <= self.capacity:
            return {}
        return self._evict_bytes(needed - self.capacity, protect)

    def _evict_bytes(self, nbytes: int, protect: Callable[[], frozenset[ChunkKey]]) -> Victims | None:
        victims = self.policy.evict(nbytes, protect())
        return None if victims is None else {key: self._drop(key) for key in victims}

    def _add(self, key: ChunkKey, nbytes: int) -> None:
        self._sizes[key] = nbytes
        self.used += nbytes
        self.other_namespace += _is_other_namespace(key)
        self.policy.insert(key, nbytes)

    def _drop(self, key: ChunkKey) -> int:
        self._note(key)
        nbytes = self._sizes.pop(key)
        self.used -= nbytes
        self.other_namespace -= _is_other_namespace(key)
        return nbytes

    # -- removing -----------------------------------------------------------------------------------------

    def discard(self, key: ChunkKey) -> None:
        """The backend has turned out not to have it."""
        if key in self._sizes:
            self._drop(key)
            self.policy.discard(key)

    def mark_deleted(self, keys: Iterable[ChunkKey]) -> None:
        """Serve these no more; their bytes are to be deleted."""
        for key in keys:
            if key in self._sizes:
                self._tombstones[key] = self._drop(key)
                self.policy.discard(key)

    def clear(self) -> Collection[ChunkKey]:
        """Doom everything but others' chunks, what is not indexed included; returns what was held.

        Ends a listing under way.
        """
        held = {key: nbytes for key, nbytes in self._sizes.items() if not _is_other_namespace(key)}
        self.mark_deleted(held)
        self.clearing = True
        self.end_listing()
        return held

    def take_tombstones(self, replaced_by: int = 0) -> Victims:
        """What is to be deleted, for the caller to do it. `replaced_by`: bytes that he then writes instead.

        Until the rest of its room is really free, nobody else can use it.
        """
        victims, self._tombstones = self._tombstones, {}
        self._reclaiming.update(victims)
        self._reclaiming_bytes += max(0, sum(victims.values()) - replaced_by)
        return victims

    def reclaimed(self, victims: Victims, ok: bool, replaced_by: int = 0) -> None:
        """The deletion of these tombstones has ended; if not `ok`, they are tombstones again."""
        self._reclaiming.difference_update(victims)
        for key in victims:
            self._note(key)
        self._reclaiming_bytes -= max(0, sum(victims.values()) - replaced_by)
        if not ok:
            self._tombstones |= victims

    # -- listing what persists ----------------------------------------------------------------------------

    def begin_listing(self) -> bool:
        """From now on note what changes, because a listing may show it as it was. False: not now."""
        if self.clearing:
            return False
        self._changed, self._unseen = set(), self._sizes.copy()
        self._last_used = self._newest or math.inf
        return True

    def _note(self, key: ChunkKey) -> None:
        if self._changed is not None:
            self._changed.add(key)

    def adopt(self, found: Sequence[Listed]) -> bool:
        """Index chunks that a listing found, oldest use first, and mark_deleted what is too much.

        False: everything was cleared since the listing began, and it has to end.
        """
        if self._changed is None:
            return False
        for item in found:
            self._unseen.pop(item.key, None)
            self._newest = max(self._newest, item.last_used)
            if item.key in self._sizes and item.last_used > self._last_used:
                # Used since the last listing, perhaps by another process.
                self.policy.touch([item.key])
            if not (self.knows(item.key) or item.key in self._changed or self._is_deleted(item.key)):
                self._adopt(item)
        return True

    def _is_deleted(self, key: ChunkKey) -> bool:
        return key in self._tombstones or key in self._reclaiming

    def _adopt(self, item: Listed) -> None:
        evicted = self._evict(self.used + self._reclaiming_bytes + item.nbytes, frozenset)
        if evicted is None:
            self._tombstones[item.key] = item.nbytes
        else:
            self._add(item.key, item.nbytes)
            self._tombstones |= evicted

    def forget_unseen(self, most: int) -> bool:
        """Drop up to `most` chunks that were here all the while and not listed: others have deleted them.

        True while there may be more.
        """
        for _ in range(min(most, len(self._unseen))):
            key, _ = self._unseen.popitem()
            if self._changed is not None and key not in self._changed:
                self.discard(key)
        return bool(self._unseen)

    def end_listing(self) -> None:
        self._changed, self._unseen = None, {}


def _is_other_namespace(key: ChunkKey) -> bool:
    return len(key) > KEY_BYTES
