"""Two ranks in processes of their own, a core each: both halves of the KV come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.harness import engine, external_hits, prompt


@pytest.mark.nightly
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
