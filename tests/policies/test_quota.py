"""Quotas: what a flood of one tenant leaves to another."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lmkv.errors import UsageError
from lmkv.policies import LRU, POLICIES, Quotas, make_policy
from tests.tables import raised


def stored(policy: Quotas, tenant: str, names: list[int], size: int = 10) -> None:
    keys = [bytes([name]) * 32 for name in names]
    policy.label(keys, [tenant])
    for key in keys:
        policy.insert(key, size)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_flood_does_not_push_a_tenant_under_its_quota(name: str) -> None:
    policy = Quotas(lambda: make_policy(name), {"alice": 0.4, "bob": 0.2})
    stored(policy, "alice", list(range(4)))
    stored(policy, "bob", list(range(10, 16)))
    for number in range(100, 200):
        assert policy.evict(10)
        stored(policy, "bob", [number])
        assert policy.used_bytes() == {"alice": 40, "bob": 60}


def test_room_that_nobody_wants_is_used_and_given_back() -> None:
    policy = Quotas(LRU, {"alice": 0.5, "bob": 0.5})
    stored(policy, "alice", list(range(10)))
    for number in range(20, 25):
        assert policy.evict(10)
        stored(policy, "bob", [number])
    assert policy.used_bytes() == {"alice": 50, "bob": 50}


def test_chunks_without_a_tenant_go_before_those_within_a_quota() -> None:
    policy = Quotas(LRU, {"alice": 0.5})
    stored(policy, "alice", [1, 2])
    stored(policy, "carol", [3, 4])
    assert policy.evict(20) == [bytes([3]) * 32, bytes([4]) * 32]


def test_a_chunk_belongs_to_the_tenant_of_its_parent() -> None:
    policy = Quotas(LRU, {"alice": 0.5})
    stored(policy, "alice", [1])
    policy.insert(b"x" * 32, 10, bytes([1]) * 32)
    assert policy.used_bytes() == {"alice": 20}


def test_when_others_are_held_even_those_within_a_quota_go() -> None:
    policy = Quotas(LRU, {"alice": 0.5})
    stored(policy, "alice", [1])
    stored(policy, "bob", [2])
    policy.hold(bytes([2]) * 32)
    assert policy.evict(11) is None
    assert policy.evict(10) == [bytes([1]) * 32]


def test_more_than_all_cannot_be_promised() -> None:
    raised(UsageError, "add up to 100 % at most", Quotas, LRU, {"alice": 0.6, "bob": 0.6})


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["insert", "evict", "hold", "release", "discard"]), st.integers(0, 9)), max_size=60
    )
)
def test_it_counts_its_bytes(calls: list[tuple[str, int]]) -> None:
    policy, sizes, held = Quotas(LRU, {"even": 0.3, "odd": 0.3}), {}, set()
    for call, number in calls:
        key = bytes([number]) * 32
        if call == "insert" and key not in sizes:
            stored(policy, ("even", "odd", "third")[number % 3], [number], number + 1)
            sizes[key] = number + 1
        elif call in ("hold", "release") and key in sizes:
            getattr(policy, call)(key)
            (held.add if call == "hold" else held.discard)(key)
        elif call == "discard":
            policy.discard(key)
            sizes.pop(key, None)
            held.discard(key)
        elif call == "evict":
            free = sum(size for each, size in sizes.items() if each not in held)
            victims = policy.evict(number * 3, {bytes([number]) * 32})
            if victims is None:
                assert number * 3 > free - sizes.get(key, 0) * (key not in held)
            else:
                assert not {*victims} & held
                assert sum(sizes.pop(each) for each in victims) >= number * 3
        assert sum(policy.used_bytes().values()) == sum(sizes.values()) == policy.total_bytes
