"""vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter: hits, and loads that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import triton_cpu
from tests.vllm.server import child_environment

PROGRAM = """if True:
    import json, sys
    from pathlib import Path
    from tests.vllm import triton_cpu

    triton_cpu.install()
    from tests.vllm.harness import engine, prompt

    model, ids = Path(sys.argv[1]), prompt(3, 1500)
    with engine(model, connector=None, max_num_batched_tokens=480) as plain:
        expected = plain.ids([ids])
    with engine(model, max_num_batched_tokens=480, extra=json.loads(sys.argv[2])) as running:
        runner = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        cold = running.ids([ids])
        running.forget_local()
        (hit,) = running.run([ids])
        running.forget_local()
        copier = running.worker._copier
        real, copier.load = copier.load, lambda *_, **__: 1 / 0
        failed = running.ids([ids])
        copier.load = real
        running.assert_nothing_leaked()
    print(json.dumps({
        "runner": type(runner).__mro__[1].__module__,
        "equal": [cold == expected, [list(hit.outputs[0].token_ids)] == expected, failed == expected],
        "hit": hit.kv_transfer_params["lmkv"]["hit_tokens"],
    }))
"""


@pytest.mark.skipif(not triton_cpu.is_there(), reason="no triton")
@pytest.mark.parametrize("extra", [{}, {"load_mode": "sync"}, {"use_layerwise": True}], ids=json.dumps)
def test_a_load_that_fails_is_recomputed(model: Path, extra: dict[str, object]) -> None:
    """Within a step it made this runner write outside its KV space, and end."""
    root = Path(__file__).parents[2]
    environment = child_environment(**{triton_cpu.SWITCH: "1", "PYTHONPATH": os.fspath(root)})
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(extra)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert found["equal"] == [True, True, True]
    assert found["hit"] == 1499
