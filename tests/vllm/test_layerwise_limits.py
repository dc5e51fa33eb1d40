"""Where copies layer by layer would be wrong: they are off, and the log says why."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.harness import configured, full_attention, kv_caches, side_of

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(2)]


@pytest.fixture
def layerwise(model: Path) -> Callable[..., Any]:
    """vLLM's configuration with `use_layerwise`."""
    extra = {"use_layerwise": True, "max_local_cpu_size": 0.01}
    return functools.partial(configured, model, extra, async_scheduling=False)


@pytest.fixture
def open_worker(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., str]]:
    """Why a worker with these layers does not copy layer by layer; "" if it does."""
    with ExitStack() as opened:

        def make(vllm_config: Any, modules: Mapping[str, Any] | None = None) -> str:
            vllm_config.compilation_config.static_forward_context.update(modules or {})
            names = LAYERS + sorted(set(modules or ()) - set(LAYERS))
            caplog.clear()
            with caplog.at_level(logging.WARNING, "lmkv"):
                connector = side_of("WORKER", vllm_config, kv_caches((names, full_attention())))
            opened.callback(connector.shutdown)
            assert connector.sides.worker is not None
            said = next((text for text in caplog.messages if "use_layerwise" in text), "")
            assert connector.sides.worker._layerwise is not bool(said)
            return said

        yield make


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
    layerwise: Callable[..., Any], open_worker: Callable[..., str]
) -> None:
    config = layerwise()
    assert open_worker(config, {name: attention(config, name) for name in LAYERS}) == ""


def test_a_layer_that_reads_its_kv_without_a_wait(
    layerwise: Callable[..., Any], open_worker: Callable[..., str]
) -> None:
    config, odd = layerwise(), "model.layers.0.indexer.k_cache"
    modules = {**{name: attention(config, name) for name in LAYERS}, odd: indexer(config, odd)}
    said = open_worker(config, modules)
    assert "use_layerwise has no effect: 1 layers do not wait until their KV is loaded" in said
    assert "indexer.k_cache (DeepseekV32IndexerCache)" in said


def test_steps_of_several_microbatches(layerwise: Callable[..., Any], open_worker: Callable[..., str]) -> None:
    for name, value in (("ubatch_size", 2), ("enable_dbo", True)):
        config = layerwise()
        setattr(config.parallel_config, name, value)
        assert "use_layerwise has no effect: vLLM computes each layer once for every microbatch" in open_worker(config)


def test_drafts_with_layers_of_their_own(
    layerwise: Callable[..., Any], open_worker: Callable[..., str], model: Path
) -> None:
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    said = open_worker(layerwise(speculative_config=drafts))
    assert "use_layerwise has no effect: vLLM asks lmkv for failed loads" in said
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert open_worker(layerwise(speculative_config=ngrams)) == ""


def test_the_scheduler_side_then_promises_what_others_do(layerwise: Callable[..., Any]) -> None:
    promised = []
    for size in (0, 2):
        config = layerwise()
        config.parallel_config.ubatch_size = size
        connector = side_of("SCHEDULER", config, kv_caches((LAYERS, full_attention())))
        assert connector.sides.scheduler is not None
        options = connector.sides.scheduler._options
        promised.append((options.whole_blocks, options.load_mode))
        connector.shutdown()
    assert promised == [(True, "sync"), (False, "auto")]
