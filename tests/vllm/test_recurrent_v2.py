"""Recurrent layers with vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import triton_cpu
from tests.vllm.families import RECURRENT
from tests.vllm.server import child_environment

PROGRAM = """if True:
    import json, sys
    from pathlib import Path
    from tests.vllm import triton_cpu

    triton_cpu.install()
    from lmkv.vllm.scheduler.async_load import AsyncLoad
    from tests.vllm.families import RECURRENT
    from tests.vllm.harness import engine, external_hits, prompt
    from tests.vllm.test_recurrent import answers_of, ask, distance

    model, family = Path(sys.argv[1]), RECURRENT[sys.argv[2]]
    ids, options = prompt(3, 700), {"max_num_batched_tokens": 480, "kv_cache_memory_bytes": 64 << 20, **family.options}
    with family.vllm():
        with engine(model, connector=None, **options) as plain:
            expected = answers_of(ask(plain, [ids], max_tokens=3))
        with engine(model, **options) as running:
            runner = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

            def asked():
                running.forget_local()
                (output,) = ask(running, [ids], max_tokens=3)
                return distance(answers_of([output]), expected), external_hits(output)

            cold, warm, copier = asked(), asked(), running.worker._copier
            real, copier.load = copier.load, lambda *_, **__: 1 / 0
            failed = asked()
            copier.load = real
            again = asked()
            copies, AsyncLoad._state_copies = AsyncLoad._state_copies, lambda self, lease: []
            left_out = asked()
            running.assert_nothing_leaked()
    print(json.dumps({
        "runner": type(runner).__mro__[1].__module__,
        "distances": [cold[0], warm[0], failed[0], again[0]],
        "hits": [cold[1], warm[1], again[1]],
        "left out": left_out[0],
    }))
"""


@pytest.mark.skipif(not triton_cpu.is_there(), reason="no triton")
@pytest.mark.parametrize("name", ["Mamba-2, Nemotron-H", "gated delta net, Qwen3-Next"])
def test_states_are_loaded_and_a_load_that_fails_is_recomputed(name: str, tmp_path: Path) -> None:
    family = RECURRENT[name]
    folder = family.write(tmp_path / "model")
    root = Path(__file__).parents[2]
    environment = child_environment(**{triton_cpu.SWITCH: "1", "PYTHONPATH": os.fspath(root)})
    command = [sys.executable, "-c", PROGRAM, str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    whole = 699 // family.unit * family.unit
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert max(found["distances"]) < family.noise, found
    assert found["hits"] == [0, whole, whole]
    assert found["left out"] > family.noise
