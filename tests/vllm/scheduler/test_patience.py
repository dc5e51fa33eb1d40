"""How long a request may wait for chunks of lower tiers: by what it saves, and without what it waits for otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lmkv.chunks.hashing import KeyChain, state_keys
from lmkv.chunks.namespace import Namespace
from lmkv.protocols import Chunk, ChunkKey
from lmkv.testing import ManualClock
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.plan.request import STALL, WaitLimit
from lmkv.vllm.scheduler import Scheduler
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.scheduler.timing import LoadCost
from tests.kit import LIMIT, NEVER, Gated, Persistent, eventually, listing_every, lower, memory, payload, small_store
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, request_for
from tests.vllm.scheduler.test_explain import OTHERS, PROMPT, asks, engine_of, report, serve

MIB = 1 << 20


class TestPatience:
    def test_a_wait_lasts_as_long_as_its_limit(self) -> None:
        patience = WaitLimit(30.0)
        assert patience.lasts(5.0, lambda: 2.0, 0)
        assert patience.lasts(7.0, lambda: 100.0, 0), "the limit is asked for once"
        assert not patience.lasts(7.1, lambda: 100.0, 0)
        assert patience.late
        assert patience.spent == pytest.approx(2.1)
        assert not patience.lasts(0.0, lambda: 100.0, 0), "there is no wait after one that took too long"

    def test_time_between_waits_does_not_count(self) -> None:
        patience = WaitLimit(30.0)
        for start in (0.0, 1000.0, 2000.0):
            assert patience.lasts(start, lambda: 2.0, 0)
            assert patience.lasts(start + 1.9, lambda: 2.0, 0)
            patience.end(start + 1.9)
        assert patience.spent == pytest.approx(5.7)

    def test_all_waits_together_end_with_the_deadline(self) -> None:
        patience = WaitLimit(3.0)
        for start in (0.0, 10.0):
            assert patience.lasts(start, lambda: 2.0, 0)
            patience.end(start + 1.4)
        assert patience.lasts(20.0, lambda: 2.0, 0)
        assert not patience.lasts(20.3, lambda: 2.0, 0)

    def test_a_wait_of_which_nothing_is_known_lasts_while_chunks_arrive(self) -> None:
        patience, now = WaitLimit(30.0), 0.0
        for arrived in range(20):
            assert patience.lasts(now, lambda: None, arrived)
            now += 0.9 * STALL
        assert not patience.lasts(now + STALL, lambda: None, 19)

    @given(
        deadline=st.floats(0, 50),
        steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9), st.none() | st.floats(0, 20), st.booleans())),
    )
    def test_no_history_of_waits_exceeds_the_deadline_by_more_than_a_step(
        self, deadline: float, steps: list[tuple[float, int, float | None, bool]]
    ) -> None:
        patience, now, longest = WaitLimit(deadline), 0.0, 0.0
        for seconds, arrived, limit, ends in steps:
            now += seconds
            longest = max(longest, seconds)
            patience.lasts(now, lambda limit=limit: limit, arrived)
            if ends:
                patience.end(now)
        assert patience.spent <= deadline + longest + 1e-9


class TestLimit:
    def test_it_follows_the_seconds_that_computing_takes(self) -> None:
        cost = LoadCost()
        assert cost.patience("redis", 1000, MIB) is None
        cost.note_step(1000, 1.0)
        assert cost.patience("redis", 29_000, MIB) == pytest.approx(29.0)
        assert cost.patience("redis", 100, MIB) == pytest.approx(0.1)

    def test_a_tier_that_is_known_to_be_fast_is_not_waited_for_as_long(self) -> None:
        cost = LoadCost()
        cost.note_step(1000, 1.0)
        cost.note_load("redis", 10 * MIB, 0.1)
        assert cost.patience("redis", 29_000, 10 * MIB) == pytest.approx(29 / 4)
        cost.note_load("redis", 10 * MIB, 16.0)
        load = cost.loads["redis"].of(10 * MIB)
        assert cost.patience("redis", 29_000, 10 * MIB) == pytest.approx(min(29.0, 4 * load))
        assert cost.patience("redis", 10, 10 * MIB) == pytest.approx(0.01)

    def test_who_wants_everything_loaded_waits_up_to_the_deadline(self) -> None:
        assert LoadCost(enabled=False).patience("redis", 1, MIB) == math.inf


@pytest.fixture
def tiered() -> Iterator[SimulatedVLLM]:
    """PROMPT lies below."""
    with engine_of(ram_chunks=10, lower_chunks=60) as made:
        serve(made, PROMPT, *OTHERS)
        yield made


def lookup(engine: SimulatedVLLM, request: SimulatedRequest) -> int | None:
    return engine.scheduler.get_num_new_matched_tokens(request, 0)[0]


def waits(engine: SimulatedVLLM, *, hangs: bool = False) -> SimulatedRequest:
    """A request whose chunks the tier below is to bring; `hangs`: for ever."""
    if hangs:
        engine.disks[0].latency = math.inf
    request = asks(engine, PROMPT)
    assert lookup(engine, request) is None
    return request


def test_a_request_that_waits_for_kv_space_is_not_late_for_its_chunks(tiered: SimulatedVLLM) -> None:
    """It is promised its chunks, finds no blocks, and its chunks are evicted meanwhile: again and again."""
    request = asks(tiered, PROMPT)
    for _ in range(5):
        assert lookup(tiered, request) is None
        assert tiered.store.drain(LIMIT)
        tiered.now += 0.9 * STALL
        assert lookup(tiered, request) == len(PROMPT) - 1
        tiered.step()
        tiered.now += 100.0
        tiered.store.drop(tiered.scheduler.keys_of(PROMPT[:-1], "a", {}))
    assert report(tiered, request) is None, "nothing was missed"


def test_io_threads_are_let_in_where_a_request_has_them_read_and_once_in_a_while(
    tiered: SimulatedVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    requests: list[SimulatedRequest] = []

    def arrives(tokens: list[int]) -> int:
        """How often the scheduling thread has let others in by now."""
        requests.append(SimulatedRequest(f"{len(requests)}", list(tokens), len(tokens), 1, "a"))
        tiered.scheduler.on_new_request(requests[-1])
        return len(slept)

    monkeypatch.setattr("lmkv.vllm.scheduler.match.time.sleep", slept.append)
    tiered.disks[0].latency = math.inf
    assert arrives(PROMPT) == 1
    tiered.now += 1.0
    assert arrives(PROMPT) == 1, "its chunks are being read already"
    assert arrives(OTHERS[0]) == 2
    assert arrives(OTHERS[1]) == 2, "others were let in at the same moment"
    assert max(slept) < 0.001
    monkeypatch.undo()
    tiered.disks[0].latency = 0.0
    for request in requests:
        tiered.scheduler.request_finished(request)


def test_what_was_promised_and_withdrawn_counts_for_the_tier_that_had_it(tiered: SimulatedVLLM) -> None:
    request = waits(tiered)
    assert tiered.store.drain(LIMIT)
    for _ in range(3):
        assert lookup(tiered, request) == len(PROMPT) - 1
        assert tiered.scheduler.hit_sources("asks") == {"cpu": 0, "lower": len(PROMPT) - 1}
        tiered.step()
    tiered.scheduler.request_finished(request)


def test_what_did_not_arrive_counts_for_no_tier(tiered: SimulatedVLLM) -> None:
    """A part of the prompt is in host memory; the rest comes from a disk that hangs."""
    serve(tiered, PROMPT[:17])
    request = waits(tiered, hangs=True)
    tiered.now += STALL + 0.1
    assert lookup(tiered, request) == 16
    assert tiered.scheduler.hit_sources("asks") == {"cpu": 16}
    assert report(tiered, request)["reason"] == "deadline"
    tiered.disks[0].latency = 0.0


def test_a_model_that_computes_slowly_waits_longer_and_a_fast_one_not_at_all(tiered: SimulatedVLLM) -> None:
    for speed, patience in ((2.0, (len(PROMPT) - 1) / 2.0), (1e6, 0.0)):
        tiered.scheduler.timing.cost = LoadCost(prefill_speed=speed)
        request = waits(tiered, hangs=True)
        tiered.now += 0.9 * patience
        assert (lookup(tiered, request) is None) == (patience > 0) or speed > 100
        tiered.now += 0.5 * patience + 0.01
        assert lookup(tiered, request) == 0
        assert report(tiered, request)["reason"] == "deadline"
        tiered.disks[0].latency = 0.0
        tiered.step()


def test_a_tier_that_was_given_up_is_slow_until_a_probe_shows_otherwise(tiered: SimulatedVLLM) -> None:
    cost = tiered.scheduler.timing.cost = LoadCost(prefill_speed=100.0)
    request = waits(tiered, hangs=True)
    tiered.now += 1.0
    assert lookup(tiered, request) == 0
    tiered.scheduler.request_finished(request)
    tiered.disks[0].latency = 0.0
    assert tiered.store.drain(LIMIT)
    tiered.store.drop(tiered.scheduler.keys_of(PROMPT, "a", {}))
    for _ in range(16):
        request = asks(tiered, PROMPT)
        assert lookup(tiered, request) == 0, "nobody waits for a slow tier"
        assert report(tiered, request)["reason"] in ("slower", "not_ready")
    assert tiered.store.drain(LIMIT)
    assert cost.worth_loading("lower", len(PROMPT), 1), "the sixteenth was loaded beside, and measured"
    assert lookup(tiered, asks(tiered, PROMPT)) == len(PROMPT) - 1
    tiered.finish()


def test_nobody_waits_for_a_load_that_hangs_and_what_was_computed_meanwhile_is_found(tiered: SimulatedVLLM) -> None:
    """The chunk is still being loaded, perhaps for ever, when others ask for it."""
    request = waits(tiered, hangs=True)
    tiered.store.drain(LIMIT)
    tiered.now += 6.0
    assert lookup(tiered, request) == 0
    assert report(tiered, request)["reason"] == "tier_unavailable"
    request = asks(tiered, PROMPT)
    assert lookup(tiered, request) == 0, "it does not wait"
    tiered.scheduler.request_finished(request)
    request = tiered.begin("computes", PROMPT)
    while request.status != "ended":
        tiered.step()
    tiered.step()
    assert lookup(tiered, asks(tiered, PROMPT)) == len(PROMPT) - 1, "from host memory"
    tiered.disks[0].latency = 0.0
    tiered.finish()


def test_a_stream_waits_no_longer_in_all_its_windows_than_computing_takes() -> None:
    """Each window comes within the limit; there are forty of them. The next request knows."""
    prompt = [(3 * token) % 50 for token in range(40 * 8 + 1)]
    with engine_of(num_blocks=200, ram_chunks=8, lower_chunks=60, load_mode="async") as engine:
        serve(engine, prompt, *OTHERS[:4])
        engine.scheduler.timing.cost = LoadCost(prefill_speed=len(prompt) / 1.0)
        engine.disks[0].latency = 0.5
        request = engine.begin("streams", prompt, **{"lmkv.report": True})
        before = engine.now
        while request.status in ("waiting", "loading"):
            engine.step()
        assert engine.counts["async_loads"] == 1
        assert engine.now - before < 1.0 + 0.5 + 0.1
        engine.disks[0].latency = 0.0
        engine.finish()
        assert engine.scheduler.timing.cost.loads["lower"].of(40) > 0
        engine.scheduler.timing.cost.prefill_speed = len(prompt) / 1.0
        request = asks(engine, prompt)
        assert lookup(engine, request) is not None
        assert report(engine, request)["reason"] == "slower"
        engine.finish()


Both = tuple[Scheduler, dict[str, Gated], ManualClock]


def asks_of(scheduler: Scheduler) -> SimulatedRequest:
    """A request for the prompt that has just arrived, which wants a report."""
    request = request_for("r", PROMPT, **{"lmkv.report": True})
    scheduler.on_new_request(request)
    return request


def told(scheduler: Scheduler, request: SimulatedRequest) -> Any:
    """Its report."""
    answer = scheduler.request_finished(request)
    assert answer is not None
    return answer["lmkv"]


@contextmanager
def over_two_tiers(
    tokens: Sequence[int],
    block_map: BlockMap,
    parts: Callable[[list[ChunkKey]], Sequence[Sequence[ChunkKey]]],
    **more: Any,
) -> Iterator[Both]:
    """`parts`: keys that the fast and the slow tier have, of those of the tokens' chunks."""
    clock, gates = ManualClock(), {name: Gated(Persistent(memory(64, name))) for name in ("fast", "slow")}
    namespace = Namespace(model="m", dtype="u8", chunk_size=8, block_size=block_map.groups[0].block_size)
    chain = KeyChain(namespace.root(cache_salt="a", lora=None, extra={}), 8)
    chain.extend(tokens)
    for gate, part in zip(gates.values(), parts(chain.keys), strict=True):
        for key in part:
            gate.write(Chunk(key, memoryview(payload(key))))
    with listing_every(NEVER):
        store = small_store(32, *map(lower, gates.values()), clock=clock)
    assert store.wait_indexed(LIMIT)
    options = SchedulerOptions(save_unfull_chunk=False, clock=clock, **more)
    with closing(Scheduler(store, namespace, block_map, options)) as scheduler:
        yield scheduler, gates, clock


