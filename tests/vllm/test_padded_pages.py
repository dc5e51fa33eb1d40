"""Pages of several sizes, some of them padded, as vLLM lays them out: both sides make the same of them.

A worker has a specification for each layer. The scheduler has one for each group: that of its first layer.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from lmkv.memory.paged import block_rows
from lmkv.memory.slab import Slab, slab_name
from lmkv.vllm.compat import tensors_by_layer
from lmkv.vllm.model import ServedModel, describe
from lmkv.vllm.plan import CopyTask, StepPlan
from lmkv.vllm.worker import Worker
from tests.vllm.harness import configured

BLOCK, CHUNK, MEMORY = 64, 256, 4 << 20


def sparse(tokens_per_state: int, state: int | None, head: int, **changes: Any) -> Any:
    """A layer of latent KV, as DeepSeek-V4 has several kinds of them: compressed, packed, aligned to 576 bytes."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    form = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.uint8, "head_size": head, **changes}
    return MLAAttentionSpec(**form, tokens_per_state=tokens_per_state, state_content_bytes=state)


def one_group() -> dict[str, Any]:
    """Compressed and indexer layers of one block table: unpadded pages of 9,344, 2,112 and 292 bytes."""
    specs = {}
    for number in range(2):
        specs[f"{number}.latent"] = sparse(4, 584, 512, alignment=576)
        specs[f"{number}.indexer"] = sparse(4, None, 132, alignment=576)
        specs[f"{number}.coarse"] = sparse(32, 146, 512, alignment=576)
    return specs


def of_one_padded_size() -> dict[str, Any]:
    """Two kinds whose pages differ without their padding, and with it do not."""
    return {"a": sparse(4, 584, 512, alignment=9792), "b": sparse(4, 600, 512, alignment=9792)}


def all_alike() -> dict[str, Any]:
    return {str(number): sparse(4, 584, 512, alignment=576) for number in range(3)}


def two_groups() -> dict[str, Any]:
    """Beside layers with a window: each table has layers of two sizes."""
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    window = {"block_size": BLOCK, "num_kv_heads": 1, "dtype": torch.uint8, "sliding_window": 128, "alignment": 576}
    specs: dict[str, Any] = one_group()
    for number in range(2):
        specs[f"{number}.window"] = SlidingWindowMLASpec(**window, head_size=512, state_content_bytes=584)
        specs[f"{number}.state"] = SlidingWindowMLASpec(**window, head_size=77)
    return specs


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str, int]] = {
    "layers of a block together": (one_group, "BLHNC", 1),
    "layers apart": (one_group, "LBHNC", 1),
    "one padded size": (of_one_padded_size, "LBHNC", 1),
    "one padded size, together": (of_one_padded_size, "BLNHC", 1),
    "one kind": (all_alike, "LBHNC", 1),
    "one kind, together": (all_alike, "BLHNC", 1),
    "two tables": (two_groups, "BLHNC", 2),
}
"""Specifications, vLLM's layout, and into how many groups vLLM puts the layers."""


@frozen
class Sides:
    """The layouts that both sides derive from one configuration, and the worker's tensors."""

    scheduler: ServedModel
    worker: ServedModel
    tensors: dict[str, torch.Tensor]


def tensors_of(config: Any) -> dict[str, torch.Tensor]:
    """As vLLM's model runner makes them."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    raw = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    specs: dict[str, Any] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        mixed = isinstance(spec, UniformTypeKVCacheSpecs)
        specs.update(spec.kv_cache_specs if mixed else dict.fromkeys(group.layer_names, spec))
    found = {}
    for tensor in config.kv_cache_tensors:
        layout = KVCacheLayout[config.kv_cache_layout]
        views = create_kv_cache_views(raw, specs[tensor.layers[0]], config.num_blocks, layout, tensor)
        found.update(zip(tensor.layers, views, strict=True))
    return found


@pytest.fixture(params=CASES)
def sides(request: pytest.FixtureRequest, model: Path) -> Sides:
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.kv_cache_layout import KVCacheLayout

    make, layout, groups = CASES[request.param]
    vllm_config = configured(model)
    vllm_config.cache_config.kv_cache_layout = KVCacheLayout[layout].name
    # vLLM 0.33 has a module for it.
    name = "kv_cache_planning" if find_spec("vllm.v1.core.kv_cache_planning") else "kv_cache_utils"
    planning = importlib.import_module(f"vllm.v1.core.{name}")
    made = planning.get_kv_cache_groups(vllm_config, make())
    config = planning.get_kv_cache_config_from_groups(vllm_config, made, MEMORY)
    config.kv_cache_layout = layout
    assert len(config.kv_cache_groups) == groups
    scheduler = generate_scheduler_kv_cache_config([config])
    return Sides(describe(vllm_config, scheduler, CHUNK), describe(vllm_config, config, CHUNK), tensors_of(config))


def test_both_sides_make_equal_layouts(sides: Sides) -> None:
    assert sides.worker.layout == sides.scheduler.layout
    assert sides.worker.layers == sides.scheduler.layers
    assert sides.worker.layout.digest == sides.scheduler.layout.digest


@pytest.fixture
def slab(sides: Sides) -> Iterator[Slab]:
    size = sides.scheduler.layout.slot_bytes
    slab = Slab(size, 2 * size, shared=True, engine=slab_name(f"padded-{os.getpid()}", sides.scheduler.layout))
    yield slab
    slab.close()


def test_a_tail_is_the_same_after_lower_tiers_had_it(sides: Sides, slab: Slab) -> None:
    """They keep its own pages, which the scheduler's layout names; a worker wrote them, and reads them again."""
    model, tokens = sides.scheduler, BLOCK + 5
    worker = Worker(0, sides.worker.layout, engine=f"{sides.worker.layout.digest}-padded")
    named = tensors_by_layer(sides.tensors, sides.worker.layers, sides.worker.num_blocks)
    worker.register(sides.worker.paged_memory([block_rows(tensor, name) for name, tensor in named]))
    generator = torch.Generator().manual_seed(1)
    tables = [[1, 2], [3, 4]][: len(model.block_map.groups)]
    wanted = {}
    for name, tensor in sides.tensors.items():
        blocks = tables[next(n for n, group in enumerate(groups_of(model)) if name in group)]
        fresh = torch.randint(0, 200, tensor[blocks].view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
        tensor.view(torch.uint8)[blocks] = fresh
        wanted[name] = fresh
    stored = model.block_map.store_copy(0, tables, 0, tokens)
    assert stored is not None
    worker.begin(StepPlan(stores=[CopyTask(1, [stored], stores=True)], slab=slab.ref))
    worker.save()
    for span in model.layout.spans(tokens):
        slab.view(1)[span] = slab.view(0)[span]
    others = [[5, 6], [7, 8]][: len(tables)]
    worker.begin(StepPlan(loads=[CopyTask(2, model.block_map.load_copies([1], others, 0, tokens))]))
    worker.load()
    report = worker.take_report()
    assert report is not None
    assert [job.ok for job in report.jobs.values()] == [True, True], report
    for name, tensor in sides.tensors.items():
        blocks = others[next(n for n, group in enumerate(groups_of(model)) if name in group)]
        assert torch.equal(tensor.view(torch.uint8)[blocks], wanted[name]), name
    worker.close()


def groups_of(model: ServedModel) -> list[set[str]]:
    """The layers of each block table."""
    if model.fused:
        return [set(model.layers)]
    pages = zip(model.layers, model.layout.layers, strict=True)
    found: list[set[str]] = [set() for _ in model.block_map.groups]
    for name, layer in pages:
        found[layer.group].add(name)
    return found
