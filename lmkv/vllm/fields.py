"""The fields of vLLM's configuration, and the environment variables, that decide the bytes of KV and are in no layer.

`loaded` reads the values that layers were built with. A test lists every other field of vLLM's, with a reason.
"""

from __future__ import annotations

import enum
import json
import os
from typing import Any

KEY: dict[str, tuple[str, ...]] = {
    "": ("additional_config",),
    "model_config": (
        *("dtype", "quantization", "quantization_config", "model_impl", "trust_remote_code", "code_revision"),
        "model_class_overrides",
    ),
    "model_config.multimodal_config": (
        *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
        "mm_encoder_attn_dtype",
    ),
    "cache_config": ("cache_dtype", "kv_cache_dtype_skip_layers"),
    "attention_config": (
        *("backend", "backend_per_kind", "indexer_kv_dtype", "indexer_sparse_logits", "use_trtllm_attention"),
        *("disable_flashinfer_q_quantization", "use_prefill_query_quantization"),
        # Before vLLM 0.30, and from 0.33 on.
        *("use_fp4_indexer_cache", "trtllm_ragged_backend"),
    ),
    "kernel_config": ("moe_backend", "linear_backend", "linear_backend_per_quant"),
    "parallel_config": ("dcp_kv_cache_interleave_size", "all2all_backend", "worker_cls", "sd_worker_cls"),
    "lora_config": (
        *("lora_dtype", "target_modules", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        "enable_tower_connector_lora",
    ),
    "compilation_config": ("inductor_passes",),
    "ec_manager_config": ("encoder_cache_manager_cls", "manager_config"),
}
"""The fields whose values are part of every key, by the path of their configuration from vLLM's `VllmConfig`."""

DRAFT_KEY = (
    *("method", "draft_tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype"),
    *("code_revision", "disable_eagle_block_drop", "use_heterogeneous_vocab", "parallel_drafting", "max_model_len"),
)
"""The fields of `speculative_config` that count where drafts have layers with KV of their own."""

ENVIRONMENT = (
    *("VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_PLUGINS", "VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE"),
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_HUMMING_USE_F16_ACCUM"),
    *("VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION", "VLLM_B12X_MOE_FP4_FORCE_A16"),
    *("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"),
    *("VLLM_USE_DEEP_GEMM_E8M0", "VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_ROCM_USE_AITER"),
    *("VLLM_ROCM_USE_AITER_MOE_SITUV2", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "VLLM_ROCM_USE_AITER_FP8BMM"),
    *("VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS", "VLLM_ROCM_FP8_MFMA_PAGE_ATTN"),
    *("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_MEDIA_CONNECTOR"),
    *("VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB"),
    *("VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB"),
    *("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"),
    *("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", "VLLM_VIDEO_LOADER_BACKEND", "NVIDIA_TF32_OVERRIDE"),
    *("INKLING_SPLIT_KV", "INKLING_GFX950_GLUON", "FORCE_NUM_KV_SPLITS", "AITER_BF16_FP8_MOE_BOUND", "USE_FLAGOS"),
    "XHS_VIDEO_JPEG_QUALITY",
)


def described(vllm_config: Any, *, drafts: bool) -> str:
    """The values of all these, as text. `drafts`: whether these have layers with KV of their own."""
    found: dict[str, Any] = {}
    for path, names in {**KEY, **({"speculative_config": DRAFT_KEY} if drafts else {})}.items():
        config = vllm_config
        for step in path.split(".") if path else ():
            config = getattr(config, step, None)
        found |= {f"{path}.{name}": value for name in names if (value := getattr(config, name, None)) is not None}
    found |= {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return as_json(found)


def as_json(value: Any) -> str:
    """The same text for the same value in every process."""
    return json.dumps(_with_text_keys(value), sort_keys=True, default=lambda part: _with_text_keys(_plain(part)))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """A part of a configuration that JSON has no form for, without the addresses that its own text may have."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return vars(value) if hasattr(value, "__dict__") else str(value)
