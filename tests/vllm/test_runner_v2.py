"""vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter: the suite, once more.

Where VLLM_USE_V2_MODEL_RUNNER=1 is set, all of tests/vllm runs on it. That is done here in processes of their own:
in every run with what is marked `runner_v2`, nightly with everything, file by file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv.vllm.compat import vllm_version
from tests.vllm import triton_cpu
from tests.vllm.harness import engine, prompt

HERE = Path(__file__).parent
IN_PROCESS = (
    "connector", "disk", "drafts", "failures", "families", "kv_events", "metrics", "multi_connector", "pressure",
    "refused", "runner_v2", "shared_blocks", "shared_memory", "streamed_inputs", "variants",
)  # fmt: skip
SERVERS = ("agent", "multiprocess", "online", "prefill_decode", "remote", "walk")

CAN = triton_cpu.is_there() and vllm_version().startswith(("0.32", "0.33"))
outside = pytest.mark.skipif(triton_cpu.is_wanted() or not CAN, reason="no triton, another vLLM, or V2 already")
inside = pytest.mark.skipif(not triton_cpu.is_wanted(), reason="only on vLLM's V2 runner")


def run_on_v2(*what: str) -> None:
    environment = os.environ | {triton_cpu.SWITCH: "1", "NIGHTLY": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *what]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@outside
@pytest.mark.timeout(3600)
def test_a_part_of_the_suite() -> None:
    run_on_v2("-m", "runner_v2", str(HERE))


@outside
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", IN_PROCESS + SERVERS)
def test_the_suite(name: str) -> None:
    run_on_v2("-m", "not nightly", str(HERE / f"test_{name}.py"))


@inside
@pytest.mark.runner_v2
@pytest.mark.parametrize("extra", [{}, {"load_mode": "sync"}, {"use_layerwise": True}], ids=json.dumps)
def test_a_load_that_fails_is_recomputed(
    model: Path, expected: dict[int, list[int]], extra: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a step it made this runner write outside its KV space, and end."""
    ids = prompt(3, 1500)
    with engine(model, max_num_batched_tokens=480, extra=extra) as running:
        runner = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert type(runner).__mro__[1].__module__ == "vllm.v1.worker.gpu.model_runner"
        assert running.ids([ids]) == [expected[3]]
        running.forget_local()
        (hit,) = running.run([ids])
        assert list(hit.outputs[0].token_ids) == expected[3]
        assert hit.kv_transfer_params["lmkv"]["hit_tokens"] == 1499
        running.forget_local()
        with monkeypatch.context() as patch:
            patch.setattr(running.worker._copier, "load", lambda *_, **__: 1 / 0)
            assert running.ids([ids]) == [expected[3]]
        running.assert_nothing_leaked()
