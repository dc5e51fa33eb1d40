"""Which workers an engine has, and which part of a chunk each of them stores and loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from lmkv.chunks.layout import LayerPages
from lmkv.vllm.cacheable import check_parallel


@frozen
class Ranks:
    """The workers of an engine. Each pipeline stage has context ranks, each of which has tensor ranks.

    `replicas`: how many consecutive ranks have the same KV, of which one copy is stored. `stages`: hidden layers of
    each pipeline stage.
    """

    stages: tuple[int, ...]
    tensor: int
    context: int = 1
    replicas: int = 1

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Ranks:
        """The workers of a configuration. Raises ValueError, with the reason, for those that lmkv does not serve."""
        check_parallel(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        tensor, context = int(parallel.tensor_parallel_size), getattr(parallel, "prefill_context_parallel_size", 1)
        replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
        if context > 1:
            # Without decode context parallelism each context rank has all KV.
            replicas = replicas * context if parallel.decode_context_parallel_size == 1 else 1
        return cls(_stages(vllm_config), tensor, context, replicas)

    @property
    def total(self) -> int:
        """Workers."""
        return len(self.stages) * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Parts of a chunk."""
        return self.total // self.replicas

    def describe(self, parallel: Any) -> str:
        """Everything about the workers that decides which part of a chunk has which KV; equal for equal parts."""
        spread = getattr(parallel, "decode_context_parallel_size", 1)
        interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        stages = f" stages {','.join(map(str, self.stages))}" if len(self.stages) > 1 else ""
        context = f" pcp{self.context} dcp{spread} by {interleave}" if max(self.context, spread) > 1 else ""
        return f"tp{self.tensor}{stages}{context}"

    def place(self, stage: int, context: int, tensor: int) -> tuple[int, int]:
        """`(shard, replica)` of the worker with these ranks. Context ranks are next to each other."""
        return divmod((stage * self.tensor + tensor) * self.context + context, self.replicas)

    def widest_stage(self, layers: Sequence[LayerPages], stage: int) -> tuple[LayerPages, ...]:
        """The layers of the stage that has most of them; every other stage has the first of these.

        `layers`: of one stage. The scheduler side knows those of stage 0 only, so that all hidden layers must have
        equal pages. Raises ValueError if they have not.
        """
        if len(self.stages) == 1:
            return tuple(layers)
        hidden = self.stages[stage]
        if not hidden:
            raise ValueError(f"pipeline stage {stage} has no layers, so that it does not know those of the others")
        pattern = tuple(layers[: len(layers) // hidden])
        if pattern * hidden != tuple(layers):
            raise ValueError("its layers have different KV, so that a pipeline stage does not know that of the others")
        return pattern * max(self.stages)


def _stages(vllm_config: Any) -> tuple[int, ...]:
    size = int(vllm_config.parallel_config.pipeline_parallel_size)
    if size == 1:
        return (0,)
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    spans = (get_pp_indices(total, stage, size) for stage in range(size))
    return tuple(end - start for start, end in spans)
