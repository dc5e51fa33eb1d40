"""TieredStore: what is true whatever interferes, and whatever breaks below."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from attrs import evolve

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.errors import BackendUnavailable, ClosedError
from lmkv.policies import LRU
from lmkv.protocols import MISS, Backend, Chunk, ChunkKey, Presence, Tier
from lmkv.store import guards as closing
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.kit import (
    LIMIT,
    SLOT,
    Failing,
    Gated,
    Persistent,
    assert_idle,
    chain,
    eventually,
    get,
    lower,
    memory,
    payload,
    put,
    put_below,
    put_through,
    raised,
    small_store,
    versions,
)

VERBS = ("insert_chain", "touch", "discard", "hold", "release", "evict", "hint")


def kept(store: TieredStore, keys: list[ChunkKey]) -> list[bool]:
    return [presence is Presence.READY for presence in store.catalog.lookup(keys)]


def reads_shut(slots: int, *chains: list[ChunkKey], **options: Any) -> tuple[Gated, TieredStore]:
    """A store whose chains are in its lower tier alone, where reads wait until it is opened."""
    gated = Gated(memory(40, "low"))
    store = small_store(slots, lower(gated), **options)
    for keys in chains:
        put_below(store, keys)
    gated.shut("read")
    return gated, store


def written(slots: int, name: str, keys: list[ChunkKey], version: int = 0) -> CPUPinnedBackend:
    """Memory of a lower tier that has these chunks before any store knows it."""
    backend = memory(slots, name)
    for key in keys:
        backend.write(Chunk(key, memoryview(payload(key, version))))
    return backend


def all_closed(*backends: Backend) -> None:
    for backend in backends:
        raised(ClosedError, "", backend.contains, [])


# -- the head of a chain outlives its tail -------------------------------------------------------------


@pytest.mark.parametrize("policy", ["LRU", "FIFO"])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_stored_chain_is_evicted_from_its_tail(policy: str, below: bool, pinned: bool) -> None:
    """One that was pinned, too."""
    clock, tiers = ManualClock(), [lower(memory(20, "low"))] if below else []
    store, keys = small_store(6, *tiers, policy=policy, clock=clock, pin_share=1.0), chain("a", 6)
    put_through(store, keys)
    if pinned:
        assert store.pin(keys[:4], 10) == 4
        clock.advance(11)
    put(store, chain("b", 2))
    assert kept(store, keys) == [True] * 4 + [False] * 2


def test_a_lower_tier_evicts_from_the_tail_and_never_the_head_of_what_it_is_given() -> None:
    below = memory(4, "low")
    store, keys = small_store(10, lower(below, 4)), chain("a", 10)
    put_through(store, keys)
    assert below.contains(keys) == [True] * 4 + [False] * 6
    put_through(store, chain("b", 1))
    assert below.contains(keys) == [True] * 3 + [False] * 7


def test_a_chain_longer_than_the_tier_keeps_its_head() -> None:
    store, keys = small_store(4), chain("a", 9)
    assert put(store, keys) == 4
    assert put(store, keys[4:], protect=keys) == 0
    assert kept(store, keys) == [True] * 4 + [False] * 5
    store, keys = small_store(4), keys[:4]
    put(store, keys[1:])
    put(store, chain("b", 1))
    assert put(store, keys, protect=keys) >= 2, "the missing head takes the place of its own tail"
    assert kept(store, keys)[:2] == [True, True]


def test_the_tail_makes_room_for_its_own_head_from_below() -> None:
    """Reading a long chain leaves its tail in the tier: reading it again begins with the head."""
    store, keys = small_store(4, lower(memory(20, "low"))), chain("a", 12)
    put_below(store, keys)
    for _ in range(2):
        assert get(store, keys) == [0] * 4
        assert get(store, keys[8:]) == [0] * 4
    assert_idle(store)


# -- nothing of before clear() or delete() is served ---------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2])
def test_a_chain_that_passes_through_evicts_nothing_of_its_own_that_is_nowhere_else(limit: int) -> None:
    """The end of it was not written below, because too many writes waited, say."""
    store, keys = small_store(5, lower(memory(20, "low"))), chain("a", 6)
    put_below(store, keys[:3])
    put_through(store, keys[3:])
    store._tiers[0].index.mark_deleted(keys[3:])
    put(store, chain("b", 2))  # used later than the end of the chain
    assert store.drain(LIMIT)
    for first in range(3):
        promotion = store.promote(keys[first:], limit=limit)
        assert promotion.wait(LIMIT)
        promotion.release()
    assert kept(store, keys[3:]) == [True] * 3
    assert store.catalog.count_prefix(keys)[1] == 6


def unlisted(keys: list[ChunkKey], version: int = 0) -> tuple[CPUPinnedBackend, Gated, TieredStore]:
    """A store whose tier has these chunks, and is not listed before it is opened."""
    disk = written(10, "disk", keys, version)
    gated = Gated(Persistent(disk))
    gated.shut("list_keys")
    return disk, gated, small_store(4, lower(gated, 10))


def test_clear_deletes_what_was_not_even_indexed_yet() -> None:
    keys = chain("a", 4)
    disk, gated, store = unlisted(keys)
    gated.waiting("list_keys")
    store.clear()
    gated.open()
    assert store.drain(LIMIT)
    eventually(lambda: disk.contains(keys) == [False] * 4)
    assert store.catalog.count_prefix(keys) == (0, 0)


def test_a_listing_from_before_clear_brings_nothing_back() -> None:
    keys = chain("a", 6)
    disk = written(10, "disk", keys)
    passed, go_on = threading.Event(), threading.Event()

    class Slow(Persistent):
        def list_keys(self) -> Any:
            for number, batch in enumerate(super().list_keys()):
                if number == 1 and threading.current_thread().name.startswith("lmkv-index"):
                    passed.set()
                    assert go_on.wait(LIMIT)
                yield batch

    store = small_store(4, lower(Slow(disk), 10))
    assert passed.wait(LIMIT)
    store.clear()
    assert store.drain(LIMIT)
    go_on.set()
    assert store.wait_indexed(LIMIT)
    assert store.catalog.count_prefix(keys[:1]) == (0, 0)
    assert [store.catalog.count_prefix([key]) for key in keys] == [(0, 0)] * 6


def test_an_unlisted_chunk_is_not_taken_for_a_new_one_before_it_is_deleted() -> None:
    keys = chain("a", 1)
    disk, gated, store = unlisted(keys, 1)
    store.clear()
    gated.waiting("list_keys", 2)
    put(store, keys, version=2)
    eventually(lambda: store.stats().tiers[1].write_rejects == 1)
    gated.open()
    assert store.drain(LIMIT)
    assert store.wait_indexed(LIMIT)
    assert disk.contains(keys) == [False]
    store.drop(keys)
    put_through(store, keys, version=3)
    store.drop(keys)
    assert get(store, keys) == [3]


def test_nothing_is_written_until_a_failed_clear_has_been_made_up_for() -> None:
    disk = memory(10, "disk")
    (key,) = keys = chain("a", 1)
    failing = Failing(Persistent(disk), "list_keys")
    store = small_store(4, lower(failing, 10))
    disk.write(Chunk(key, memoryview(payload(key, 1))))
    store.clear()
    assert store.drain(LIMIT)
    for version in (2, 3):
        put_through(store, keys, version)
        store.drop(keys)
        assert store.catalog.count_prefix(keys) == (0, 0)
    failing.failing = set()
    put_through(store, keys, version=4)
    store.drop(keys)
    assert get(store, keys) == [4]


def test_a_failed_deletion_never_turns_old_bytes_into_new_ones() -> None:
    below = memory(10, "low")
    failing = Failing(below)
    store, keys = small_store(4, lower(failing)), chain("a", 2)
    put_through(store, keys, version=1)
    failing.failing = {"delete"}
    store.clear()
    store.drain(LIMIT)
    put_through(store, keys, version=2)
    store.drop(keys)
    assert get(store, keys) in ([], [2, 2])
    failing.failing = set()
    put_through(store, keys, version=3)
    store.drop(keys)
    assert get(store, keys) in ([], [3, 3])
    assert_idle(store)


def test_what_was_being_written_when_it_was_deleted_does_not_come_back() -> None:
    below = memory(10, "low")
    gated = Gated(below)
    store, keys = small_store(4, lower(gated), io_threads=2), chain("a", 3)
    gated.shut("write")
    put(store, keys)
    gated.waiting("write")
    assert store.delete(keys) == 3
    gated.open()
    assert store.drain(LIMIT)
    assert below.contains(keys) == [False] * 3
    assert store.catalog.count_prefix(keys) == (0, 0)
    gated.shut("write")
    put(store, keys, version=1)
    gated.waiting("write")
    store.clear()
    put(store, keys, version=2)
    gated.open()
    assert store.drain(LIMIT)
    store.drop(keys)
    assert {*get(store, keys)} <= {2}, "nor when all was cleared"
    assert_idle(store)


def test_the_callers_thread_never_touches_a_backend() -> None:
    gated = Gated(Persistent(memory(10, "low")))
    store, keys = small_store(2, lower(gated, 10)), chain("a", 4)
    for key in keys:
        put_through(store, [key])
    get(store, keys[:2])
    store.delete(keys[:1])
    store.clear()
    assert store.drain(LIMIT)
    mine = threading.current_thread().name
    assert {verb for verb, _ in gated.calls} >= {"write", "read", "delete", "list_keys"}
    assert [verb for verb, thread in gated.calls if thread == mine] == []


def test_what_is_ready_and_what_is_promised_end_with_clear() -> None:
    store, keys = small_store(4, lower(memory(10, "low"))), chain("a", 3)
    put(store, keys)
    promotion = store.promote(keys)
    assert promotion.ready == 3
    store.clear()
    assert promotion.ready == 0
    promotion.release()
    assert_idle(store)


# -- accounting ---------------------------------------------------------------------------------------


def test_victims_that_cannot_be_deleted_keep_their_room() -> None:
    below = memory(20, "low")
    failing = Failing(below)
    store = small_store(10, lower(failing, 3))
    put_through(store, chain("a", 3))
    failing.failing = {"delete"}
    put_through(store, chain("b", 3))
    assert sum(below.contains(chain("a", 3) + chain("b", 3))) == 3
    failing.failing = set()


def test_a_tier_that_was_away_for_a_moment_has_lost_nothing() -> None:
    below = memory(10, "low")
    failing = Failing(below, error=BackendUnavailable("low", "read"))
    store, keys = small_store(2, lower(failing, 10)), chain("a", 2)
    put_below(store, keys)
    failing.failing = {"read"}
    assert get(store, keys) == []
    failing.failing = set()
    assert get(store, keys) == [0, 0]
    assert store.stats().tiers[1].chunks == 2


@pytest.mark.parametrize("nonsense", [[], [MISS], None, "read", MISS])
def test_a_read_that_returns_nonsense_is_a_miss(nonsense: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Mad(Failing):
        def read(self, key: ChunkKey, into: memoryview) -> Any:
            return nonsense

    store = small_store(2, lower(Mad(memory(10, "low"))))
    put_below(store, chain("a", 1))
    assert get(store, chain("a", 1)) == []
    assert_idle(store)
    if nonsense is MISS:
        assert store.stats().tiers[1].lost == 1
        assert not caplog.records, "it is no error"


def test_a_backend_that_takes_lists_stores_nothing_and_its_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The verbs were so before `read` and `write` moved one chunk each."""

    class TakesLists(Failing):
        def read(self, items: Any) -> Any:
            return [self.inner.read(key, into) for key, into in items]

        def write(self, chunks: Any) -> Any:
            return [self.inner.write(chunk) for chunk in chunks]

    store = small_store(2, lower(TakesLists(memory(10, "low"))))
    keys = chain("a", 1)
    put_below(store, keys)
    assert get(store, keys) == []
    (said,) = caplog.messages
    reason = "TypeError(\"'Chunk' object is not iterable\")"
    what = f"lmkv: backend 'low': write of chunk {keys[0].hex()} failed: {reason}"
    assert said == f"{what}; lmkv does not store the chunk in this tier"
    assert_idle(store)


