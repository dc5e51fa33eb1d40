"""Where copies layer by layer would be wrong: they are off, and the log says why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.harness import ENVIRONMENT

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(2)]


@pytest.fixture
def configured(model: Path) -> Callable[..., Any]:
    """vLLM's configuration with `use_layerwise`."""
    os.environ.update(ENVIRONMENT)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    def make(**options: Any) -> Any:
        extra = {"use_layerwise": True, "max_local_cpu_size": 0.01}
        transfer = KVTransferConfig(
            kv_connector="LMKVConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
        given = {"skip_tokenizer_init": True, "kv_transfer_config": transfer, "async_scheduling": False, **options}
        return EngineArgs(model=str(model), **given).create_engine_config()

    return make


@pytest.fixture
def open_worker(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., bool]]:
    """Whether a worker with these layers copies layer by layer."""
    opened = []

    def make(vllm_config: Any, modules: Mapping[str, Any] | None = None) -> bool:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from lmkv.vllm.connector import LMKVConnector

        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
        vllm_config.compilation_config.static_forward_context.update(modules or {})
        names = LAYERS + sorted(set(modules or ()) - set(LAYERS))
        with caplog.at_level(logging.WARNING, "lmkv"):
            config = KVCacheConfig(100, [], [KVCacheGroupSpec(names, spec)])
            opened.append(LMKVConnector(vllm_config, KVConnectorRole.WORKER, config))
        assert opened[-1]._worker is not None
        return opened[-1]._worker._layerwise

    yield make
    for connector in opened:
        connector.shutdown()


def attention(vllm_config: Any, name: str) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    with set_current_vllm_config(vllm_config):
        return Attention(4, 64, 0.125, num_kv_heads=2, prefix=name)


def indexer(vllm_config: Any, name: str) -> Any:
    """As DeepSeek-V3.2 has one beside the attention of each layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    with set_current_vllm_config(vllm_config):
        return DeepseekV32IndexerCache(132, torch.uint8, name, vllm_config.cache_config)


def test_layers_of_attention_are_copied_one_by_one(
    configured: Callable[..., Any], open_worker: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    config = configured()
    assert open_worker(config, {name: attention(config, name) for name in LAYERS})
    assert "use_layerwise" not in caplog.text


def test_a_layer_that_reads_its_kv_without_a_wait(
    configured: Callable[..., Any], open_worker: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    config = configured()
    modules = {name: attention(config, name) for name in LAYERS}
    modules["model.layers.0.indexer.k_cache"] = indexer(config, "model.layers.0.indexer.k_cache")
    assert not open_worker(config, modules)
    assert "use_layerwise is off: 1 layers do not wait for their KV" in caplog.text
    assert "indexer.k_cache, of type DeepseekV32IndexerCache" in caplog.text


def test_steps_of_several_microbatches(
    configured: Callable[..., Any], open_worker: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    config = configured()
    config.parallel_config.ubatch_size = 2
    assert not open_worker(config)
    assert "use_layerwise is off: a step computes each layer once for every microbatch" in caplog.text
    config.parallel_config.ubatch_size = 0
    config.parallel_config.enable_dbo = True
    assert not open_worker(config)


def test_drafts_with_layers_of_their_own(
    configured: Callable[..., Any], open_worker: Callable[..., bool], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    assert not open_worker(configured(speculative_config=drafts))
    assert "use_layerwise is off: the layers of a draft model" in caplog.text
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert open_worker(configured(speculative_config=ngrams))


def test_the_scheduler_side_then_promises_what_others_do(configured: Callable[..., Any]) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from lmkv.vllm.connector import LMKVConnector

    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    promised = []
    for size in (0, 2):
        config = configured()
        config.parallel_config.ubatch_size = size
        kv_cache = KVCacheConfig(100, [], [KVCacheGroupSpec(LAYERS, spec)])
        connector = LMKVConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
        assert connector.sides.scheduler is not None
        options = connector.sides.scheduler._options
        promised.append((options.whole_blocks, options.load_mode))
        connector.shutdown()
    assert promised == [(True, "sync"), (False, "auto")]
