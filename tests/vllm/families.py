"""Small checkpoints of every kind of attention, with real random weights, made locally."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import field, frozen

from tests.vllm import mamba_cpu

WEIGHT_STD = 0.15
EMBEDDING_STD = 0.05
"""Smaller: where it is the output's matrix too, a token would only ever be followed by itself."""

VOCAB = 1024
MAX_POSITION = 4096

_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITION,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


_NETS: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@frozen
class Family:
    """`make`: a model of transformers. `options`: of the engine.

    `groups`: block tables that vLLM gives it. `blocks`: KV blocks that three to four requests of 1,500 tokens
    fill. `own`: layers with KV of their own. `unit`: tokens of a chunk of a model with recurrent layers, with whose
    end a hit ends; 0 for others. `noise`, `batches`: how far vLLM's own log-probabilities are apart where it computes a
    prompt in other steps, or in another batch. `vllm`: what vLLM wants to run it.
    """

    make: Callable[[], Any]
    options: dict[str, Any] = field(factory=dict)
    groups: int = 1
    blocks: int = 60
    own: int = 4
    unit: int = 0
    noise: float = 1e-3
    batches: float = 1e-3
    vllm: Callable[[], AbstractContextManager[Any]] = nullcontext

    def write(self, folder: Path, *, seed: int = 0) -> Path:
        """The checkpoint in `folder`; the same seed makes the same bytes."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=EMBEDDING_STD if "embed" in name else WEIGHT_STD)
        model.to(torch.float32).save_pretrained(folder)
        return folder


def causal(name: str, settings: str = "", **config: Any) -> Any:
    """A model of transformers, of this configuration; `settings`: the name of its configuration, if it has another."""
    import transformers

    made = getattr(transformers, f"{settings or name}Config")(**config)
    return getattr(transformers, f"{name}ForCausalLM")(made)


def llama(**changes: Any) -> Any:
    return causal("Llama", **_SMALL | changes)


def qwen3(**changes: Any) -> Any:
    return causal("Qwen3", **_SMALL | changes)


def mistral(window: int) -> Any:
    return causal("Mistral", **_SMALL, sliding_window=window)


def gemma3(window: int, **changes: Any) -> Any:
    """Five layers with a window for one without, as Gemma 3 has them."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    settings = {**_SMALL, "num_hidden_layers": 6, "layer_types": kinds, "sliding_window": window, **changes}
    return causal("Gemma3", "Gemma3Text", **settings, query_pre_attn_scalar=32)


def gemma3n() -> Any:
    """The last two layers attend to the KV of layers before them."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 64}
    changes = {"num_hidden_layers": 6, "intermediate_size": [256] * 6, "tie_word_embeddings": True}
    layers = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2}
    settings = {**_SMALL, **changes, **kinds, **layers}
    return causal("Gemma3n", "Gemma3nText", **settings, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6)


def gemma4(window: int, shared: int = 0) -> Any:
    """Heads differ in size between layers with and without a window; the last `shared` have no own KV."""
    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": window}
    changes = {"num_hidden_layers": 6, "tie_word_embeddings": True, "num_kv_shared_layers": shared}
    settings = {**_SMALL, **changes, **kinds}
    return causal("Gemma4", "Gemma4Text", **settings, global_head_dim=64, hidden_size_per_layer_input=0)


def deepseek_v2(**changes: Any) -> Any:
    """Multi-head latent attention; the latent has DeepSeek's own sizes, the only ones vLLM has on CPU."""
    return causal("DeepseekV2", **_latent() | changes)


def deepseek_v3(**changes: Any) -> Any:
    return causal("DeepseekV3", **_latent() | changes)


def _latent() -> dict[str, Any]:
    return {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITION,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        # As DeepSeek has it. Without, vLLM 0.32 takes a CPU kernel whose results depend on the batch.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    }


def hrm_text() -> Any:
    """The tokens of a prompt attend to all of it, also to later ones."""
    return causal("HrmText", **_SMALL | {"num_hidden_layers": 2}, H_cycles=2, L_cycles=2, prefix_lm=True)


def falcon_h1(**changes: Any) -> Any:
    """Attention and a Mamba-2 mixer in every layer."""
    mixer = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
    return causal("FalconH1", **{**_SMALL, **mixer, **changes}, mamba_chunk_size=32)


def nemotron_h(**changes: Any) -> Any:
    """Layers of Mamba-2, of attention, and without either."""
    mixer = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16, "chunk_size": 32}
    pattern = {"hybrid_override_pattern": "M-M*", "conv_kernel": 4}
    return causal("NemotronH", **{**_SMALL, **mixer, **pattern, **changes})


def granite_4(**changes: Any) -> Any:
    """Three layers of Mamba-2 for one of attention."""
    sizes = {name: value for name, value in {**_SMALL, **changes}.items() if name != "head_dim"}
    mixer = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32}
    scales = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    scales |= {"attention_multiplier": 0.17}
    layers = {"layer_types": ["mamba"] * 3 + ["attention"], "position_embedding_type": "rope"}
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 256}
    return causal("GraniteMoeHybrid", **{**sizes, **mixer, **scales, **layers, **experts})


def zamba2() -> Any:
    """Layers of Mamba-2, and one with attention as well."""
    mixer = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 64, "use_mem_rope": True}
    layers = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]}
    sizes = {name: _SMALL[name] for name in ("vocab_size", "max_position_embeddings", "hidden_size")}
    more = {"intermediate_size": 256, "chunk_size": 32, "num_mem_blocks": 1, "adapter_rank": 8}
    return causal("Zamba2", **{**sizes, **mixer, **attention, **layers, **more})


