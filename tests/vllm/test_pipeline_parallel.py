"""Workers in processes of their own that have different layers: all of these come back, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.cli.small_model import SmallModel
from tests.vllm.harness import BREAKS_COPIES, Engine, engine, external_hits, generated, prompt

PROMPTS = [prompt(90, 700), prompt(91, 900)]
HITS = [699, 899]


class Faults:
    """Lets the copies of one worker fail while it is told to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.switch, self.rank = folder / "switch", rank

    @contextlib.contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """Every copy of the worker fails while in here. `verb`: "store" or "load"."""
        self.switch.write_text(f"{self.rank} {verb}")
        try:
            yield
        finally:
            self.switch.unlink()


@contextlib.contextmanager
def stages(model: Path, faults: Faults, **options: Any) -> Iterator[Engine]:
    """An engine of two pipeline stages, whose copies fail when `faults` says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(["0", "1"] * options.get("tensor_parallel_size", 1)))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv(BREAKS_COPIES, str(faults.switch))
        # Without a compiler's warm-up vLLM 0.32's CPU worker has no tensors to receive from the stage before.
        compiled = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
        ranks = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
        options |= {"connector": "BreakableConnector", "transfer": {"kv_connector_module_path": "tests.vllm.breakable"}}
        with engine(model, max_num_batched_tokens=480, **compiled, **ranks, **options) as running:
            yield running


def check(running: Engine, faults: Faults, expected: list[list[int]]) -> None:
    """Stores and loads; a store and a load that fail on one worker."""
    assert running.repeats(PROMPTS, HITS) == expected
    running.forget_local()
    with faults.of("load"):
        failed = running.run(PROMPTS)
    assert generated(failed) == expected
    assert [external_hits(output) for output in failed] == [0, 0]

    running.forget_local()
    running.connector.reset_cache()
    with faults.of("store"):
        assert running.ids(PROMPTS) == expected
    missed = running.again(PROMPTS)
    assert generated(missed) == expected
    assert [external_hits(output) for output in missed] == [0, 0]

    again = running.again(PROMPTS)
    assert generated(again) == expected
    assert [external_hits(output) for output in again] == HITS
    running.assert_nothing_leaked()


def of_stages(model: Path, folder: Path, rank: int, tensor_parallel_size: int = 1, **environment: str) -> None:
    """The copies of `rank` are to fail."""
    with engine(model, connector=None, max_num_batched_tokens=480) as plain:
        expected = plain.ids(PROMPTS)
    faults = Faults(folder, rank)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with stages(model, faults, tensor_parallel_size=tensor_parallel_size) as running:
            check(running, faults, expected)


def test_two_stages(model: Path, tmp_path: Path) -> None:
    of_stages(model, tmp_path, rank=1)


@pytest.mark.nightly("ranks")
@pytest.mark.parametrize("partition", ["3,2", "2,3"])
def test_stages_of_different_length(tmp_path: Path, partition: str) -> None:
    small = SmallModel(layers=5, hidden=256, max_position=8192)
    small.write(tmp_path / "model")
    of_stages(tmp_path / "model", tmp_path, rank=0, VLLM_PP_LAYER_PARTITION=partition)


@pytest.mark.nightly("ranks")
def test_two_stages_of_two_ranks(model: Path, tmp_path: Path) -> None:
    of_stages(model, tmp_path, rank=2, tensor_parallel_size=2)
