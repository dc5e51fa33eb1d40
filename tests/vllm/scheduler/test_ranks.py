"""Which part of a chunk each worker has, by vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.chunks.layout import LayerPages
from lmkv.vllm.model import Ranks, describe
from tests.tables import raised
from tests.vllm.harness import kv_caches
from tests.vllm.scheduler.test_scratch import BLOCK, CHUNK, latent, vllm_config, window

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("tensor", "decode", "prefill", "shards", "replicas"), [(4, 2, 1, 4, 1), (2, 1, 2, 2, 2)])
def test_blocks_that_are_spread_over_context_ranks(
    model: Path, tensor: int, decode: int, prefill: int, shards: int, replicas: int
) -> None:
    """With decode context parallelism a block has that many times its tokens; with prefill's alone, copies."""
    config = vllm_config(model)
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.decode_context_parallel_size = tensor, decode
    parallel.prefill_context_parallel_size = prefill
    served = describe(config, kv_caches(latent()), CHUNK)
    assert [group.block_size for group in served.block_map.groups] == [BLOCK * decode]
    assert served.layout.pages_per_chunk(0) == CHUNK // (BLOCK * decode)
    assert (served.layout.num_ranks, served.ranks.replicas, served.ranks.total) == (shards, replicas, tensor * prefill)
    places = {served.ranks.place(0, c, t) for c in range(prefill) for t in range(tensor)}
    assert places == {(shard, replica) for shard in range(shards) for replica in range(replicas)}
    alone = vllm_config(model)
    assert served.namespace.digest != describe(alone, kv_caches(latent()), CHUNK).namespace.digest


def test_every_stage_has_the_first_layers_of_the_longest() -> None:
    key, index = LayerPages(64, 2), LayerPages(16, 2)
    ranks = Ranks((2, 3, 1), tensor=2)
    longest = ranks.widest_stage([key, index] * 3, stage=1)
    assert longest == (key, index) * 3
    assert {ranks.widest_stage([key, index] * hidden, stage) for stage, hidden in enumerate(ranks.stages)} == {longest}
    places = [ranks.place(stage, 0, tensor) for stage in range(3) for tensor in range(2)]
    assert places == [(shard, 0) for shard in range(6)]


def test_a_stage_cannot_know_the_kv_of_the_others_where_layers_differ() -> None:
    with pytest.raises(ValueError, match="layers have different KV"):
        Ranks((2, 2), tensor=1).widest_stage([LayerPages(64, 2), LayerPages(16, 2)], stage=0)
    raised(ValueError, "stage 0 has no layers", lambda: Ranks((0, 2), tensor=1).widest_stage([], stage=0))


@pytest.mark.parametrize(
    ("specs", "draft", "reason"),
    [
        ([latent, lambda: window(replayed=False)], None, "several block tables"),
        ([latent], "eagle", "a draft model with pipeline parallel ranks"),
    ],
)
def test_stages_of_which_the_layers_are_not_known_are_refused(
    model: Path, specs: list[Any], draft: str | None, reason: str
) -> None:
    config = vllm_config(model)
    config.parallel_config.pipeline_parallel_size = 2
    config.speculative_config = SimpleNamespace(method=draft) if draft else None
    raised(ValueError, reason, lambda: describe(config, kv_caches(*(make() for make in specs)), CHUNK))