class TestTwoTiers:
    """The head of a prompt is in a fast tier, its end in a slow one."""

    @pytest.fixture
    def both(self) -> Iterator[Both]:
        with over_two_tiers(PROMPT, BlockMap(8, (Group(4),)), lambda keys: (keys[:2], keys[2:3])) as made:
            yield made

    def test_each_is_measured_by_what_it_delivers(self, both: Both) -> None:
        scheduler, gates, clock = both
        cost = scheduler.timing.cost
        for gate in gates.values():
            gate.shut("read")
        asks_of(scheduler)
        for gate in gates.values():
            gate.waiting("read")
        clock.advance(0.01)
        gates["fast"].open()
        promotion = scheduler.requests["r"].waiting.promotion
        assert promotion is not None
        eventually(lambda: promotion.ready == 2, "the head")
        clock.advance(5.0)
        gates["slow"].open()
        assert scheduler.store.drain(LIMIT)
        assert cost.loads["fast"].seconds == pytest.approx(0.01)
        assert cost.loads["slow"].seconds == pytest.approx(5.01)

    def test_a_report_says_how_long_the_request_waited(self, both: Both) -> None:
        scheduler, gates, clock = both
        for gate in gates.values():
            gate.shut("read")
        request = asks_of(scheduler)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        clock.advance(0.25)
        for gate in gates.values():
            gate.open()
        assert scheduler.store.drain(LIMIT)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (24, False)
        assert told(scheduler, request)["wait_seconds"] == pytest.approx(0.25)

    def test_the_head_is_loaded_where_the_rest_is_sooner_computed(self, both: Both) -> None:
        scheduler, _, _ = both
        cost = scheduler.timing.cost
        cost.note_step(1000, 1.0)
        cost.note_load("slow", 1, 10.0)
        request = asks_of(scheduler)
        assert scheduler.store.drain(LIMIT)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        assert told(scheduler, request)["missed"] == {
            "reason": "slower",
            "tokens": len(PROMPT) - 1 - 16,
            "tier": "slow",
        }
        assert cost.skipped == {"slow": 1}


