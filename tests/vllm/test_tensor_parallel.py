"""Two ranks in processes of their own, a core each: both halves of the KV come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.families import Family, nemotron_h
from tests.vllm.harness import engine, prompt

pytestmark = pytest.mark.nightly("ranks")
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


def test_two_ranks(model: Path) -> None:
    ids = [prompt(90, 700), prompt(91, 900)]
    with engine(model, max_num_batched_tokens=480, **RANKS) as running:
        running.repeats(ids, [699, 899])


def test_two_ranks_of_recurrent_layers(tmp_path: Path) -> None:
    """Each has a half of the KV and of each state."""
    folder, ids = Family(nemotron_h).write(tmp_path / "model"), [prompt(91, 900)]
    # Steps of a block each: vLLM's CPU kernel exports no state from inside a step.
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 64 << 20}
    with engine(folder, **options, **RANKS) as running:
        running.repeats(ids, [896])
