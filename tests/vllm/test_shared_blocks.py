"""Requests that share blocks through vLLM's own cache, when a load into these blocks fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.harness import engine, parameters, pipelining, prompt

FIRST = prompt(70, 1300)
SECOND = FIRST[:1290] + prompt(71, 30)


@pytest.mark.parametrize("abort_after", [1, 2, 3])
@pytest.mark.parametrize("budget", [200, 4000])
def test_the_one_that_was_to_recompute_them_is_aborted(model: Path, budget: int, abort_after: int) -> None:
    """Both in one step or, with a budget that the first one uses up, one after the other."""
    with engine(model, max_num_batched_tokens=budget) as running:
        expected = running.ids([SECOND], params={"lmkv.skip_save": True})[0]
        running.run([FIRST])
        running.forget_local()

        core = running.llm.llm_engine
        answers = {}
        with running.failing():
            for name, ids in (("first", FIRST), ("second", SECOND)):
                core.add_request(name, {"prompt_token_ids": ids}, parameters())
            for step in range(100):
                if step == abort_after:
                    core.abort_request(["first"])
                for output in core.step():
                    answers[output.request_id] = list(output.outputs[0].token_ids)
                if not core.has_unfinished_requests():
                    break
        assert answers["second"] == expected
        running.assert_nothing_leaked()


@pytest.mark.runner_v2
def test_a_load_fails_while_the_next_step_is_scheduled_already(model: Path) -> None:
    with pipelining(), engine(model, max_num_batched_tokens=480) as running:
        expected = running.ids([FIRST, SECOND], max_tokens=20)
        running.forget_local()

        with running.failing():
            assert running.ids([FIRST, SECOND], max_tokens=20) == expected
        running.assert_nothing_leaked()
