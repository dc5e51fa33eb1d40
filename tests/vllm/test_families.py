"""Kinds of attention: expected hits, outputs as without a connector, nothing leaked under pressure.

Each family has one engine, whose KV space three to four requests fill, with prefill in steps of an odd size
and room for few chunks in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from lmkv.cli.sizing import KVDtype, kv_size
from lmkv.vllm.compat import vllm_version
from tests.vllm.alone import Alone
from tests.vllm.families import FAMILIES, Family
from tests.vllm.harness import CHUNK, Engine, engine, external_hits, prompt

CHUNKS_IN_RAM = 14
LENGTHS = (257, 512, 513, 1000, 1500)
SHARED = 1100
TURN = 50
TIGHT = {"max_model_len": 1600, "max_num_batched_tokens": 333, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}


@frozen
class Case:
    """A family's engine with the connector, and what one without it answered."""

    family: Family
    running: Engine
    answers: dict[str, list[list[int]]]


def repeated() -> list[list[int]]:
    return [prompt(length, length) for length in LENGTHS]


def continued() -> list[list[int]]:
    """Prompts that leave the longest of `repeated` at different places."""
    return [prompt(1500, cut) + prompt(cut, 90) for cut in (SHARED, 800, 300)]


def crowd() -> list[list[int]]:
    """16 prompts over 6 prefixes of different lengths, each with a tail of its own."""
    return [
        prompt(100 + index % 6, 260 + 23 * (index % 6)) + prompt(500 + index, 20 + index % 7) for index in range(16)
    ]


def chunk_bytes(running: Engine) -> int:
    from lmkv.vllm.model import describe

    return describe(running.scheduler.vllm_config, running.scheduler.kv_cache_config, CHUNK).layout.slot_bytes


def refuse_what_vllm_cannot(error: Exception) -> None:
    """Skip a family that this build of vLLM does not run, with the reason that it gives."""
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
    pytest.skip(f"vLLM does not run it here: {reason}")


def answers_and_ram(plain: Engine) -> tuple[dict[str, list[list[int]]], int]:
    """Answers without a connector, and bytes of host memory that are soon full."""
    answers = {
        "repeated": plain.ids(repeated()),
        "continued": plain.ids(continued()),
        "crowd": plain.ids(crowd(), max_tokens=TURN),
    }
    return answers, CHUNKS_IN_RAM * chunk_bytes(plain)


FRESH = "GQA, Qwen3"
"""The family whose answers are computed in every run, and compared with those that were kept."""
MARKS = {
    # test_connector has full attention there.
    "window everywhere, smaller than a chunk": pytest.mark.runner_v2,
    "hybrid, window larger than a chunk": pytest.mark.quick,
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in FAMILIES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[Case]:
    family = FAMILIES[request.param]
    folder = family.write(tmp_path_factory.mktemp("family"))
    options = {**TIGHT, "num_gpu_blocks_override": family.blocks, **family.options}
    try:
        answers, ram = alone(folder, options, answers_and_ram, request.param, anew=request.param == FRESH)
    except NotImplementedError as error:
        refuse_what_vllm_cannot(error)
    except ValueError as error:
        # vLLM 0.29 wants weights of their own for layers that share KV.
        if "not initialized from checkpoint" not in str(error) or not vllm_version().startswith("0.29"):
            raise
        refuse_what_vllm_cannot(error)
    extra = {"max_local_cpu_size": ram / 2**30, "prefetch_deadline": 60.0}
    with engine(folder, extra=extra, **options) as running:
        yield Case(family, running, answers)


def generated(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_vllm_makes_of_it_what_is_expected(case: Case) -> None:
    """One copy of each layer that has KV of its own, in as many block tables as vLLM makes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    sides = [case.running.connector.sides.model, get_kv_transfer_group()._model]
    for model in sides:
        assert len(model.block_map.groups) == case.family.groups
        assert len(set(model.layers)) == len(model.layers) == case.family.own
    assert sides[0].layout == sides[1].layout


def test_doctor_knows_its_size(case: Case) -> None:
    config = case.running.scheduler.vllm_config
    dtype = KVDtype.FP8 if config.cache_config.cache_dtype == "fp8" else KVDtype.FLOAT32
    assert kv_size(Path(config.model_config.model), dtype).slot_bytes(CHUNK) == chunk_bytes(case.running)


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=map(str, LENGTHS))
def test_a_repeated_prompt_hits_every_whole_chunk(case: Case, index: int) -> None:
    ids, expected = repeated()[index], case.answers["repeated"][index]
    case.running.forget_local()
    cold = case.running.run([ids])[0]
    case.running.forget_local()
    warm = case.running.run([ids])[0]
    assert external_hits(cold) == 0
    assert external_hits(warm) == warm.num_cached_tokens == len(ids) - 1
    assert generated([cold, warm]) == [expected, expected]
    case.running.assert_nothing_leaked()


def test_what_was_loaded_serves_others_through_vllms_own_cache(case: Case) -> None:
    case.running.run([prompt(1500, 1500)])
    case.running.forget_local()
    assert external_hits(case.running.run([prompt(1500, 1500)])[0]) == 1499
    outputs = case.running.run(continued())
    assert generated(outputs) == case.answers["continued"]
    assert all(output.num_cached_tokens > 0 for output in outputs)
    case.running.assert_nothing_leaked()


def test_a_failed_load_is_recomputed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, expected = repeated()[-1], case.answers["repeated"][-1]
    case.running.run([ids])
    case.running.forget_local()
    broken: list[object] = []

    def breaks(*orders: object, **_: object) -> None:
        broken.append(orders)
        raise OSError("injected: the copy of this load breaks")

    with monkeypatch.context() as patch:
        patch.setattr(case.running.worker._copier, "load", breaks)
        failed = case.running.run([ids])[0]
    assert broken, "nothing was loaded"
    assert generated([failed]) == [expected]
    case.running.assert_nothing_leaked()
    case.running.forget_local()
    again = case.running.run([ids])[0]
    assert external_hits(again) == 1499, "the recomputed chunks are stored anew"
    assert generated([again]) == [expected]


def count_preemptions(running: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a request's id each time that one is preempted."""
    preempted: list[str] = []
    original = running.scheduler._preempt_request

    def noted(request: Any, *rest: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *rest, **more)

    monkeypatch.setattr(running.scheduler, "_preempt_request", noted)
    return preempted


def test_outputs_stay_equal_under_preemption_and_eviction(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = count_preemptions(case.running, monkeypatch)
    before, hits = case.running.store.stats().primary.evictions, 0
    for _ in range(2):
        case.running.forget_local()
        outputs = case.running.run(crowd(), max_tokens=TURN)
        assert generated(outputs) == case.answers["crowd"]
        hits += sum(map(external_hits, outputs))
        case.running.assert_nothing_leaked()
    assert preempted, "the KV space was not tight enough to preempt"
    assert hits, "nothing was ever loaded"
    assert case.running.store.stats().primary.evictions > before, "the tier was not small enough to evict"
