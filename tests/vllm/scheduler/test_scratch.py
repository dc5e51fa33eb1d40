"""Models whose layers keep scratch blocks beside their prefixes, by vLLM's own specifications of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv.vllm.model import describe
from tests.tables import raised
from tests.vllm.harness import configured, kv_caches
from tests.vllm.scheduler.simulated_vllm import Replay, Ring, SimulatedVLLM, request_for

pytestmark = pytest.mark.vllm

BLOCK, CHUNK = 4, 8


def vllm_config(model: Path) -> Any:
    config = configured(model)
    # As it is for a model with recurrent layers.
    config.cache_config.mamba_cache_mode = "align"
    return config


def latent(**changes: Any) -> Any:
    """Compressed KV: a state of each two tokens."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    form = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.uint8, "tokens_per_state": 2}
    return MLAAttentionSpec(**form | changes)


def ring(capacity: int) -> Any:
    """The keys that are not compressed yet, as DeepSeek-V4.1, Qwen4-Exp and GLM5-Next keep them."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    return CircularBufferSpec(block_size=capacity, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.float32)


def window(*, replayed: bool) -> Any:
    """DeepSeek-V4.1's window, which vLLM computes again after a hit, or DeepSeek-V4's, which it keeps."""
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    form = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.uint8, "sliding_window": 8}
    return SlidingWindowMLASpec(**form, bounded_replay=replayed)


def recurrent() -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=8, shapes=((2, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS: dict[str, tuple[Any, list[Any]]] = {
    "ring first": (lambda: [ring(8), latent()], [Ring(8, ratio=2), None]),
    "as DeepSeek-V4.1": (
        lambda: [latent(), window(replayed=True), ring(8), ring(16)],
        [None, Replay(BLOCK, window=8), Ring(8, ratio=2), Ring(16, ratio=4)],
    ),
    "as Qwen4-Exp and GLM5-Next": (
        lambda: [recurrent(), ring(16), latent(block_size=8), recurrent()],
        [None, Ring(16, ratio=8), None, None],
    ),
    "beside a window that is kept": (lambda: [ring(8), window(replayed=False), latent()], [Ring(8, 2), None, None]),
}
"""vLLM's specifications, and what the simulated engine has in place of those that are scratch."""


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_scratch_blocks_are_left_out(model: Path, kind: str, seed: int) -> None:
    specs, scratch = MODELS[kind]
    config = vllm_config(model)
    served = describe(config, kv_caches(*specs()), CHUNK)
    assert served.block_map.scratch
    assert {group.table for group in served.block_map.groups} == {n for n, table in enumerate(scratch) if table is None}
    assert served.layers == tuple(f"{group.table}.layer" for group in served.block_map.groups)
    cached = iter(served.block_map.groups)
    tables = [table if table is not None else next(cached) for table in scratch]
    options: dict[str, Any] = {"groups": tables, "block_map": served.block_map, "depth": 1 + seed % 2}
    size = served.block_map.chunk_size
    with SimulatedVLLM(seed, chunk_size=size, local_hits=0.0, **options) as engine:
        tokens = list(range(3 * size + 5))
        for turn in range(3):
            engine.serve(f"r{turn}", tokens[: len(tokens) - turn], 6)
        assert engine.counts["hits"] == 2
        again = request_for("again", tokens)
        assert engine.scheduler.get_num_new_matched_tokens(again, 0)[0] == 3 * size
        engine.scheduler.request_finished(again)


def test_chunks_are_whole_blocks_of_every_table(model: Path) -> None:
    """vLLM shortens a hit to whole blocks of all tables, scratch included, where it computes its end again."""
    served = describe(vllm_config(model), kv_caches(latent(), window(replayed=True), ring(16)), CHUNK)
    assert served.block_map.chunk_size == 16


def test_a_state_cannot_go_back_for_a_window_that_is_computed_again(model: Path) -> None:
    with pytest.raises(ValueError, match="a recurrent layer's state cannot go back"):
        describe(vllm_config(model), kv_caches(latent(), window(replayed=True), recurrent()), CHUNK)


def test_a_model_of_scratch_alone_is_not_cached(model: Path) -> None:
    raised(ValueError, "the model has no KV cache", lambda: describe(vllm_config(model), kv_caches(ring(8)), CHUNK))


def test_events_name_vllms_own_groups(model: Path) -> None:
    from lmkv.vllm.publishing import BlockDescriber

    config = kv_caches(ring(8), latent())
    describer = BlockDescriber.of(config, describe(vllm_config(model), config, CHUNK).block_map)
    assert (describer.groups, describer.block_sizes, describer.kinds) == ([1], [BLOCK], ["mla_attention"])
