"""From paged KV tensors to the namespace, the layout and the store of an engine over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lmkv.build import build_store
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.engine.validation import positive
from lmkv.errors import UsageError, short_repr
from lmkv.memory.paged import PagedMemory
from lmkv.store.tiered import TieredStore


def open_store(
    kv_caches: Mapping[str, torch.Tensor] | Iterable[torch.Tensor],
    config: object,
    *,
    block_size: int,
    block_axis: int,
    **identity: Any,
) -> tuple[TieredStore, Namespace, KVLayout, PagedMemory]:
    """The store, namespace, layout and memory of an engine. Raises UsageError.

    `identity`: the fields of the namespace that the tensors do not tell.
    """
    if not isinstance(config, Config):
        raise UsageError(f"config must be a Config, as Config.load(...) makes one, not {short_repr(config)}")
    try:
        tensors = list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
    except TypeError:
        given = "tensor without dimensions" if isinstance(kv_caches, torch.Tensor) else type(kv_caches).__name__
        raise UsageError(f"kv_caches must be tensors, one per layer, not a {given}") from None
    names = (list(kv_caches),) if isinstance(kv_caches, Mapping) else ()
    memory = PagedMemory.of(tensors, block_axis=block_axis)
    layout = memory.layout(config.chunk_size, [positive(block_size, "block_size")])
    namespace = Namespace(
        dtype=str(tensors[0].dtype),
        chunk_size=config.chunk_size,
        block_size=block_size,
        layout=repr((block_axis, [_page_format(tensor, block_axis) for tensor in tensors], *names)),
        **identity,
    )
    return build_store(config, namespace, layout, shared=False), namespace, layout, memory


def _page_format(tensor: torch.Tensor, block_axis: int) -> tuple[object, ...]:
    """Everything that decides which value each byte of a layer's pages belongs to."""
    inner = block_axis + 1
    return str(tensor.dtype), (*tensor.shape[:block_axis], *tensor.shape[inner:]), tensor.stride()[inner:]
