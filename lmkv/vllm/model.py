"""What vLLM serves, as lmkv needs it: the namespace of its KV, and where its pages lie."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from pathlib import Path
from typing import Any

from attrs import frozen

from lmkv.keys import Namespace
from lmkv.layout import KVLayout, LayerPages
from lmkv.vllm.compat import GroupFacts, kv_groups, vllm_version
from lmkv.vllm.geometry import Geometry, Group

_SAMPLES = 64
_SAMPLE_BYTES = 4096


@frozen
class ServedModel:
    """`layers[i]` names the layer that `layout.layers[i]` describes."""

    namespace: Namespace
    geometry: Geometry
    layout: KVLayout
    layers: tuple[str, ...]
    num_blocks: int
    ranks: int


def describe(vllm_config: Any, kv_cache_config: Any, chunk_size: int) -> ServedModel:
    """Raises ValueError, with the reason, for a model or a parallel split that lmkv does not cache."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("pipeline parallel ranks hold different layers, which is not supported yet")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"{name} > 1 spreads blocks over ranks, which is not supported yet")
    groups = kv_groups(kv_cache_config)
    size = _round_up(chunk_size, math.lcm(*(group.block_size for group in groups)))
    ranks = int(parallel.tensor_parallel_size)
    layers = [
        (name, LayerPages(page, size // group.block_size, number))
        for number, group in enumerate(groups)
        for name, page in zip(group.layers, group.page_bytes, strict=True)
    ]
    return ServedModel(
        namespace=_namespace(vllm_config, kv_cache_config, groups, size),
        geometry=Geometry(size, tuple(Group(group.block_size, group.window) for group in groups)),
        layout=KVLayout(size, tuple(pages for _, pages in layers), ranks),
        layers=tuple(name for name, _ in layers),
        num_blocks=int(kv_cache_config.num_blocks),
        ranks=ranks,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _namespace(
    vllm_config: Any, kv_cache_config: Any, groups: list[GroupFacts], chunk_size: int
) -> Namespace:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache.cache_dtype),
        chunk_size=chunk_size,
        block_size=int(groups[0].block_size),
        layout=str(getattr(kv_cache_config, "kv_cache_layout", None) or cache.kv_cache_layout or ""),
        ranks=f"tp{parallel.tensor_parallel_size}",
        extra={
            "vllm": ".".join(vllm_version().split(".")[:2]),
            "groups": repr(groups),
            "config": _config_digest(model),
            "weights": _weights_digest(vllm_config),
            "quantization": str(model.quantization),
            "page_format": _page_format(vllm_config),
        },
    )


def _config_digest(model_config: Any) -> str:
    """Of the model's own configuration with all overrides: rope scaling, heads, layers, windows..."""
    described = model_config.hf_config.to_dict()
    # Where the files lie does not change what they mean.
    described.pop("_name_or_path", None)
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _page_format(vllm_config: Any) -> str:
    """What else decides the bytes inside a page: device, attention backend if chosen, and on CPU the ISA."""
    device = str(getattr(vllm_config.device_config, "device_type", ""))
    backend = str(getattr(getattr(vllm_config, "attention_config", None), "backend", None))
    isa = ""
    if device == "cpu":
        import torch

        isa = f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}/{_amx()}"
    return f"{device}/{backend}/{isa}"


def _amx() -> str:
    try:
        return "amx" if "amx_tile" in Path("/proc/cpuinfo").read_text() else ""
    except OSError:
        return ""


def _weights_digest(vllm_config: Any) -> str:
    """Of the checkpoint files' sizes and of samples of their bytes: another fine-tune is another model.

    Empty where the model is not a local folder; then the revision has to tell.
    """
    load = vllm_config.load_config
    digest = hashlib.sha256(f"{load.load_format}".encode())
    folder = Path(str(vllm_config.model_config.model))
    if str(load.load_format) == "dummy":
        digest.update(str(vllm_config.model_config.seed).encode())
    elif folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
                digest.update(path.name.encode() + _sampled(path))
    else:
        return ""
    return digest.hexdigest()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
