"""Every policy against what must hold of all of them, and LRU against a list that is searched from its beginning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.errors import UsageError
from lmkv.policies import LRU, POLICIES, make_policy
from lmkv.protocols import TakesHints
from tests.tables import raised

names = st.integers(0, 14)
"""Few, so that known, held and discarded keys come up again and again."""


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def parent_of(number: int) -> bytes:
    """A fixed binary tree: 0 is the root."""
    return key_of((number - 1) // 2) if number else b""


def chain_to(number: int) -> list[bytes]:
    """Head first."""
    chain = [number]
    while chain[-1]:
        chain.append((chain[-1] - 1) // 2)
    return [key_of(each) for each in reversed(chain)]


@define
class Known:
    size: int
    held: bool = False


class PolicyMachine(RuleBasedStateMachine):
    """Any calls, in any order: sizes, holds, protection, and that nobody is orphaned without need."""

    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str) -> None:
        self.policy: Any = make_policy(name)
        self.known: dict[bytes, Known] = {}

    @rule(number=names, size=st.integers(1, 9))
    def insert(self, number: int, size: int) -> None:
        key = key_of(number)
        if key in self.known:
            raised(UsageError, "already", self.policy.insert, key, 90 + size)
        else:
            self.policy.insert(key, size, parent_of(number))
            self.known[key] = Known(size)

    @rule(number=names, size=st.integers(1, 9))
    def insert_chain(self, number: int, size: int) -> None:
        chain = chain_to(number)
        keys = [key for key in chain if key not in self.known]
        self.policy.insert_chain(keys, size, [parent_of(int.from_bytes(key, "big")) for key in keys])
        self.known |= {key: Known(size) for key in keys}
        if keys != chain:
            raised(UsageError, "", self.policy.insert_chain, chain[:1], size, [b""])

    @rule(number=names, size=st.sampled_from([0, -1]))
    def insert_nothing(self, number: int, size: int) -> None:
        raised(UsageError, "size|already", self.policy.insert, key_of(number), size)

    @rule(number=names)
    def touch(self, number: int) -> None:
        self.policy.touch(chain_to(number))

    @rule(number=names)
    def discard(self, number: int) -> None:
        self.policy.discard(key_of(number))
        self.known.pop(key_of(number), None)

    @rule(number=names, held=st.booleans())
    def hold_or_release(self, number: int, held: bool) -> None:
        key = key_of(number)
        change = self.policy.hold if held else self.policy.release
        if key not in self.known:
            raised(UsageError, key.hex(), change, key)
        else:
            change(key)
            self.known[key].held = held

    @rule(number=names, priority=st.integers(-1, 2))
    def hint(self, number: int, priority: int) -> None:
        assert isinstance(self.policy, TakesHints)
        self.policy.hint(chain_to(number), priority)

    @rule(nbytes=st.integers(-1, 40), protect=st.sets(names, max_size=5))
    def evict(self, nbytes: int, protect: set[int]) -> None:
        kept = {key_of(number) for number in protect}
        free = {key for key, known in self.known.items() if not known.held and key not in kept}
        victims = self.policy.evict(nbytes, kept)
        if nbytes > sum(self.known[key].size for key in free):
            assert victims is None
            return
        assert victims is not None
        assert len({*victims}) == len(victims)
        assert {*victims} <= free
        assert sum(self.known[key].size for key in victims[:-1]) < max(nbytes, 1)
        assert sum(self.known[key].size for key in victims) >= nbytes
        for key in victims:
            free.discard(key)
            self.check_orphans(key, free)
            del self.known[key]

    def check_orphans(self, victim: bytes, free: Set[bytes]) -> None:
        """A victim with children went only because no key without any could go."""
        children = [key for key in self.known if parent_of(int.from_bytes(key, "big")) == victim]
        if children:
            parents = {parent_of(int.from_bytes(key, "big")) for key in self.known}
            assert [key for key in free if key not in parents] == []

    @invariant()
    def knows_the_same_keys(self) -> None:
        assert self.policy.sizes() == {key: known.size for key, known in self.known.items()}

    @precondition(lambda self: self.known)
    @invariant()
    def has_not_a_byte_more_than_can_be_evicted(self) -> None:
        total = sum(known.size for known in self.known.values() if not known.held)
        assert self.policy.evict(total + 1) is None

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            free = {key for key, known in self.known.items() if not known.held}
            assert {*(self.policy.evict(sum(self.known[key].size for key in free)) or ())} == free


TestPolicies = PolicyMachine.TestCase
HISTORIES: list[list[tuple[str, Any]]] = [
    [("hold_or_release", (0, True)), ("evict", (20, {2})), ("hold_or_release", (0, False)), ("evict", (20, set()))],
    [
        ("hold_or_release", (1, True)),
        *(("evict", (most, kept)) for most, kept in ((21, set()), (11, {0}), (1, {0, 2}))),
    ],
    [("evict", (10, {0, 2, 3})), ("evict", (0, set())), ("evict", (-1, set())), ("evict", (6, set()))],
    [("hold_or_release", (1, True))] * 2 + [("discard", (1,)), ("insert", (1, 3)), ("evict", (24, set()))],
    [("insert", (0, 9)), ("hold_or_release", (0, True)), ("insert", (0, 9)), ("insert_nothing", (5, 0))],
    [("discard", (number,)) for number in (0, 1, 2, 0)] + [("evict", (1, set())), ("hold_or_release", (0, True))],
]
"""Calls after three keys of ten bytes were inserted."""


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_histories_that_were_wrong_once(name: str) -> None:
    for history in HISTORIES:
        machine = PolicyMachine()
        machine.start(name)
        for call, arguments in [("insert", (number, 10)) for number in range(3)] + history:
            getattr(machine, call)(*arguments)
            machine.knows_the_same_keys()
            machine.has_not_a_byte_more_than_can_be_evicted()
        machine.teardown()


# -- whole requests ------------------------------------------------------------------------------------


@define
class NaiveLRU:
    """Keys in the order of their last use. Evicts the first one that has no child, searching from the beginning."""

    order: list[bytes] = field(factory=list)
    sizes: dict[bytes, int] = field(factory=dict)
    parents: dict[bytes, bytes] = field(factory=dict)

    def insert(self, key: bytes, size: int, parent: bytes = b"") -> None:
        self.order.append(key)
        self.sizes[key], self.parents[key] = size, parent

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def evict(self, nbytes: int, protect: Set[bytes] = frozenset()) -> list[bytes]:
        victims: list[bytes] = []
        while sum(self.sizes[key] for key in victims) < nbytes:
            parents = {self.parents[key] for key in self.order}
            victims.append(next(key for key in self.order if key not in parents and key not in protect))
            self.order.remove(victims[-1])
        return victims


tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)
"""Requests of a few alternatives a chunk: prefixes are shared now and then."""


def requests_of(drawn: list[list[int]]) -> Iterator[list[bytes]]:
    for letters in drawn:
        yield [bytes(letters[: end + 1]).rjust(32, b"\xff") for end in range(len(letters))]


def drive(policy: Any, chains: list[list[bytes]], capacity: int, sizes: dict[bytes, int]) -> list[list[bytes]]:
    """Store each chain, evicting others; returns the victims of each request. No chunk is larger than the tier."""
    resident: dict[bytes, bytes] = {}
    evicted = []
    for chain in chains:
        victims: list[bytes] = []
        parent = b""
        for key in chain:
            if key not in resident:
                over = sum(sizes[each] for each in resident) + sizes[key] - capacity
                protect = set(chain[: chain.index(key)])
                if over > sum(sizes[each] for each in resident if each not in protect):
                    break
                found = policy.evict(over, protect) if over > 0 else []
                assert found is not None
                victims += found
                for each in found:
                    del resident[each]
                policy.insert(key, sizes[key], parent)
                resident[key] = parent
            parent = key
        policy.touch(chain)
        evicted.append(victims)
        assert all(not parent or parent in resident for parent in resident.values()), "an orphan is kept"
    return evicted


@given(drawn=tries, capacity=st.integers(9, 24), weights=st.lists(st.integers(1, 4), min_size=7, max_size=7))
def test_lru_decides_as_a_naive_one(drawn: list[list[int]], capacity: int, weights: list[int]) -> None:
    chains = list(requests_of(drawn))
    sizes = {key: weights[sum(key) % 7] for chain in chains for key in chain}
    assert drive(LRU(), chains, capacity, sizes) == drive(NaiveLRU(), chains, capacity, sizes)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(drawn=tries, capacity=st.integers(9, 24), weights=st.lists(st.integers(1, 4), min_size=7, max_size=7))
def test_no_chunk_is_kept_without_its_parent(
    name: str, drawn: list[list[int]], capacity: int, weights: list[int]
) -> None:
    chains = list(requests_of(drawn))
    drive(make_policy(name), chains, capacity, {key: weights[sum(key) % 7] for chain in chains for key in chain})
