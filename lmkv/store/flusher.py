"""Copies of chunks down to lower tiers: as they are stored (through), or as they are evicted (back)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal

from attrs import define, field

from lmkv.protocols import Chunk, ChunkKey
from lmkv.store.tiers.iopool import Deferred, IOPool, Job, Priority
from lmkv.store.tiers.primary import Entry, PrimaryTier
from lmkv.store.tiers.secondary import Secondary

_Copy = tuple[Secondary, Entry]


@define(eq=False)
class _Flush:
    """Copies of one chain's chunks, head first. They hold their chunks until the last of them has ended, and

    then let go tail first. `chain`: those before a chunk are not evicted below for it.
    """

    chain: Sequence[ChunkKey]
    copies: dict[_Copy, None]
    left: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = len(self.copies)

    def ancestors(self, key: ChunkKey) -> frozenset[ChunkKey]:
        return frozenset(takewhile(lambda other: other != key, self.chain))


class Flusher:
    """`slots_freed`: called under the lock when copies have ended: slots of evicted chunks may be free."""

    def __init__(
        self,
        lock: threading.Lock,
        primary: PrimaryTier,
        tiers: Sequence[Secondary],
        pool: IOPool,
        slots_freed: Callable[[Deferred], None],
    ) -> None:
        self._lock = lock
        self._primary = primary
        self._tiers = tiers
        self._pool = pool
        self._made_room = slots_freed

    def store(self, entries: Sequence[Entry], chain: Sequence[ChunkKey], deferred: Deferred) -> None:
        """Locked. Plan the copies that write-through tiers want of entries that were just stored."""
        copies = [copy for entry in entries for copy in self._wanted(entry, "through")]
        for _, entry in copies:
            self._primary.ref(entry)
        self._plan(copies, chain, deferred)

    def flush(self, victim: Entry, deferred: Deferred) -> bool:
        """Locked. Plan the copies that write-back tiers want of a victim; False when none does."""
        copies = self._wanted(victim, "back")
        if copies:
            self._primary.begin_flush(victim)
            for _ in copies[1:]:
                victim.refs += 1
            self._plan(copies, (victim.parent, victim.key), deferred)
        return bool(copies)

    def _wanted(self, entry: Entry, mode: Literal["through", "back"]) -> list[_Copy]:
        """Locked."""
        return [
            (tier, entry)
            for tier in self._tiers
            if tier.write_mode == mode and not entry.removed and tier.wants(entry.key)
        ]

    def _plan(self, copies: Sequence[_Copy], chain: Sequence[ChunkKey], deferred: Deferred) -> None:
        """Locked. Each of the copies holds its entry already."""
        if copies:
            flush = _Flush(chain, dict.fromkeys(copies))
            deferred.jobs += [
                Job(partial(self._copy, copy, flush), Priority.STORE, partial(self._refused, copy, flush))
                for copy in copies
            ]

    def _copy(self, copy: _Copy, flush: _Flush) -> None:
        """I/O thread."""
        tier, entry = copy
        chunk = Chunk(entry.key, self._primary.slab.view(entry.slot), entry.parent, entry.tokens)
        tier.write(chunk, lambda: not entry.removed, partial(flush.ancestors, entry.key))
        deferred = Deferred()
        with self._lock:
            self._end(flush, deferred)
        deferred.run(self._pool)

    def _refused(self, copy: _Copy, flush: _Flush) -> None:
        """The pool has no room for it: a future miss. The slot is not held any longer for it."""
        tier, entry = copy
        deferred = Deferred()
        with self._lock:
            del flush.copies[copy]
            tier.dropped()
            self._primary.unref(entry)
            self._end(flush, deferred)
        deferred.run(self._pool)

    def _end(self, flush: _Flush, deferred: Deferred) -> None:
        """Locked. One copy of the flush has ended."""
        flush.left -= 1
        if not flush.left:
            for _, entry in reversed(flush.copies):
                self._primary.unref(entry)
            for tier in {tier for tier, _ in flush.copies}:
                tier.index.policy.touch(flush.chain)
            self._made_room(deferred)
