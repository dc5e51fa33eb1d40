"""Models with recurrent layers: KV and states are loaded together, or not at all.

Each answer is compared with that of an engine without a connector, and the proofs fail where the states are left out,
or loaded within the step that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from lmkv.chunks.hashing import StateKey, state_keys
from lmkv.cli.sizing import KVDtype, kv_size
from lmkv.vllm.scheduler.loads import AsyncLoad, Loads
from tests.vllm.alone import Alone
from tests.vllm.families import RECURRENT, Family, nemotron_h
from tests.vllm.harness import Engine, engine, external_hits, prompt
from tests.vllm.test_families import TIGHT, TURN, count_preemptions, crowd

LENGTHS = (100, 257, 512, 513, 768, 1000, 1500)
LONGEST = LENGTHS[-1]
CUTS = (1100, 800, 300)
SLOTS = 120


Answers = list[list[dict[int, float]]]
"""For each token of each answer: that token first, then the likeliest, with their log-probabilities."""


def answers_of(outputs: Sequence[Any]) -> Answers:
    found = []
    for output in outputs:
        tokens, likely = output.outputs[0].token_ids, output.outputs[0].logprobs
        found.append(
            [
                {token: each[token].logprob, **{other: entry.logprob for other, entry in each.items()}}
                for token, each in zip(tokens, likely, strict=True)
            ]
        )
    return found


def distance(found: Answers, expected: Answers) -> float:
    """The largest difference of two log-probabilities of the same token after the same tokens.

    Where another token was chosen, by how much the expected one was likelier than the next.
    """
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            worst = max(worst, *(abs(mine[token] - its[token]) for token in mine.keys() & its.keys()), 0.0)
            if next(iter(mine)) != next(iter(its)):
                first, second = sorted(its.values(), reverse=True)[:2]
                worst = max(worst, first - second)
                break
    return worst


@frozen
class Case:
    """A family's engine with the connector, and what one without it answered. `states`: entries of each boundary."""

    family: Family
    folder: Path
    options: dict[str, Any]
    running: Engine
    answers: dict[str, Answers]

    @property
    def states(self) -> int:
        return int(self.running.connector.sides.model.block_map.states)

    def whole(self, tokens: int) -> int:
        """Tokens of the last boundary below so many tokens."""
        return (tokens - 1) // self.family.unit * self.family.unit

    def ask(self, prompts: Sequence[list[int]], *, max_tokens: int = 8) -> list[Any]:
        return ask(self.running, prompts, max_tokens=max_tokens)

    def keys(self, tokens: list[int]) -> list[bytes]:
        found: list[bytes] = self.running.connector.sides.scheduler.keys_of(tokens, None, {})
        return found


def ask(running: Engine, prompts: Sequence[list[int]], *, max_tokens: int = 8) -> list[Any]:
    return running.run(prompts, max_tokens=max_tokens, logprobs=3)


def repeated() -> list[list[int]]:
    return [prompt(length, length) for length in LENGTHS]


def siblings() -> list[list[int]]:
    """Prompts that leave the longest of `repeated` at different places, each twice with ends of their own."""
    return [prompt(LONGEST, LONGEST)[:cut] + prompt(cut + twin, 90) for cut in CUTS for twin in range(3)]


def gathered(family: Family) -> list[list[int]]:
    """Prompts with a few common beginnings, of several chunks each."""
    if family.unit < 500:
        return crowd()
    return [prompt(index % 4, 700 + 200 * (index % 4)) + prompt(500 + index, 20 + index % 7) for index in range(8)]


def second_turn(answer: Sequence[int]) -> list[int]:
    return prompt(600, 600) + list(answer) + prompt(601, 100)


def slot_bytes(running: Engine) -> int:
    from lmkv.vllm.model import describe

    return describe(running.scheduler.vllm_config, running.scheduler.kv_cache_config, 1).layout.slot_bytes


