"""Prefill and decode apart: what the one server answers, and how long the other waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import pytest
from attrs import define

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.namespace import Namespace
from lmkv.protocols import Chunk, ChunkKey
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.scheduler import Scheduler
from lmkv.vllm.scheduler.context import SchedulerOptions
from tests.kit import (
    LIMIT,
    NEVER,
    Gated,
    Persistent,
    eventually,
    listing_every,
    lower,
    memory,
    payload,
    put,
    small_store,
)
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, request_for, state_of

CHUNK, DEADLINE = 8, 0.8
PROMPT = list(range(22))
REMOTE = {"do_remote_decode": True}


@define
class Side:
    """The scheduler side of one server, over a medium that it shares with others and has listed when it was empty."""

    scheduler: Scheduler
    store: TieredStore
    medium: CPUPinnedBackend
    clock: ManualClock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()

    def asks(self, **params: Any) -> SimulatedRequest:
        request = request_for("r", PROMPT, **params)
        self.scheduler.on_new_request(request)
        return request

    def keys(self, request: SimulatedRequest) -> list[ChunkKey]:
        """Of two chunks and the tail."""
        keys = state_of(self.scheduler, request).keys_with_tail(2)
        assert len(keys) == 3
        return keys

    def match(self, request: SimulatedRequest) -> int | None:
        """What it tells vLLM, once all that it has asked for was answered."""
        assert self.store.drain(LIMIT)
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def answer(self, request: SimulatedRequest) -> int:
        """What it tells vLLM in the end, which asks again and again."""
        answers: list[int | None] = []

        def answers_it() -> bool:
            answers.append(self.match(request))
            self.clock.advance(0.01)
            return answers[-1] is not None

        eventually(answers_it, "an answer")
        assert answers[-1] is not None
        return answers[-1]

    def others_store(self, keys: list[ChunkKey]) -> None:
        assert self.store.drain(LIMIT)
        for key in keys:
            self.medium.write(Chunk(key, memoryview(payload(key))))


def side(*, shared: bool = True, **options: Any) -> Side:
    medium, clock = memory(64, "remote"), ManualClock()
    with listing_every(NEVER):
        store = small_store(32, lower(Gated(Persistent(medium, shared=shared))), clock=clock)
    assert store.wait_indexed(LIMIT)
    namespace = Namespace(model="m", dtype="u8", chunk_size=CHUNK, block_size=4)
    defaults = {"prefetch_deadline": DEADLINE, "save_unfull_chunk": True, "load_or_recompute": False, "clock": clock}
    scheduler = Scheduler(store, namespace, BlockMap(CHUNK, (Group(4),)), SchedulerOptions(**{**defaults, **options}))
    return Side(scheduler, store, medium, clock)


@pytest.fixture
def prefill() -> Iterator[Side]:
    with side(loads=False) as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Side]:
    with side(stores=False) as made:
        yield made


# -- prefill -------------------------------------------------------------------------------------------


def test_the_answer_says_how_many_tokens_are_stored_or_soon_will_be(prefill: Side) -> None:
    request = prefill.asks(**REMOTE)
    keys = prefill.keys(request)
    assert put(prefill.store, keys[:2]) == 2
    with prefill.store.reserve(keys[2:]) as reservation:
        assert prefill.scheduler.request_finished(request) == {"lmkv.wait_for": 22}
        assert prefill.medium.contains(keys[2:]) == [False], "its copy has not even ended"
        prefill.store.slab.view(reservation.slots[keys[2]])[:] = payload(keys[2])
        reservation.commit()
    assert prefill.store.drain(LIMIT)
    assert prefill.medium.contains(keys) == [True] * 3


def test_what_others_have_deleted_is_written_again(prefill: Side) -> None:
    request = prefill.asks(**REMOTE)
    keys = prefill.keys(request)
    put(prefill.store, keys)
    assert prefill.store.drain(LIMIT)
    prefill.medium.delete(keys[:1])
    prefill.store._tiers[0].index.discard(keys[0])
    assert prefill.scheduler.request_finished(request) == {"lmkv.wait_for": 22}
    assert prefill.store.drain(LIMIT)
    assert prefill.medium.contains(keys) == [True] * 3


def test_the_answer_ends_before_what_was_not_stored(prefill: Side) -> None:
    request = prefill.asks(**REMOTE)
    put(prefill.store, prefill.keys(request)[:1])
    assert prefill.scheduler.request_finished(request) == {"lmkv.wait_for": 8}


def test_nothing_is_promised_of_what_a_store_does_not_take(prefill: Side) -> None:
    """Its reads have not failed, for there were none; what it has is promised, and nothing else."""
    gated = prefill.store.backends[1]
    request = prefill.asks(**REMOTE)
    keys = prefill.keys(request)
    put(prefill.store, keys[:1])
    assert prefill.store.drain(LIMIT)
    assert isinstance(gated, Gated)
    gated.shut("write")
    put(prefill.store, keys[1:2])
    gated.waiting("write")
    prefill.clock.advance(6.0)
    put(prefill.store, keys[2:])
    assert prefill.scheduler.request_finished(request) == {"lmkv.wait_for": 8}
    gated.open()


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False}, {**REMOTE, "lmkv.skip_save": True}])
def test_nothing_is_answered_to_who_does_not_ask(prefill: Side, params: dict[str, Any]) -> None:
    request = prefill.asks(**params)
    put(prefill.store, prefill.keys(request))
    assert prefill.scheduler.request_finished(request) is None


@pytest.mark.parametrize("options", [{"loads": True}, {"loads": False, "shared": False}])
def test_servers_of_another_kind_answer_nothing(options: dict[str, Any]) -> None:
    """One that decodes as well may have another connector beside it that does this; a tier of one's own is no use."""
    with side(**options) as made:
        request = made.asks(**REMOTE)
        put(made.store, made.keys(request))
        assert made.scheduler.request_finished(request) is None


