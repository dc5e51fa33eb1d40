"""The main path in real vLLM, on one engine: what is stored, what is hit, and that outputs never change."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lmkv.memory.copier import DONE
from lmkv.vllm.plan import CopyTask
from lmkv.vllm.worker import _Running
from tests.vllm.harness import CHUNK, Engine, external_hits, generated, parameters, prompt

pytestmark = [pytest.mark.runner_v2, pytest.mark.quick]


@pytest.mark.parametrize("length", [2, 31, 255, 256, 257, 511, 512, 513, 1000, 1500])
def test_a_repeated_prompt_hits_all_but_its_last_token(shared: Engine, length: int) -> None:
    ids = prompt(1000 + length, length)
    cold = shared.run([ids])[0]
    warm = shared.again([ids])[0]

    assert external_hits(cold) == 0
    assert external_hits(warm) == warm.num_cached_tokens == length - 1
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    shared.assert_nothing_leaked()


def test_outputs_equal_those_without_a_connector(shared: Engine, expected: dict[int, list[int]]) -> None:
    prompts = [prompt(seed, 1500) for seed in expected]
    assert shared.repeats(prompts, [1499] * len(prompts)) == list(expected.values())


def test_a_shared_prefix_hits_up_to_where_prompts_part(shared: Engine) -> None:
    common = prompt(1, 700)
    first, second = common + prompt(2, 400), common + prompt(3, 400)
    shared.run([first])
    assert external_hits(shared.again([second])[0]) == 700


def test_decoded_tokens_are_stored_when_their_chunk_completes(shared: Engine) -> None:
    ids = prompt(8, 200)
    answer = shared.ids([ids], max_tokens=120)[0]
    shared.forget_local()
    turn = ids + answer + prompt(9, 50)
    assert external_hits(shared.run([turn])[0]) == CHUNK


def test_two_salts_never_share(shared: Engine) -> None:
    ids = prompt(10, 800)
    for salt in ("tenant-a", "tenant-b"):
        assert external_hits(shared.run([ids], salts=[salt])[0]) == 0
        shared.forget_local()
    assert external_hits(shared.run([ids])[0]) == 0
    shared.forget_local()
    for salt in ("tenant-a", "tenant-b"):
        assert external_hits(shared.run([ids], salts=[salt])[0]) == 799
        shared.forget_local()


def test_a_request_can_skip_saving_and_loading(shared: Engine) -> None:
    ids = prompt(11, 600)
    shared.run([ids], params={"lmkv.skip_save": True})
    assert external_hits(shared.again([ids])[0]) == 0
    assert external_hits(shared.again([ids], params={"lmkv.skip_load": True})[0]) == 0
    assert external_hits(shared.again([ids])[0]) == 599


def test_tags_separate_requests(shared: Engine) -> None:
    ids = prompt(12, 600)
    shared.run([ids], params={"lmkv.tag.team": "blue"})
    assert external_hits(shared.again([ids], params={"lmkv.tag.team": "red"})[0]) == 0
    assert external_hits(shared.again([ids], params={"lmkv.tag.team": "blue"})[0]) == 599


def test_a_failed_load_is_recomputed_once_and_the_entry_is_dropped(
    shared: Engine, expected: dict[int, list[int]]
) -> None:
    ids = prompt(3, 1500)
    shared.run([ids])
    shared.forget_local()

    with shared.failing():
        failed = shared.run([ids])[0]
    assert generated([failed]) == [expected[3]]
    shared.assert_nothing_leaked()

    again = shared.again([ids])[0]
    assert external_hits(again) == 1499, "the recomputed chunks are stored anew"
    assert generated([again]) == [expected[3]]


def test_a_failed_store_is_a_future_miss(shared: Engine) -> None:
    ids = prompt(13, 900)

    with shared.failing("store"):
        cold = shared.ids([ids])
        assert not shared.worker.take_failed_blocks(), "the blocks are good: nothing is to be recomputed"
    shared.assert_nothing_leaked()
    missed = shared.again([ids])[0]
    assert external_hits(missed) == 0
    assert [list(missed.outputs[0].token_ids)] == cold


def test_while_the_engine_sleeps_everything_is_computed(shared: Engine, expected: dict[int, list[int]]) -> None:
    """What vLLM 0.33 calls around its sleep, called here."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from lmkv.vllm.connector import LMKVConnector

    connector: Any = get_kv_transfer_group()
    assert LMKVConnector.supports_sleep_mode(connector._kv_transfer_config)
    ids = prompt(3, 1500)
    shared.run([ids])
    connector.unregister_kv_caches()
    for _ in range(2):
        assert list(shared.again([ids])[0].outputs[0].token_ids) == expected[3]
    connector.restore_kv_caches()
    shared.assert_nothing_leaked()
    shared.run([ids])
    again = shared.again([ids])[0]
    assert external_hits(again) == 1499
    assert generated([again]) == [expected[3]]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_in_the_middle_leaves_nothing_behind(shared: Engine, steps: int) -> None:
    ids = prompt(14, 1500)
    core = shared.llm.llm_engine
    for round_ in range(2):
        name = f"aborted-{steps}-{round_}"
        request = core.add_request(name, {"prompt_token_ids": ids}, parameters(50))
        for _ in range(steps):
            core.step()
        core.abort_request([request or name])
        while core.has_unfinished_requests():
            core.step()
        shared.run([prompt(15, 40)])
        shared.assert_nothing_leaked()
        shared.forget_local()


