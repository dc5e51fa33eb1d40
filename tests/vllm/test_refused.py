"""Models that lmkv does not cache: it says why at the start, and never hits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.vllm import families
from tests.vllm.harness import engine, prompt


def test_a_model_with_recurrent_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = families.Family(families.falcon_h1).write(tmp_path / "model")
    ids = prompt(80, 700)
    options = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "block_size": None}
    try:
        with engine(folder, connector=None, **options) as plain:
            expected = plain.ids([ids])
    except Exception as error:  # noqa: BLE001 - whatever this build of vLLM says
        pytest.skip(f"vLLM does not run it here: {error!r}"[:300])
    with caplog.at_level(logging.WARNING, logger="lmkv"), engine(folder, **options) as running:
        assert running.ids([ids]) == expected
        assert running.ids([ids]) == expected
        assert running.connector._scheduler is None
    assert any("this model is not cached" in record.getMessage() for record in caplog.records)
