"""KV events: replayed, they say which of vLLM's blocks each tier has, whatever the schedule."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given, settings, strategies as st

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.protocols import ChunkKey, Presence
from lmkv.vllm.plan.block_map import Group
from lmkv.vllm.plan.request import Request
from lmkv.vllm.scheduler.events import Blocks, BlocksStored, Event, EventRecorder, Place, place_of
from tests.kit import LIMIT, Persistent, Residents
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, state_of

RAM, BELOW = Place("CPU", "LOCAL"), Place("STORAGE", "REMOTE")

GROUPS = {
    "one group": [Group(4)],
    "window and full": [Group(4, window=8), Group(4)],
    "blocks of two sizes": [Group(4), Group(8)],
}

ENGINES: dict[str, tuple[Any, ...]] = {
    "chunk_size": (8, 16),
    "ram_chunks": (2, 5, 9, 24),
    "lower_chunks": (0, 6, 40),
    "depth": (1, 2),
    "load_faults": (0.0, 0.0, 0.2),
    "store_faults": (0.0, 0.0, 0.2),
    "save_unfull_chunk": (True, True, False),
    "load_mode": ("auto", "async"),
    "prefix_caching": (False, True),
}
"""The options of simulated engines, each with its values."""
engines = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in ENGINES.items()})


def block_hash(salt: str, group: int, size: int, tokens: Iterable[int]) -> int:
    """Of the block that ends with the last token. Unlike vLLM's it tells the groups apart."""
    return int.from_bytes(hashlib.sha256(f"{salt} {group} {size} {list(tokens)}".encode()).digest()[:8], "big")


def describe(groups: list[Group]) -> Any:
    def blocks(request: Any, group: int, start: int, end: int) -> Blocks | None:
        size, ids, salt = groups[group].block_size, request.all_token_ids, request.cache_salt
        assert start % size == end % size == 0
        assert groups[group].window is None
        return Blocks(
            group=group,
            block_size=size,
            hashes=tuple(block_hash(salt, group, size, ids[:at]) for at in range(start + size, end + size, size)),
            parent=block_hash(salt, group, size, ids[:start]) if start else None,
            tokens=array("I", ids[start:end]),
        )

    return blocks


