"""Pins, priorities, prefetches and sessions are bounded, end, and belong to a client."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, strategies as st

import lmkv.store.hints
from lmkv.chunks.hashing import StateKey, TailKey, state_keys
from lmkv.chunks.namespace import tenants_of
from lmkv.policies import LRU, POLICIES, Quotas, make_policy
from lmkv.protocols import ChunkKey, Policy, Tier
from lmkv.store.claims import STEP, Claims
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.kit import LIMIT, NEVER, Gated, chain, listing_every, lower, memory, put, put_below, put_through, small_store

DAY = 86_000.0


def with_quotas(slots: int, *tiers: Tier, **shares: float) -> TieredStore:
    with listing_every(NEVER):
        return TieredStore(Tier(memory(slots), Quotas(LRU, shares)), tiers, clock=ManualClock())


def put_as(store: TieredStore, tenant: str, keys: list[ChunkKey]) -> None:
    store.hints.label(keys, [tenant])
    put(store, keys)


Claim = Callable[[list[ChunkKey]], object]


def store_each(store: TieredStore, chains: Iterable[list[ChunkKey]], *claims: Claim) -> None:
    for keys in chains:
        put(store, keys)
        for claim in claims:
            claim(keys)


def store_below(store: TieredStore, chains: Iterable[list[ChunkKey]]) -> None:
    for keys in chains:
        put_below(store, keys)


def pinned_by(store: TieredStore, owner: str) -> Claim:
    return lambda keys: store.pin(keys, DAY, owner=owner.encode())


def prefetched_by(store: TieredStore, owner: str) -> Callable[[list[ChunkKey]], Promotion]:
    return lambda keys: store.promote(keys, prefetch=True, ttl=DAY, owner=owner.encode())


def preferred_by(store: TieredStore, owner: str, priority: int = 9) -> Claim:
    return lambda keys: store.hints.set_priority(keys, priority, DAY, owner=owner.encode())


def many(name: str, count: int, length: int = 1) -> list[list[ChunkKey]]:
    """As many chains, of other names."""
    return [chain(f"{name} {number}", length) for number in range(count)]


def in_memory(store: TieredStore, *chains: list[ChunkKey]) -> list[int]:
    return [store.catalog.count_prefix(keys)[0] for keys in chains]


# -- the record ----------------------------------------------------------------------------------------------


CALLS = ("add", "add", "add", "pop", "due", "excess")


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(CALLS), st.integers(0, 9), st.integers(0, 2), st.integers(1, 9)), max_size=80
    )
)
def test_claims_end_when_they_are_due_or_too_many(calls: list[tuple[str, int, int, int]]) -> None:
    claims: Claims[int, str] = Claims()
    known: dict[int, tuple[bytes, int, float]] = {}

    def owned(owner: bytes) -> int:
        return sum(size for each, size, _ in known.values() if each == owner)

    for number, (call, key, who, size) in enumerate(calls):
        owner = bytes([who])
        if call == "add":
            end = math.inf if size == 9 else float(number + size)
            claims.add(key, owner, size=size, end=end, value=f"{key}")
            known.pop(key, None)
            known[key] = owner, size, end
        elif call == "pop":
            assert claims.pop(key) == (f"{key}" if known.pop(key, None) else None)
        elif call == "due":
            assert {ended for ended, _ in claims.due(float(number))} == {
                each for each, (_, _, end) in known.items() if end <= number
            }
            known = {each: claim for each, claim in known.items() if claim[2] > number}
        else:
            for ended, _ in claims.excess(2 * size):
                mine = known[ended][0]
                assert owned(mine) == max(owned(each) for each, _, _ in known.values())
                assert ended == next(each for each, claim in known.items() if claim[0] == mine)
                del known[ended]
            assert sum(size for _, size, _ in known.values()) <= 2 * size
        assert (len(claims), claims.total) == (len(known), sum(size for _, size, _ in known.values()))
        assert all(claims.owned(bytes([each])) == owned(bytes([each])) for each in range(3))


class Looked:
    """Counts the lines of lmkv that run."""

    def __init__(self) -> None:
        self.lines = 0

    def __enter__(self) -> Looked:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: Any, event: str, arg: object) -> Any:
        return self._line if "/lmkv/" in frame.f_code.co_filename else None

    def _line(self, frame: Any, event: str, arg: object) -> Any:
        self.lines += event == "line"
        return self._line


def pins(store: TieredStore, number: int) -> None:
    keys = chain("a", 4)
    store.pin(keys, DAY - number % 7, owner=b"%d" % (number % 50))


def priorities(store: TieredStore, number: int) -> None:
    store.hints.set_priority(chain(f"{number % 5000}", 1), 1 + number % 9, DAY, owner=b"%d" % (number % 50))


def priorities_of_sessions(store: TieredStore, number: int) -> None:
    store.hints.set_priority(chain("a", 4), 1 + number % 9, DAY, owner=b"root", session=f"{number}")


def sessions(store: TieredStore, number: int) -> None:
    store.hints.session(b"%d" % (number % 50), f"session {number}", chain("a", 4))


def prefetches(store: TieredStore, number: int) -> None:
    store.promote(chain("a", 4), prefetch=True, ttl=DAY, owner=b"%d" % (number % 50))


@pytest.mark.parametrize("claim", [pins, priorities, priorities_of_sessions, sessions, prefetches])
def test_a_call_looks_at_no_more_after_many_claims(
    claim: Callable[[TieredStore, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmkv.store.hints, "MAX_HINTED", 2000)
    with closing(small_store(64)) as store:
        put(store, chain("a", 4))
        looked = []
        for first, last in ((0, 200), (200, 20_000)):
            for number in range(first, last):
                claim(store, number)
            with Looked() as seen:
                store.reserve(())
                store.promote(chain("b", 1)).release()
                claim(store, last)
            looked.append(seen.lines)
        # A heap is deeper, and one claim ends another where they are too many.
        assert looked[1] <= looked[0] + 600, looked


def test_what_ends_together_ends_in_several_calls() -> None:
    claims: Claims[int, int] = Claims()
    for number in range(3 * STEP):
        claims.add(number, b"", size=1, end=1.0, value=number)
    assert [len(list(claims.due(2.0))) for _ in range(4)] == [STEP, STEP, STEP, 0]


# -- pins ----------------------------------------------------------------------------------------------------


def test_pins_leave_room_for_others() -> None:
    store = small_store(20)
    store_each(store, many("mallory", 20, 2), pinned_by(store, "mallory"))
    assert store.stats().pinned == 10
    put(store, chain("alice", 10))
    assert in_memory(store, chain("alice", 10)) == [10]


def test_who_pins_much_loses_the_oldest_for_who_pins_little() -> None:
    store, theirs, alice = small_store(20), many("mallory", 5, 2), chain("alice", 4)
    store_each(store, theirs, pinned_by(store, "mallory"))
    assert store.stats().pinned == 10
    put(store, alice)
    assert store.pin(alice, 10.0, owner=b"alice") == 4
    assert store.stats().pinned == 10
    put(store, chain("flood", 10))
    assert in_memory(store, alice, *theirs) == [4, 0, 0, 2, 2, 2]
    store_each(store, many("more", 50), pinned_by(store, "mallory"))
    assert in_memory(store, alice) == [4]


def test_of_a_chain_that_is_too_long_the_beginning_is_pinned() -> None:
    store, keys = small_store(8), chain("a", 7)
    put(store, keys)
    assert store.pin(keys, DAY) == 4
    put(store, chain("b", 4))
    assert in_memory(store, keys) == [4]


def test_pins_count_against_the_quota_of_their_tenant() -> None:
    store, alice = with_quotas(20, alice=0.6), many("alice", 4, 3)
    for tenant, chains, pinned in (("mallory", many("mallory", 20), 4), ("alice", alice, 4 + 6)):
        for keys in chains:
            put_as(store, tenant, keys)
            store.pin(keys, DAY, owner=tenant.encode())
        assert store.stats().pinned == pinned
    assert in_memory(store, *alice) == [3, 3, 3, 3]
    store = with_quotas(20, alice=0.5, bob=0.5)
    put(store, chain("carol", 4))
    assert store.pin(chain("carol", 4), DAY) == 0, "what quotas leave to nobody is not pinned"


# -- prefetches ----------------------------------------------------------------------------------------------


def test_prefetches_and_pins_leave_slots_to_loads() -> None:
    with listing_every(NEVER):
        store = small_store(16, lower(memory(60, "low")), prefetch_share=1.0, pin_share=1.0)
    below, here = chain("below", 16), chain("here", 16)
    put_below(store, below)
    for key in here:
        put_through(store, [key])
    assert store.pin(here, DAY) == 14
    store.drop(here[6:])
    assert store.stats().pinned == 6
    prefetch = store.promote(below, prefetch=True, ttl=DAY)
    assert len(prefetch) == 8
    demand = store.promote(below)
    assert demand.wait(LIMIT)
    assert demand.ready == 10


def test_who_prefetches_much_loses_the_oldest_for_who_prefetches_little() -> None:
    store = small_store(16, lower(memory(60, "low")))
    wanted, alice = many("mallory", 6, 2), chain("alice", 3)
    store_below(store, [*wanted, alice])
    theirs = list(map(prefetched_by(store, "mallory"), wanted))
    assert [len(each) for each in theirs] == [2, 2, 2, 2, 0, 0]
    hers = prefetched_by(store, "alice")(alice)
    assert len(hers) == 3
    assert [each.released for each in theirs[:4]] == [True, True, False, False]
    more = map(prefetched_by(store, "mallory"), wanted)
    assert not hers.released
    assert len({key for each in (*theirs, *more) if not each.released for key in each.keys}) == 5


def test_prefetches_count_against_the_quota_of_their_tenant() -> None:
    low = Tier(memory(60, "low"), Quotas(LRU, {"alice": 0.5}), capacity_bytes=60 << 12)
    store = with_quotas(16, low, alice=0.5)
    mallory, alice = chain("mallory", 12), chain("alice", 12)
    for tenant, keys in (("mallory", mallory), ("alice", alice), ("carol", chain("flood", 16))):
        for key in keys:
            put_as(store, tenant, [key])
            assert store.drain(LIMIT)
    store.drop([*mallory, *alice])
    assert len(store.promote(mallory, prefetch=True, ttl=DAY, owner=b"m")) == 4
    assert len(store.promote(alice, prefetch=True, ttl=DAY, owner=b"a")) == 4


def test_the_same_prefetch_again_and_again_is_not_kept_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.store.promoter._MAX_KEPT", 100)
    store = small_store(16, lower(memory(60, "low")))
    keys = chain("a", 4)
    put(store, keys)
    for _ in range(500):
        store.promote(keys, prefetch=True, ttl=DAY)
    assert store.snapshot().promotions <= 100 // 5


# -- priorities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"MRU"}))  # which keeps the oldest, whatever their priority
def test_a_priority_takes_half_of_the_tier_at_most(name: str) -> None:
    store = small_store(20, policy=name)
    store_each(store, many("mallory", 10, 4), store.touch, preferred_by(store, "mallory"))
    store_each(store, many("alice", 4, 4), store.touch, store.touch)
    assert sum(in_memory(store, *many("mallory", 10, 4))) <= 10


def test_the_lowest_priority_goes_first_and_then_the_first_that_was_spared() -> None:
    policy = LRU()
    high, low = chain("high", 3), chain("low", 3)
    for key in (*high, *low):
        policy.insert(key, 10)
    policy.hint(high, 9)
    policy.hint(low, 1)
    assert policy.evict(30) == low
    assert policy.evict(30) == high


def test_of_chains_with_one_priority_the_first_goes_as_a_whole() -> None:
    policy = LRU()
    chains = [chain(name, 3) for name in "abc"]
    for keys in chains:
        policy.insert_chain(keys, 10, [b"", *keys[:-1]])
        policy.touch(keys)
        policy.hint(keys, 5)
    assert policy.evict(30) == chains[0][::-1]


def test_a_priority_has_an_end_of_its_own() -> None:
    clock = ManualClock()
    store, keys = small_store(8, clock=clock), chain("a", 4)
    put(store, keys)
    store.hints.set_priority(keys, 9)
    for kept, seconds in ((4, 301), (0, 0)):
        store_each(store, many(f"{kept}", 2, 4))
        assert in_memory(store, keys) == [kept]
        clock.advance(seconds)


class Key(bytes):
    """A key that counts how often any is looked for."""

    asked = 0

    def __hash__(self) -> int:
        Key.asked += 1
        return bytes.__hash__(self)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_evicting_costs_the_same_with_many_hints_as_with_few(name: str) -> None:
    """The same number of looks at keys for each victim, for any size of the tier."""
    asked = []
    for count in (200, 4000):
        policy: Any = make_policy(name)
        keys = [Key(key) for key in chain(name, count)]
        for key in keys:
            policy.insert(key, 10)
        policy.hint(keys, 3)
        policy.evict(10 * count // 10)
        Key.asked = 0
        for _ in range(20):
            policy.evict(10)
        asked.append(Key.asked)
    assert asked[1] <= 2 * asked[0] + 100, asked


# -- sessions ------------------------------------------------------------------------------------------------


def test_a_session_belongs_to_its_owner() -> None:
    store = small_store(12)
    alice, mallory = chain("alice", 5), chain("mallory", 1)
    put(store, chain("old", 5))
    put(store, alice)
    put(store, mallory)
    store.hints.session(b"alice", "worker-7", alice)
    store.hints.session(b"mallory", "worker-7", mallory, ended=True)
    assert not store.hints.end_session(b"mallory", "worker-7")
    put(store, chain("new", 5))
    assert in_memory(store, alice) == [5]
    assert store.hints.end_session(b"alice", "worker-7")


def test_a_long_name_takes_no_room() -> None:
    store = small_store(4)
    for number in range(100):
        store.hints.session(b"root", f"{number}" + "x" * (1 << 20), chain("a", 1))
    kept = store.hints._sessions._claims
    assert len(kept) == 100
    assert sum(map(sys.getsizeof, kept)) < 100 * 100


def test_a_tenant_with_many_sessions_forgets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmkv.store.hints, "MAX_HINTED", 100)
    store = small_store(4)
    store.hints.session(b"alice", "one", chain("alice", 5))
    for number in range(1000):
        store.hints.session(b"mallory", f"{number}", chain("a", 5))
    assert store.hints.counts()["sessions"] <= 100
    assert store.hints.end_session(b"alice", "one")


def test_a_session_that_is_not_heard_of_is_forgotten() -> None:
    clock = ManualClock()
    store = small_store(4, clock=clock)
    store.hints.session(b"alice", "one", chain("alice", 2))
    clock.advance(2 * DAY)
    store.reserve(())
    assert not store.hints.end_session(b"alice", "one")


# -- tails and states, which have slots of their own ---------------------------------------------------------


def with_state(name: str) -> list[ChunkKey]:
    """A chunk and the state behind it."""
    keys = chain(name, 1)
    return [*keys, *state_keys(keys[-1], 1)]


def with_tail(name: str) -> list[ChunkKey]:
    keys = chain(name, 2)
    return [keys[0], TailKey.of(keys[1], 5)]


@pytest.mark.parametrize("of", [with_state, with_tail])
def test_pins_leave_states_and_tails_to_others(of: Callable[[str], list[ChunkKey]]) -> None:
    store = small_store(24)
    store_each(store, [of(f"mallory {number}") for number in range(30)], pinned_by(store, "mallory"))
    put(store, of("alice"))
    assert in_memory(store, of("alice")) == [2]


@pytest.mark.parametrize("of", [with_state, with_tail])
def test_a_flood_of_states_or_tails_leaves_a_tenant_its_own(of: Callable[[str], list[ChunkKey]]) -> None:
    store = with_quotas(64, alice=0.5)
    alice = [of(f"alice {number}") for number in range(4)]
    for keys in alice:
        put_as(store, "alice", keys)
    store_each(store, [of(f"mallory {number}") for number in range(100)])
    assert in_memory(store, *alice) == [2, 2, 2, 2]


# -- before the chunks are there -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: LRU(), lambda: Quotas(LRU, {})], ids=["lru", "quotas"])
@pytest.mark.parametrize(("priority", "there"), [(5, [0, 0, 2, 0]), (-1, [2, 2, 0, 2])], ids=["kept", "given up"])
def test_a_hint_holds_in_a_tier_that_is_still_being_written(
    make: Callable[[], Policy], priority: int, there: list[int]
) -> None:
    """A tier first evicts chunks that were given up before they arrived, and last those with a priority."""
    gated = Gated(memory(8, "low"))
    store = small_store(32, Tier(gated, make(), capacity_bytes=6 << 12))
    chains = many("a", 4, 2)
    put_through(store, chains[0])
    put_through(store, chains[1])
    gated.shut("write")
    put(store, chains[2])
    gated.waiting("write")
    store.hints.set_priority(chains[2], priority, DAY)
    gated.open()
    assert store.drain(LIMIT)
    put_through(store, chains[3])
    put_through(store, chain("b", 4 if priority > 0 else 0))
    store.drop([key for keys in chains for key in keys])
    assert [store.catalog.count_prefix(keys)[1] for keys in chains] == there


def test_hints_about_keys_that_never_come_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    store = small_store(8)
    monkeypatch.setattr("lmkv.store.guards.MAX_GIVEN_UP", 10)
    for number in range(1000):
        store.hints.set_priority(chain(f"{number}", 1), -1)
    assert len(store._primary.order._given_up) == 10


def test_a_chunk_that_comes_back_has_its_priority_again() -> None:
    """It was evicted, or lost, while it was prioritized for."""
    clock = ManualClock()
    store, keys = small_store(16, clock=clock), chain("a", 4)
    put(store, keys)
    store.hints.set_priority(keys, 1, 60.0, owner=b"root")
    store.drop(keys[2:])
    put(store, keys)
    assert kept_after(store, clock, keys, 1) == 4
    assert kept_after(store, clock, keys, 60) == 0


def test_no_labels_of_a_tenant_make_a_priority_endless() -> None:
    """The claim was for chunks that came after its end."""
    clock, host = ManualClock(), Tier(memory(32), Quotas(LRU, {"red": 0.5}))
    store, keys = TieredStore(host, clock=clock), chain("mallory", 4)
    store.hints.label(keys, ["red"])
    store.hints.set_priority(keys, 9, 10.0, owner=b"mallory")
    store.hints.label(chain("flood", 1 << 16), ["red"])
    clock.advance(11.0)
    store.reserve(())
    store.hints.label(keys, ["red"])
    put(store, keys)
    for number in range(60):
        other = chain(f"other {number}", 1)
        store.hints.label(other, ["red"])
        put(store, other)
    assert in_memory(store, keys) == [0]


# -- what another claim, a restart or a repair must not take -------------------------------------------------


def kept_after(store: TieredStore, clock: ManualClock, keys: list[ChunkKey], seconds: float) -> int:
    clock.advance(seconds)
    store_each(store, many(f"flood {seconds}", 40))
    return in_memory(store, keys)[0]


@pytest.mark.parametrize("first", ["long", "short"])
@pytest.mark.parametrize("of", ["the same", "a longer one"])
@pytest.mark.parametrize("claim", ["priority", "pin"])
def test_no_claim_ends_another(claim: str, first: str, of: str) -> None:
    clock = ManualClock()
    store, prompt, longer = small_store(16, clock=clock), chain("a", 3), chain("a", 5)
    put(store, longer)
    claims = [(prompt, 3600.0), (prompt if of == "the same" else longer, 10.0)]
    for keys, seconds in claims if first == "long" else claims[::-1]:
        store.pin(keys, seconds) if claim == "pin" else store.hints.set_priority(keys, 1, seconds, owner=b"root")
    assert kept_after(store, clock, prompt, 11) == 3
    assert kept_after(store, clock, prompt, 3600) == 0


def test_a_chunk_has_the_highest_of_its_priorities() -> None:
    clock = ManualClock()
    store, keys = small_store(16, clock=clock), chain("a", 3)
    put(store, keys)
    policy: Any = store.policies[0]
    store.hints.set_priority(keys, 2, 100)
    store.hints.set_priority(keys, 7, 10)
    kept = policy._kept
    assert {kept[key] for key in keys} == {7}
    clock.advance(11)
    store.reserve(())
    assert {kept[key] for key in keys} == {2}
    store.hints.set_priority(keys, 0)
    assert not kept
    assert not any(store.hints.counts().values())


def test_the_end_of_a_session_ends_its_own_claims_alone() -> None:
    store, keys = small_store(16), chain("a", 3)
    put(store, keys)
    policy: Any = store.policies[0]
    store.hints.set_priority(keys, 1, 100, b"root", "mine")
    store.hints.session(b"root", "mine", keys, ended=True)
    assert len(policy._first) == 3
    store.touch(keys)
    store.hints.set_priority(keys, 1, 100, b"root", "another's")
    store.hints.session(b"root", "mine", keys, ended=True)
    assert (len(policy._first), len(policy._kept)) == (0, 3)


def test_priorities_of_one_owner_leave_those_of_others() -> None:
    store, alice = small_store(32), chain("alice", 4)
    put(store, alice)
    preferred_by(store, "alice", 1)(alice)
    store_each(store, many("mallory", 200, 2), preferred_by(store, "mallory"))
    assert in_memory(store, alice) == [4]


def test_one_clients_claims_leave_an_eighth_of_the_states() -> None:
    store = small_store(96, lower(memory(600, "low")), pin_share=1.0, prefetch_share=1.0)
    for number in range(80):
        keys = with_state(f"mallory {number}")[1:]
        put_through(store, keys)
        store.pin(keys, DAY) or store.promote(keys, prefetch=True, ttl=DAY)
    states = store._primary.states
    assert store.snapshot().prioritized[StateKey] == states.limit - states.limit // 8
    store_each(store, [with_state(f"alice {number}")[1:] for number in range(20)])
    assert states.count_ready() == states.limit


def test_a_store_of_a_state_looks_at_no_state_that_is_in_use() -> None:
    looked = []
    for slots in (96, 960):
        store = small_store(slots, pin_share=1.0)
        store_each(store, [with_state(f"{number}")[1:] for number in range(slots)], pinned_by(store, "mallory"))
        with Looked() as seen:
            put(store, with_state("alice")[1:])
        looked.append(seen.lines)
    assert looked[1] <= looked[0] + 10


def test_a_tenants_claims_for_all_kinds_of_keys_are_within_its_quota() -> None:
    store = with_quotas(96, alice=0.5, bob=0.5)
    for number in range(60):
        keys = with_state(f"alice {number}")
        put_as(store, "alice", keys)
        store.pin(keys, DAY, owner=b"alice")
    assert store.stats().pinned <= 24


def test_what_was_nobodys_is_a_tenants_once_it_asks() -> None:
    """After a restart an index knows the chunks of a disk, and not whose they are."""
    policy, alice = Quotas(LRU, {"alice": 0.5}), chain("alice", 4)
    for at in reversed(range(4)):
        policy.insert(alice[at], 10, alice[at - 1] if at else b"")
    policy.hold(alice[0])
    policy.label(alice, ["alice"])
    assert policy.used_bytes() == {"alice": 40}
    for number in range(20):
        if number > 5:
            policy.evict(10)
        policy.insert(bytes([number]) * 32, 10)
    assert policy.used_bytes()["alice"] == 40
    policy.release(alice[0])
    policy.label(alice, ["bob"])
    assert policy.used_bytes()["alice"] == 40
    assert (policy.evict(100) or [])[-4:] == alice[::-1]


def test_labels_of_others_push_out_no_tenants() -> None:
    policy, alice = Quotas(LRU, {"alice": 0.5}), chain("alice", 4)
    policy.label(alice, ["alice"])
    for number in range(70):
        policy.label(chain(f"mallory {number}", 1000), ["mallory"])
    for key in alice:
        policy.insert(key, 10)
    assert policy.used_bytes() == {"alice": 40}


def test_a_repair_forgets_neither_tenants_nor_priorities() -> None:
    store = with_quotas(16, alice=0.5)
    alice, kept = chain("alice", 4), chain("kept", 3)
    put_as(store, "alice", alice)
    put(store, kept)
    store.hints.set_priority(kept, 3, DAY)
    store._changes.lost.append(None)
    store_each(store, many("flood", 40))
    assert in_memory(store, alice, kept) == [4, 3]
    assert store.hints.used_bytes()["cpu"]["alice"] == 4 * store.slab.slot_bytes


def test_a_claim_ends_no_crowd_of_others() -> None:
    """Claims of many sessions for one prompt, and then one too many."""
    looked = []
    for count in (200, 20_000):
        store = small_store(64)
        for number in range(count):
            store.hints.set_priority(chain("a", 1), 1, DAY, b"root", f"{number}")
        with Looked() as seen:
            store.hints.set_priority(chain("b", 40), 1, DAY, b"root")
            store.hints.session(b"root", "0", chain("a", 1), ended=True)
            store.hints.set_priority(chain("a", 1), 0)
        looked.append(seen.lines)
        store.close()
    assert looked[1] <= looked[0] + 100, looked


def test_whose_prompts_share_a_beginning_has_no_more_for_it() -> None:
    store, shared = small_store(512), chain("shared", 20)
    for number in range(200):
        store.hints.set_priority([*shared, *chain(f"{number}", 1)], 1, DAY, b"alice", f"{number}")
    for number in range(600):
        store.hints.set_priority(chain(f"mallory {number}", 1), 1, DAY, b"mallory")
    owned = store.hints.owned()
    assert owned[b"alice"] >= 127
    assert owned[b"mallory"] <= 129


def test_priorities_count_against_the_quota_of_their_tenant() -> None:
    store = with_quotas(40, alice=0.8)
    for tenant, count, priority in (("mallory", 20, 1), ("alice", 16, 9)):
        for keys in many(tenant, count):
            put_as(store, tenant, keys)
            store.hints.set_priority(keys, priority, DAY, owner=tenant.encode())
    assert store.hints.owned("alice").total() == 16
    assert store.hints.owned().total() <= 4


def test_a_key_that_was_labelled_twice_is_one_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv.policies.quota._MAX_LABELLED", 10)
    policy = Quotas(LRU, {"alice": 0.4, "bob": 0.4})
    key = chain("a", 1)
    policy.label(key, ["alice"])
    policy.label(key, ["bob"])
    policy.insert(key[0], 10)
    policy.label(chain("b", 20), ["alice"])
    policy.touch(key)
    assert policy.used_bytes() == {"bob": 10}
    assert policy.evict(10) == key


def test_prefetches_that_share_a_beginning_count_it_once() -> None:
    store, shared = small_store(64, lower(memory(200, "low"))), chain("shared", 10)
    prompts = [[*shared, *chain(f"{number}", 1)] for number in range(15)]
    store_below(store, prompts)
    mine = list(map(prefetched_by(store, "alice"), prompts))
    for keys in many("mallory", 20):
        put_below(store, keys)
        prefetched_by(store, "mallory")(keys)
    assert sum(not each.released for each in mine) >= 6, "she has sixteen slots then, as many as he"


def test_a_chunk_that_becomes_a_tenants_keeps_its_priority() -> None:
    store, keys = with_quotas(16, alice=0.5), chain("a", 2)
    put(store, keys)
    store.hints.set_priority(keys, 4, DAY)
    store.hints.label(keys, ["alice"])
    policies: Any = store.policies[0]
    assert set(policies._policies["alice"]._kept) == set(keys)


def test_tags_that_could_be_taken_for_others_are_no_tenants() -> None:
    assert tenants_of(None, [("team", "a:b"), ("team:a", "b"), ("a", "x")]) == ["a:x", "team:a:b"]


def test_no_prefetch_ends_a_demand() -> None:
    store = small_store(16, lower(memory(60, "low")))
    demanded, first, second = chain("demanded", 4), chain("first", 8), chain("second", 4)
    store_below(store, [demanded, first, second])
    demand = store.promote(demanded, ttl=DAY)
    store.promote(first, prefetch=True, ttl=DAY)
    assert len(store.promote(second, prefetch=True, ttl=DAY, owner=b"another")) == 4
    assert not demand.released


def test_the_only_slot_for_tails_is_not_pinned() -> None:
    store = small_store(10)
    assert store._primary.tails.limit == 1
    put(store, with_tail("mallory"))
    assert store.pin(with_tail("mallory"), DAY) == 1
    put(store, with_tail("alice"))
    assert in_memory(store, with_tail("alice")) == [2]
