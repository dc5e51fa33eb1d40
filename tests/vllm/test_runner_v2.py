"""vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter.

Where VLLM_USE_V2_MODEL_RUNNER=1 is set, all of tests/vllm runs on it: in every run what is marked `runner_v2`, nightly
the rest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm.harness import engine, prompt

pytestmark = pytest.mark.runner_v2(only=True)


@pytest.mark.parametrize("extra", [{}, {"load_mode": "sync"}, {"use_layerwise": True}], ids=json.dumps)
def test_a_load_that_fails_is_recomputed(model: Path, expected: dict[int, list[int]], extra: dict[str, object]) -> None:
    """Within a step it made this runner write outside its KV space, and end."""
    ids = prompt(3, 1500)
    with engine(model, max_num_batched_tokens=480, extra=extra) as running:
        runner = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert type(runner).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
        assert running.repeats([ids], [1499]) == [expected[3]]
        running.forget_local()
        with running.failing():
            assert running.ids([ids]) == [expected[3]]
        running.assert_nothing_leaked()
