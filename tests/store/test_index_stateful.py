"""TierIndex against the medium that it keeps account of, with writes, deletions and listings half done.

The medium is a dictionary. Alone on it, the index never lets it take more than the capacity, never promises
what is not there, and never lets old bytes pass for new ones. Beside others it becomes right with a listing.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from attrs import define, field

from lmkv.policies import make_policy
from lmkv.protocols import ChunkKey, Listed
from lmkv.store.index import ScanGuard, TierIndex, Victims
from tests.kit import Residents

KEYS = [bytes([number]) * 32 for number in range(9)]
SIZES = {key: 1 + number % 3 for number, key in enumerate(KEYS)}


@define(eq=False)
class Writer:
    key: ChunkKey
    victims: Victims
    deleted: bool | None = None
    stored: bool | None = None
    wanted: bool = True


@define(eq=False)
class Medium:
    """The version of the stored bytes, by key."""

    index: TierIndex
    alone: bool
    rng: random.Random
    chunks: dict[ChunkKey, int] = field(factory=dict)
    version: dict[ChunkKey, int] = field(factory=lambda: dict.fromkeys(KEYS, 0))
    writers: list[Writer] = field(factory=list)
    deleters: list[Victims] = field(factory=list)
    clearer: Victims | None = None
    listing: list[ChunkKey] | None = None
    scan: ScanGuard | None = None
    sighted: list[ChunkKey] = field(factory=list)
    reading: list[ChunkKey] = field(factory=list)
    seen: Counter[str] = field(factory=Counter)
    told: Residents = field(factory=Residents)

    def key(self) -> ChunkKey:
        return self.rng.choice(KEYS)

    def begin_write(self) -> None:
        key = self.key()
        protected = frozenset(self.rng.sample(KEYS, 3))
        tombstones = self.index.snapshot().tombstones
        victims = self.index.begin_write(key, SIZES[key], lambda: protected)
        if victims is not None:
            assert key not in self.index
            self.seen["rewritten"] += key in self.index.snapshot().rewriting
            assert not (set(victims) - tombstones) & (protected | set(self.reading))
            self.writers.append(Writer(key, victims))

    def move_writer(self) -> None:
        """Delete, then write, then say how it went; each may fail."""
        if not self.writers:
            return
        writer = self.rng.choice(self.writers)
        if writer.deleted is None:
            writer.deleted = self.delete(writer.victims)
        elif writer.stored is None:
            writer.stored = writer.deleted and self.write(writer.key)
        else:
            self.writers.remove(writer)
            self.index.reclaimed(writer.victims, writer.deleted)
            self.index.end_write(writer.key, SIZES[writer.key], stored=writer.stored, wanted=writer.wanted)

    def delete(self, keys: Victims) -> bool:
        ok = self.rng.random() < 0.8
        self.seen["deleted" if ok else "not deleted"] += len(keys)
        for key in keys if ok else ():
            self.chunks.pop(key, None)
        return ok

    def write(self, key: ChunkKey) -> bool:
        if self.rng.random() < 0.2:
            return False
        present = key in self.chunks
        self.seen["present" if present else "written"] += 1
        assert not present or not self.alone or key in self.index.snapshot().rewriting, (
            "what is there already would pass for what was to be written"
        )
        self.chunks.setdefault(key, self.version[key])
        return True

    def reclaim(self) -> None:
        if len(self.deleters) < 2 and (victims := self.index.take_tombstones()):
            self.deleters.append(victims)
        elif self.deleters:
            victims = self.deleters.pop(0)
            self.index.reclaimed(victims, self.delete(victims))

    def mark_deleted(self) -> None:
        keys = [self.key() for _ in range(self.rng.randint(1, 3))]
        for key in keys:
            self.version[key] += 1
        self.unwant(keys)
        self.index.mark_deleted(keys)

    def unwant(self, keys: list[ChunkKey]) -> None:
        for writer in self.writers:
            writer.wanted &= writer.key not in keys

    def clear(self) -> None:
        for key in KEYS:
            self.version[key] += 1
        self.unwant(KEYS)
        self.index.clear()
        self.clearer = None

    def delete_all(self) -> None:
        """In two steps, and sometimes in vain."""
        if self.clearer is None and self.index.clearing:
            self.clearer = self.index.take_tombstones()
            self.deleters.append(self.clearer)
        elif self.clearer is not None and self.clearer in self.deleters:
            self.deleters.remove(self.clearer)
            ok = self.delete(self.clearer)
            self.index.reclaimed(self.clearer, ok)
            self.index.clearing = not ok
            self.clearer = None

    def list(self) -> None:
        """Part of what is there now, or was when the listing began."""
        if self.listing is None:
            if self.index.begin_listing():
                self.listing = self.rng.sample(list(self.chunks), len(self.chunks))
            return
        part, self.listing = self.listing[:2], self.listing[2:]
        if not self.index.adopt([Listed(key, SIZES[key]) for key in part]):
            self.listing = None
        elif not self.listing:
            while self.index.forget_unseen(1):
                pass
            self.index.end_listing()
            self.listing = None
            self.seen["listed"] += 1

    def add_found(self) -> None:
        """Look at some keys now, and index those that were there only after other things have happened."""
        if self.scan is None:
            self.scan = self.index.begin_scan()
            self.sighted = [key for key in self.rng.sample(KEYS, 3) if key in self.chunks]
            return
        for key in self.sighted:
            self.seen["found"] += key not in self.index
            self.index.add_found({key: SIZES[key]}, self.scan)
        self.index.end_scan(self.scan)
        self.scan = None

    def read(self) -> None:
        if self.reading and self.rng.random() < 0.6:
            self.index.end_read(self.reading.pop())
            return
        key = self.key()
        if key in self.index and key not in self.reading:
            self.index.begin_read(key)
            self.reading.append(key)

    def doubt(self) -> None:
        """A read has failed, perhaps for no fault of the chunk."""
        found = [key for key in KEYS if key in self.index]
        if found:
            key = self.rng.choice(found)
            self.index.distrust(key)
            self.seen["doubted"] += 1
            assert key not in self.index
            assert not self.index.knows(key)

    def somebody_else(self) -> None:
        if self.alone:
            return
        key = self.key()
        if self.rng.random() < 0.5:
            self.chunks.pop(key, None)
        else:
            self.chunks.setdefault(key, self.version[key])

    def discard(self) -> None:
        """A read has found that a chunk is not there."""
        key = self.key()
        if key in self.index and key not in self.chunks:
            self.index.discard(key)

    def check(self) -> None:
        index = self.index
        self.reading = [key for key in self.reading if key in index]
        assert index.capacity is not None
        assert 0 <= index.used <= index.capacity
        assert index.snapshot().reclaiming_bytes >= 0
        assert index.used == sum(SIZES[key] for key in index.sizes()) + sum(
            SIZES[writer.key] for writer in self.writers
        )
        policy: Any = index.policy
        assert len(policy.sizes()) == len(index)
        assert self.told.of.get("medium", set()) == {key for key in index.sizes() if key in index}
        if self.alone:
            assert sum(SIZES[key] for key in self.chunks) <= index.capacity, "the medium is over its capacity"
            for key in index.sizes():
                assert self.chunks[key] == self.version[key], "what is promised is not there, or outdated"

    def agree(self) -> None:
        """With nobody else about and nothing failing, index and medium agree after one listing."""
        self.rng.random = lambda: 0.5  # type: ignore[method-assign]
        while self.writers:
            self.move_writer()
        self.clearer = self.clearer if self.clearer in self.deleters else None
        while self.index.clearing:
            self.delete_all()
        self.listing = None
        self.index.end_listing()
        if self.scan is not None:
            self.add_found()
        self.list()
        while self.listing is not None:
            self.list()
        while self.deleters or self.index.snapshot().tombstones:
            self.reclaim()
        self.check()
        assert set(self.chunks) == set(self.index.sizes())
        assert sum(SIZES[key] for key in self.chunks) == self.index.used
        assert (left := self.index.snapshot()).reclaiming_bytes == len(left.reclaiming) == 0


def drive(seed: int, alone: bool, steps: int) -> Counter[str]:
    rng = random.Random(seed)
    told = Residents()
    index = TierIndex(make_policy(rng.choice(["LRU", "FIFO"])), rng.randint(3, 12), "medium", [told])
    medium = Medium(index, alone, rng, told=told)
    actions = {
        medium.begin_write: 5, medium.move_writer: 12, medium.reclaim: 4, medium.mark_deleted: 2, medium.read: 3,
        medium.list: 3, medium.add_found: 3, medium.clear: 0.2, medium.delete_all: 2, medium.somebody_else: 2,
        medium.discard: 1, medium.doubt: 3,
    }  # fmt: skip
    for _ in range(steps):
        rng.choices(list(actions), list(actions.values()))[0]()
        medium.check()
    medium.agree()
    return medium.seen


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, 200, 50)], ids=str)
def test_the_index_keeps_account_of_the_medium(seeds: range, alone: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += drive(seed, alone, 500)
    expected = ("written", "deleted", "not deleted", "listed", "found", "doubted", "rewritten")
    assert min(seen[name] for name in expected) > 50, seen


def test_what_is_written_over_its_own_bytes_takes_no_place_of_what_is_being_deleted() -> None:
    doubted, deleted, other, last = KEYS[0], KEYS[5], KEYS[2], KEYS[3]
    index = TierIndex(make_policy("LRU"), 7, "medium")
    for key in (doubted, deleted):
        assert index.begin_write(key, SIZES[key]) == {}
        index.end_write(key, SIZES[key], stored=True)
    index.distrust(doubted)
    index.mark_deleted([deleted])
    victims = index.begin_write(doubted, SIZES[doubted])
    assert victims == {deleted: 3}
    assert index.begin_write(other, SIZES[other]) == {}, "1 + 3 + 3 bytes"
    assert index.begin_write(last, SIZES[last]) is None
    index.reclaimed(victims, ok=True)
    assert index.begin_write(last, SIZES[last]) == {}


@pytest.mark.nightly("histories")
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_the_index_keeps_account_for_long(seed: int) -> None:
    for alone in (True, False):
        drive(seed, alone, 20_000)
