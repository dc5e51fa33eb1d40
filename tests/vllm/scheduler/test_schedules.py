"""For any schedule: every byte served is what a fresh prefill gives, every lease ends, every slot returns."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import event, given, strategies as st

from lmkv.vllm.plan.block_map import Group
from lmkv.vllm.scheduler.loads import AsyncLoad
from lmkv.vllm.scheduler.stores import StateStores
from tests.vllm.scheduler.simulated_vllm import Replay, Ring, SimulatedRequest, SimulatedVLLM, Table, request_for

GROUPS: dict[str, list[Table]] = {
    "full attention": [Group(4)],
    "window of two blocks and full": [Group(4), Group(4, window=8)],
    "window alone": [Group(4, window=8)],
    "a recurrent layer and full": [Group(8), Group(8, state=1)],
    "two kinds of recurrent layers in two entries, and full": [
        Group(8),
        *(Group(8, state=1), Group(8, state=1), Group(8, state=2)),
    ],
    "window over several chunks, larger blocks": [Group(4), Group(8, window=40)],
    "full attention behind a ring": [Ring(8, ratio=4), Group(4)],
    "a ring, full, and a recurrent layer": [Ring(16, ratio=8), Group(8), Group(8, state=1)],
    "full, ring, window and a window that is computed again": [
        Group(4),
        Ring(16, ratio=8),
        Group(8, window=24),
        Replay(4, window=6),
    ],
}

SITUATIONS = ("hits", "partial_hits", "preempted", "aborted", "recomputed", "async_loads")

ENGINES: dict[str, tuple[Any, ...]] = {
    "chunk_size": (8, 16),
    "lower_chunks": (0, 0, 40),
    "depth": (1, 1, 2, 3),
    "load_faults": (0.0, 0.0, 0.2),
    "store_faults": (0.0, 0.0, 0.2),
    "ranks": (1, 1, 2),
    "context": (1, 1, 2),
    "lookahead": (0, 0, 1, 3),
    "save_unfull_chunk": (True, True, False),
    "load_mode": ("auto", "auto", "async"),
    "aborts": (0.0, 0.0, 0.1),
    "audit_rate": (0.0, 0.5),
    **dict.fromkeys(("drafts", "layerwise", "prefix_caching", "device", "load_or_recompute"), (False, True)),
}
engines = st.fixed_dictionaries(
    {"num_blocks": st.integers(40, 90), "ram_chunks": st.integers(2, 24)}
    | {name: st.sampled_from(values) for name, values in ENGINES.items()}
)


def one_of_a_few_conversations(rng: random.Random, number: int) -> SimulatedRequest:
    """One of a few conversations, cut anywhere, with an end of its own now and then."""
    story = random.Random(rng.randrange(3))
    tokens = [story.randrange(50) for _ in range(rng.randint(1, 70))]
    if rng.random() < 0.4:
        tokens += [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    salt = rng.choice(["a", "a", "b"])
    return SimulatedRequest(f"r{number}", tokens, len(tokens), rng.randint(1, 20), salt)


def drive(engine: SimulatedVLLM, pending: list[SimulatedRequest], steps: int) -> None:
    """Requests come, are aborted, and all is reset now and then, in any order; then all of them end."""
    rng, alive = engine.rng, list[SimulatedRequest]()
    for _ in range(steps):
        while pending and rng.random() < 0.4:
            alive.append(pending.pop())
            engine.add(alive[-1])
        alive = [request for request in alive if request.status != "ended"]
        if alive and rng.random() < 0.04:
            engine.abort(rng.choice(alive))
        if rng.random() < 0.01:
            engine.scheduler.reset()
        engine.step()
    for request in pending:
        engine.add(request)
    engine.finish()


def _drive(rng: random.Random, groups: list[Table], options: dict[str, Any]) -> Counter[str]:
    options = {**options, "ranks": options.get("ranks", 1) * options.get("context", 1)}
    with SimulatedVLLM(rng, groups=groups, **options) as engine:
        pending = [one_of_a_few_conversations(rng, number) for number in range(rng.randint(2, 14))]
        drive(engine, pending, rng.randint(10, 60))
        assert engine.total("lmkv_wrong_chunks") == {}, "what is stored is what a fresh prefill gives"
        assert engine.total("lmkv_wrong_loads") == {}, "what is loaded is what is stored"
        return Counter(engine.counts)


@pytest.mark.slow("random schedules find the most, and need many examples")
@pytest.mark.parametrize("kind", GROUPS)
@given(seed=st.integers(0, 2**32), options=engines)
def test_any_schedule(kind: str, seed: int, options: dict[str, Any]) -> None:
    counts = _drive(random.Random(seed), GROUPS[kind], options)
    for name in SITUATIONS:
        if counts[name]:
            event(name)


def test_draft_layers_beside_recurrent_ones_are_not_audited() -> None:
    """Their KV at the end of a hit depends on the token that came next, which is no wrong chunk."""
    options = {"num_blocks": 40, "chunk_size": 8, "ram_chunks": 18, "drafts": True, "lookahead": 1, "context": 2}
    _drive(random.Random(942469063), GROUPS["a ring, full, and a recurrent layer"], {**options, "audit_rate": 0.5})


@pytest.mark.parametrize("kind", [kind for kind in GROUPS if kind != "window alone"])
def test_the_schedules_test_something(kind: str) -> None:
    """Over fixed seeds, each of the situations that matter occurs."""
    total: Counter[str] = Counter()
    for seed in range(30):
        rng = random.Random(seed)
        options = {
            "num_blocks": 70,
            "chunk_size": 8,
            "ram_chunks": 4 if seed % 2 else 20,
            "lower_chunks": 40 if seed % 2 else 0,
            "depth": 1 + seed % 2,
            "load_faults": 0.3 * (seed % 3 == 0),
        }
        total += _drive(rng, GROUPS[kind], options)
    # With recurrent layers, and beside scratch blocks, a hit ends with a block.
    whole = any(isinstance(table, Ring) or table.state for table in GROUPS[kind])
    missing = [name for name in SITUATIONS if not total[name] and not (whole and name == "partial_hits")]
    assert not missing, total


def test_states_that_are_not_loaded_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the schedules."""
    monkeypatch.setattr(AsyncLoad, "_state_copies", lambda self, lease: [])
    options = {"num_blocks": 70, "chunk_size": 8, "ram_chunks": 40}
    wrong = 0
    for seed in range(10):
        try:
            _drive(random.Random(seed), GROUPS["a recurrent layer and full"], options)
        except AssertionError:
            wrong += 1
    assert wrong