# -- decode --------------------------------------------------------------------------------------------


def test_it_waits_for_the_last_token_that_is_being_stored(decode: Side) -> None:
    request = decode.asks(**{"lmkv.wait_for": 22})
    keys = decode.keys(request)
    for key in keys:
        assert decode.match(request) is None
        assert decode.match(request) is None
        decode.others_store([key])
        decode.clock.advance(0.1)
    assert decode.answer(request) == 21


def test_the_longer_it_waits_the_less_often_it_looks(decode: Side) -> None:
    """Others may wait, too, and for long prompts."""
    request, looks = decode.asks(**{"lmkv.wait_for": 22}), 0
    state = decode.scheduler.requests[request.request_id]
    for _ in range(800):
        before = state.waiting.look_at
        assert decode.match(request) is None
        looks += state.waiting.look_at > before
        decode.clock.advance(0.001)
    assert 5 < looks < 40


def test_it_waits_as_long_when_the_first_answer_comes_after_vllm_has_asked() -> None:
    """As it does: between a request's arrival and the next step there are microseconds."""
    with side(stores=False, load_or_recompute=True, prefetch_deadline=30.0) as made:
        shared = made.store.backends[1]
        assert isinstance(shared, Gated)
        shared.shut("contains")
        request = made.asks(**{"lmkv.wait_for": 22})
        assert made.scheduler.get_num_new_matched_tokens(request, 0)[0] is None
        shared.open()
        for _ in range(5):
            made.clock.advance(2.0)
            assert made.match(request) is None, "nothing is known of how long computing takes"
        made.others_store(made.keys(request))
        assert made.answer(request) == 21


def test_without_a_number_it_takes_what_there_is(decode: Side) -> None:
    request = decode.asks()
    decode.others_store(decode.keys(request)[:1])
    assert decode.match(request) == 0
    assert decode.answer(decode.asks()) == 8


def test_what_loading_is_worth_is_decided_once_shared_tiers_have_answered() -> None:
    """One chunk is known and not worth the delay of a load; with those that are found it is."""
    with side(stores=False, load_or_recompute=True) as made:
        cost, nbytes = made.scheduler.timing.cost, made.store.slab.slot_bytes
        cost.note_step(1000, 1.0)
        for chunks in (1, 2, 4):
            cost.note_load("remote", chunks * nbytes, 0.010 + chunks * 1e-5)
        keys = made.keys(made.asks())
        made.others_store(keys[:1])
        assert made.store.look_up_shared(keys[:1]) is not None
        made.others_store(keys)
        assert made.store.catalog.count_prefix(keys) == (0, 1)
        assert made.answer(made.asks()) == 21


def test_the_wait_ends_with_the_deadline_and_what_was_found_is_used(
    decode: Side, caplog: pytest.LogCaptureFixture
) -> None:
    request = decode.asks(**{"lmkv.wait_for": 22})
    decode.others_store(decode.keys(request)[:1])
    assert decode.match(request) is None
    assert decode.match(request) is None
    decode.clock.advance(DEADLINE + 0.1)
    assert decode.answer(request) == 8, "to promote the chunk that is there has a deadline of its own"
    assert "waited 0.9 s for 22 tokens of another server, got 8, and computes the rest" in caplog.text


def test_it_never_waits_when_no_tier_can_be_asked() -> None:
    with side(stores=False, shared=False) as made:
        assert made.match(made.asks(**{"lmkv.wait_for": 22})) == 0


def test_what_vllm_has_itself_is_not_waited_for(decode: Side) -> None:
    request = decode.asks(**{"lmkv.wait_for": 16})
    assert decode.store.drain(LIMIT)
    assert decode.scheduler.get_num_new_matched_tokens(request, 16) == (0, False)


@pytest.mark.parametrize("number", [0, -1, "22", None, 2.5, 2**40])
def test_a_number_that_makes_no_sense_is_ignored(decode: Side, number: object) -> None:
    assert decode.match(decode.asks(**{"lmkv.wait_for": number})) == 0
