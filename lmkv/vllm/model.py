"""Describes the model that vLLM serves: the layout of its KV pages, and the namespace of its chunks."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from lmkv.chunks.layout import KVLayout, LayerPages, align_up
from lmkv.chunks.namespace import Namespace
from lmkv.memory.comparison import Part
from lmkv.memory.paged import PagedMemory, padded
from lmkv.vllm.code import as_json, described
from lmkv.vllm.compat import KVGroup, Numbers, block_sizes, draft_modules, kv_groups, numbers, vllm_version
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.plan.options import check_model, check_parallel, check_states, has_draft_layers, is_replayed

if TYPE_CHECKING:
    import torch

_LOOSE = 0.5
"""Share of a page's numbers that may differ in an audit without counting as wrong, for models with experts."""


@frozen
class Ranks:
    """The ranks of an engine, one per worker: the product of pipeline stages, prefill context ranks and tensor ranks.

    `stages`: number of hidden layers of each pipeline stage ((0,) if there is one stage). `tensor`: number of tensor
    ranks. `context`: number of prefill context ranks. `replicas`: number of consecutive ranks with the same KV, which
    lmkv stores once.
    """

    stages: tuple[int, ...]
    tensor: int
    context: int = 1
    replicas: int = 1

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Ranks:
        """Return the ranks of a configuration. Raises ValueError with the reason if lmkv does not support the
        configuration.
        """
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
        """Number of workers."""
        return len(self.stages) * self.tensor * self.context

    @property
    def shards(self) -> int:
        """Number of parts of each chunk: one for each group of ranks with the same KV."""
        return self.total // self.replicas

    def describe(self, parallel: Any) -> str:
        """Return a text about how the workers divide KV. Engines with equal texts divide KV in the same way."""
        spread = getattr(parallel, "decode_context_parallel_size", 1)
        interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        stages = f" stages {','.join(map(str, self.stages))}" if len(self.stages) > 1 else ""
        context = f" pcp{self.context} dcp{spread} by {interleave}" if max(self.context, spread) > 1 else ""
        return f"tp{self.tensor}{stages}{context}"

    def place(self, stage: int, context: int, tensor: int) -> tuple[int, int]:
        """Return `(shard, replica)` of a worker.

        `shard`: the index of the worker's part in each chunk. `replica`: the worker's index among the workers with the
        same part. Workers are numbered by stage, then by tensor rank, then by context rank.
        """
        return divmod((stage * self.tensor + tensor) * self.context + context, self.replicas)

    def widest_stage(self, layers: Sequence[LayerPages], stage: int) -> tuple[LayerPages, ...]:
        """Return the pages of the pipeline stage with the most layers, derived from the pages of one stage.

        `layers`: the pages of stage number `stage`. All hidden layers must have equal pages, so the pages of each stage
        equal the first pages of the result. Raises ValueError if they do not, or if the stage has no layers.
        """
        if len(self.stages) == 1:
            return tuple(layers)
        hidden = self.stages[stage]
        if not hidden:
            raise ValueError(f"pipeline stage {stage} has no layers, which lmkv does not support")
        pattern = tuple(layers[: len(layers) // hidden])
        if pattern * hidden != tuple(layers):
            raise ValueError("lmkv does not support pipeline stages for a model whose layers have different KV")
        return pattern * max(self.stages)


def _stages(vllm_config: Any) -> tuple[int, ...]:
    size = int(vllm_config.parallel_config.pipeline_parallel_size)
    if size == 1:
        return (0,)
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    spans = (get_pp_indices(total, stage, size) for stage in range(size))
    return tuple(end - start for start, end in spans)


# Without slots, because cached_property keeps its value in the instance's __dict__.
@frozen(slots=False)
class ServedModel:
    """A model that vLLM serves.

    `block_map`: decides which blocks belong to which chunk. `layout`: the layout of a chunk; with pipeline stages, for
    the stage with the most layers. `layers`: names of the layers that `layout` describes. `fused`: whether all layers
    of a block are adjacent in memory, so that `layout` treats them as one layer.

    `num_blocks`: number of vLLM's blocks. `numbers`: for each layer, the sections of its pages; empty if the types of
    its numbers are unknown. `experts`: whether the model is a mixture of experts.
    """

    block_map: BlockMap
    layout: KVLayout
    layers: tuple[str, ...]
    fused: bool
    num_blocks: int
    ranks: Ranks
    _make_namespace: Callable[[], Namespace] = field(repr=False, eq=False)
    numbers: Sequence[Sequence[Numbers]] = field(default=(), repr=False)
    experts: bool = False
    dtype: torch.dtype | None = None

    @cached_property
    def namespace(self) -> Namespace:
        """The namespace of the model's KV. Only the first access computes the namespace, because workers do not need
        one.
        """
        return self._make_namespace()

    def paged_memory(self, rows: Sequence[torch.Tensor]) -> PagedMemory:
        """Return paged memory over `rows`: the KV tensor of each layer, with one row for each block, in the order of
        `layers`.

        Raises ValueError if the pages of `rows` do not match the layout.
        """
        sizes = [pages.page_bytes for pages in self.layout.layers[: 1 if self.fused else len(rows)]]
        if self.fused:
            # In the order of memory, which need not be that of the layers.
            rows = sorted(rows, key=lambda row: row.storage_offset())
            starts = [int(row.storage_offset()) for row in rows]
            ends = [*starts[1:], starts[0] + sizes[0]]
            memory = PagedMemory([padded(row, end - start) for row, start, end in zip(rows, starts, ends, strict=True)])
        else:
            groups = [pages.group for pages in self.layout.layers[: len(rows)]]
            memory = PagedMemory([padded(*pair) for pair in zip(rows, sizes, strict=True)], groups, fuse=False)
        found = [row.shape[1] for row in memory.rows]
        if found != sizes:
            raise ValueError(f"vLLM's KV tensors have pages of {found} bytes instead of {sizes}")
        return memory

    def parts(self, rows: Sequence[torch.Tensor]) -> list[Part]:
        """Describe for audits which numbers the pages of each layer contain. Unknown types are described as bytes.

        `rows`: the KV tensor of each layer, as for `paged_memory`.
        """
        import torch

        base = min(int(row.storage_offset()) for row in rows) if self.fused else 0
        found = []
        for number, (layer, row, kinds) in enumerate(zip(self.layers, rows, self.numbers, strict=False)):
            at = int(row.storage_offset()) - base if self.fused else 0
            for dtype, nbytes, strides in kinds or [Numbers(torch.uint8)]:
                place = layer, 0 if self.fused else number, at, nbytes or row.shape[1]
                found.append(Part(*place, dtype, strides, _LOOSE if self.experts else 0.0, self.dtype))
                at += nbytes
        return found


def describe(vllm_config: Any, kv_cache_config: Any, chunk_size: int, stage: int = 0) -> ServedModel:
    """Describe the model of vLLM's configuration. `chunk_size`: number of tokens in a chunk, which is rounded up to
    whole blocks; with recurrent layers, a chunk is a block.

    `stage`: index of the pipeline stage to which `kv_cache_config` belongs. Raises ValueError with the reason if lmkv
    does not cache the model or the parallel configuration.
    """
    check_model(vllm_config)
    ranks = Ranks.of(vllm_config, kv_cache_config)
    one_table = len(kv_cache_config.kv_cache_groups) == 1
    block_major = _layout_name(vllm_config, kv_cache_config).startswith("BL")
    # Pipeline stages with fewer layers have smaller blocks.
    fused = block_major and one_table and len(ranks.stages) == 1
    context = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1)
    # Where layers lie next to each other, padding is part of the run of bytes.
    groups = kv_groups(kv_cache_config, padded=fused, context=context)
    if not groups:
        raise ValueError("the model has no KV cache")
    recurrent = any(group.recurrent for group in groups)
    scratch = len(groups) < len(kv_cache_config.kv_cache_groups)
    replayed = any(map(is_replayed, kv_cache_config.kv_cache_groups))
    check_states(vllm_config, [group.recurrent for group in groups], replayed=replayed)
    # vLLM may shorten a hit to whole blocks of all tables.
    blocks = math.lcm(*block_sizes(kv_cache_config, context))
    # With recurrent layers a hit ends where there is a state, which is between blocks.
    size = blocks if recurrent else align_up(chunk_size, blocks)
    if recurrent:
        # Ranks with equal KV have different states.
        ranks = evolve(ranks, replicas=1)
    states = _state_entries(groups, size)
    layers: list[tuple[str, LayerPages]] = [
        (name, LayerPages(page, 1 if state else size // group.block_size, number, state))
        for number, (group, state) in enumerate(zip(groups, states, strict=True))
        for name, page in zip(group.layers, group.page_bytes, strict=True)
    ]
    pages = tuple(pages for _, pages in layers)
    if fused:
        pages = (LayerPages(sum(layer.page_bytes for layer in pages), pages[0].pages_per_chunk),)
    tables = tuple(
        Group(group.block_size, group.window, group.number, state) for group, state in zip(groups, states, strict=True)
    )
    return ServedModel(
        block_map=BlockMap(size, tables, scratch=scratch),
        layout=KVLayout(size, ranks.widest_stage(pages, stage), ranks.shards),
        layers=tuple(name for name, _ in layers),
        fused=fused,
        num_blocks=int(kv_cache_config.num_blocks),
        ranks=ranks,
        experts=bool(getattr(vllm_config.model_config, "is_moe", False)),
        dtype=vllm_config.model_config.dtype,
        numbers=[numbers(spec, vllm_config.cache_config.cache_dtype) for group in groups for spec in group.specs],
        make_namespace=partial(_namespace, vllm_config, kv_cache_config, groups, size, ranks),
    )


def _state_entries(groups: list[KVGroup], chunk_size: int) -> list[int]:
    """Return for each KV cache group the number of its state entry, or 0 if the group has KV of tokens.

    A state entry is a slot with the states of recurrent layers after a chunk. Every slot has the size of the largest
    entry. So groups share an entry as long as their states fit into the size of a chunk.
    """
    chunk = sum(sum(group.page_bytes) * (chunk_size // group.block_size) for group in groups if not group.recurrent)
    entries, number, room = [], 0, 0
    for group in groups:
        nbytes = sum(group.page_bytes)
        if group.recurrent and (not number or nbytes > room):
            number, room = number + 1, chunk
        entries.append(number if group.recurrent else 0)
        room -= nbytes if group.recurrent else 0
    return entries


def _namespace(
    vllm_config: Any, kv_cache_config: Any, groups: list[KVGroup], chunk_size: int, ranks: Ranks
) -> Namespace:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = getattr(vllm_config, "speculative_config", None)
    drafted = speculative is not None and has_draft_layers(speculative)
    return Namespace(
        model=source_of(model),
        revision=str(model.revision or ""),
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache.cache_dtype),
        chunk_size=chunk_size,
        block_size=int(groups[0].block_size),
        layout=_layout_name(vllm_config, kv_cache_config),
        ranks=ranks.describe(vllm_config.parallel_config),
        extra={
            "vllm": ".".join(vllm_version().split(".")[:2]),
            "groups": repr(groups),
            "config": config_digest(model),
            "fields": described(vllm_config, drafts=drafted),
            "device": _device(vllm_config),
            **({"draft_modules": modules} if (modules := draft_modules(vllm_config)) else {}),
            **({"states": _state_format(vllm_config)} if any(group.recurrent for group in groups) else {}),
        },
    )


def _layout_name(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return vLLM's name for the memory layout: the order of blocks (B), layers (L), heads (H) and tokens (N)."""
    chosen = getattr(kv_cache_config, "kv_cache_layout", None)
    return str(chosen or getattr(vllm_config.cache_config, "kv_cache_layout", None) or "")


def source_of(model_config: Any) -> str:
    """Return the name, path or URL from which vLLM loads the weights."""
    return str(getattr(model_config, "model_weights", None) or model_config.model)


def config_digest(model_config: Any) -> str:
    """Return a digest of the model's configuration with all overrides, such as rope scaling, heads, layers and
    windows.
    """
    described = model_config.hf_config.to_dict()
    # The same model in another folder has the same KV.
    described.pop("_name_or_path", None)
    return hashlib.sha256(as_json(described).encode()).hexdigest()


def _device(vllm_config: Any) -> str:
    """Describe the device type, and the form of 8-bit floats on GPUs or the instruction set on CPUs, because these
    affect results.
    """
    from vllm.platforms import current_platform

    device = str(getattr(vllm_config.device_config, "device_type", ""))
    if device != "cpu":
        return f"{device} {'fnuz' if current_platform.is_fp8_fnuz() else ''}"
    import torch

    return f"{device} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_amx()}"


def _state_format(vllm_config: Any) -> str:
    """Return the options, other than shape and type, that decide the bytes of a recurrent layer's state, as text."""
    from vllm import envs

    return f"{getattr(envs, 'VLLM_SSM_CONV_STATE_LAYOUT', None)} {getattr(vllm_config, 'mamba_config', None)}"


def _amx() -> str:
    try:
        return "amx" if "amx_tile" in Path("/proc/cpuinfo").read_text() else ""
    except OSError:
        return ""
