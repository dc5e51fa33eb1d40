"""Recurrent layers with vLLM's Model Runner V2, which it chooses on every GPU, on Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import mamba_cpu
from tests.vllm.alone import Alone
from tests.vllm.answers import answers_of, ask, off, without_states
from tests.vllm.drafts import N_GRAMS, write_qwen3_next
from tests.vllm.families import RECURRENT
from tests.vllm.harness import Engine, engine, external_hits, generated, pipelining, prompt
from tests.vllm.test_recurrent_preempted import preempted

pytestmark = pytest.mark.runner_v2(only=True)


@pytest.mark.parametrize("name", ["Mamba-2, Nemotron-H", "gated delta net, Qwen3-Next"])
def test_states_are_loaded_and_a_load_that_fails_is_recomputed(name: str, tmp_path: Path, alone: Alone) -> None:
    family, ids = RECURRENT[name], prompt(3, 700)
    whole = 699 // family.unit * family.unit
    model = family.write(tmp_path / "model")
    options = {"max_num_batched_tokens": 480, "kv_cache_memory_bytes": 64 << 20, **family.options}
    expected = alone(model, options, lambda plain: answers_of(ask(plain, [ids], max_tokens=3)), vllm=family.vllm)
    with family.vllm(), engine(model, **options) as running:

        def asked() -> tuple[float, int]:
            running.forget_local()
            (output,) = ask(running, [ids], max_tokens=3)
            return off([output], expected), external_hits(output)

        cold, warm = asked(), asked()
        with running.failing():
            failed = asked()
        again = asked()
        with without_states():
            left_out, _ = asked()
        running.assert_nothing_leaked()
    assert max(each for each, _ in (cold, warm, failed, again)) < family.noise
    assert [hits for _, hits in (cold, warm, again)] == [0, whole, whole]
    assert left_out > family.noise


@pytest.mark.parametrize(
    ("places", "answer"), [((1, 3), 25), pytest.param(range(1, 7), 40, marks=pytest.mark.nightly("sizes"))], ids=str
)
def test_a_preempted_request_goes_on_from_the_right_state(places: tuple[int, ...], answer: int, tmp_path: Path) -> None:
    """Where the V1 runner does not: see `test_vllm_alone_goes_on_from_a_wrong_state`."""
    family, ids = RECURRENT["Mamba-2 in each layer, Falcon-H1"], prompt(1, 180)
    model = family.write(tmp_path / "model")
    boundary = (len(ids) // family.unit + 1) * family.unit
    at = [boundary + more - len(ids) for more in places]
    options = {"kv_cache_memory_bytes": 64 << 20, **family.options}
    with family.vllm(), mamba_cpu.drafted():
        with engine(model, connector=None, **options) as plain:
            said = plain.ids([ids], max_tokens=answer)[0]
        with engine(model, connector=None, speculative_config=N_GRAMS, **options) as drafting:
            assert all(preempted(drafting, ids, len(said), tokens) == said for tokens in at)
        with engine(model, speculative_config=N_GRAMS, **options) as drafting:
            assert all(preempted(drafting, ids, len(said), tokens) == said for tokens in at)
            keys = drafting.connector.sides.scheduler.keys_of(ids + said, None, {})
            stored = drafting.store.catalog.count_prefix(keys)[1] * family.unit
    assert stored >= 192, "no state within the answer was stored"


@pytest.mark.parametrize("answer", [35, pytest.param(60, marks=pytest.mark.nightly("sizes"))])
@pytest.mark.parametrize(
    ("name", "write", "config", "length"),
    [
        ("Mamba-2, Nemotron-H", RECURRENT["Mamba-2, Nemotron-H"].write, N_GRAMS, 115),
        ("gated delta net, Qwen3-Next", write_qwen3_next, {"method": "mtp", "num_speculative_tokens": 2}, 515),
    ],
    ids=["n-grams, Nemotron-H", "MTP, Qwen3-Next"],
)
def test_drafts_with_asynchronous_scheduling(
    name: str, write: Callable[[Path], Path], config: dict[str, Any], length: int, answer: int, tmp_path: Path
) -> None:
    """As on GPUs: the next step is planned before it is known which drafts are accepted."""
    family, model = RECURRENT[name], write(tmp_path / "model")
    asked = [prompt(number, length + 3 * number) for number in range(2)]
    options: dict[str, Any] = {"max_num_batched_tokens": 480, "kv_cache_memory_bytes": 64 << 20}
    options |= {"disable_log_stats": False, **family.options, "speculative_config": config}

    def forget(running: Engine) -> None:
        # A step that was under way when its request ended has its blocks until the next one.
        ask(running, [prompt(8, 5)], max_tokens=1)
        running.forget_local()

    with family.vllm(), mamba_cpu.drafted(), pipelining():
        with engine(model, connector=None, **options) as plain:
            first = ask(plain, asked, max_tokens=answer)
            turns = [ids + said + prompt(9, 40) for ids, said in zip(asked, generated(first), strict=True)]
            forget(plain)
            second = answers_of(ask(plain, turns, max_tokens=4))
        with engine(model, **options) as running:
            assert type(running.scheduler).__name__ == "AsyncScheduler"
            found = ask(running, asked, max_tokens=answer)
            assert running.accepted_drafts > 0
            forget(running)
            turned = ask(running, turns, max_tokens=4)
            forget(running)
            with without_states():
                left_out = ask(running, turns, max_tokens=4)
            # Its last stores are reported with the next step.
            forget(running)
            running.assert_nothing_leaked()
    assert off(found, answers_of(first)) < family.noise
    assert off(turned, second) < family.batches
    hits = [external_hits(each) for each in turned]
    assert max(hits) > length, "no state of an answer was loaded"
    assert min(hits) >= length // family.unit * family.unit
    if config["method"] == "ngram":
        assert off(left_out, second) > family.batches
