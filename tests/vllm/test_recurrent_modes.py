"""Nemotron-H under each of vLLM's ways to schedule, hash and keep its states: random prompts, and what is loaded."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from tests.vllm import mamba_cpu
from tests.vllm.alone import Alone
from tests.vllm.answers import answers_of, ask, off, one_by_one, slot_bytes
from tests.vllm.drafts import KNOWN, Known
from tests.vllm.families import RECURRENT, Family, nemotron_h
from tests.vllm.harness import Engine, engine, external_hits, generated, pipelining, prompt
from tests.vllm.test_families import TIGHT

UNIT = 64


@contextlib.contextmanager
def pipelined() -> Iterator[None]:
    with mamba_cpu.exported(), pipelining():
        yield


@frozen
class Mode:
    """`options`: of the engine. `vllm`: around it. `extra`: lmkv's settings. `nightly`: left out of the daily run.

    `behind`: whether a hit of lmkv's may be behind one of vLLM's own.
    """

    options: dict[str, Any] = field(factory=dict)
    vllm: Callable[[], AbstractContextManager[Any]] = mamba_cpu.exported
    extra: dict[str, Any] = field(factory=dict)
    nightly: bool = False
    behind: bool = True


MODES = {
    "asynchronous scheduling": Mode(vllm=pipelined),
    "steps that end at boundaries": Mode(vllm=mamba_cpu.split),
    "a state at each boundary, by a step of its own": Mode(
        {"max_num_batched_tokens": UNIT, "max_num_seqs": 4}, vllm=contextlib.nullcontext, behind=False
    ),
    "hits within a block": Mode({"prefix_match_unit": 32}, vllm=mamba_cpu.split),
    "hits within a block, exported": Mode({"prefix_match_unit": 32}),
    "vLLM keeps every state": Mode({"prefix_cache_retention_interval": None}),
    "vLLM keeps every fourth state": Mode({"prefix_cache_retention_interval": 4 * UNIT}, nightly=True),
    "lmkv keeps every state": Mode(extra={"state_interval": 1}),
    "lmkv keeps ends alone": Mode(extra={"state_interval": 10_000}, nightly=True),
    "prompts alone": Mode(extra={"save_decode_cache": False}, nightly=True),
}
ANSWER = 40
"""Tokens: an answer goes past a boundary of a state more often than not."""
OPTIONS = {**TIGHT, "num_gpu_blocks_override": 60}


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Of few beginnings, cut anywhere, with few endings, so that all of it comes again."""
    found = []
    for _ in range(count):
        beginning = prompt(rng.randrange(4), 900)[: rng.choice((64, 128, 200, 300, 511, 640, 900))]
        found.append(beginning + prompt(100 + rng.randrange(5), rng.choice((1, 3, 31, 33, 64, 100, 200))))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Family(nemotron_h).write(tmp_path_factory.mktemp("nemotron"))


@frozen
class Expected:
    """Prompts, what an engine without a connector answers to them, and the bytes of a slot of lmkv's."""

    asked: list[list[int]]
    answers: list[Any]
    slot_bytes: int


@pytest.fixture(scope="module")
def expected(folder: Path, alone: Alone) -> Expected:
    """A mode changes when a token is computed, not which one it is, so all modes have the same answers."""
    asked = prompts(random.Random(5), 24)

    def answers(plain: Engine) -> tuple[list[Any], int]:
        return answers_of(one_by_one(plain, asked, max_tokens=ANSWER)), slot_bytes(plain)

    return Expected(asked, *alone(folder, OPTIONS, answers, vllm=mamba_cpu.exported))