class UntoldError(Exception):
    """It cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


class PanicError(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("error", [RuntimeError("on purpose"), UntoldError(), PanicError(), KeyboardInterrupt()])
@pytest.mark.parametrize("verb", ["read", "write", "delete", "list_keys"])
def test_whatever_a_backend_raises_nothing_leaks(verb: str, error: BaseException) -> None:
    failing = Failing(Persistent(memory(10, "low")), verb, error=error)
    store = small_store(3, lower(failing, 2))
    for name in "abc":
        keys = chain(name, 2)
        put_through(store, keys)
        get(store, keys)
        store.drop(keys)
        get(store, keys)
    store.delete(keys)
    store.clear()
    assert_idle(store)
    assert store.stats().tiers[1].used_bytes <= 2 * SLOT


def test_a_tier_works_again_after_a_backend_that_cannot_say_what_a_chunk_takes() -> None:
    class Sized(Failing):
        def stored_bytes(self, nbytes: int) -> int:
            return self.around("stored_bytes", lambda: nbytes)

    below = Sized(memory(10, "low"), "stored_bytes")
    store = small_store(4, lower(below, 4))
    put_through(store, chain("a", 2))
    assert_idle(store)
    below.failing.clear()
    keys = chain("b", 2)
    put_through(store, keys)
    store.drop(keys)
    assert len(get(store, keys)) == 2


@pytest.mark.parametrize("error", [ValueError, PanicError, SystemExit])
def test_an_admission_that_raises_admits_nothing_and_leaks_nothing(error: type[BaseException]) -> None:
    class Broken:
        def admit(self, *_: object) -> bool:
            raise error("user policy")

        prompt = admit

    store = small_store(3, evolve(lower(memory(10, "low"), 2), admission=Broken()))
    put_through(store, chain("a", 2))
    assert_idle(store)
    assert len(get(store, chain("a", 2))) == 2
    assert store.stats().tiers[1].chunks == 0


class Broken(LRU):
    """Of another package. Its methods may be replaced."""


def broken(verb: str, after: int, error: type[BaseException] = RuntimeError) -> Broken:
    """A policy that does it well `after` times, and raises from then on."""
    policy, left = Broken(), [after]
    method = getattr(policy, verb)

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error("of another package")
        return method(*args)

    setattr(policy, verb, call)
    return policy


def lying(policy: Broken, answer: list[ChunkKey]) -> Broken:
    policy.evict = lambda nbytes, protect=frozenset(): answer  # type: ignore[method-assign]
    return policy


POLICIES = {
    **{f"{verb} {after}": partial(broken, verb, after) for verb in VERBS for after in (0, 2, 5)},
    **{f"{verb} panics": partial(broken, verb, 2, PanicError) for verb in VERBS},
    "what is not there": lambda: lying(Broken(), [bytes(32)]),
    "what is in use": lambda: lying(Broken(), chain("held", 1)),
    "nothing": lambda: lying(Broken(), []),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("below", [False, True])
def test_a_policy_that_fails_costs_no_slot_and_no_call(
    below: bool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy, other = POLICIES[name](), LRU()
    medium = memory(12, "low")
    policies = (other, policy) if below else (policy, other)
    store = TieredStore(Tier(memory(6), policies[0]), [Tier(medium, policies[1], capacity_bytes=8 * SLOT)])
    with store.reserve(chain("held", 1)) as reservation:
        store.slab.view(reservation.slots[chain("held", 1)[0]])[:] = payload(chain("held", 1)[0])
        reservation.commit()
    assert store.drain(LIMIT)
    with store.lease(chain("held", 1)) as lease:
        for number in range(8):
            keys = chain(f"{number}", 4)
            put_through(store, keys)
            store.touch(keys)
            store.hints.set_priority(keys, 1)
            get(store, chain(f"{number - 1}", 4))
            store.drop(keys[2:])
            assert len(get(store, keys)) >= 1
        assert versions(store, lease) == [0]
    assert_idle(store)
    assert store.stats().tiers[1].used_bytes == sum(medium.contains(store.snapshot().tiers[0].sizes)) * SLOT <= 8 * SLOT
    store.clear()
    assert store.drain(LIMIT)
    assert store.slab.free_slots == 6
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert "evicts by LRU" in told[0]
    store.close()


@pytest.mark.parametrize("error", [ValueError, PanicError])
def test_an_observer_that_raises_is_told_nothing_more(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Raises:
        calls = 0

        def stored(self, tier: str, key: ChunkKey) -> None:
            self.calls += 1
            raise error("of another package")

        removed = stored

    store, observer = small_store(4, lower(memory(10, "low"), 2)), Raises()
    store.catalog.add_observer(observer)
    for name in "abc":
        put_through(store, chain(name, 2))
    assert_idle(store)
    assert observer.calls == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_reads_that_hang_keep_their_slots_and_are_counted() -> None:
    clock, keys = ManualClock(), chain("a", 2)
    gated, store = reads_shut(8, keys, io_threads=4, clock=clock)
    promotion = store.promote(keys)
    gated.waiting("read", 2)
    assert store.stats().tiers[1].hung_reads == 0
    clock.advance(6)
    assert store.stats().tiers[1].hung_reads == 2
    put(store, keys)
    assert promotion.wait(LIMIT)
    promotion.release()
    assert store.slab.free_slots == 8 - 2 - 2, "the reads may still write into theirs"
    gated.open()
    assert store.drain(LIMIT)
    assert store.stats().tiers[1].hung_reads == 0
    assert_idle(store)


class Sized(Gated):
    """Is asked for the size of each chunk, too."""

    def stored_bytes(self, nbytes: int) -> int:
        return self.around("stored_bytes", lambda: nbytes)


@pytest.mark.parametrize("verb", ["read", "write", "delete", "stored_bytes"])
def test_a_tier_that_hangs_keeps_no_other_from_its_work(verb: str) -> None:
    inner, healthy, clock = memory(200, "hanging"), memory(200, "healthy"), ManualClock()
    hanging = Sized(inner)
    with contextlib.closing(small_store(32, lower(hanging), lower(healthy), io_threads=4, clock=clock)) as store:
        old, unknown, known = chain("old", 8), chain("unknown", 4), chain("known", 12)
        put_below(store, old)
        hanging.shut(verb)
        promotion = store.promote(old if verb == "read" else [])
        for number, key in enumerate(old if verb == "delete" else ()):
            store.delete([key])
            # One at a time: a call deletes everything that is to be deleted.
            hanging.waiting(verb, min(number + 1, 3))
        put(store, chain("more", 8))
        hanging.waiting(verb, 4 if verb == "read" else 3)
        # As long as nobody knows that it hangs, too.
        put(store, unknown)
        eventually(lambda: all(healthy.contains(unknown)))
        clock.advance(6)
        promotion.release()
        put(store, known)
        eventually(lambda: all(healthy.contains(known)))
        assert store.wait_for_room(LIMIT)
        stats = store.stats()
        assert (stats.tiers[1].hung_reads, stats.tiers[1].hung_writes) == ((4, 0) if verb == "read" else (0, 3))
        held = {"read": 4, "delete": 0}.get(verb, 3)
        eventually(lambda: store.stats().leased == held, "one for each call that may use its own", seen=store.stats)
        store.drop(known)
        assert get(store, known) == [0] * len(known)
        assert not store.drain(0.01)
        hanging.open()
        assert_idle(store)
        assert (store.stats().tiers[1].hung_reads, store.stats().tiers[1].hung_writes) == (0, 0)
        put_through(store, chain("after", 4))
        assert all(inner.contains(chain("after", 4)))
        assert not any(inner.contains(old)) or verb != "delete", "what was deleted meanwhile is deleted"


def test_slots_of_a_chain_are_not_kept_for_one_write_that_hangs() -> None:
    class HangsOnce(Gated):
        def write(self, chunk: Chunk) -> Any:
            return self.around("write" if chunk.key == keys[3] else "another", lambda: self.inner.write(chunk))

    keys, clock = chain("a", 8), ManualClock()
    gated = HangsOnce(memory(20, "low"))
    gated.shut("write")
    with contextlib.closing(small_store(16, lower(gated), io_threads=4, clock=clock)) as store:
        put(store, keys)
        gated.waiting("write")
        eventually(lambda: store.stats().tiers[1].writes == 7)
        assert store.stats().leased == 8
        clock.advance(6)
        assert put(store, chain("b", 15)) == 15
        assert store.stats().leased == 1, store.stats()
        gated.open()
        assert_idle(store)


def test_evicted_chunks_that_a_tier_hangs_over_keep_nobody_waiting() -> None:
    clock = ManualClock()
    gated, healthy = Gated(memory(40, "hanging")), memory(40, "healthy")
    with contextlib.closing(
        small_store(16, lower(gated, write="back"), lower(healthy), io_threads=4, clock=clock)
    ) as store:
        wanted = chain("wanted", 4)
        put_below(store, wanted)
        gated.shut("write")
        put(store, chain("a", 16))
        eventually(lambda: all(healthy.contains(chain("a", 16))))
        put(store, chain("b", 4))
        gated.waiting("write", 3)
        clock.advance(6)
        assert put(store, chain("c", 4)) == 4
        assert get(store, wanted) == [0] * 4
        eventually(lambda: store.stats().leased == store.stats().tiers[1].hung_writes == 3, seen=store.stats)
        gated.open()
        assert_idle(store)


def test_a_lookup_asks_the_next_tier_where_one_hangs() -> None:
    clock, gated = ManualClock(), Gated(Persistent(memory(20, "hanging"), shared=True))
    inner = memory(20, "healthy")
    store = small_store(8, lower(gated), lower(Persistent(inner, shared=True)), io_threads=2, clock=clock)
    assert store.wait_indexed(LIMIT)
    keys = chain("a", 2)
    for key in keys:
        inner.write(Chunk(key, memoryview(payload(key))))
    gated.shut("contains")
    lookups = [store.look_up_shared([key]) for key in chain("unknown", 2)]
    gated.waiting("contains", 2)
    lookup = store.look_up_shared(keys)
    assert lookup is not None
    clock.advance(6)
    put(store, chain("b", 1))
    assert lookup.wait(LIMIT / 2), "before the call that hangs gives up"
    assert store.catalog.count_prefix(keys) == (0, 2)
    gated.open()
    assert all(other is not None and other.wait(LIMIT) for other in lookups)
    assert_idle(store)
    store.close()


class Hanging(LRU):
    """A policy, filter and observer of another package that waits for ever once it is `shut`."""

    def __init__(self) -> None:
        super().__init__()
        self.shut = False
        self.began, self.opened = threading.Event(), threading.Event()

    def hang(self, *_: object) -> bool:
        if self.shut:
            self.began.set()
            assert self.opened.wait(LIMIT)
        return True

    admit = stored = removed = hang

    def evict(self, nbytes: int, protect: Any = frozenset()) -> list[ChunkKey] | None:
        self.hang()
        return super().evict(nbytes, protect)


@pytest.mark.parametrize("role", ["policy", "policy below", "filter", "observer"])
def test_a_guest_that_hangs_under_the_lock_keeps_no_store_from_closing(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "PATIENCE", 0.5)
    guest, backend = Hanging(), memory(8, "low")
    below = guest if role == "policy below" else LRU()
    tier = Tier(backend, below, capacity_bytes=2 * SLOT, admission=guest if role == "filter" else None)
    store = TieredStore(Tier(memory(4), guest if role == "policy" else LRU()), [tier])
    if role == "observer":
        store.catalog.add_observer(guest)  # type: ignore[arg-type]
    put_through(store, chain("a", 4))
    guest.shut = True
    thread = threading.Thread(target=put, args=(store, chain("b", 4)), daemon=True)
    thread.start()
    assert guest.began.wait(LIMIT)
    store.close(0.1)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "lmkv: a policy, filter or observer hangs; host memory stays taken until the process ends"
    ]
    raised(ClosedError, "", backend.contains, [])
    store.close(0.1)
    guest.opened.set()
    thread.join(LIMIT)
    # Late, but in the end.
    eventually(lambda: not store.stats().leased)
    assert put(store, chain("c", 1)) == 0


def test_a_chunk_that_is_being_read_is_not_evicted_from_its_tier() -> None:
    below = memory(4, "low")
    gated = Gated(below)
    store, keys = small_store(8, lower(gated, 2)), chain("a", 2)
    put_below(store, keys)
    gated.shut("read")
    promotion = store.promote(keys)
    gated.waiting("read")
    put(store, chain("b", 2))
    eventually(lambda: store.stats().tiers[1].write_rejects == 2)
    gated.open()
    assert promotion.wait(LIMIT)
    assert promotion.ready == 2
    promotion.release()


# -- prefetch ------------------------------------------------------------------------------------------


def test_the_prefetch_share_counts_every_slot_that_prefetches_hold() -> None:
    store = small_store(8, lower(memory(40, "low")), prefetch_share=0.5)
    a, b = chain("a", 4), chain("b", 4)
    put_below(store, a + b)
    for _ in range(3):
        first = store.promote(a, prefetch=True)
        second = store.promote(a, prefetch=True)
        assert first.wait(LIMIT)
        assert second.wait(LIMIT)
        assert (len(first), len(second)) == (4, 4)
        first.release()
        third = store.promote(b, prefetch=True)
        assert len(third) == 0, "chunks that were there already count, too"
        second.release()
        assert len(store.promote(b, prefetch=True, ttl=-1)) == 4
    store.reserve(())
    assert_idle(store)


def test_a_demand_overtakes_the_prefetch_that_wants_the_same() -> None:
    many, wanted = chain("many", 10), chain("wanted", 1)
    gated, store = reads_shut(16, many + wanted, prefetch_share=1.0, io_threads=2)
    order: list[ChunkKey] = []
    inner = gated.inner.read
    gated.inner.read = lambda key, into: order.append(key) or inner(key, into)  # type: ignore[method-assign,func-returns-value]
    early = store.promote(many + wanted, prefetch=True)
    gated.waiting("read", 2)
    demanded = store.promote(wanted)
    gated.open()
    assert demanded.wait(LIMIT)
    assert early.wait(LIMIT)
    assert order.index(wanted[0]) <= 3
    demanded.release()
    early.release()
    assert_idle(store)


def test_a_prefetch_that_is_cancelled_reads_no_more() -> None:
    keys = chain("a", 10)
    gated, store = reads_shut(16, keys, prefetch_share=1.0, io_threads=2)
    prefetch = store.promote(keys, prefetch=True)
    gated.waiting("read", 2)
    prefetch.release()
    assert store.slab.free_slots == 16 - 2
    gated.open()
    assert prefetch.wait(LIMIT)
    assert_idle(store)
    assert [verb for verb, _ in gated.calls].count("read") == 2


def test_a_load_that_somebody_else_wants_too_is_not_left_out() -> None:
    keys = chain("a", 6)
    gated, store = reads_shut(16, keys, io_threads=2)
    first, second = store.promote(keys), store.promote(keys)
    gated.waiting("read", 2)
    first.release()
    gated.open()
    assert second.wait(LIMIT)
    assert (len(second), second.ready) == (6, 6)
    second.release()
    assert [verb for verb, _ in gated.calls].count("read") == 6, "one load serves all who wait"
    assert_idle(store)


def test_a_promotion_ends_before_the_chunk_that_is_lost() -> None:
    below = memory(40, "low")
    store, keys = small_store(16, lower(below)), chain("a", 6)
    put_below(store, keys)
    below.delete([keys[3]])
    promotion = store.promote(keys)
    assert promotion.wait(LIMIT)
    assert (promotion.keys, promotion.ready) == (keys[:3], 3)
    promotion.release()
    assert store.stats().tiers[1].lost == 1
    assert store.catalog.count_prefix(keys[3:]) == (0, 0)
    assert_idle(store)


def test_a_promotion_waits_for_a_chunk_that_is_just_being_stored() -> None:
    store, keys = small_store(8), chain("a", 3)
    put(store, keys[:1])
    for commits in (True, False):
        reservation = store.reserve(keys[1:])
        promotion = store.promote(keys)
        assert (len(promotion), promotion.done) == (3, False)
        assert store.catalog.lookup(keys) == [Presence.READY, Presence.PENDING, Presence.PENDING]
        if commits:
            reservation.commit()
        else:
            reservation.abort()
        assert promotion.done
        assert promotion.ready == (3 if commits else 1)
        promotion.release()
        store.drop(keys[1:])
    assert_idle(store)


# -- waking and ending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the event loop is closed"), SystemExit(1)])
def test_a_callback_that_raises_keeps_nobody_else_waiting(error: BaseException) -> None:
    keys, called = chain("a", 1), threading.Event()
    gated, store = reads_shut(4, keys)
    first, second = store.promote(keys), store.promote(keys)

    def explode() -> None:
        raise error

    first.add_done_callback(explode)
    first.add_done_callback(called.set)
    gated.open()
    assert first.wait(LIMIT)
    assert second.wait(LIMIT)
    assert called.wait(LIMIT)


def test_closing_while_a_backend_hangs_is_bounded_and_ends_every_wait() -> None:
    keys = chain("a", 8)
    gated, store = reads_shut(8, keys, io_threads=2)
    promotion = store.promote(keys)
    gated.waiting("read", 2)
    store.close(timeout=0.01)
    gated.waiting("read", 2)
    assert promotion.done, "what waits for a load must hear that it never comes"
    assert promotion.ready == 0
    promotion.release()
    gated.open()


def test_a_backend_that_never_closes_is_left_behind_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Gated):
        def close(self) -> None:
            self.around("close", lambda: None)

    monkeypatch.setattr(closing, "PATIENCE", 0.05)
    below, other = Stuck(memory(10, "low")), Failing(memory(10, "other"))
    below.shut("close")
    store = small_store(4, lower(below), lower(other))
    put_below(store, chain("a", 2))
    store.close()
    assert [record.message for record in caplog.records] == [
        "lmkv: tier 'low' did not close in 0.05 s; lmkv continues without waiting"
    ]
    all_closed(other, store.backends[0])
    store.close()
    below.open()


def test_a_close_that_was_interrupted_is_carried_on() -> None:
    below = Gated(memory(10, "low"))
    store, keys = small_store(4, lower(below)), chain("a", 2)
    below.shut("write")
    put(store, keys)
    below.waiting("write")
    main = threading.main_thread().ident
    assert main is not None
    waiting = store._pool._idle._waiters  # type: ignore[attr-defined]

    def interrupt() -> None:
        eventually(lambda: bool(waiting))
        signal.pthread_kill(main, signal.SIGINT)

    # Programs that run tests may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        raised(KeyboardInterrupt, "", store.close, LIMIT)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    below.open()
    store.close(LIMIT)
    all_closed(below, store.backends[0])


def test_a_closed_store_has_nothing_and_takes_nothing() -> None:
    store, keys = small_store(4, lower(memory(10, "low"))), chain("a", 2)
    put(store, keys)
    lease = store.lease(keys)
    store.close()
    store.close()
    assert store.catalog.count_prefix(keys) == (0, 0)
    assert len(store.lease(keys)) == 0
    assert store.reserve(chain("b", 1)).accepted == 0
    assert store.promote(keys).done
    assert store.pin(keys, 1) == 0
    lease.release()


def test_one_tier_that_cannot_be_listed_hides_no_other() -> None:
    failing, keys = Gated(Failing(Persistent(memory(10, "one")), "list_keys")), chain("a", 2)
    fine = written(10, "two", keys)
    store = small_store(4, lower(failing), lower(Persistent(fine)))
    eventually(lambda: store.catalog.count_prefix(keys) == (0, 2))
    eventually(lambda: bool(failing.calls))
    assert not store.wait_indexed(0)


# -- write-back ------------------------------------------------------------------------------------------


def test_a_load_waits_for_the_room_that_is_being_made() -> None:
    """A full tier of chunks that none below has yet: they are copied first, and the load is not given up."""
    store, wanted = small_store(4, lower(memory(60, "low"), write="back")), chain("wanted", 3)
    put(store, wanted)
    for number in range(8):
        while not put(store, chain(f"dirty {number}", 1)):
            assert store.drain(LIMIT)
    assert store.drain(LIMIT)
    assert store.catalog.count_prefix(wanted) == (0, 3)
    assert get(store, wanted) == [0] * 3
    assert_idle(store)


def test_copies_down_are_bounded_while_the_tier_below_is_slow() -> None:
    gated = Gated(memory(40, "low"))
    store, keys = small_store(16, lower(gated, write="back")), chain("a", 16)
    put(store, keys)
    gated.shut("write")
    for number in range(20):
        put(store, chain(f"more {number}", 2))
    assert sum(kept(store, keys)) >= 8, "what waits to be copied is still there, nothing more is sent after it"
    gated.open()
    assert_idle(store)


def test_a_chunk_on_its_way_down_can_be_leased_and_then_stays() -> None:
    gated = Gated(memory(40, "low"))
    store, keys = small_store(2, lower(gated, write="back")), chain("a", 2)
    put(store, keys)
    gated.shut("write")
    put(store, chain("b", 1))
    gated.waiting("write")
    with store.lease(keys) as lease:
        assert versions(store, lease) == [0, 0]
        gated.open()
        assert store.drain(LIMIT)
    assert kept(store, keys) == [True, True]
    assert_idle(store)


def test_a_chain_gives_up_its_own_end_for_its_beginning() -> None:
    """Where host memory has room for nothing else, and the end is in no other tier."""
    below = Failing(memory(10, "low"))
    store, keys = small_store(1, lower(below, 10)), chain("a", 2)
    put_below(store, keys[:1])
    below.failing.add("write")
    assert put(store, keys[1:]) == 1
    assert store.drain(LIMIT)
    assert get(store, keys) == [0]
    assert kept(store, keys) == [True, False]
    assert_idle(store)


def test_a_promotion_whose_time_is_over_before_it_has_begun_leaks_nothing() -> None:
    store, keys = small_store(4, lower(memory(10, "low"))), chain("a", 3)
    put_below(store, keys)
    put_through(store, chain("b", 3))
    with store.lease(chain("b", 3)):
        store.promote(keys, ttl=0)
        store.reserve(())
    assert_idle(store)


@contextlib.contextmanager
def many_writes(*chains: list[ChunkKey]) -> Iterator[tuple[Gated, TieredStore]]:
    """A store of 40 slots and a tier that takes no write before all these chains were stored."""
    below = Gated(memory(200, "low"))
    with contextlib.closing(small_store(40, lower(below))) as store:
        below.shut("write")
        for keys in chains:
            put(store, keys)
        below.waiting("write")
        below.open()
        assert store.drain(LIMIT)
        yield below, store


def test_more_writes_than_may_wait_come_later_while_their_chunks_are_here() -> None:
    keys = chain("a", 38)
    with many_writes(keys) as (below, store):
        assert below.contains(keys) == [True] * 38
        assert store.stats().tiers[1].dropped == 0
        put(store, chain("b", 10))
        assert kept(store, keys) == [True] * 30 + [False] * 8, "the chain is evicted from its tail, as ever"


def test_a_chunk_that_is_evicted_before_its_write_is_dropped_below() -> None:
    with many_writes(*(chain(name, 30) for name in "abcd")) as (_, store):
        tier = store.stats().tiers[1]
        assert tier.dropped > 0
        assert tier.writes + tier.dropped == store.stats().primary.writes
