"""Eviction order, what evict may not do, what it costs, and the admission filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lmkv.errors import ConfigError, UsageError
from lmkv.policies import (
    ADAPTIVE,
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
from lmkv.policies.adaptive import Shadow
from tests.tables import chain, every, raised

A, B, C = (bytes([letter]) * 32 for letter in b"abc")


def filled(make: Callable[[], PolicyBase], keys: str) -> PolicyBase:
    policy = make()
    for key in keys:
        policy.insert(key.encode() * 32, 10)
    return policy


def order(policy: PolicyBase) -> str:
    """Empty the policy, victim by victim; the letters of the keys."""
    victims = ""
    while found := policy.evict(1):
        victims += "".join(chr(key[0]) for key in found)
    return victims


ORDERS = [
    (LRU, "abcd", "touch abc", "dcba"),
    (LRU, "abcd", "touch ab, touch ac", "dbca"),
    (LRU, "abc", "hold a, touch a, release a", "bca"),
    (LRU, "ab", "release a", "ab"),
    (FIFO, "abc", "touch ab", "abc"),
    (FIFO, "abc", "hold a, hold b, evict c, insert d, release b, release a", "abd"),
    (FIFO, "ab", "discard a, insert a", "ba"),
    (FIFO, "abcd", "hold a, hold b, evict c, release a, release b", "bad"),
]
"""A policy, the keys that it is filled with, calls, and the order in which it evicts what there is then."""


def test_lru_evicts_a_touched_chain_from_its_tail() -> None:
    """And whatever else LRU and FIFO do."""

    def check(make: Callable[[], PolicyBase], keys: str, calls: str, expected: str) -> None:
        policy = filled(make, keys)
        for verb, letters in (call.split() for call in calls.split(", ")):
            named = [letter.encode() * 32 for letter in letters]
            match verb:
                case "touch":
                    policy.touch(named)
                case "evict":
                    assert policy.evict(10) == named
                case "insert":
                    policy.insert(named[0], 10)
                case _:
                    getattr(policy, verb)(*named)
        assert order(policy) == expected

    every(ORDERS, check)


def test_fifo_keeps_order_and_acquired_keys_over_many_discards() -> None:
    policy = filled(FIFO, "abc")
    policy.hold(B)
    for number in range(1000):
        policy.insert(number.to_bytes(32, "big"), 1)
        policy.discard(number.to_bytes(32, "big"))
    policy.release(B)
    assert order(policy) == "abc"


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
    assert len(policy.sizes()) == 30


def test_policies_are_made_by_name() -> None:
    assert isinstance(make_policy("LRU"), LRU)
    assert isinstance(make_policy("FIFO"), FIFO)
    assert make_policy("LRU") is not make_policy("LRU")
    with pytest.raises(ConfigError, match=r"'lfu'; known are: LRU, FIFO, LFU, MRU, ARC, SLRU, S3FIFO, SIEVE, ADAPTIVE"):
        make_policy("lfu")


def test_admissions_are_made_by_name() -> None:
    made = {name: type(make_admission(name)) for name in ADMISSIONS}
    assert made == {"all": AdmitAll, "second_touch": SecondTouch, "min_tokens": MinTokens, "none": AdmitNone}
    admission: Any = make_admission("min_tokens:512")
    assert admission.min_tokens == 512
    for unknown in ("some", "min_tokens:0", "min_tokens:", "second_touch:3"):
        raised(ConfigError, rf"'{unknown}'; known are: all, second_touch, min_tokens, none", make_admission, unknown)


def test_all_and_none_do_as_they_say() -> None:
    assert [AdmitAll().admit(key) for key in (A, A, B)] == [True] * 3
    assert [AdmitNone().admit(key) for key in (A, A, B)] == [False] * 3


def test_second_touch_admits_from_the_second_offer_on() -> None:
    """And forgets what was offered longest ago."""
    admission = SecondTouch(8)
    assert [admission.admit(key) for key in (A, B, A, A, B)] == [False, False, True, True, True]
    admission = SecondTouch(2)
    assert [admission.admit(key) for key in (A, B, A, C)] == [False, False, True, False]
    assert [admission.admit(key) for key in (A, B)] == [True, False]
    for number in range(1000):
        admission.admit(number.to_bytes(32, "big"))
    assert len(admission._offered) == 2
    raised(UsageError, "max_keys", SecondTouch, 0)


def test_min_tokens_admits_chunks_of_long_prompts() -> None:
    admission = MinTokens(100, max_keys=2)
    admission.prompt([A, B], 99)
    assert not admission.admit(A)
    admission.prompt([A], 100)
    admission.prompt([A, C], 50)
    assert [admission.admit(key) for key in (A, B, C)] == [True, False, False]
    admission.prompt([B, C], 200)
    assert [admission.admit(key) for key in (A, B, C)] == [False, True, True], "it must be bounded"
    raised(UsageError, "min_tokens must be positive, not 0", MinTokens, 0)


# -- `position_cost`: a hit far into a prompt saves more than one near its beginning -----------------------------

TIER, LONG, SHORT = 130, 40, 4
"""Chunks that have room, of a long prompt, and of a short one."""


def hits(policy: ADAPTIVE, turns: int) -> tuple[int, int]:
    """Chunks found of long prompts, each of which comes twice, and of twelve short ones, which come in every turn.

    There is room for one kind or the other, as new prompts come in between.
    """
    tier, deep, shallow = Shadow(policy, TIER), 0, 0
    for turn in range(turns):
        tier.request(chain(f"long {turn}", LONG), 1)
        for number in range(15):
            tier.request(chain(f"new {turn} {number}", SHORT), 1)
        deep += tier.request(chain(f"long {turn}", LONG), 1)
        for number in range(12):
            shallow += tier.request(chain(f"short {number}", SHORT), 1)
        for number in range(15, 30):
            tier.request(chain(f"new {turn} {number}", SHORT), 1)
    return deep, shallow


def test_with_a_position_cost_adaptive_keeps_what_costs_more_to_compute() -> None:
    turns = 100
    most, costly = ADAPTIVE(), ADAPTIVE(position_cost=0.1)
    deep, shallow = hits(most, turns)
    assert most.weight > 1
    assert shallow > deep, "more chunks are found of the short ones"
    assert hits(costly, turns)[0] > 2 * deep
    assert costly.weight == 1