QUICK = {"Mamba-2, Nemotron-H": pytest.mark.quick}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=QUICK.get(name, ())) for name in RECURRENT])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[Case]:
    family = RECURRENT[request.param]
    folder = family.write(tmp_path_factory.mktemp("recurrent"))
    options = {**TIGHT, "num_gpu_blocks_override": family.blocks, **family.options}

    def answers_and_ram(plain: Engine) -> tuple[dict[str, Answers], int]:
        turn = ask(plain, [prompt(600, 600)], max_tokens=3 * TURN)
        continued = second_turn(turn[0].outputs[0].token_ids)
        asked = {
            "repeated": [ask(plain, [ids])[0] for ids in repeated()],
            "siblings": [ask(plain, [ids])[0] for ids in siblings()],
            "first turn": turn,
            "second turn": ask(plain, [continued]),
            "crowd": ask(plain, gathered(family), max_tokens=TURN),
        }
        return {name: answers_of(outputs) for name, outputs in asked.items()}, SLOTS * slot_bytes(plain)

    fresh = family.make is nemotron_h
    answers, ram = alone(folder, options, answers_and_ram, request.param, vllm=family.vllm, anew=fresh)
    extra = {"max_local_cpu_size": ram / 2**30, "prefetch_deadline": 60.0}
    with family.vllm(), engine(folder, extra=extra, **options) as running:
        yield Case(family, folder, options, running, answers)


def test_vllm_makes_of_it_what_is_expected(case: Case) -> None:
    model = case.running.connector.sides.model
    assert len(model.block_map.groups) == case.family.groups
    assert len(set(model.layers)) == len(model.layers) == case.family.own
    assert model.block_map.chunk_size == case.family.unit
    assert max(model.layout.sizes[1:]) <= model.layout.sizes[0], "no slot is larger than a chunk needs"


def test_doctor_knows_its_sizes(case: Case) -> None:
    layout = case.running.connector.sides.model.layout
    dtype = KVDtype.FLOAT32 if case.family.options.get("dtype") is None else KVDtype.BFLOAT16
    size = kv_size(case.folder, dtype)
    assert size.states is not None
    assert size.states.nbytes == sum(layer.nbytes for layer in layout.layers if layer.state)
    assert size.token_bytes * case.family.unit == layout.chunk_bytes
    # Here blocks are whole multiples of 32 tokens.
    assert 0 <= case.family.unit - size.chunk_tokens(256) < 32


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=map(str, LENGTHS))
def test_a_repeated_prompt_hits_up_to_the_last_boundary(case: Case, index: int) -> None:
    ids, expected = repeated()[index], case.answers["repeated"][index]
    case.running.forget_local()
    cold, own = case.ask([ids])[0], case.ask([ids])[0]
    case.running.forget_local()
    warm = case.ask([ids])[0]
    assert external_hits(cold) == 0
    assert external_hits(warm) >= own.num_cached_tokens, "at least what vLLM's own cache has"
    assert external_hits(warm) == warm.num_cached_tokens == case.whole(len(ids))
    assert distance(answers_of([cold, warm]), [expected, expected]) < case.family.noise
    case.running.assert_nothing_leaked()