class TestStates:
    """A fast tier has a prompt's chunks, and the states behind the second; a slow one has those behind the fourth."""

    TOKENS = tuple(range(40))

    @pytest.fixture
    def scheduler(self) -> Iterator[Scheduler]:
        def parts(keys: list[ChunkKey]) -> list[list[ChunkKey]]:
            return [[*keys, *state_keys(keys[1], 1)], [*state_keys(keys[3], 1)]]

        block_map = BlockMap(8, (Group(8), Group(8, state=1)))
        with over_two_tiers(self.TOKENS, block_map, parts, load_mode="async") as (made, _, _):
            cost, nbytes = made.timing.cost, made.store.slab.slot_bytes
            cost.note_step(1000, 1.0)
            cost.note_load("fast", nbytes, 0.001)
            yield made

    @pytest.mark.parametrize(
        ("seconds", "computed", "hit"),
        [
            # Without it the 32 tokens before it would be computed, not those of a chunk.
            (0.030, 0, 32),
            (0.034, 0, 16),
            # Two chunks are in vLLM's own cache.
            (0.015, 16, 16),
            (0.017, 16, 0),
        ],
    )
    def test_a_state_is_worth_what_it_saves_computing(
        self, scheduler: Scheduler, seconds: float, computed: int, hit: int
    ) -> None:
        scheduler.timing.cost.note_load("slow", scheduler.store.slab.slot_bytes, seconds)
        request = request_for("r", self.TOKENS)
        answer: list[int | None] = [None]

        def asked() -> bool:
            answer[0] = scheduler.get_num_new_matched_tokens(request, computed)[0]
            return answer[0] is not None

        eventually(asked)
        assert answer == [hit]
        scheduler.request_finished(request)
