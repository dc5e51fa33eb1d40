"""Small models of several kinds of attention with random weights in float32, written locally."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from attrs import field, frozen

from kv_connector_torture.schedule import VOCAB

_WEIGHT_STD = 0.15
_EMBEDDING_STD = 0.05
"""Standard deviation of the embeddings' weights. With a larger one, a token would always be followed by itself in
models whose output uses the same matrix.
"""

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 32}
_RANK = 8
_N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@frozen
class Kind:
    """A kind of model for trials, and options for its engines.

    `make`: a function that makes a model of transformers. `write`: a function that replaces `make`. It writes a model
    into a folder, and returns the model's path and options for engines under test. Without `make` and `write`, the user
    names the model. `blocks`: number of KV blocks, so small that requests preempt each other. `options`: options of all
    engines. `tortured`: options of engines under test, which no schedule changes. `cpu`: options of engines on CPUs.
    `connector`: more keys of `kv_connector_extra_config`. `around`: a context manager in which engines are made.
    """

    make: Callable[[], Any] | None = None
    write: Callable[[Path], tuple[Path, dict[str, Any]]] | None = None
    blocks: int = 34
    adapters: int = 0
    options: dict[str, Any] = field(factory=dict)
    tortured: dict[str, Any] = field(factory=dict)
    cpu: dict[str, Any] = field(factory=dict)
    connector: dict[str, Any] = field(factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _gqa() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def _windows() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    more = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 48, "query_pre_attn_scalar": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**_SIZES, **more}))


def _mla() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    # DeepSeek's own, the only ones that vLLM has on CPUs.
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_group": 1}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **{**sizes, **latent, **experts, "num_key_value_heads": 2},
            q_lora_rank=None,
            first_k_dense_replace=2,
            topk_group=1,
            rope_parameters={**rope, "mscale": 1.0, "mscale_all_dim": 1.0},
        )
    )


def _recurrent() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    pattern = {"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "conv_kernel": 4}
    return NemotronHForCausalLM(NemotronHConfig(**{**_SIZES, **_MAMBA, **pattern}))


KINDS = {
    "gqa": Kind(_gqa),
    "windows": Kind(_windows, blocks=90),
    # A CPU with AMX has another backend by itself, which cannot load weights in float32.
    "mla": Kind(_mla, blocks=66, cpu={"attention_backend": "CPU_MLA"}),
    # With as many adapters in a step as max_loras, vLLM 0.32 computes requests without one with an adapter on CPUs.
    "lora": Kind(_llama, adapters=2, options={"enable_lora": True, "max_loras": 3, "max_lora_rank": _RANK}),
    "drafts": Kind(_gqa, blocks=44, tortured={"speculative_config": _N_GRAMS}),
    "recurrent": Kind(_recurrent, blocks=40),
    "own": Kind(blocks=44),
}


def kind_of(name: str) -> Kind:
    """Return the kind called `name`. `MODULE:NAME` is the kind NAME in `KINDS` of the module MODULE."""
    module, elsewhere, key = name.partition(":")
    found: dict[str, Kind] = importlib.import_module(module).KINDS if elsewhere else KINDS
    return found[key if elsewhere else name]


def names_of(wanted: str) -> list[str]:
    """Return the names of the wanted kinds. `wanted`: a kind's name, or `MODULE:TEXT` for all kinds in `KINDS` of
    MODULE whose names contain TEXT.
    """
    module, elsewhere, text = wanted.partition(":")
    if not elsewhere:
        return [wanted] if wanted in KINDS else []
    return [f"{module}:{name}" for name in importlib.import_module(module).KINDS if text in name]


def write(name: str, weights: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the model of kind `name` into `folder`, unless it is there. Returns the model's path, and options for
    engines under test.

    `weights`: an id. Models of one kind with different ids have the same shape, but other weights.
    """
    kind, target = kind_of(name), folder / f"{name.replace(':', '-')}-{weights}"
    done = target / "torture.json"
    if not done.exists():
        path, options = kind.write(target) if kind.write else (_write(kind, weights, target), {})
        done.write_text(json.dumps([str(path), options]))
    path, options = json.loads(done.read_text())
    return Path(path), options


def _write(kind: Kind, weights: int, target: Path) -> Path:
    import torch

    assert kind.make is not None
    torch.manual_seed(weights)
    model = kind.make()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=_EMBEDDING_STD if "embed" in name else _WEIGHT_STD)
    model.to(torch.float32).save_pretrained(target)
    return target


def write_adapter(number: int, folder: Path) -> Path:
    """Write a LoRA adapter with random weights for the kind `lora`, in PEFT's format. Returns the adapter's folder.
    `number`: the adapter's number, from 1 on.
    """
    import torch
    from safetensors.torch import save_file

    target = folder / f"adapter-{number}"
    settings = target / "adapter_config.json"
    if settings.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    generator, weights = torch.Generator().manual_seed(number), {}
    for layer in range(2):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(_RANK, 64, generator=generator) * _WEIGHT_STD
            weights[f"{stem}.lora_B.weight"] = torch.randn(width, _RANK, generator=generator) * _WEIGHT_STD
    save_file(weights, target / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["q_proj", "v_proj"]}
    settings.write_text(json.dumps({**lora, "bias": "none"}))
    return target