def test_prompts_that_part_find_a_state_there_from_the_third_on(case: Case) -> None:
    case.ask([prompt(LONGEST, LONGEST)])
    hits = []
    for ids, expected in zip(siblings(), case.answers["siblings"], strict=True):
        case.running.forget_local()
        output = case.ask([ids])[0]
        assert distance(answers_of([output]), [expected]) < case.family.noise
        hits.append(external_hits(output))
    for number, cut in enumerate(CUTS):
        assert hits[3 * number + 1 : 3 * number + 3] == [cut // case.family.unit * case.family.unit] * 2, hits
    case.running.assert_nothing_leaked()


def test_a_second_turn_loads_up_to_the_last_boundary_of_the_answer(case: Case) -> None:
    case.running.forget_local()
    first = case.ask([prompt(600, 600)], max_tokens=3 * TURN)
    assert distance(answers_of(first), case.answers["first turn"]) < case.family.noise
    case.running.forget_local()
    ids = second_turn(first[0].outputs[0].token_ids)
    output = case.ask([ids])[0]
    assert distance(answers_of([output]), case.answers["second turn"]) < case.family.noise
    # The last token of an answer is never computed.
    assert external_hits(output) == case.whole(600 + 3 * TURN)
    case.running.assert_nothing_leaked()


@pytest.mark.parametrize("local", [64, 320, 513, 1000, 1473])
def test_a_hit_of_vllms_own_with_a_longer_one_behind_it(case: Case, local: int) -> None:
    ids, expected = repeated()[-1], case.answers["repeated"][-1]
    case.ask([ids])
    case.running.forget_local()
    case.ask([ids[:local]])
    output = case.ask([ids])[0]
    assert distance(answers_of([output]), [expected]) < case.family.noise
    assert output.num_cached_tokens == case.whole(LONGEST)
    case.running.assert_nothing_leaked()


def test_chunks_without_a_state_are_a_miss(case: Case) -> None:
    ids, expected = repeated()[-2], case.answers["repeated"][-2]
    case.ask([ids])
    case.running.forget_local()
    for key in case.keys(ids):
        case.running.store.delete(state_keys(key, case.states)[-1:])
    case.running.connector.sides.scheduler.forget_evictions()
    output = case.ask([ids])[0]
    assert external_hits(output) == 0
    assert output.kv_transfer_params["lmkv"]["missed"]["reason"] == "no_state"
    assert distance(answers_of([output]), [expected]) < case.family.noise
    case.running.forget_local()
    assert external_hits(case.ask([ids])[0]) == case.whole(len(ids)), "it is stored again"


def test_a_failed_load_is_recomputed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, expected = repeated()[-1], case.answers["repeated"][-1]
    case.ask([ids])
    case.running.forget_local()
    broken: list[object] = []

    def breaks(*orders: object, **_: object) -> None:
        broken.append(orders)
        raise OSError("injected: the copy of this load breaks")

    with monkeypatch.context() as patch:
        patch.setattr(case.running.worker._copier, "load", breaks)
        failed = case.ask([ids])[0]
    assert broken, "nothing was loaded"
    assert distance(answers_of([failed]), [expected]) < case.family.noise
    case.running.assert_nothing_leaked()
    case.running.forget_local()
    again = case.ask([ids])[0]
    assert external_hits(again) == case.whole(LONGEST), "what was recomputed is stored anew"
    assert distance(answers_of([again]), [expected]) < case.family.noise


def test_a_load_that_has_lost_only_its_state_has_failed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost between the promise and the load, as a chunk of a slow tier may be."""
    ids, expected = repeated()[-1], case.answers["repeated"][-1]
    case.ask([ids])
    case.running.forget_local()
    begin, lost = Loads.begin, []

    def loses(self: Loads, state: Any, keys: list[bytes], *rest: Any) -> None:
        lost.extend(key for key in keys if isinstance(key, StateKey))
        self._store.drop(lost)
        begin(self, state, keys, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Loads, "begin", loses)
        output = case.ask([ids])[0]
    assert len(lost) == case.states
    assert distance(answers_of([output]), [expected]) < case.family.noise
    case.running.assert_nothing_leaked()


def test_outputs_stay_equal_under_preemption_and_eviction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = count_preemptions(case.running, monkeypatch)
    before, hits = case.running.store.stats().primary.evictions, 0
    for _ in range(3):
        case.running.forget_local()
        outputs = case.ask(gathered(case.family), max_tokens=TURN)
        assert distance(answers_of(outputs), case.answers["crowd"]) < case.family.batches
        hits += sum(map(external_hits, outputs))
        case.running.assert_nothing_leaked()
        stats = case.running.store.stats().primary
        assert stats.states <= SLOTS * 2 // 3
    assert hits, "nothing was ever loaded"
    if case.family.unit < 500:
        assert preempted, "the KV space was not tight enough to preempt"
        assert case.running.store.stats().primary.evictions > before, "the tier was not small enough to evict"


@pytest.mark.parametrize("how", ["left out", "within the step"])
def test_wrong_states_would_show(case: Case, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of all others: KV alone, or a state that comes once vLLM has read it."""
    if case.family.noise > 0.01:
        pytest.skip("on a CPU vLLM's own outputs of this model vary more than with a missing state")
    prompts, expected = repeated()[2:], case.answers["repeated"][2:]
    answers: Answers = []
    for ids in prompts:
        case.running.forget_local()
        case.ask([ids])
        case.running.forget_local()
        with monkeypatch.context() as patch:
            if how == "left out":
                patch.setattr(AsyncLoad, "_state_copies", lambda self, lease: [])
            else:
                patch.setattr(case.running.connector.sides.scheduler.matcher, "_may_load_within_step", True)
                patch.setattr(Loads, "order", _load_within_the_step)
            output = case.ask([ids])[0]
        assert external_hits(output) == case.whole(len(ids))
        answers += answers_of([output])
    assert distance(answers, expected) > case.family.noise
    case.running.forget_local()


def _load_within_the_step(self: Loads, state: Any, lease: Any, tables: Any, end: int) -> None:
    """As `Loads.order`, with states."""
    blocks = self._block_map.state_blocks(tables, end)
    copies = self._block_map.load_copies(lease.slots, tables, state.waiting.computed, end)
    for key, slot in zip(lease.keys, lease.slots, strict=True):
        if isinstance(key, StateKey):
            copies.append(self._block_map.state_copy(slot, key.number, blocks))
    order = self._builder.load(copies, [])
    self._follow(order.job, state, lease, tables, end)
