"""Two ranks in processes of their own, a core each: both halves of the KV come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.families import Family, nemotron_h
from tests.vllm.harness import engine, external_hits, prompt


@pytest.mark.nightly("ranks")
def test_two_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    ids = [prompt(90, 700), prompt(91, 900)]
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, max_num_batched_tokens=480, **ranks) as running:
        cold = running.ids(ids)
        running.forget_local()
        warm = running.run(ids)
        assert [list(output.outputs[0].token_ids) for output in warm] == cold
        assert [external_hits(output) for output in warm] == [699, 899]
        running.assert_nothing_leaked()


@pytest.mark.nightly("ranks")
def test_two_ranks_of_recurrent_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a half of the KV and of each state."""
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    folder, ids = Family(nemotron_h).write(tmp_path / "model"), [prompt(91, 900)]
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    # Steps of a block each: vLLM's CPU kernel exports no state from inside a step.
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 64 << 20}
    with engine(folder, **options, **ranks) as running:
        cold = running.ids(ids)
        running.forget_local()
        warm = running.run(ids)
        assert [list(output.outputs[0].token_ids) for output in warm] == cold
        assert [external_hits(output) for output in warm] == [896]
        running.assert_nothing_leaked()
