"""Ways to set up the connector, each in an engine of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.vllm.copies import LayerwiseTransfer
from tests.vllm import triton_cpu
from tests.vllm.harness import BLOCK, engine, external_hits, generated, prompt


@pytest.mark.runner_v2
def test_loads_start_where_the_local_prefix_cache_ends(model: Path) -> None:
    ids = prompt(4, 1500)
    # A small KV space: running other prompts leaves a part of the first one in vLLM's own cache.
    with engine(model, max_num_batched_tokens=480) as running:
        cold = running.ids([ids])
        running.run([prompt(5, 1500), prompt(6, 1900)])
        warm = running.run([ids])[0]
        local = warm.num_cached_tokens - external_hits(warm)
        assert local % BLOCK == 0
        assert 0 < external_hits(warm) < 1499
        assert warm.num_cached_tokens == 1499
        assert [list(warm.outputs[0].token_ids)] == cold
        running.assert_nothing_leaked()


@pytest.mark.runner_v2
def test_without_prefix_caching_every_repetition_is_loaded(model: Path) -> None:
    ids = prompt(7, 1500)
    with engine(model, enable_prefix_caching=False) as running:
        outputs = [running.run([ids])[0] for _ in range(3)]
    assert [external_hits(output) for output in outputs] == [0, 1499, 1499]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_roles_switch_the_directions(model: Path) -> None:
    ids = prompt(17, 600)
    with engine(model, kv_role="kv_producer") as producer:
        producer.run([ids])
        assert external_hits(producer.again([ids])[0]) == 0
        assert producer.store.stats().primary.chunks == 3
    with engine(model, kv_role="kv_consumer") as consumer:
        consumer.run([ids])
        assert consumer.store.stats().primary.chunks == 0


def test_the_default_failure_policy_is_warned_about(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lmkv"), engine(model, kv_load_failure_policy="fail"):
        pass
    assert any("kv_load_failure_policy" in record.getMessage() for record in caplog.records)


def test_the_module_path_works_without_the_entry_point(model: Path) -> None:
    ids = prompt(19, 300)
    with engine(model, transfer={"kv_connector_module_path": "lmkv.vllm.connector"}) as running:
        running.repeats([ids], [299])


def test_lmcache_settings_are_in_force_with_only_the_connector_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"USE_EXPERIMENTAL": "True", "CHUNK_SIZE": "96", "LOCAL_CPU": "True", "MAX_LOCAL_CPU_SIZE": "0.125"}
    for name, value in given.items():
        monkeypatch.setenv(f"LMCACHE_{name}", value)
    ids = prompt(20, 200)
    with (
        caplog.at_level(logging.INFO, logger="lmkv"),
        engine(model, transfer={"kv_connector_extra_config": {}}) as running,
    ):
        running.run([ids])
        assert external_hits(running.again([ids])[0]) >= 192, "chunks of 256 tokens would not hit"
        slab = running.store.slab
        assert running.connector.sides.model.block_map.chunk_size == 96
        assert slab.num_slots == (1 << 27) // slab.slot_bytes
    lines = [record.getMessage() for record in caplog.records if "LMCache" in record.getMessage()]
    # There is one rank, so that its sizes are the engine's.
    assert lines == ["lmkv: these LMCache settings have no effect: use_experimental"]


def test_a_bad_option_names_key_and_value(model: Path) -> None:
    with pytest.raises(Exception, match=r"chunk_sise"), engine(model, extra={"chunk_sise": 256}):
        pass


@pytest.mark.skipif(triton_cpu.is_wanted(), reason="off with vLLM's V2 runner: test_runner_v2.py")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_layer_by_layer(model: Path, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """Equal outputs; loads and stores really go by layers; and no load failed for a layer not waited for."""
    ids = [prompt(23, 1500), prompt(24, 700)]
    with engine(model, None, max_num_batched_tokens=480) as plain:
        expected = plain.ids(ids)
    steps: list[bool] = []
    begin = LayerwiseTransfer.__init__

    def noted(self: LayerwiseTransfer, *args: Any, loads: bool) -> None:
        steps.append(loads)
        begin(self, *args, loads=loads)

    monkeypatch.setattr(LayerwiseTransfer, "__init__", noted)
    options = {"extra": {"use_layerwise": True}, "enforce_eager": eager, "max_num_batched_tokens": 480}
    with engine(model, **options) as running:
        assert running.ids(ids) == expected
        assert set(steps) == {False}
        again = running.again(ids)
        assert generated(again) == expected
        assert [external_hits(output) for output in again] == [1499 // BLOCK * BLOCK, 699 // BLOCK * BLOCK]
        assert set(steps) == {False, True}
        running.assert_nothing_leaked()


@pytest.mark.runner_v2
def test_loads_between_steps(model: Path) -> None:
    ids = [prompt(25, 1500), prompt(26, 700)]
    with engine(model, extra={"load_mode": "async"}) as running:
        running.repeats(ids, [1499, 699])


def test_what_vllm_asks_the_class() -> None:
    """Pieces of CUDA graphs only for layers, one run of bytes for a block only on CUDA."""
    from vllm.config import KVTransferConfig

    from lmkv.vllm.connector import LMKVConnector

    def layout(device: str, *, hybrid: bool = False, block_size: bool = False, **extra: Any) -> str | None:
        transfer = KVTransferConfig(kv_connector="LMKVConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        device_config = SimpleNamespace(device_type=device)
        asked = SimpleNamespace(
            kv_transfer_config=transfer,
            device_config=device_config,
            cache_config=SimpleNamespace(user_specified_block_size=block_size),
            model_config=SimpleNamespace(is_hybrid=hybrid, use_mla=False),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, world_size=1),
        )
        return LMKVConnector.get_required_kvcache_layout(asked)

    assert not LMKVConnector.requires_piecewise_for_cudagraph({})
    assert LMKVConnector.requires_piecewise_for_cudagraph({"use_layerwise": True})
    assert layout("cpu") is None
    assert layout("cuda") == "BLHNC"
    assert layout("cuda", block_major=False) is None
    assert layout("cuda", use_layerwise=True) is None
    assert layout("cuda", hybrid=True) is None, "its blocks are larger than attention backends support"
    assert layout("cuda", block_size=True) is None, "nor is every block size that a user may choose"