def test_reset_leaves_no_hit_in_any_tier(shared: Engine) -> None:
    ids = prompt(16, 600)
    shared.run([ids])
    assert shared.llm.llm_engine.engine_core.reset_prefix_cache(reset_connector=True)
    assert external_hits(shared.run([ids])[0]) == 0
    assert external_hits(shared.again([ids])[0]) == 599


def test_one_line_for_a_lookup_and_one_for_each_steps_store(shared: Engine, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt(18, 600)
    with caplog.at_level(logging.INFO, logger="lmkv"):
        shared.run([ids])
        shared.again([ids])
    lines = [record.getMessage().split(": ", 2)[2] for record in caplog.records if "request" in record.getMessage()]
    assert lines == [
        "lmkv found 0 and loads 0 (599 tokens missed: not stored)",
        "stored 256 of 256 tokens",
        "stored 256 of 512 tokens",
        "stored 88 of 600 tokens",
        "lmkv found 599 and loads 599",
    ]


@pytest.mark.parametrize("method", ["allocated", "jobs.plan"])
def test_a_load_that_cannot_be_ordered_is_recomputed(
    shared: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """And so is what the step computes from its unfilled blocks: none of it is stored."""
    ids = prompt(5, 1024)
    longer = ids + prompt(50, 600)
    skipped = {"lmkv.skip_load": True, "lmkv.skip_save": True}
    right = shared.run([longer], params=skipped)[0].outputs[0].token_ids
    shared.again([ids])
    # Blocks that are free have other bytes.
    shared.again([prompt(51, 2000)], params=skipped)
    shared.forget_local()

    def broken(*_: object) -> None:
        raise RuntimeError("injected: our own code fails after the promise")

    scheduler = shared.connector.sides.scheduler
    owner, name = (scheduler.loads, "plan") if "." in method else (scheduler.matcher, method)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        assert shared.run([longer])[0].outputs[0].token_ids == right
    assert shared.again([longer])[0].outputs[0].token_ids == right
    shared.assert_nothing_leaked()


@pytest.mark.parametrize("method", ["on_new_request", "get_num_new_matched_tokens", "plan_step", "_note"])
def test_no_exception_of_ours_ends_the_engine(
    shared: Engine, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    # Something to load, whose end is reported meanwhile.
    shared.run([prompt(6, 1500)])
    shared.forget_local()
    with monkeypatch.context() as patch:
        patch.setattr(shared.connector.sides.scheduler, method, broken)
        assert shared.ids([prompt(6, 1500)]) == [expected[6]]
    assert shared.ids([prompt(6, 1500)]) == [expected[6]]
    shared.forget_local()
    assert shared.ids([prompt(6, 1500)]) == [expected[6]]
    shared.assert_nothing_leaked()


def test_an_asynchronous_load_is_reported_in_the_step_in_which_it_has_ended(shared: Engine) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector, worker = get_kv_transfer_group(), shared.worker
    worker._running.append(_Running(CopyTask(10**6, [], between_steps=True, finishes="loaded"), DONE, 0.0, 0))
    assert connector.get_finished(set()) == (set(), {"loaded"})
    assert connector.build_connector_worker_meta().report.jobs[10**6].ok