def drive(mode: Mode, folder: Path, expected: Expected, turns: int, answer: int = ANSWER) -> None:
    """Ask in another order in each turn.

    Some find a part in vLLM's own cache and more behind it, some are preempted.
    """
    rng = random.Random(6)
    extra = {"max_local_cpu_size": 70 * expected.slot_bytes / 2**30, "prefetch_deadline": 60.0, **mode.extra}
    hits = behind = 0
    with mode.vllm(), engine(folder, extra=extra, **{**OPTIONS, **mode.options}) as running:
        for turn in range(turns):
            order = rng.sample(range(len(expected.asked)), len(expected.asked))
            for first in range(0, len(order), 6):
                if rng.random() < 0.6:
                    running.forget_local()
                these = order[first : first + 6]
                outputs = ask(running, [expected.asked[index] for index in these], max_tokens=answer)
                wanted = [expected.answers[index] for index in these]
                assert off(outputs, wanted) < 1e-3, (turn, these)
                hits += sum(map(external_hits, outputs))
                behind += sum(0 < external_hits(each) < (each.num_cached_tokens or 0) for each in outputs)
        ask(running, [prompt(1, 5)])
        running.assert_nothing_leaked()
        stats = running.store.stats().primary
    assert hits > 1000
    assert stats.evictions, "host memory was not small enough to evict"
    assert stats.states <= 70 * 2 // 3
    if mode.behind:
        assert behind, "no hit of lmkv's was behind one of vLLM's own"


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if not mode.nightly])
def test_random_prompts(name: str, folder: Path, expected: Expected) -> None:
    drive(MODES[name], folder, expected, turns=2)


@pytest.mark.nightly("sizes")
@pytest.mark.parametrize("name", MODES)
def test_more_random_prompts(name: str, folder: Path) -> None:
    """Beside an engine without a connector in the same mode, with longer answers."""
    mode, asked = MODES[name], prompts(random.Random(5), 24)
    with mode.vllm(), engine(folder, connector=None, **{**OPTIONS, **mode.options}) as plain:
        expected = Expected(asked, answers_of(one_by_one(plain, asked, max_tokens=70)), slot_bytes(plain))
    drive(mode, folder, expected, turns=4, answer=70)


def test_a_block_that_takes_several_steps(tmp_path: Path) -> None:
    """Steps of 333 tokens, blocks of 544: a state moves on within its block, and is kept at its end alone."""
    family = RECURRENT["gated delta net, Qwen3-Next"]
    folder = family.write(tmp_path / "model")
    heads = {1200: prompt(1, 1200), 600: prompt(1, 600)}
    asked = [prompt(1, 1500), *([*heads[at], *prompt(at + n, 100)] for at in heads for n in range(2))]
    options = {**family.options, "max_num_batched_tokens": 333, "kv_cache_memory_bytes": 64 << 20}
    with engine(folder, connector=None, **options) as plain:
        expected = answers_of(one_by_one(plain, asked, max_tokens=30))
    with engine(folder, **options) as running:
        for turn in range(2):
            hits = []
            for ids, wanted in zip(asked, expected, strict=True):
                running.forget_local()
                outputs = ask(running, [ids], max_tokens=30)
                assert off(outputs, [wanted]) < 1e-3
                hits += map(external_hits, outputs)
            assert hits == ([1088, 1088, 1088, 544, 544] if turn else [0, 1088, 1088, 0, 544])
        running.assert_nothing_leaked()


def test_drafts_in_a_crowd_under_preemption_and_eviction(folder: Path) -> None:
    prompts = [prompt(index, 280 + 7 * index) for index in range(14)]
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 333}
    options |= {"num_gpu_blocks_override": 75, "max_num_seqs": len(prompts), "kv_cache_memory_bytes": 64 << 20}
    with mamba_cpu.exported(), mamba_cpu.drafted(), contextlib.ExitStack() as stack:
        with engine(folder, connector=None, **options) as plain:
            outputs = ask(plain, prompts, max_tokens=90)
            expected, ram = answers_of(outputs), 60 * slot_bytes(plain) / 2**30
        Known.tell([ids + answer for ids, answer in zip(prompts, generated(outputs), strict=True)])
        extra = {"max_local_cpu_size": ram, "prefetch_deadline": 60.0}
        with engine(folder, extra=extra, speculative_config=KNOWN, **options) as running:
            hits, preempted = 0, stack.enter_context(running.preemptions())
            for _ in range(3):
                running.forget_local()
                outputs = ask(running, prompts, max_tokens=90)
                assert off(outputs, expected) < 1e-3
                hits += sum(map(external_hits, outputs))
                running.assert_nothing_leaked()
            assert preempted, "the KV space was not tight enough to preempt"
            assert running.store.stats().primary.evictions, "the tier was not small enough to evict"
            assert hits, "nothing was ever loaded"
