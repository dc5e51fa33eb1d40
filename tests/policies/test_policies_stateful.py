"""Every policy against a plain dictionary that is sorted anew each time."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.errors import UsageError
from lmkv.policies import POLICIES, make_policy

keys = st.integers(0, 11).map(lambda number: number.to_bytes(32, "big"))
"""Few, so that known, held and discarded keys come up again and again."""

sizes = st.integers(1, 9)


@define
class Model:
    """What is known of one key. The lowest rank is evicted first."""

    size: int
    rank: int
    held: bool = False
    passed: bool = False
    """Acquired when its turn to be evicted came."""


class PolicyMachine(RuleBasedStateMachine):
    name: ClassVar[str]
    use_counts: ClassVar[bool]

    @initialize()
    def start(self) -> None:
        self.policy = make_policy(self.name)
        self.model: dict[bytes, Model] = {}
        self.last_rank = 0

    def next_rank(self) -> int:
        self.last_rank += 1
        return self.last_rank

    def evictable(self) -> list[bytes]:
        """In order of eviction."""
        free = [key for key, known in self.model.items() if not known.held]
        return sorted(free, key=lambda key: self.model[key].rank)

    def expected_victims(self, nbytes: int, protect: set[bytes]) -> list[bytes] | None:
        victims: list[bytes] = []
        for key in self.evictable():
            if sum(self.model[victim].size for victim in victims) >= nbytes:
                break
            if key not in protect:
                victims.append(key)
        enough = sum(self.model[victim].size for victim in victims) >= nbytes
        return victims if enough else None

    @rule(key=keys, size=sizes)
    def insert(self, key: bytes, size: int) -> None:
        if key in self.model:
            with pytest.raises(UsageError):
                self.policy.insert(key, size)
        else:
            self.policy.insert(key, size, parent=b"")
            self.model[key] = Model(size, self.next_rank())

    @rule(chain=st.lists(keys, max_size=6))
    def touch(self, chain: list[bytes]) -> None:
        self.policy.touch(chain)
        for key in reversed(chain):
            if self.use_counts and key in self.model:
                self.model[key].rank = self.next_rank()

    @rule(key=keys)
    def discard(self, key: bytes) -> None:
        self.policy.discard(key)
        self.model.pop(key, None)

    @rule(key=keys, evictable=st.booleans())
    def set_evictable(self, key: bytes, evictable: bool) -> None:
        change = self.policy.release if evictable else self.policy.hold
        if key not in self.model:
            with pytest.raises(UsageError):
                change(key)
            return
        change(key)
        if evictable and self.model[key].held and self.use_counts:
            self.model[key].rank = self.next_rank()
        if evictable and self.model[key].passed and not self.use_counts:
            self.model[key].rank = min(entry.rank for entry in self.model.values()) - 1
        self.model[key].held = not evictable
        self.model[key].passed &= not evictable

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 6), evictable=st.booleans())
    def set_many_evictable(self, count: int, evictable: bool) -> None:
        for key in sorted(self.model)[:count]:
            self.set_evictable(key, evictable)

    @rule(nbytes=st.integers(-1, 40), protect=st.sets(keys, max_size=5))
    def evict(self, nbytes: int, protect: set[bytes]) -> None:
        victims = self.policy.evict(nbytes, protect)
        assert victims == self.expected_victims(nbytes, protect)
        if victims:
            last = max(self.model.pop(key).rank for key in victims)
            for known in self.model.values():
                known.passed |= known.held and known.rank < last

    @invariant()
    def knows_the_same_keys(self) -> None:
        assert {*self.policy._queue, *self.policy._held} == set(self.model)

    @invariant()
    def would_evict_everything_evictable_in_order_and_not_a_byte_more(self) -> None:
        order = self.evictable()
        total = sum(self.model[key].size for key in order)
        assert self.policy.evict(total + 1) is None
        assert copy.deepcopy(self.policy).evict(total) == order


class LRUMachine(PolicyMachine):
    name = "LRU"
    use_counts = True


class FIFOMachine(PolicyMachine):
    name = "FIFO"
    use_counts = False


TestLRU = LRUMachine.TestCase
TestFIFO = FIFOMachine.TestCase


def test_every_policy_has_a_machine() -> None:
    assert {machine.name for machine in PolicyMachine.__subclasses__()} == set(POLICIES)
