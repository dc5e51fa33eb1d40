"""Copies of chunks down to lower tiers: as they are stored (through), or as they are evicted (back)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal

from attrs import define, field

from lmkv.protocols import Chunk, ChunkKey
from lmkv.store.tiers.iopool import IOPool, Job, Priority, Todo
from lmkv.store.tiers.primary import Entry, PrimaryTier
from lmkv.store.tiers.secondary import Secondary

_Copy = tuple[Secondary, Entry]


@define(eq=False)
class _Descent:
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


class Descents:
    """`made_room`: called under the lock when copies have ended: slots of evicted chunks may be free."""

    def __init__(
        self,
        lock: threading.Lock,
        primary: PrimaryTier,
        tiers: Sequence[Secondary],
        pool: IOPool,
        made_room: Callable[[Todo], None],
    ) -> None:
        self._lock = lock
        self._primary = primary
        self._tiers = tiers
        self._pool = pool
        self._made_room = made_room

    def store(self, entries: Sequence[Entry], chain: Sequence[ChunkKey], todo: Todo) -> None:
        """Locked. Plan the copies that write-through tiers want of entries that were just stored."""
        copies = [copy for entry in entries for copy in self._wanted(entry, "through")]
        for _, entry in copies:
            self._primary.hold(entry)
        self._plan(copies, chain, todo)

    def demote(self, victim: Entry, todo: Todo) -> bool:
        """Locked. Plan the copies that write-back tiers want of a victim; False when none does."""
        copies = self._wanted(victim, "back")
        if copies:
            self._primary.demote(victim)
            for _ in copies[1:]:
                victim.refs += 1
            self._plan(copies, (victim.parent, victim.key), todo)
        return bool(copies)

    def _wanted(self, entry: Entry, mode: Literal["through", "back"]) -> list[_Copy]:
        """Locked."""
        return [
            (tier, entry)
            for tier in self._tiers
            if tier.write_mode == mode and not entry.gone and tier.wants(entry.key)
        ]

    def _plan(self, copies: Sequence[_Copy], chain: Sequence[ChunkKey], todo: Todo) -> None:
        """Locked. Each of the copies holds its entry already."""
        if copies:
            descent = _Descent(chain, dict.fromkeys(copies))
            todo.jobs += [
                Job(partial(self._copy, copy, descent), Priority.STORE, partial(self._refused, copy, descent))
                for copy in copies
            ]

    def _copy(self, copy: _Copy, descent: _Descent) -> None:
        """I/O thread."""
        tier, entry = copy
        chunk = Chunk(entry.key, self._primary.slab.view(entry.slot), entry.parent, entry.tokens)
        tier.write(chunk, lambda: not entry.gone, partial(descent.ancestors, entry.key))
        todo = Todo()
        with self._lock:
            self._end(descent, todo)
        todo.act(self._pool)

    def _refused(self, copy: _Copy, descent: _Descent) -> None:
        """The pool has no room for it: a future miss. The slot is not held any longer for it."""
        tier, entry = copy
        todo = Todo()
        with self._lock:
            del descent.copies[copy]
            tier.dropped()
            self._primary.let_go(entry)
            self._end(descent, todo)
        todo.act(self._pool)

    def _end(self, descent: _Descent, todo: Todo) -> None:
        """Locked. One copy of the descent has ended."""
        descent.left -= 1
        if not descent.left:
            for _, entry in reversed(descent.copies):
                self._primary.let_go(entry)
            for tier in {tier for tier, _ in descent.copies}:
                tier.index.policy.touch(descent.chain)
            self._made_room(todo)
