"""Models with recurrent layers: KV and states are loaded together, or not at all.

Each answer is compared with that of an engine without a connector, and the proofs fail where the states are left out,
or loaded within the step that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from lmkv.chunks.hashing import StateKey, state_keys
from lmkv.cli.sizing import KVDtype, kv_size
from lmkv.vllm.scheduler.loads import Loads
from tests.vllm.alone import Alone
from tests.vllm.answers import answers_of, ask, off, one_by_one, without_states
from tests.vllm.families import RECURRENT, Family, nemotron_h
from tests.vllm.harness import Engine, external_hits, generated, prompt
from tests.vllm.test_families import LONGEST, TURN, Case, ModelSuite, case_of, crowd

LENGTHS = (100, 257, 512, 513, 768, 1000, LONGEST)
CUTS = (1100, 800, 300)
QUICK = {"Mamba-2, Nemotron-H": pytest.mark.quick}


def siblings() -> list[list[int]]:
    """Prompts that leave the longest of the repeated ones at different places, each twice with ends of their own."""
    return [prompt(LONGEST, LONGEST)[:cut] + prompt(cut + twin, 90) for cut in CUTS for twin in range(3)]


def second_turn(answer: Sequence[int]) -> list[int]:
    return prompt(600, 600) + list(answer) + prompt(601, 100)


def asked(family: Family, plain: Engine) -> dict[str, Any]:
    turn = ask(plain, [prompt(600, 600)], max_tokens=3 * TURN)
    found = {
        "repeated": one_by_one(plain, [prompt(length, length) for length in LENGTHS]),
        "siblings": one_by_one(plain, siblings()),
        "first turn": turn,
        "second turn": ask(plain, [second_turn(generated(turn)[0])]),
        "crowd": ask(plain, crowd(family), max_tokens=TURN),
    }
    return {name: answers_of(outputs) for name, outputs in found.items()}


def keys_of(case: Case, tokens: list[int]) -> list[bytes]:
    found: list[bytes] = case.running.connector.sides.scheduler.keys_of(tokens, None, {})
    return found


@pytest.fixture(scope="module", params=[pytest.param(name, marks=QUICK.get(name, ())) for name in RECURRENT])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[Case]:
    family, folder = RECURRENT[request.param], tmp_path_factory.mktemp("recurrent")
    fresh = family.make is nemotron_h
    with case_of(request.param, family, folder, alone, asked, 120, fresh=fresh) as made:
        yield made


class TestRecurrent(ModelSuite):
    LENGTHS = LENGTHS

    def test_doctor_knows_its_sizes(self, case: Case) -> None:
        layout = case.running.connector.sides.model.layout
        dtype = KVDtype.FLOAT32 if case.family.options.get("dtype") is None else KVDtype.BFLOAT16
        size = kv_size(case.folder, dtype)
        assert size.states is not None
        assert size.states.nbytes == sum(layer.nbytes for layer in layout.layers if layer.state)
        assert size.token_bytes * case.family.unit == layout.chunk_bytes
        # Here blocks are whole multiples of 32 tokens.
        assert 0 <= case.family.unit - size.chunk_tokens(256) < 32

    def test_prompts_that_part_find_a_state_there_from_the_third_on(self, case: Case) -> None:
        case.ask([prompt(LONGEST, LONGEST)])
        hits = []
        for ids, expected in zip(siblings(), case.answers["siblings"], strict=True):
            output = case.again([ids])[0]
            case.assert_same([output], [expected])
            hits.append(external_hits(output))
        for number, cut in enumerate(CUTS):
            assert hits[3 * number + 1 : 3 * number + 3] == [cut // case.family.unit * case.family.unit] * 2, hits
        case.running.assert_nothing_leaked()

    def test_a_second_turn_loads_up_to_the_last_boundary_of_the_answer(self, case: Case) -> None:
        first = case.again([prompt(600, 600)], max_tokens=3 * TURN)
        case.assert_same(first, case.answers["first turn"])
        case.running.forget_local()
        ids = second_turn(first[0].outputs[0].token_ids)
        output = case.ask([ids])[0]
        case.assert_same([output], case.answers["second turn"])
        # The last token of an answer is never computed.
        assert external_hits(output) == case.whole(600 + 3 * TURN)
        case.running.assert_nothing_leaked()

    @pytest.mark.parametrize("local", [64, 320, 513, 1000, 1473])
    def test_a_hit_of_vllms_own_with_a_longer_one_behind_it(self, case: Case, local: int) -> None:
        ids, expected = case.longest()
        case.ask([ids])
        case.again([ids[:local]])
        output = case.ask([ids])[0]
        case.assert_same([output], [expected])
        assert output.num_cached_tokens == case.whole(LONGEST)
        case.running.assert_nothing_leaked()

    def test_chunks_without_a_state_are_a_miss(self, case: Case) -> None:
        ids, expected = prompt(1000, 1000), case.answers["repeated"][-2]
        case.ask([ids])
        case.running.forget_local()
        for key in keys_of(case, ids):
            case.running.store.delete(state_keys(key, case.running.states)[-1:])
        case.running.connector.sides.scheduler.observer.explainer.evictions.forget()
        output = case.ask([ids])[0]
        assert external_hits(output) == 0
        assert output.kv_transfer_params["lmkv"]["missed"]["reason"] == "no_state"
        case.assert_same([output], [expected])
        assert external_hits(case.again([ids])[0]) == case.whole(len(ids)), "it is stored again"

    def test_a_load_that_has_lost_only_its_state_has_failed(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is lost between the promise and the load, as a chunk of a slow tier may be."""
        ids, expected = case.longest()
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
        assert len(lost) == case.running.states
        case.assert_same([output], [expected])
        case.running.assert_nothing_leaked()

    @pytest.mark.parametrize("how", ["left out", "within the step"])
    def test_wrong_states_would_show(self, case: Case, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The negative control of all others: KV alone, or a state that comes once vLLM has read it."""
        if case.family.noise > 0.01:
            pytest.skip("on a CPU vLLM's own outputs of this model vary more than with a missing state")
        prompts, outputs = [prompt(length, length) for length in LENGTHS[2:]], list[Any]()
        for ids in prompts:
            case.again([ids])
            case.running.forget_local()
            with monkeypatch.context() as patch, without_states() if how == "left out" else nullcontext():
                if how != "left out":
                    patch.setattr(case.running.connector.sides.scheduler.matcher, "_may_load_within_step", True)
                    patch.setattr(Loads, "plan", _load_within_the_step)
                outputs += case.ask([ids])
            assert external_hits(outputs[-1]) == case.whole(len(ids))
        assert off(outputs, case.answers["repeated"][2:]) > case.family.noise
        case.running.forget_local()


def _load_within_the_step(self: Loads, state: Any, lease: Any, tables: Any, end: int) -> None:
    """As `Loads.plan`, with states."""
    blocks = self._block_map.state_blocks(tables, end)
    copies = self._block_map.load_copies(lease.slots, tables, state.waiting.computed, end)
    for key, slot in zip(lease.keys, lease.slots, strict=True):
        if isinstance(key, StateKey):
            copies.append(self._block_map.state_copy(slot, key.number, blocks))
    task = self._builder.load(copies, [])
    self._follow(task.job, state, lease, tables, end)
