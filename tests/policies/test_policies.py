"""Eviction order, what evict may not do, what it costs, and the admission filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmkv.errors import ConfigError, UsageError
from lmkv.policies import (
    ADMISSIONS,
    FIFO,
    LRU,
    POLICIES,
    AdmitAll,
    AdmitNone,
    MinTokens,
    PolicyBase,
    SecondTouch,
    make_admission,
    make_policy,
)

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> PolicyBase:
    return make_policy(request.param)


def filled(make: Callable[[], PolicyBase], *keys: bytes, size: int = 10) -> PolicyBase:
    policy = make()
    for key in keys:
        policy.insert(key, size)
    return policy


def known(policy: PolicyBase) -> list[bytes]:
    return sorted(policy.sizes())


def order(policy: PolicyBase) -> list[bytes]:
    """Empty the policy, victim by victim."""
    victims = []
    while victim := policy.evict(1):
        victims += victim
    return victims


def test_lru_evicts_a_touched_chain_from_its_tail() -> None:
    policy = filled(LRU, A, B, C, D)
    policy.touch([A, B, C])
    assert order(policy) == [D, C, B, A]


def test_lru_keeps_the_head_of_the_later_touch_longest() -> None:
    policy = filled(LRU, A, B, C, D)
    policy.touch([A, B])
    policy.touch([A, C])
    assert order(policy) == [D, B, C, A]


def test_lru_takes_a_released_key_as_just_used() -> None:
    policy = filled(LRU, A, B, C)
    policy.hold(A)
    policy.touch([A])
    policy.release(A)
    assert order(policy) == [B, C, A]


def test_lru_takes_releasing_twice_for_no_use() -> None:
    policy = filled(LRU, A, B)
    policy.release(A)
    assert order(policy) == [A, B]


def test_fifo_evicts_in_order_of_insertion_whatever_is_used() -> None:
    policy = filled(FIFO, A, B, C)
    policy.touch([A, B])
    assert order(policy) == [A, B, C]


def test_fifo_keeps_the_place_of_an_acquired_key() -> None:
    policy = filled(FIFO, A, B, C)
    policy.hold(A)
    policy.hold(B)
    assert policy.evict(10) == [C]
    policy.insert(D, 10)
    policy.release(B)
    policy.release(A)
    assert order(policy) == [A, B, D]


def test_fifo_puts_a_key_that_comes_back_last() -> None:
    policy = filled(FIFO, A, B)
    policy.discard(A)
    policy.insert(A, 10)
    assert order(policy) == [B, A]


def test_fifo_keeps_order_and_acquired_keys_over_many_discards() -> None:
    policy = filled(FIFO, A, B, C)
    policy.hold(B)
    for number in range(1000):
        policy.insert(number.to_bytes(32, "big"), 1)
        policy.discard(number.to_bytes(32, "big"))
    policy.release(B)
    assert order(policy) == [A, B, C]


def test_fifo_evicts_a_key_first_whose_turn_came_while_it_was_held() -> None:
    policy = filled(FIFO, A, B, C, D)
    policy.hold(A)
    policy.hold(B)
    assert policy.evict(10) == [C]
    policy.release(A)
    policy.release(B)
    assert order(policy) == [B, A, D]


def test_an_evict_that_is_refused_changes_no_turn(policy: PolicyBase) -> None:
    for key in (A, B, C):
        policy.insert(key, 10)
    policy.hold(A)
    assert policy.evict(20, protect={C}) is None
    assert known(policy) == [A, B, C]
    policy.release(A)
    assert sorted(order(policy)) == [A, B, C]


def test_evict_takes_no_more_victims_than_it_needs(policy: PolicyBase) -> None:
    for key, size in ((A, 5), (B, 5), (C, 5)):
        policy.insert(key, size)
    assert len(policy.evict(6) or ()) == 2
    assert len(policy.evict(5) or ()) == 1
    assert len(known(policy)) == 0


def test_evict_of_nothing_takes_nothing(policy: PolicyBase) -> None:
    assert policy.evict(0) == []
    policy.insert(A, 10)
    assert policy.evict(0) == []
    assert policy.evict(-1) == []
    assert A in known(policy)


def test_evict_from_an_empty_policy_is_refused(policy: PolicyBase) -> None:
    assert policy.evict(1) is None


def test_evict_is_all_or_nothing(policy: PolicyBase) -> None:
    for key in (A, B, C):
        policy.insert(key, 10)
    policy.hold(B)
    assert policy.evict(21) is None
    assert policy.evict(11, protect={A}) is None
    assert policy.evict(1, protect={A, C}) is None
    assert len(known(policy)) == 3
    assert sorted(order(policy)) == [A, C]
    assert B in known(policy)


def test_evict_passes_over_protected_keys(policy: PolicyBase) -> None:
    for key in (A, B, C):
        policy.insert(key, 10)
    assert policy.evict(10, protect=frozenset({A, C, D})) == [B]
    assert sorted(order(policy)) == [A, C]


def test_an_acquired_key_is_known_and_can_be_discarded(policy: PolicyBase) -> None:
    policy.insert(A, 10)
    policy.hold(A)
    policy.hold(A)
    assert A in known(policy)
    assert len(known(policy)) == 1
    policy.discard(A)
    assert A not in known(policy)
    policy.insert(A, 3)
    assert policy.evict(4) is None
    assert policy.evict(3) == [A]


def test_unknown_keys_are_ignored_by_touch_and_discard_and_refused_otherwise(policy: PolicyBase) -> None:
    policy.touch([A, B])
    policy.discard(A)
    assert len(known(policy)) == 0
    for change in (policy.hold, policy.release):
        with pytest.raises(UsageError, match=A.hex()):
            change(A)


@pytest.mark.parametrize("held", [False, True])
def test_inserting_a_known_key_is_refused_and_changes_nothing(policy: PolicyBase, held: bool) -> None:
    policy.insert(A, 10)
    (policy.hold if held else policy.release)(A)
    with pytest.raises(UsageError, match="already"):
        policy.insert(A, 99)
    policy.release(A)
    assert policy.evict(11) is None
    assert policy.evict(10) == [A]


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_has_a_size(policy: PolicyBase, size: int) -> None:
    with pytest.raises(UsageError, match="size"):
        policy.insert(A, size)
    assert len(known(policy)) == 0


class CountingKey(bytes):
    """Counts the look-ups that every policy operation is made of."""

    hashed = 0

    def __hash__(self) -> int:
        CountingKey.hashed += 1
        return super().__hash__()


def cost_of_steady_state(policy: PolicyBase, held: int, evictable: int) -> int:
    """Look-ups of 100 evictions and insertions beside so many held and evictable keys."""
    for number in range(held + evictable):
        policy.insert(CountingKey(number.to_bytes(32, "big")), 10)
    for number in range(held):
        policy.hold(CountingKey(number.to_bytes(32, "big")))
    policy.evict(10)
    CountingKey.hashed = 0
    for number in range(100):
        policy.evict(10)
        policy.insert(CountingKey((1 << 60 | number).to_bytes(32, "big")), 10)
    return CountingKey.hashed


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_evict_costs_the_same_however_many_keys_are_acquired_or_evictable(name: str) -> None:
    base = cost_of_steady_state(make_policy(name), held=0, evictable=100)
    assert 0 < base < 100 * 20
    # Where any key is held, each victim is looked up among them.
    assert cost_of_steady_state(make_policy(name), held=4096, evictable=100) <= base + 100
    assert cost_of_steady_state(make_policy(name), held=0, evictable=4096) == base


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_hopeless_evict_looks_at_no_key(name: str) -> None:
    """So the policy counts its bytes exactly, held and discarded ones left out."""
    policy: Any = make_policy(name)
    keys = [CountingKey(number.to_bytes(32, "big")) for number in range(100)]
    for key in keys:
        policy.insert(key, 10)
    for key in keys[:50]:
        policy.hold(key)
    for key in keys[:10]:
        policy.release(key)
    for key in keys[40:60]:
        policy.discard(key)
    assert policy.evict(100) is not None
    CountingKey.hashed = 0
    assert policy.evict(401) is None
    assert CountingKey.hashed == 0
    assert policy.evict(400) is not None
    assert len(known(policy)) == 30


def test_policies_are_made_by_name() -> None:
    assert isinstance(make_policy("LRU"), LRU)
    assert isinstance(make_policy("FIFO"), FIFO)
    assert make_policy("LRU") is not make_policy("LRU")
    with pytest.raises(ConfigError, match=r"'lfu'; there are: LRU, FIFO, LFU, MRU, ARC, SLRU, S3FIFO, SIEVE, ADAPTIVE"):
        make_policy("lfu")


def test_admissions_are_made_by_name() -> None:
    made = {name: type(make_admission(name)) for name in ADMISSIONS}
    assert made == {"all": AdmitAll, "second_touch": SecondTouch, "min_tokens": MinTokens, "none": AdmitNone}
    admission: Any = make_admission("min_tokens:512")
    assert admission.min_tokens == 512
    for unknown in ("some", "min_tokens:0", "min_tokens:", "second_touch:3"):
        with pytest.raises(ConfigError, match=rf"'{unknown}'; there are: all, second_touch, min_tokens, none"):
            make_admission(unknown)


def test_all_and_none_do_as_they_say() -> None:
    assert [AdmitAll().admit(key) for key in (A, A, B)] == [True] * 3
    assert [AdmitNone().admit(key) for key in (A, A, B)] == [False] * 3


def test_second_touch_admits_from_the_second_offer_on() -> None:
    admission = SecondTouch(8)
    assert [admission.admit(key) for key in (A, B, A, A, B)] == [False, False, True, True, True]


def test_second_touch_forgets_what_was_offered_longest_ago() -> None:
    admission = SecondTouch(2)
    assert [admission.admit(key) for key in (A, B, A, C)] == [False, False, True, False]
    assert [admission.admit(key) for key in (A, B)] == [True, False]


def test_min_tokens_admits_chunks_of_long_prompts() -> None:
    admission = MinTokens(100, max_keys=2)
    admission.prompt([A, B], 99)
    assert not admission.admit(A)
    admission.prompt([A], 100)
    admission.prompt([A, C], 50)
    assert [admission.admit(key) for key in (A, B, C)] == [True, False, False]
    admission.prompt([B, C], 200)
    assert [admission.admit(key) for key in (A, B, C)] == [False, True, True], "it must be bounded"
    with pytest.raises(UsageError, match="min_tokens must be positive, not 0"):
        MinTokens(0)


def test_second_touch_is_bounded() -> None:
    admission = SecondTouch(16)
    for number in range(1000):
        admission.admit(number.to_bytes(32, "big"))
    assert len(admission._offered) == 16
    with pytest.raises(UsageError, match="max_keys"):
        SecondTouch(0)
