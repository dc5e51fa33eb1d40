"""TieredStore against an oracle of plain dictionaries, with its I/O stopped at every point.

A key's *version* changes whenever it is deleted or everything is cleared: what is leased from then on must
never be of an older one, however the store's writes, reads and deletions lie.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from operator import attrgetter
from typing import Any

import attrs
import pytest
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.policies import LRU, AdmitNone, SecondTouch
from lmkv.protocols import HIT, ChunkKey, Presence
from lmkv.store.entries import State
from lmkv.store.leases import Lease, Reservation
from lmkv.store.promotion import Promotion
from lmkv.testing import ManualClock
from lmkv.testing.faults import FaultyBackend
from tests.interrupted import Interrupted
from tests.kit import SLOT, Residents, chain, lower, memory, payload, small_store
from tests.store.stepped import Pausing, stepped

CHAINS = {name: chain(name, 4) for name in "ab"}
ALL = [key for keys in CHAINS.values() for key in keys]

spans = st.tuples(st.sampled_from("ab"), st.sampled_from([0, 0, 0, 1, 2]), st.integers(1, 4))
numbers = st.integers(0, 7)


def keys_of(span: tuple[str, int, int]) -> list[ChunkKey]:
    name, start, count = span
    return CHAINS[name][start : start + count]


@define
class Leased:
    """A lease, and what must be in each of its slots until it ends."""

    lease: Lease
    contents: list[bytes]


@define
class Open:
    reservation: Reservation
    keys: list[ChunkKey]
    """The chunks that it reserved."""


@pytest.fixture(autouse=True)
def no_warnings_of_faults(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "lmkv")


class Unreliable(LRU):
    """A policy of another package, which raises from the 25th of its calls on."""

    calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= 25:
            raise RuntimeError("of another package")

    def insert_chain(self, keys: Sequence[ChunkKey], size: int, parents: Sequence[ChunkKey]) -> None:
        super().insert_chain(keys, size, parents)
        self._count()

    def hold(self, key: ChunkKey) -> None:
        self._count()
        super().hold(key)

    def evict(self, nbytes: int, protect: Set[ChunkKey] = frozenset()) -> list[ChunkKey] | None:
        self._count()
        return super().evict(nbytes, protect)


ORDERS = ["LRU", "FIFO", f"{__name__}:Unreliable"]


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 7),
        policy=st.sampled_from(ORDERS),
        tiers=st.lists(
            st.fixed_dictionaries(
                {
                    "slots": st.integers(1, 8),
                    "write": st.sampled_from(["through", "back"]),
                    "policy": st.sampled_from(ORDERS),
                    "admission": st.sampled_from([None, None, SecondTouch, AdmitNone]),
                }
            ),
            max_size=2,
        ),
        error_rate=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        retain=st.sampled_from([True, True, True, False]),
        seed=st.integers(0, 3),
    )
    def start(self, slots: int, policy: str, tiers: list[Any], error_rate: float, retain: bool, seed: int) -> None:
        self.clock = ManualClock()
        self.media: list[tuple[CPUPinnedBackend, int]] = []
        self.faulty: list[FaultyBackend] = []
        below = [self.make_tier(number, options, error_rate, seed) for number, options in enumerate(tiers)]
        with stepped():
            self.store = small_store(slots, *below, policy=policy, clock=self.clock, retain=retain, io_threads=3)
        self.pool: Any = self.store._pool
        self.told = Residents()
        self.store.catalog.add_observer(self.told)
        self.retain = retain
        self.version = dict.fromkeys(ALL, 0)
        self.committed: set[ChunkKey] = set()
        self.leases: list[Leased] = []
        self.reservations: list[Open] = []
        self.promotions: list[Promotion] = []
        self.pins: dict[ChunkKey, float] = {}

    def make_tier(self, number: int, options: dict[str, Any], error_rate: float, seed: int) -> Any:
        slots, admission = options.pop("slots"), options.pop("admission")
        medium = memory(slots + 2, f"tier {number}")
        self.media.append((medium, slots))
        self.faulty.append(FaultyBackend(medium, seed=seed, error_rate=error_rate))
        return lower(Pausing(self.faulty[-1]), slots, admission=admission and admission(), **options)

    # -- storing ------------------------------------------------------------------------------------------

    @rule(span=spans, protected=st.booleans())
    def reserve(self, span: tuple[str, int, int], protected: bool) -> None:
        keys = keys_of(span)
        reservation = self.store.reserve(keys, protect=CHAINS[span[0]] if protected else ())
        assert reservation.accepted <= len(keys)
        assert set(reservation.slots) <= set(keys[: reservation.accepted])
        for key, slot in reservation.slots.items():
            self.store.slab.view(slot)[:] = payload(key, self.version[key])
        self.reservations.append(Open(reservation, list(reservation.slots)))

    @precondition(lambda self: self.reservations)
    @rule(which=numbers, part=st.integers(0, 4))
    def commit(self, which: int, part: int) -> None:
        """The first `part` keys; the rest is aborted."""
        opened = self.reservations.pop(which % len(self.reservations))
        done = opened.keys[:part]
        valid = [
            key
            for key in done
            if bytes(self.store.slab.view(opened.reservation.slots[key])) == payload(key, self.version[key])
        ]
        with opened.reservation:
            opened.reservation.commit(done)
        # One that was deleted meanwhile is of an older version, and does not count.
        self.committed.update(valid)

    @rule(span=spans, moves=st.lists(numbers, max_size=12))
    def store_at_once(self, span: tuple[str, int, int], moves: list[int]) -> None:
        self.reserve(span, True)
        self.commit(-1, 4)
        self.io_moves(moves)

    @rule(name=st.sampled_from("ab"))
    def store_everywhere(self, name: str) -> None:
        for start in range(4):
            self.reserve((name, start, 1), True)
            self.commit(-1, 4)
            self.pool.drain(0)

    # -- reading ------------------------------------------------------------------------------------------

    @rule(span=spans)
    def lease(self, span: tuple[str, int, int]) -> None:
        keys = keys_of(span)
        lease = self.store.lease(keys)
        assert lease.keys == keys[: len(lease)]
        contents = [payload(key, self.version[key]) for key in lease.keys]
        self.leases.append(Leased(lease, contents))
        self.check_lease(self.leases[-1])
        assert set(lease.keys) <= self.committed

    def check_lease(self, leased: Leased) -> None:
        for slot, content in zip(leased.lease.slots, leased.contents, strict=True):
            assert bytes(self.store.slab.view(slot)) == content

    @precondition(lambda self: self.leases)
    @rule(which=numbers)
    def end_lease(self, which: int) -> None:
        leased = self.leases.pop(which % len(self.leases))
        self.check_lease(leased)
        leased.lease.release()
        leased.lease.release()

    @rule(span=spans, prefetch=st.booleans(), limit=st.sampled_from([None, 0, 2]), ttl=st.sampled_from([None, 1.0]))
    def promote(self, span: tuple[str, int, int], prefetch: bool, limit: int | None, ttl: float | None) -> None:
        keys = keys_of(span)
        promotion = self.store.promote(keys, prefetch=prefetch, limit=limit, ttl=ttl)
        assert promotion.keys == keys[:limit][: len(promotion)]
        self.promotions.append(promotion)

    @precondition(lambda self: self.promotions)
    @rule(which=numbers)
    def end_promotion(self, which: int) -> None:
        promotion = self.promotions.pop(which % len(self.promotions))
        if promotion.done and not promotion.released:
            present = self.store.catalog.lookup(promotion.keys[: promotion.ready])
            assert present == [Presence.READY] * promotion.ready
        promotion.release()

    @rule(span=spans, moves=st.lists(numbers, max_size=12))
    def read_at_once(self, span: tuple[str, int, int], moves: list[int]) -> None:
        """As an engine does: promote, wait a while, lease what is there, release all."""
        promotion = self.store.promote(keys_of(span))
        self.io_moves(moves)
        self.lease(span)
        promotion.release()
        self.end_lease(-1)
        self.store.touch(keys_of(span))

    # -- pins and time ------------------------------------------------------------------------------------

    @rule(span=spans, ttl=st.sampled_from([None, 0.5, 3.0]))
    def pin(self, span: tuple[str, int, int], ttl: float | None) -> None:
        """Or unpin, without a time to live."""
        keys = keys_of(span)
        if ttl is None:
            live = sum(self.pins.pop(key, 0) > self.clock() for key in keys)
            assert live <= self.store.unpin(keys) <= len(keys)
        else:
            count = self.store.pin(keys, ttl, owner=span[0].encode())
            assert count <= self.store.catalog.count_prefix(keys)[0]
            self.pins.update(dict.fromkeys(keys[:count], self.clock() + ttl))
            # Others may have ended for them.
            still = self.store.snapshot().pinned
            self.pins = {key: end for key, end in self.pins.items() if key in still}
            assert still >= set(keys[:count])

    @rule(seconds=st.sampled_from([0.1, 1.0, 70.0]), poll=st.booleans())
    def time_passes(self, seconds: float, poll: bool) -> None:
        self.clock.advance(seconds)
        if poll:
            self.store.reserve(())

    # -- interrupts ---------------------------------------------------------------------------------------

    @rule(
        span=spans,
        nth=st.integers(1, 40),
        verb=st.sampled_from(["lease", "touch", "catalog.count_prefix", "catalog.lookup"]),
    )
    def interrupt(self, span: tuple[str, int, int], nth: int, verb: str) -> None:
        """Ctrl-C in a call whose result nobody gets."""
        with suppress(KeyboardInterrupt), Interrupted(nth):
            attrgetter(verb)(self.store)(keys_of(span))
        self.store.reserve(())

    # -- removing -----------------------------------------------------------------------------------------

    @rule(span=spans, how=st.sampled_from(["drop", "drop", "delete", "delete", "clear"]))
    def remove(self, span: tuple[str, int, int], how: str) -> None:
        keys = ALL if how == "clear" else keys_of(span)
        known = sum(presence is not Presence.MISS for presence in self.store.catalog.lookup(keys))
        if how == "drop":
            self.store.drop(keys)
            assert Presence.READY not in self.store.catalog.lookup(keys)
        else:
            # clear() removes and counts the chunks of an unreachable tier, too.
            assert known <= (self.store.clear() if how == "clear" else self.store.delete(keys))
            assert self.store.catalog.lookup(keys) == [Presence.MISS] * len(keys)
            self.outdate(keys)
        for key in keys:
            self.pins.pop(key, None)

    def outdate(self, keys: list[ChunkKey]) -> None:
        for key in keys:
            self.version[key] += 1
            self.committed.discard(key)

    # -- I/O ----------------------------------------------------------------------------------------------

    @rule(moves=st.lists(numbers, min_size=1, max_size=12))
    def io_moves(self, moves: list[int]) -> None:
        self.pool.move(moves)

    @rule()
    def io_ends(self) -> None:
        self.pool.drain(0)

    @precondition(lambda self: self.faulty)
    @rule(which=numbers, times=st.integers(1, 8), fixed=st.booleans())
    def io_fails(self, which: int, times: int, fixed: bool) -> None:
        """The next calls fail; or the tier works from now on."""
        faulty = self.faulty[which % len(self.faulty)]
        if fixed:
            faulty.error_rate = 0.0
        for nth in range(0 if fixed else times):
            faulty.fail_call(nth + 1)

    # -- always -------------------------------------------------------------------------------------------

    @invariant()
    def what_is_found_was_committed(self) -> None:
        present = dict(zip(ALL, self.store.catalog.lookup(ALL), strict=True))
        assert {key for key in ALL if present[key] in (Presence.READY, Presence.LOWER)} <= self.committed
        for key, end in self.pins.items():
            assert end <= self.clock() or present[key] is Presence.READY, "a pinned chunk was evicted"

    @invariant()
    def observers_were_told_what_the_tiers_have(self) -> None:
        now = Residents()
        found = self.store.catalog.replay_to(now, ALL)
        told = {tier: keys for tier, keys in self.told.of.items() if keys}
        assert now.of == told
        assert found == [any(key in keys for keys in told.values()) for key in ALL]

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        store = self.store
        snapshot, flags = store.snapshot(), store.slab._used
        entries = snapshot.held.values()
        slots = [entry.slot for entry in entries]
        assert len(set(slots)) == len(slots), "two chunks in one slot"
        taken = {slot for leased in self.leases for slot in leased.lease.slots}
        taken |= {slot for opened in self.reservations for slot in opened.reservation.slots.values()}
        used = {slot for slot, flag in enumerate(flags) if flag}
        assert taken | set(slots) <= used
        assert len(used) == store.slab.num_slots - store.slab.free_slots
        stats, prefetched, prioritized = store.stats(), snapshot.prefetched, sum(snapshot.prioritized.values())
        assert stats.writing == sum(entry.state is State.WRITING for entry in entries)
        assert stats.pinned + len(prefetched) == prioritized <= len(flags) - max(1, len(flags) // 8)
        assert max(stats.pinned, len(prefetched)) <= max(1, len(flags) // 2)
        assert stats.primary.chunks == sum(entry.ready for entry in entries)
        policy: Any = store.policies[0]
        assert len(policy.sizes()) == sum(entry.in_policy for entry in entries)

    @invariant()
    def no_tier_takes_more_than_its_capacity(self) -> None:
        for (medium, slots), stats in zip(self.media, self.store.stats().tiers[1:], strict=True):
            assert sum(medium.contains(ALL)) <= slots
            assert 0 <= stats.used_bytes <= slots * SLOT

    @invariant()
    def what_a_lower_tier_promises_it_has(self) -> None:
        for (medium, _), tier in zip(self.media, self.store.snapshot().tiers, strict=True):
            for key in tier.sizes:
                assert medium.read(key, into := memoryview(bytearray(SLOT))) is HIT
                assert into == payload(key, self.version[key])

    @invariant()
    def what_is_done_is_ready(self) -> None:
        for promotion in self.promotions:
            if promotion.done and not promotion.released:
                assert not self.store._promoter._unreleased[promotion].missing
                assert all(entry.state is State.READY for entry in promotion.entries[: len(promotion)])

    @invariant()
    def leased_bytes_stay(self) -> None:
        for leased in self.leases:
            self.check_lease(leased)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for faulty in self.faulty:
            faulty.error_rate = 0.0
        for leased in self.leases:
            leased.lease.release()
        for opened in self.reservations:
            opened.reservation.abort()
        self.pool.drain(0)
        for promotion in self.promotions:
            promotion.release()
        self.pool.drain(0)
        assert all(promotion.done for promotion in self.promotions), "somebody would wait for ever"
        self.store.unpin(ALL)
        self.clock.advance(1000)
        self.store.reserve(())
        self.pool.drain(0)
        self.everything_is_released()
        self.store.close()
        assert self.store.catalog.count_prefix(ALL) == (0, 0)
        assert self.store.slab.free_slots in (0, self.store.slab.num_slots)

    def everything_is_released(self) -> None:
        store, stats = self.store, self.store.stats()
        assert (stats.leased, stats.pinned, stats.writing, stats.loading) == (0, 0, 0, 0)
        assert store.slab.free_slots + stats.primary.chunks == store.slab.num_slots
        snapshot = store.snapshot()
        assert not any(entry.flushing for entry in snapshot.held.values())
        assert not snapshot.prefetched
        assert stats.primary.chunks == 0 or self.retain
        below: Any = store.policies[1:]
        for tier, policy in zip(snapshot.tiers, below, strict=True):
            assert tier.reclaiming_bytes == len(tier.reclaiming) == 0
            assert len(policy.sizes()) == len(tier.sizes)
            evictable = copy.deepcopy(policy).evict(len(tier.sizes) * SLOT)
            assert evictable is not None, "nobody reads it, and yet it is held"
        for key in ALL:
            self.check_below(key)

    def check_below(self, key: ChunkKey) -> None:
        """Whatever a tier promises, it has, unless a fault took it; and it is of the last version."""
        promotion = self.store.promote([key])
        self.pool.drain(0)
        assert promotion.done
        with self.store.lease(promotion.keys) as lease:
            for slot in lease.slots:
                assert bytes(self.store.slab.view(slot)) == payload(key, self.version[key])
        promotion.release()


TestStore = StoreMachine.TestCase


# -- the same machine, driven at random for longer than Hypothesis would -------------------------------


def _span(rng: random.Random) -> tuple[str, int, int]:
    return rng.choice("ab"), rng.choice([0, 0, 0, 0, 1, 2]), rng.randint(1, 4)


def _moves(rng: random.Random) -> list[int]:
    return [rng.randint(0, 7) for _ in range(rng.randint(0, 12))]


def _one_step(machine: StoreMachine, rng: random.Random) -> None:
    span = _span(rng)
    actions: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: machine.store_at_once(span, _moves(rng))),
        (2, lambda: machine.store_everywhere(span[0])),
        (3, lambda: machine.reserve(span, rng.random() < 0.5)),
        (4, lambda: machine.reservations and machine.commit(rng.randint(0, 7), rng.randint(0, 4))),
        (6, lambda: machine.read_at_once(span, _moves(rng))),
        (2, lambda: machine.lease(span)),
        (3, lambda: machine.leases and machine.end_lease(rng.randint(0, 7))),
        (4, lambda: machine.promote(span, rng.random() < 0.5, rng.choice([None, 2]), rng.choice([None, 1.0]))),
        (5, lambda: machine.promotions and machine.end_promotion(rng.randint(0, 7))),
        (1, lambda: machine.pin(span, rng.choice([None, 0.5, 3.0]))),
        (2, lambda: machine.interrupt(span, rng.randint(1, 40), rng.choice(["lease", "touch", "catalog.lookup"]))),
        (1, lambda: machine.time_passes(rng.choice([0.1, 1.0, 70.0]), rng.random() < 0.5)),
        (4, lambda: machine.remove(span, rng.choice(["drop"] * 6 + ["delete"] * 2 + ["clear"]))),
        (14, lambda: machine.io_moves(_moves(rng))),
        (1, machine.io_ends),
        (1, lambda: machine.faulty and machine.io_fails(rng.randint(0, 1), rng.randint(1, 7), False)),
    ]
    weights = [weight for weight, _ in actions]
    rng.choices([action for _, action in actions], weights)[0]()


def drive(seed: int, steps: int) -> Counter[str]:
    """A long history; what happened in it."""
    rng = random.Random(seed)
    machine = StoreMachine()
    tiers = [
        {
            "slots": rng.randint(1, 8),
            "write": rng.choice(["through", "through", "back"]),
            "policy": rng.choice(ORDERS),
            "admission": rng.choice([None, None, None, SecondTouch]),
        }
        for _ in range(rng.choice([1, 1, 2]))
    ]
    error_rate = rng.choice([0.0, 0.0, 0.02, 0.2])
    machine.start(rng.randint(2, 7), rng.choice(ORDERS), tiers, error_rate, rng.random() < 0.9, seed)
    for _ in range(steps):
        _one_step(machine, rng)
        machine.what_is_found_was_committed()
        machine.observers_were_told_what_the_tiers_have()
        machine.every_slot_is_accounted_for()
        machine.no_tier_takes_more_than_its_capacity()
        machine.what_a_lower_tier_promises_it_has()
        machine.what_is_done_is_ready()
        machine.leased_bytes_stay()
    seen: Counter[str] = Counter()
    for tier in machine.store.stats().tiers:
        seen.update(attrs.asdict(tier, filter=lambda field, value: isinstance(value, int)))
        seen["opened"] += "open" in (tier.breaker, tier.write_breaker)
    machine.teardown()
    return seen


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_long_histories(seeds: range) -> None:
    for seed in seeds:
        drive(seed, 400)


def test_the_histories_test_something() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60, 80):
        seen += drive(seed, 400)
    rare = {name: seen[name] for name in ("hits", "reads", "writes", "evictions", "write_rejects")}
    assert min(rare.values()) > 10, rare
    assert min(seen["read_failures"], seen["write_failures"], seen["opened"]) > 5


@pytest.mark.nightly("histories")
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_longer_histories(seed: int) -> None:
    drive(seed, 2000)
