"""vLLM alone, with drafts and recurrent layers, when a request is preempted within its answer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import mamba_cpu
from tests.vllm.drafts import KNOWN, Known
from tests.vllm.families import RECURRENT
from tests.vllm.harness import Engine, engine, generated, parameters, prompt


@pytest.mark.parametrize("runner", ["as it is", "corrected"])
def test_vllm_alone_goes_on_from_a_wrong_state(runner: str, tmp_path: Path) -> None:
    """Why drafts are refused on V1: once vLLM is right here, `options.STATES_WITH_DRAFTS_ON_V1` may become True."""
    family = RECURRENT["Mamba-2 in each layer, Falcon-H1"]
    folder, ids = family.write(tmp_path / "model"), prompt(1, 180)
    boundary = (len(ids) // family.unit + 1) * family.unit
    with family.vllm(), mamba_cpu.drafted(), mamba_cpu.resumed() if runner == "corrected" else nullcontext():
        with engine(folder, connector=None, **family.options) as plain:
            said = plain.ids([ids], max_tokens=40)[0]
        Known.tell([ids + said[:8] + [0] * 400])
        with engine(folder, connector=None, speculative_config=KNOWN, **family.options) as drafting:
            assert preempted(drafting, ids, len(said), len(said)) == said
            found = [preempted(drafting, ids, len(said), boundary + more - len(ids)) for more in range(1, 7)]
    wrong = [more for more, answer in enumerate(found, 1) if answer != said]
    assert wrong == ([] if runner == "corrected" else [2, 3, 4])


def preempted(running: Engine, ids: list[int], max_tokens: int, tokens: int) -> list[int]:
    """The answer to a request that is preempted when it has so many tokens of it."""
    running.llm.llm_engine.add_request(f"preempted {tokens}", {"prompt_token_ids": ids}, parameters(max_tokens))
    outputs: list[Any] = []
    while running.llm.llm_engine.has_unfinished_requests():
        outputs = running.llm.llm_engine.step() or outputs
        if any(each.num_output_tokens == tokens and not each.num_preemptions for each in running.scheduler.running):
            assert running.scheduler.reset_prefix_cache(reset_running_requests=True)
    running.forget_local()
    return generated(outputs)[-1]
