"""Kinds of models: expected hits, outputs as without a connector, nothing leaked under pressure.

Each family has one engine, whose KV space three to four requests fill, with prefill in steps of an odd size
and room for few chunks in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from lmkv.cli.sizing import KVDtype, kv_size
from lmkv.vllm.compat import vllm_version
from tests.vllm.alone import Alone
from tests.vllm.answers import off, slot_bytes
from tests.vllm.families import FAMILIES, Family
from tests.vllm.harness import CHUNK, Engine, engine, external_hits, generated, prompt

LENGTHS = (257, 512, 513, 1000, 1500)
LONGEST = LENGTHS[-1]
SHARED = 1100
TURN = 50
TIGHT = {"max_model_len": 1600, "max_num_batched_tokens": 333, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}


@frozen
class Case:
    """A family's engine with the connector, and what one without it answered. `slots`: of lmkv's host memory."""

    family: Family
    folder: Path
    slots: int
    running: Engine
    answers: dict[str, Any]

    def whole(self, tokens: int) -> int:
        """Tokens that a prompt of so many hits at most: those up to the last boundary below it, of states."""
        unit = self.family.unit or 1
        return (tokens - 1) // unit * unit

    def ask(self, prompts: Sequence[list[int]], *, max_tokens: int = 8) -> list[Any]:
        return self.running.run(prompts, max_tokens=max_tokens, logprobs=3 if self.family.unit else None)

    def again(self, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
        """The same, where vLLM has forgotten all."""
        self.running.forget_local()
        return self.ask(prompts, **options)

    def assert_same(self, outputs: Sequence[Any], expected: Any, *, batch: bool = False) -> None:
        """`batch`: they were computed in another batch than the expected ones."""
        if self.family.unit:
            assert off(outputs, expected) < (self.family.batches if batch else self.family.noise)
        else:
            assert generated(outputs) == expected

    def longest(self) -> tuple[list[int], Any]:
        """The longest prompt that is asked again and again, and the answer to it."""
        return prompt(LONGEST, LONGEST), self.answers["repeated"][-1]


def continued() -> list[list[int]]:
    """Prompts that leave the longest of the repeated ones at different places."""
    return [prompt(1500, cut) + prompt(cut, 90) for cut in (SHARED, 800, 300)]


def crowd(family: Family) -> list[list[int]]:
    """Prompts over a few prefixes of different lengths, each with a tail of its own."""
    if family.unit > 500:
        return [prompt(index % 4, 700 + 200 * (index % 4)) + prompt(500 + index, 20 + index % 7) for index in range(8)]
    return [
        prompt(100 + index % 6, 260 + 23 * (index % 6)) + prompt(500 + index, 20 + index % 7) for index in range(16)
    ]


@contextmanager
def case_of(
    name: str,
    family: Family,
    folder: Path,
    alone: Alone,
    asked: Callable[[Family, Engine], dict[str, Any]],
    slots: int,
    *,
    fresh: bool = False,
) -> Iterator[Case]:
    """`asked`: the answers of an engine without a connector. `fresh`: compute them, and compare with those kept."""
    family.write(folder)
    options = {**TIGHT, "num_gpu_blocks_override": family.blocks, **family.options}

    def answers_and_slot(plain: Engine) -> tuple[dict[str, Any], int]:
        return asked(family, plain), slot_bytes(plain)

    try:
        answers, slot = alone(folder, options, answers_and_slot, name, vllm=family.vllm, anew=fresh)
    except (NotImplementedError, ValueError) as error:
        # vLLM 0.29 wants weights of their own for layers that share KV.
        known = "not initialized from checkpoint" in str(error) and vllm_version().startswith("0.29")
        if isinstance(error, ValueError) and not isinstance(error, NotImplementedError) and not known:
            raise
        pytest.skip(f"vLLM does not run it here: {(str(error).strip().splitlines() or [repr(error)])[-1]}")
    extra = {"max_local_cpu_size": slots * slot / 2**30, "prefetch_deadline": 60.0}
    with family.vllm(), engine(folder, extra=extra, **options) as running:
        yield Case(family, folder, slots, running, answers)


class ModelSuite:
    """What every model does. `LENGTHS`: of the prompts that are repeated."""

    LENGTHS: tuple[int, ...] = LENGTHS

    def test_vllm_makes_of_it_what_is_expected(self, case: Case) -> None:
        """One copy of each layer that has KV or a state of its own, in as many block tables as vLLM makes."""
        sides = [case.running.connector.sides.model, case.running.worker_model]
        for model in sides:
            assert len(model.block_map.groups) == case.family.groups
            assert len(set(model.layers)) == len(model.layers) == case.family.own
        assert sides[0].layout == sides[1].layout
        if case.family.unit:
            assert sides[0].block_map.chunk_size == case.family.unit
            sizes = sides[0].layout.sizes
            assert max(sizes[1:]) <= sizes[0], "no slot is larger than a chunk needs"

    def test_a_repeated_prompt_hits_every_whole_chunk(self, case: Case) -> None:
        """And its tail; with recurrent layers up to the last boundary."""
        for length, expected in zip(self.LENGTHS, case.answers["repeated"], strict=True):
            ids = prompt(length, length)
            (cold,), (own,), (warm,) = case.again([ids]), case.ask([ids]), case.again([ids])
            assert external_hits(cold) == 0, length
            assert external_hits(warm) >= own.num_cached_tokens, "at least what vLLM's own cache has"
            assert external_hits(warm) == warm.num_cached_tokens == case.whole(length)
            case.assert_same([cold, warm], [expected, expected])
            case.running.assert_nothing_leaked()

    def test_a_failed_load_is_recomputed(self, case: Case) -> None:
        ids, expected = case.longest()
        case.ask([ids])
        case.running.forget_local()
        with case.running.failing():
            failed = case.ask([ids])
        case.assert_same(failed, [expected])
        case.running.assert_nothing_leaked()
        again = case.again([ids])
        assert external_hits(again[0]) == case.whole(LONGEST), "what was recomputed is stored anew"
        case.assert_same(again, [expected])

    def test_outputs_stay_equal_under_preemption_and_eviction(self, case: Case) -> None:
        before, hits = case.running.store.stats().primary.evictions, 0
        with case.running.preemptions() as preempted:
            for _ in range(3 if case.family.unit else 2):
                outputs = case.again(crowd(case.family), max_tokens=TURN)
                case.assert_same(outputs, case.answers["crowd"], batch=True)
                hits += sum(map(external_hits, outputs))
                case.running.assert_nothing_leaked()
                assert case.running.store.stats().primary.states <= case.slots * 2 // 3
        assert hits, "nothing was ever loaded"
        if case.family.unit < 500:
            assert preempted, "the KV space was not tight enough to preempt"
            assert case.running.store.stats().primary.evictions > before, "the tier was not small enough to evict"


FRESH = "GQA, Qwen3"
"""The family whose answers are computed in every run, and compared with those that were kept."""
MARKS = {
    # test_connector has full attention there.
    "window everywhere, smaller than a chunk": pytest.mark.runner_v2,
    "hybrid, window larger than a chunk": pytest.mark.quick,
}


def asked(family: Family, plain: Engine) -> dict[str, Any]:
    return {
        "repeated": plain.ids([prompt(length, length) for length in LENGTHS]),
        "continued": plain.ids(continued()),
        "crowd": plain.ids(crowd(family), max_tokens=TURN),
    }


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in FAMILIES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[Case]:
    name, folder = request.param, tmp_path_factory.mktemp("family")
    with case_of(name, FAMILIES[name], folder, alone, asked, 14, fresh=name == FRESH) as made:
        yield made


class TestFamilies(ModelSuite):
    def test_doctor_knows_its_size(self, case: Case) -> None:
        config = case.running.scheduler.vllm_config
        dtype = KVDtype.FP8 if config.cache_config.cache_dtype == "fp8" else KVDtype.FLOAT32
        assert kv_size(case.folder, dtype).slot_bytes(CHUNK) == slot_bytes(case.running)

    def test_what_was_loaded_serves_others_through_vllms_own_cache(self, case: Case) -> None:
        ids, _ = case.longest()
        case.ask([ids])
        assert external_hits(case.again([ids])[0]) == LONGEST - 1
        outputs = case.ask(continued())
        case.assert_same(outputs, case.answers["continued"])
        assert all(output.num_cached_tokens > 0 for output in outputs)
        case.running.assert_nothing_leaked()
