"""Recurrent layers with vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import triton_cpu
from tests.vllm.drafts import N_GRAMS, write_qwen3_next
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

DRAFTING = """if True:
    import json, sys
    from pathlib import Path
    from tests.vllm import triton_cpu

    triton_cpu.install()
    from lmkv.vllm.scheduler.async_load import AsyncLoad
    from tests.vllm import mamba_cpu
    from tests.vllm.families import RECURRENT
    from tests.vllm.harness import engine, external_hits, pipelining, prompt
    from tests.vllm.test_recurrent import answers_of, ask, distance

    model, family, config, length = Path(sys.argv[1]), RECURRENT[sys.argv[2]], json.loads(sys.argv[3]), int(sys.argv[4])
    asked = [prompt(number, length + 3 * number) for number in range(2)]
    options = {"max_num_batched_tokens": 480, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False}
    options |= family.options | {"speculative_config": config}

    def forget(running):
        # A step that was under way when its request ended has its blocks until the next one.
        ask(running, [prompt(8, 5)], max_tokens=1)
        running.forget_local()

    with family.vllm(), mamba_cpu.drafted(), pipelining():
        with engine(model, connector=None, **options) as plain:
            first = ask(plain, asked, max_tokens=60)
            turns = [ids + list(each.outputs[0].token_ids) + prompt(9, 40) for ids, each in zip(asked, first)]
            forget(plain)
            second = ask(plain, turns, max_tokens=4)
        with engine(model, **options) as running:
            found = ask(running, asked, max_tokens=60)
            accepted = running.accepted_drafts
            forget(running)
            turned = ask(running, turns, max_tokens=4)
            forget(running)
            AsyncLoad._state_copies = lambda self, lease: []
            left_out = ask(running, turns, max_tokens=4)
            running.assert_nothing_leaked()
            scheduler = type(running.scheduler).__name__
    print(json.dumps({
        "scheduler": scheduler,
        "accepted": accepted,
        "first": distance(answers_of(found), answers_of(first)),
        "second": distance(answers_of(turned), answers_of(second)),
        "hits": [external_hits(each) for each in turned],
        "left out": distance(answers_of(left_out), answers_of(second)),
    }))
"""

PREEMPTED = """if True:
    import json, sys
    from pathlib import Path
    from tests.vllm import triton_cpu

    triton_cpu.install()
    from tests.vllm import mamba_cpu
    from tests.vllm.families import RECURRENT
    from tests.vllm.harness import engine, prompt
    from tests.vllm.test_recurrent_preempted import preempted

    model, family, config = Path(sys.argv[1]), RECURRENT[sys.argv[2]], json.loads(sys.argv[3])
    ids = prompt(1, 180)
    boundary = (len(ids) // family.unit + 1) * family.unit
    options = {"kv_cache_memory_bytes": 64 << 20, **family.options}
    found = {}
    with family.vllm(), mamba_cpu.drafted():
        with engine(model, connector=None, **options) as plain:
            said = plain.ids([ids], max_tokens=40)[0]
        at = [boundary + more - len(ids) for more in range(1, 7)]
        for name, connector in (("vLLM", {"connector": None}), ("lmkv", {})):
            with engine(model, speculative_config=config, **connector, **options) as drafting:
                found[name] = [preempted(drafting, ids, len(said), tokens) == said for tokens in at]
                if name == "lmkv":
                    keys = drafting.connector._scheduler.keys_of(ids + said, None, {})
                    found["stored"] = drafting.store.count_prefix(keys)[1] * family.unit
    print(json.dumps(found))
"""


def run(program: str, *arguments: str) -> Any:
    """Run a program on vLLM's V2 runner, in a process of its own; returns the JSON of the last line that it prints."""
    root = Path(__file__).parents[2]
    environment = child_environment(**{triton_cpu.SWITCH: "1", "PYTHONPATH": os.fspath(root)})
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not triton_cpu.is_there(), reason="no triton")
@pytest.mark.parametrize("name", ["Mamba-2, Nemotron-H", "gated delta net, Qwen3-Next"])
def test_states_are_loaded_and_a_load_that_fails_is_recomputed(name: str, tmp_path: Path) -> None:
    family = RECURRENT[name]
    found = run(PROGRAM, str(family.write(tmp_path / "model")), name)
    whole = 699 // family.unit * family.unit
    assert found["runner"] == "vllm.v1.worker.gpu.model_runner"
    assert max(found["distances"]) < family.noise, found
    assert found["hits"] == [0, whole, whole]
    assert found["left out"] > family.noise


@pytest.mark.skipif(not triton_cpu.is_there(), reason="no triton")
def test_a_preempted_request_goes_on_from_the_right_state(tmp_path: Path) -> None:
    """Where the V1 runner does not: see `test_vllm_alone_goes_on_from_a_wrong_state`."""
    name = "Mamba-2 in each layer, Falcon-H1"
    found = run(PREEMPTED, str(RECURRENT[name].write(tmp_path / "model")), name, json.dumps(N_GRAMS))
    assert found["vLLM"] == found["lmkv"] == [True] * 6
    assert found["stored"] >= 192, "no state within the answer was stored"


@pytest.mark.skipif(not triton_cpu.is_there(), reason="no triton")
@pytest.mark.parametrize(
    ("name", "write", "config", "length"),
    [
        ("Mamba-2, Nemotron-H", RECURRENT["Mamba-2, Nemotron-H"].write, N_GRAMS, 115),
        ("gated delta net, Qwen3-Next", write_qwen3_next, {"method": "mtp", "num_speculative_tokens": 2}, 515),
    ],
    ids=["n-grams, Nemotron-H", "MTP, Qwen3-Next"],
)
def test_drafts_with_asynchronous_scheduling(
    name: str, write: Callable[[Path], Path], config: dict[str, Any], length: int, tmp_path: Path
) -> None:
    """As on GPUs: the next step is planned before it is known which drafts are accepted."""
    family = RECURRENT[name]
    found = run(DRAFTING, str(write(tmp_path / "model")), name, json.dumps(config), str(length))
    assert (found["scheduler"], found["accepted"] > 0) == ("AsyncScheduler", True)
    assert found["first"] < family.noise
    assert found["second"] < family.batches
    assert max(found["hits"]) > length, "no state of an answer was loaded"
    assert min(found["hits"]) >= length // family.unit * family.unit
    if config["method"] == "ngram":
        assert found["left out"] > family.batches