def jamba() -> Any:
    """Three layers of Mamba-1 for one of attention."""
    sizes = {name: value for name, value in _SMALL.items() if name != "head_dim"}
    layers = {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1}
    mixer = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8}
    return causal("Jamba", **{**sizes, **layers, **mixer}, use_mamba_kernels=False)


def qwen3_next() -> Any:
    """Three layers of gated delta nets for one of attention; heads have the only sizes that vLLM has on CPU."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    experts |= {"shared_expert_intermediate_size": 64}
    return causal("Qwen3Next", **{**_SMALL, **_NETS, **experts}, mlp_only_layers=[])


def qwen3_5() -> Any:
    """The same without experts."""
    return causal("Qwen3_5", "Qwen3_5Text", **_SMALL | _NETS)


def lfm2() -> Any:
    """Three layers of short convolutions for one of attention."""
    kinds = {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    blocks = {"block_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "conv_dim": 128}
    return causal("Lfm2", **{**_SMALL, **kinds, **blocks})


def whisper() -> Any:
    """Encoder and decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    shape = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in shape.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    nothing: dict[str, list[int]] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    return WhisperForConditionalGeneration(
        WhisperConfig(**{"vocab_size": VOCAB, "d_model": 128, **sides, **tokens, **nothing})
    )


def write_whisper_processor(folder: Path) -> None:
    """Write the files that vLLM wants beside Whisper's weights: a feature extractor and special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    words = {word: index for index, word in enumerate([*special, *map(str, range(VOCAB - len(special)))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=special[0])),
        additional_special_tokens=special,
        eos_token=special[0],
        bos_token=special[0],
        pad_token=special[0],
    )
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)


REFERENCE_MLA = {"attention_backend": "CPU_MLA"}
"""On a CPU with AMX vLLM 0.32 takes another backend by itself, which cannot load weights in float32."""

FAMILIES = {
    "GQA, Qwen3": Family(qwen3),
    "GQA, Llama": Family(llama),
    "GQA, fp8 KV": Family(qwen3, options={"kv_cache_dtype": "fp8"}),
    "MHA": Family(lambda: llama(num_key_value_heads=4)),
    "MQA": Family(lambda: llama(num_key_value_heads=1)),
    "MLA, DeepSeek-V2": Family(deepseek_v2, REFERENCE_MLA, blocks=120, own=3),
    "MLA, DeepSeek-V3": Family(deepseek_v3, REFERENCE_MLA, blocks=120, own=3),
    "window everywhere, smaller than a chunk": Family(lambda: mistral(96), blocks=19),
    "window everywhere, larger than a chunk": Family(lambda: mistral(700)),
    "hybrid, window smaller than a chunk": Family(lambda: gemma3(96), groups=6, blocks=128, own=6),
    "hybrid, window larger than a chunk": Family(lambda: gemma3(700), groups=6, blocks=320, own=6),
    "layers that share KV": Family(gemma3n, groups=2, blocks=90),
    "pages of two sizes, hybrid": Family(lambda: gemma4(700, shared=1), groups=5, blocks=130, own=5),
    "pages of two sizes, one table": Family(
        lambda: gemma4(96), options={"disable_hybrid_kv_cache_manager": True}, own=6
    ),
}

_NET: dict[str, Any] = {
    # States are float32 by default on processors with bfloat16 of AVX-512 only, and blocks are as long as a state.
    "options": {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_num_batched_tokens": 1200},
    "groups": 4,
    "blocks": 24,
    "own": 4,
    "unit": 544,
    "batches": 0.1,
}

RECURRENT = {
    "Mamba-2, Nemotron-H": Family(nemotron_h, groups=3, blocks=60, own=3, unit=64, vllm=mamba_cpu.exported),
    "Mamba-2 in each layer, Falcon-H1": Family(falcon_h1, groups=2, blocks=90, own=8, unit=32, vllm=mamba_cpu.split),
    "Mamba-2, Granite-4": Family(granite_4, groups=4, blocks=70, own=4, unit=64, vllm=mamba_cpu.split),
    "Mamba-2, several groups in an entry, Zamba2": Family(
        zamba2, groups=5, blocks=125, own=5, unit=32, vllm=mamba_cpu.split
    ),
    "Mamba-1, Jamba": Family(jamba, groups=4, blocks=70, own=4, unit=64, vllm=mamba_cpu.scanned),
    "gated delta net, Qwen3-Next": Family(qwen3_next, **_NET),
    "short convolution, LFM2": Family(lfm2, groups=4, blocks=120, own=4, unit=32, noise=0.05, batches=0.1),
}
"""Models with layers that keep a state instead of KV for each token."""

if find_spec("torchvision") is not None:
    # vLLM has the text model beside that for images.
    RECURRENT["gated delta net, Qwen3.5"] = Family(qwen3_5, **_NET)


def write_adapter(folder: Path, *, seed: int, hidden: int = 128, layers: int = 4, rank: int = 8) -> Path:
    """A LoRA adapter of random weights for `llama()`, as PEFT lays it out."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, width in (("q_proj", hidden), ("v_proj", hidden // 2)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * WEIGHT_STD
            weights[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * WEIGHT_STD
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none"}))
    return folder
