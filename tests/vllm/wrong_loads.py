"""Copiers whose loads copy something else than was ordered: for audits of loads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import define, field

from lmkv.memory.copier import ChunkCopy, Copier, Event, Run

Fault = Callable[[list[ChunkCopy], "Faulty"], list[ChunkCopy]]


@define(eq=False)
class Faulty:
    """A copier whose loads copy something else than was ordered, where `fault` says so."""

    inner: Copier
    fault: Fault
    slots: np.ndarray
    """`SlabMap.array`; the last one is not used otherwise."""
    rng: random.Random = field(factory=lambda: random.Random(0))
    seen: set[int] = field(factory=set)
    at: int = 0
    """Where the part of a slot begins that it copies."""
    victim: int = 0
    """A block of another request."""
    touched: int = 0
    """Loads that went wrong."""

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def _broken(self, copies: Sequence[ChunkCopy]) -> list[ChunkCopy]:
        made = self.fault(list(copies), self)
        self.touched += made != list(copies)
        return made

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        return self.inner.load(self._broken(copies), overlap=overlap, after=after)

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self.inner.load_layers(self._broken(copies))

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        return self.inner.store(copies)

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        return self.inner.store_layers(copies)

    def close(self, *, process_ends: bool = False) -> None:
        self.inner.close(process_ends=process_ends)


def changed(copies: list[ChunkCopy], change: Callable[[ChunkCopy], ChunkCopy]) -> list[ChunkCopy]:
    return [*copies[:1], change(copies[1]), *copies[2:]]


def unwritten(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    return changed(copies, lambda copy: ChunkCopy(copy.slot, tuple(Run(r.first, r.blocks[:-1]) for r in copy.runs)))


def turned(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    return changed(copies, lambda copy: ChunkCopy(copy.slot, tuple(Run(r.first, r.blocks[::-1]) for r in copy.runs)))


def another_slot_the_second_time(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    again = copies[1].slot in copier.seen
    copier.seen.update(copy.slot for copy in copies)
    return changed(copies, lambda copy: ChunkCopy(copies[0].slot, copy.runs)) if again else copies


def one_in_twenty(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    return unwritten(copies, copier) if copier.rng.random() < 0.05 else copies


def one_row(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    """Some bytes of a page are others: one token of one head."""
    spare = len(copier.slots) - 1
    copier.slots[spare] = copier.slots[copies[1].slot]
    copier.slots[spare, copier.at : copier.at + 4] ^= 0x55
    return changed(copies, lambda copy: ChunkCopy(spare, copy.runs))


def into_another_block(copies: list[ChunkCopy], copier: Faulty) -> list[ChunkCopy]:
    """The first page is also written into a block of another request."""
    runs = tuple(Run(run.first, [copier.victim]) for run in copies[-1].runs)
    return [*copies, ChunkCopy(copies[-1].slot, runs)]


FAULTS: list[Fault] = [unwritten, turned, another_slot_the_second_time, one_in_twenty, one_row]