def _second_turns(seed: int, depth: int) -> list[tuple[int, int]]:
    """`(loaded, best)` of prompts that go on where an answer with drafts has ended: tokens of each hit, and of the best

    that was possible.
    """
    rng, size = random.Random(seed), 8
    options: dict[str, Any] = {"ram_chunks": 200, "drafts": True, "lookahead": 1, "local_hits": 0.0}
    found = []
    with SimulatedVLLM(rng, groups=GROUPS["a recurrent layer and full"], depth=depth, **options) as engine:
        prompts = [[rng.randrange(50) for _ in range(rng.randint(3, 20))] for _ in range(4)]
        asked = [engine.begin(f"{number}", tokens, rng.randint(20, 40)) for number, tokens in enumerate(prompts)]
        engine.finish()
        for request in asked:
            tokens = [*request.all_token_ids, *[49] * rng.randint(1, 9)]
            again = engine.serve(f"{request.request_id} again", tokens, 3)
            best = [at for at in request.ends if at % size == 0 and at > request.num_prompt_tokens]
            found.append((again.loaded, max(best, default=request.num_prompt_tokens // size * size)))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_second_turn_loads_the_last_state_that_no_accepted_draft_has_passed(depth: int) -> None:
    found = [each for seed in range(20) for each in _second_turns(seed, depth)]
    assert [loaded for loaded, _ in found] == [best for _, best in found]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_states_that_accepted_drafts_have_passed_would_show(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Had they been looked for once the drafts were accepted, where the step before was to put them."""
    take, expected = StateStores.take, dict[str, Any]()

    def remembers(self: StateStores, state: Any, computed: int, tables: Any, offers: Any = ()) -> None:
        tokens, blocks = expected.pop(state.request_id, (0, {}))
        if self._keyed(state, tokens):
            self._step_ended(state, tokens // self._chunk_size, blocks)
        take(self, state, computed, tables, offers)
        end = (computed + 3) // self._chunk_size * self._chunk_size
        if end > state.num_tokens > state.prompt_tokens:
            expected[state.request_id] = end, self._block_map.state_blocks(tables, end)

    monkeypatch.setattr(StateStores, "take", remembers)
    wrong = 0
    for seed in range(20):
        expected.clear()
        try:
            _second_turns(seed, depth)
        except AssertionError:
            wrong += 1
    assert wrong


def test_an_aborted_load_frees_its_blocks_once_the_device_is_done_with_them() -> None:
    """A copy that comes late must not hit the blocks of another request."""
    while_copying = 0
    for seed in range(125, 140):
        rng = random.Random(seed)
        options: dict[str, Any] = {"ram_chunks": 8, "lower_chunks": 60, "io_moves": 40}
        with SimulatedVLLM(rng, **options, load_mode="async", depth=2, device=True) as engine:
            stories = [list(range(first, first + 60)) for first in range(2)]
            for number, story in enumerate(stories):
                engine.begin(f"stores {number}", story)
            engine.finish()
            for turn in range(6):
                asked = [engine.begin(f"{turn} {number}", story, 2) for number, story in enumerate(stories)]
                for _ in range(rng.randint(1, 9)):
                    engine.step()
                for request in asked:
                    if request.status != "ended" and rng.random() < 0.7:
                        load = engine.scheduler.loads.between_steps.get(request.request_id)
                        while_copying += load is not None and load.copying > 0
                        engine.abort(request)
                others = [rng.randrange(50) for _ in range(50)]
                engine.begin(f"other {turn}", others, 3, "b")
            engine.finish()
    assert while_copying > 10, while_copying


@pytest.mark.parametrize(
    ("groups", "stored", "asked", "hit"),
    [
        # The tokens that the KV of the last ones looks ahead to are the prompt's, and were found.
        ("full attention", 21, 21, {0: 20, 1: 20, 3: 18}),
        ("full attention", 21, 30, {0: 21, 1: 20, 3: 18}),
        # A whole chunk, after which the prompts go on otherwise.
        ("full attention", 16, 24, {0: 16, 1: 15, 3: 13}),
        ("full attention", 5, 13, {0: 5, 1: 4, 3: 2}),
        ("window alone", 16, 24, {0: 16, 1: 15, 3: 8}),
        ("window alone", 21, 21, {0: 20, 1: 20, 3: 16}),
    ],
)
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_the_end_of_a_hit_is_left_out_where_it_depends_on_what_follows(
    groups: str, stored: int, asked: int, hit: dict[int, int], lookahead: int
) -> None:
    with SimulatedVLLM(groups=GROUPS[groups], lookahead=lookahead, local_hits=0.0) as engine:
        tokens = list(range(stored))
        engine.serve("first", tokens, 5)
        again = request_for("again", [*tokens, *[49] * (asked - stored)])
        assert engine.scheduler.get_num_new_matched_tokens(again, 0)[0] == hit[lookahead]
        engine.scheduler.request_finished(again)
        engine.serve("another", again.all_token_ids)


def test_a_chunk_is_stored_when_all_of_it_was_computed_for_the_last_time() -> None:
    """Modules of MTP compute the end of what was generated again, with the tokens that come after it."""
    with SimulatedVLLM(lookahead=3, local_hits=0.0) as engine:
        first = engine.serve("first", range(6), 30)
        again = engine.serve("again", [*first.all_token_ids, 49])
        assert engine.counts["hits"] == 1
        assert again.loaded == first.num_tokens // 8 * 8 - 3


@pytest.mark.parametrize("arrives", ["with it", "after it"])
@pytest.mark.parametrize("first_aborted", [True, False])
def test_blocks_of_a_load_that_fails_are_not_shared(arrives: str, first_aborted: bool) -> None:
    with SimulatedVLLM(2, prefix_caching=True, load_faults=1.0) as engine:
        tokens = list(range(40))
        engine.serve("stores", tokens)
        engine.forget()
        first = request_for("first", tokens, 4)
        second = request_for("second", tokens, 4)
        engine.add(first)
        if arrives == "with it":
            engine.add(second)
        engine.step()
        assert engine.counts["recomputed"] == 1
        if first_aborted:
            engine.abort(first)
        if arrives == "after it":
            engine.add(second)
        engine.finish()
        assert second.status == "ended"
        assert engine.counts["finished"] == (2 if first_aborted else 3)


def test_blocks_of_a_load_that_succeeds_are_shared_from_the_next_step_on() -> None:
    with SimulatedVLLM(prefix_caching=True, save_unfull_chunk=False) as engine:
        tokens = list(range(40))
        engine.serve("stores", tokens)
        engine.forget()
        for name in ("first", "second"):
            engine.begin(name, tokens, 4)
        engine.step()
        assert (engine.counts["hits"], len(engine.waiting)) == (1, 1)
        engine.step()
        assert (engine.counts["hits"], len(engine.waiting)) == (1, 0)
        assert engine.counts["shared"] == 1
        engine.finish()