@define
class Index:
    """A router's: the blocks of each place, checked as they come. `blocks`: what was told of each."""

    of: dict[tuple[Place, int], set[Any]] = field(factory=dict)
    blocks: dict[Any, tuple[Any, tuple[int, ...]]] = field(factory=dict)
    seen: Counter[str] = field(factory=Counter)

    def replay(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self._stored(event.place, event.blocks)
            else:
                there = self.of[event.place, event.group]
                assert event.hashes
                assert set(event.hashes) <= there, "removed, but not stored"
                there.difference_update(event.hashes)
                self.seen[f"removed from {event.place.medium}"] += 1

    def _stored(self, place: Place, blocks: Blocks) -> None:
        there, size, parent = self.of.setdefault((place, blocks.group), set()), blocks.block_size, blocks.parent
        assert not there.intersection(blocks.hashes), "stored twice"
        assert len(blocks.tokens) == len(blocks.hashes) * size > 0
        for number, block in enumerate(blocks.hashes):
            told = (parent, tuple(blocks.tokens[number * size : (number + 1) * size]))
            assert self.blocks.setdefault(block, told) == told, "another parent, or other tokens"
            there.add(block)
            parent = block
        self.seen[f"stored in {place.medium}"] += 1

    @property
    def places(self) -> dict[tuple[Place, int], set[Any]]:
        return {place: blocks for place, blocks in self.of.items() if blocks}


def chunks_of(state: Request, size: int) -> Iterator[tuple[ChunkKey, int, int]]:
    """Each of its keys, with the first token of the chunk and how many there are."""
    for index, key in enumerate(state.chain.keys):
        yield key, index * size, size
    if state.tail is not None:
        yield state.tail, state.tail_chunk * size, state.tail.tokens


def found(engine: SimulatedVLLM, states: Iterable[Request]) -> dict[tuple[Place, int], set[Any]]:
    """The whole blocks of these requests that each place has, of groups without windows."""
    places: dict[tuple[Place, int], set[Any]] = {}
    for state in states:
        for key, start, count in chunks_of(state, engine.chunk_size):
            has = Residents()
            engine.store.catalog.replay_to(has, [key])
            assert bool(has.of) == (engine.store.catalog.lookup([key]) != [Presence.MISS])
            for number, group in enumerate(engine.groups):
                whole = count // group.block_size * group.block_size
                if group.window is None and whole:
                    blocks = describe([*engine.groups])(state.vllm, number, start, start + whole)
                    for tier in has.of:
                        places.setdefault((place_of(tier), number), set()).update(blocks.hashes)
    return places


def request_of(rng: random.Random, name: str) -> SimulatedRequest:
    """One of a few conversations, cut anywhere, with an end of its own now and then, and one of two tags."""
    story = random.Random(rng.randrange(4))
    tokens = [story.randrange(50) for _ in range(rng.randint(1, 70))]
    if rng.random() < 0.4:
        tokens += [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    params = {"lmkv.tag.team": rng.choice(["", "red"])} if rng.random() < 0.3 else None
    return SimulatedRequest(name, tokens, len(tokens), rng.randint(1, 20), rng.choice(["a", "a", "b"]), params)


class Driver:
    """Runs requests on one engine after another over one medium, and replays what each of them tells."""

    def __init__(self, seed: int, groups: list[Group], options: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        self.groups = groups
        self.options = options
        size = 4096 * (options["lower_chunks"] + 4)
        medium = CPUPinnedBackend(size, 4096, populate=False)
        medium.name = "lower"
        self.medium = Persistent(medium)
        self.seen: Counter[str] = Counter()

    def life(self, number: int) -> None:
        """Of one engine. A router knows nothing of it before, and all of it afterwards."""
        rng, index = self.rng, Index()
        options = self.options | {"medium": self.medium, "describe": describe(self.groups)}
        with SimulatedVLLM(rng, groups=self.groups, **options) as engine:
            assert engine.store.wait_indexed(LIMIT)
            states: list[Request] = []
            for name in range(rng.randint(2, 10)):
                request = request_of(rng, f"{number} {name}")
                engine.add(request)
                states.append(state_of(engine.scheduler, request))
                for _ in range(rng.randint(0, 9)):
                    engine.step()
                index.replay(engine.events)
                engine.events.clear()
                if rng.random() < 0.04:
                    engine.scheduler.reset()
                    states.clear()
            engine.finish()
            engine.step()
            index.replay([*engine.events, *engine.scheduler.take_events()])
            assert index.places == found(engine, states)
            self.seen += index.seen + Counter(hits=engine.counts["hits"])
            engine.scheduler.republish()
            told_again = Index()
            told_again.replay(engine.scheduler.take_events())
            assert told_again.places == index.places, "what routers were told to forget is told again"
            engine.scheduler.reset()
            index.replay(engine.scheduler.take_events())
            assert index.places == {}
            engine.scheduler.republish()
            assert engine.scheduler.take_events() == []
            recorder = engine.scheduler.observer.events
            assert recorder is not None
            assert not recorder._chunks


@pytest.mark.parametrize("kind", GROUPS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), options=engines)
def test_replayed_they_say_what_each_tier_has(kind: str, seed: int, options: dict[str, Any]) -> None:
    driver = Driver(seed, GROUPS[kind], options)
    for number in range(2):
        driver.life(number)


@pytest.mark.nightly("histories")
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_longer_histories(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    options = {name: rng.choice(values) for name, values in ENGINES.items()}
    driver = Driver(seed, GROUPS[kind], options)
    for number in range(4):
        driver.life(number)


def test_the_histories_test_something() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        options = {"ram_chunks": 5, "lower_chunks": 9 if seed % 2 else 60}
        driver = Driver(seed, GROUPS["one group"], options | {"save_unfull_chunk": seed % 3 > 0})
        for number in range(2):
            driver.life(number)
        seen += driver.seen
    told = [f"{what} {tier}" for what in ("stored in", "removed from") for tier in ("CPU", "STORAGE")]
    assert min(seen[what] for what in [*told, "hits"]) > 10, seen


# -- one thing at a time -------------------------------------------------------------------------------


DESCRIBE = describe([Group(4)])


def small_engine(describe: Any = DESCRIBE, **options: Any) -> SimulatedVLLM:
    return SimulatedVLLM(describe=describe, **options)


def serve(engine: SimulatedVLLM, name: str, tokens: list[int], more: int = 1, **params: Any) -> list[Event]:
    """What one request, served alone, gives to tell."""
    engine.events.clear()
    engine.serve(name, tokens, more, **params)
    engine.step()
    return [*engine.events, *engine.scheduler.take_events()]


def hashes(tokens: list[int], first: int, end: int) -> list[int]:
    """Of the blocks of tokens [first, end)."""
    return [block_hash("a", 0, 4, tokens[:at]) for at in range(first + 4, end + 4, 4)]


def told(events: Iterable[Event]) -> list[tuple[str, Place, list[Any]]]:
    return [("+" if isinstance(event, BlocksStored) else "-", event.place, list(_hashes(event))) for event in events]


def _hashes(event: Event) -> Any:
    return event.blocks.hashes if isinstance(event, BlocksStored) else event.hashes


def test_a_block_in_two_tiers_of_one_place_is_there_until_both_have_lost_it() -> None:
    tokens = list(range(9))
    with small_engine(save_unfull_chunk=False) as engine:
        serve(engine, "first", tokens)
        (key,), recorder = engine.store.snapshot().held, engine.scheduler.observer.events
        assert recorder is not None
        recorder.stored("shared_memory", key)
        recorder.stored("disk", key)
        assert told(recorder.take()) == [("+", Place("STORAGE", "LOCAL"), hashes(tokens, 0, 8))]
        engine.store.drop([key])
        assert recorder.take() == []
        recorder.removed("shared_memory", key)
        assert told(recorder.take()) == [("-", RAM, hashes(tokens, 0, 8))]


def test_what_a_request_that_loads_nothing_has_stored_is_told_after_one_of_its_copies_failed() -> None:
    kept = 0
    for seed in range(12):
        with SimulatedVLLM(seed, depth=3, store_faults=0.4, describe=DESCRIBE) as engine:
            engine.begin("first", range(60), 4, **{"lmkv.skip_load": True})
            state, index = engine.scheduler.requests["first"], Index()
            engine.finish()
            engine.step()
            index.replay([*engine.events, *engine.scheduler.take_events()])
            assert index.places == found(engine, [state])
            kept += state.options.skip_save and engine.store.stats().primary.chunks > 0
    assert kept > 2, kept


def test_a_copy_that_ends_after_a_reset_and_its_request_tells_nothing() -> None:
    index = Index()
    with small_engine(save_unfull_chunk=False, lower_chunks=40, depth=3) as engine:
        request = engine.begin("first", range(60), 20)
        while not (engine.scheduler.busy and engine.store.stats().tiers[1].chunks):
            engine.step()
        engine.abort(request)
        engine.scheduler.reset()
        engine.finish()
        engine.step()
        index.replay([*engine.events, *engine.scheduler.take_events()])
        assert index.places == {}, "nobody looks for these chunks any more"


def test_many_changes_are_told_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(64))
    with small_engine(save_unfull_chunk=False) as engine:
        assert len(serve(engine, "first", tokens)) == 8
        engine.store.drop(list(engine.store.snapshot().held))
        monkeypatch.setattr("lmkv.vllm.scheduler.events._BATCH_CHANGES", 3)
        steps = [told(engine.scheduler.take_events()) for _ in range(4)]
        assert [len(step) for step in steps] == [3, 3, 2, 0]
        assert [block for step in steps for _, _, blocks in step for block in blocks] == hashes(tokens, 0, 64)


def test_blocks_that_cannot_be_described_end_the_events_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any, *where: int) -> Blocks | None:
        if request.request_id == "second":
            raise AttributeError("block_hashes")
        return DESCRIBE(request, *where)  # type: ignore[no-any-return]

    tokens = list(range(24))
    with small_engine(broken, save_unfull_chunk=False) as engine:
        serve(engine, "first", tokens)
        gone = told(serve(engine, "second", list(range(50, 74))))
        assert gone == [("-", RAM, hashes(tokens, 0, 24))]
        assert caplog.text.count("no KV events from now on") == 1
        assert serve(engine, "third", list(range(25, 49))) == []
        engine.serve("again", [*tokens, 1])
        assert engine.counts["hits"] == 1


def test_blocks_that_vllm_has_not_hashed_are_not_told() -> None:
    with small_engine(lambda request, *where: None) as engine:
        assert serve(engine, "first", list(range(24))) == []


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    with small_engine(None) as engine:
        assert serve(engine, "first", list(range(24))) == []
        assert not any(isinstance(observer, EventRecorder) for observer in engine.store._observers)


def test_a_recorder_says_how_much_it_knows() -> None:
    with small_engine() as engine:
        serve(engine, "first", list(range(24)))
        assert repr(engine.scheduler.observer.events) == "<EventRecorder: 3 chunks known, 0 changes to publish>"
