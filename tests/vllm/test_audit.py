"""Audits on real vLLM: an honest hit of each kind of model passes, and a wrong one is found and not served again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmkv.vllm.scheduler.telemetry import Telemetry
from tests.vllm import triton_cpu
from tests.vllm.families import FAMILIES, RECURRENT
from tests.vllm.harness import Engine, engine, external_hits, generated, prompt
from tests.vllm.wrong_loads import FAULTS, Faulty

KINDS = ("GQA, Qwen3", "GQA, fp8 KV", "MLA, DeepSeek-V2", "hybrid, window smaller than a chunk", "Mamba-2, Nemotron-H")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of the chunks, states and loads that audits compared, and of those that were wrong."""
    found: Counter[str] = Counter()
    compared = Telemetry.compared

    def counted(self: Telemetry, tiers: Any, wrong: Any, *, states: bool) -> None:
        found["states" if states else "chunks"] += len(tiers)
        found["wrong"] += len(wrong)
        compared(self, tiers, wrong, states=states)

    def counted_load(self: Telemetry, *, wrong: bool, again: bool = False) -> None:
        found["wrong loads" if wrong else "again" if again else "loads"] += 1
        audited_load(self, wrong=wrong, again=again)

    audited_load = Telemetry.audited_load
    monkeypatch.setattr(Telemetry, "compared", counted)
    monkeypatch.setattr(Telemetry, "audited_load", counted_load)
    return found


def ask(running: Engine, prompts: list[list[int]], max_tokens: int = 8) -> list[Any]:
    """Their outputs; nothing comes from vLLM's own prefix cache, and every comparison has ended."""
    outputs = running.again(prompts, max_tokens=max_tokens)
    while running.connector.sides.scheduler.busy:
        running.llm.llm_engine.step()
    return outputs


def damage(running: Engine, tokens: list[int], chunk: int) -> None:
    """The chunk's bytes are those of the one behind it."""
    keys = running.connector.sides.scheduler.keys_of(tokens, None, {})
    slots = [running.store.snapshot().held[key].slot for key in keys[chunk : chunk + 2]]
    running.store.slab.array[slots[0]] = running.store.slab.array[slots[1]]


def answers(outputs: list[Any]) -> list[list[int]]:
    return generated(outputs)


def hits_are_found_right_or_wrong(running: Engine, counts: Counter[str], unit: int) -> None:
    audit, config = running.connector.sides.scheduler.audit, running.scheduler.vllm_config
    assert getattr(config, "use_v2_model_runner", False) is triton_cpu.is_wanted()
    size = running.connector.sides.model.block_map.chunk_size
    prompts = [prompt(700 + n, 3 * unit + 40 * n + 2) for n in range(3)]
    cold = answers(ask(running, prompts))
    asked = ask(running, prompts[::-1])
    assert [external_hits(output) for output in asked] == [0, 0, 0], "an audited hit is computed"
    assert answers(asked) == cold[::-1]
    assert counts["chunks"] >= sum((len(ids) - 1) // size for ids in prompts) - len(prompts)
    assert counts["states"] >= (len(prompts) if running.connector.sides.model.block_map.states else 0)
    assert counts["wrong"] == 0
    again = ask(running, prompts)
    assert all(external_hits(output) > 2 * size for output in again), "every other audited hit is loaded"
    assert answers(again) == cold
    assert counts["loads"] >= len(prompts)
    assert counts["wrong loads"] == 0
    damage(running, prompts[0], 1)
    ask(running, prompts[:1])
    assert counts["wrong"] > 0
    audit.sampler.rate = 0.0
    again = ask(running, prompts)
    assert answers(again) == cold, "what is wrong is not served"
    assert external_hits(again[1]) > 2 * size
    running.assert_nothing_leaked()


@pytest.mark.parametrize("kind", KINDS)
def test_honest_hits_pass_and_a_wrong_one_is_found(kind: str, counts: Counter[str], tmp_path: Path) -> None:
    family = {**FAMILIES, **RECURRENT}[kind]
    options = {"num_gpu_blocks_override": max(128, family.blocks), "max_num_batched_tokens": 256, **family.options}
    extra = {"chunk_size": 64, "audit_rate": 1.0}
    with family.vllm(), engine(family.write(tmp_path / "model"), extra=extra, max_model_len=1024, **options) as running:
        hits_are_found_right_or_wrong(running, counts, max(64, family.unit))


@pytest.mark.runner_v2
@pytest.mark.parametrize("extra", [{}, {"use_layerwise": True}])
def test_whatever_copies(model: Path, counts: Counter[str], extra: dict[str, Any]) -> None:
    with engine(model, extra={"chunk_size": 64, "audit_rate": 1.0, **extra}, max_num_batched_tokens=256) as running:
        hits_are_found_right_or_wrong(running, counts, 64)


@pytest.mark.parametrize("extra", [{"load_mode": "sync"}, {"load_mode": "async"}, {"use_layerwise": True}])
def test_wrong_loads_are_found_and_computed_where_that_is_known_in_time(
    model: Path, extra: dict[str, Any], counts: Counter[str]
) -> None:
    extra = {"chunk_size": 64, "audit_rate": 1.0, **extra}
    with engine(model, extra=extra, num_gpu_blocks_override=128) as running:
        running.connector.sides.scheduler.audit.on = False
        prompts = [prompt(760 + n, 300) for n in range(len(FAULTS))]
        cold = answers(ask(running, prompts))
        worker = running.worker
        for ids, right, fault in zip(prompts, cold, FAULTS, strict=True):
            before = counts["wrong loads"]
            copier = worker.wrap_copier(partial(Faulty, fault=fault, slots=running.store.slab.array))
            while not copier.touched:
                assert counts["wrong loads"] == before
                [output] = ask(running, [ids])
            worker.wrap_copier(lambda faulty: faulty.inner)
            assert counts["wrong loads"] == before + 1, fault
            if extra.get("load_mode") == "async":
                assert external_hits(output) == 0 or answers([output]) == [right]
        assert answers(ask(running, prompts)) == cold, "what is stored is right"
        running.assert_nothing_leaked()
