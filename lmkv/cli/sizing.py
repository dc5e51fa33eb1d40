"""Computes the size of a model's KV and recurrent states from the model's config.json, without its weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import frozen

from lmkv.chunks import codec
from lmkv.chunks.layout import align_up
from lmkv.config import read_named

Settings = Mapping[str, Any]


# -- states -----------------------------------------------------------------------------------------------


_RECURRENT = frozenset({"linear_attention", "mamba", "conv"})
_ATTENTION = {"attention": "full_attention", "full_attention": "full_attention"}
_MAMBA_2 = (
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
)
"""For each of three naming schemes, the settings of heads, values per head, groups, values per state, and
convolution.
"""
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


@frozen
class StateSize:
    """The size of the states of a model's recurrent layers.

    `layers`: number of these layers. `layer_bytes`: bytes of the state of one layer, for all ranks together.
    """

    kind: str
    layers: int
    layer_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all recurrent layers together, which lmkv saves at the end of a chunk."""
        return self.layers * self.layer_bytes

    def block_tokens(self, layer_token_bytes: int) -> int:
        """Return the number of tokens in a vLLM block. vLLM makes a block at least as large as the state of a layer.

        `layer_token_bytes`: bytes of a token in an attention layer.
        """
        return -(-self.layer_bytes // (16 * layer_token_bytes)) * 16


def layer_kinds(text: Settings) -> list[str] | None:
    """Return the kind of each layer of a model with recurrent layers. Returns None for a model without recurrent
    layers.
    """
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds is None and (pattern := text.get("hybrid_override_pattern")):
        kinds = [_PATTERN.get(each, each) for each in pattern]
    if kinds is None and (period := text.get("attn_layer_period")):
        attends, layers = text.get("attn_layer_offset", 0), range(text["num_hidden_layers"])
        kinds = ["full_attention" if number % period == attends else "mamba" for number in layers]
    if kinds is None and text.get("mamba_d_ssm"):
        # Falcon-H1: both in every layer.
        kinds = ["full_attention", "mamba"] * text["num_hidden_layers"]
    if kinds is None or not _RECURRENT.intersection(kinds):
        return None
    # Zamba2 calls a layer with both "hybrid".
    each = [["full_attention", "mamba"] if kind == "hybrid" else [_ATTENTION.get(kind, kind)] for kind in kinds]
    return [kind for kinds in each for kind in kinds]


def state_size(text: Settings, value_bytes: int) -> StateSize | None:
    """Return the size of a model's recurrent states, or None for a model without recurrent layers of a known kind.

    `value_bytes`: bytes per value.
    """
    kinds = layer_kinds(text)
    if kinds is None:
        return None
    layers = sum(kind in _RECURRENT for kind in kinds)
    if "linear_num_value_heads" in text:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        conv = (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1) * value_bytes
        return StateSize("gated delta net", layers, conv + values * text["linear_key_head_dim"] * 4)
    if "conv_L_cache" in text:
        return StateSize("short convolution", layers, text["hidden_size"] * (text["conv_L_cache"] - 1) * value_bytes)
    if "mamba_dt_rank" in text:
        kept = text["mamba_d_conv"] - 1 + text["mamba_d_state"]
        return StateSize("Mamba-1", layers, text["mamba_expand"] * text["hidden_size"] * kept * value_bytes)
    names = next((names for names in _MAMBA_2 if names[0] in text), None)
    return None if names is None else StateSize("Mamba-2", layers, _mamba_2(text, names, value_bytes))


def _mamba_2(text: Settings, names: Sequence[str], value_bytes: int) -> int:
    heads, width, groups, state, kernel = (int(text[name]) for name in names)
    kept_in = text.get("mamba_ssm_cache_dtype")
    wide = 4 if kept_in == "float32" or (kept_in is None and "mamba_num_heads" in text) else value_bytes
    return (heads * width + 2 * groups * state) * (kernel - 1) * value_bytes + heads * width * state * wide


# -- keys and values --------------------------------------------------------------------------------------


_MOST_BYTES = 16 << 20


class KVDtype(StrEnum):
    """The values of vLLM's `--kv-cache-dtype`. `auto` means the type of the model's weights in vLLM."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8 = "fp8"


BYTES = {KVDtype.FLOAT32: 4, KVDtype.BFLOAT16: 2, KVDtype.FLOAT16: 2, KVDtype.FP8: 1}
KINDS = frozenset({"full_attention", "sliding_attention"})
NOT_CACHED = ("mamba", "ssm_", "linear_num_", "index_topk")
"""Prefixes of settings in config.json. A model with such settings has layers that keep a state, or more than keys
and values.
"""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Sections of config.json in which a multimodal model has the settings of its language model."""


@frozen
class Layer:
    """An attention layer. `heads`: number of KV heads.

    `values`: number of values that a head keeps for each token (key and value, or MLA's latent).
    """

    heads: int
    values: int

    def on_a_rank(self, ranks: int) -> int:
        """Return how many values each of `ranks` ranks keeps for a token. Each rank has at least one head."""
        fewer, more = sorted((self.heads, ranks))
        if more % fewer:
            raise ValueError(f"{self.heads} KV heads cannot be split over {ranks} ranks")
        return max(1, self.heads // ranks) * self.values


@frozen
class KVSize:
    """The size of the KV of one token. `rank_bytes`: bytes of a token's KV on each rank.

    `parts`: how many ranks' KV lmkv stores: all ranks, or 1 for MLA, because all ranks then keep the same KV. `states`:
    the size of the states of recurrent layers; None without such layers.
    """

    attention: str
    layers: int
    dtype: KVDtype
    rank_bytes: int
    parts: int
    states: StateSize | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that lmkv stores for the KV of one token, for all ranks together."""
        return self.rank_bytes * self.parts

    def tokens_in(self, nbytes: int) -> int:
        return nbytes // self.token_bytes

    def chunk_tokens(self, chunk_size: int) -> int:
        """Return the number of tokens in a chunk: `chunk_size`, or vLLM's block size for a model with recurrent
        layers.
        """
        if self.states is None:
            return chunk_size
        return self.states.block_tokens(max(1, self.token_bytes // self.layers))

    def slot_bytes(self, chunk_size: int) -> int:
        """Return how many bytes of host memory a chunk takes. `chunk_size`: the setting of this name, in tokens."""
        return align_up(self.chunk_tokens(chunk_size) * self.token_bytes)

    def file_bytes(self, chunk_size: int) -> int:
        """Return the size of a chunk's file in bytes, including the header. `chunk_size`: the setting of this name, in
        tokens.
        """
        payload = self.slot_bytes(chunk_size)
        return codec.header_bytes(payload, codec.DEFAULT_SEGMENT_BYTES, self.chunk_tokens(chunk_size)) + payload


def kv_size(model: Path, dtype: KVDtype = KVDtype.AUTO, ranks: int = 1) -> KVSize:
    """Return the size of a model's KV. Raises ValueError with the reason if the size cannot be computed.

    `model`: the model's folder, its config.json, or its name in the local Hugging Face cache. `ranks`: number of
    tensor-parallel ranks.
    """
    config = _read(_file_of(model))
    try:
        text = next((config[part] for part in TEXT_PARTS if part in config), config)
        layers = list(_layers(text))
        given = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
        kept = _loaded_as(given) if dtype is KVDtype.AUTO else dtype
        latent = bool(text.get("kv_lora_rank"))
        return KVSize(
            attention=_name(layers[0], text["num_attention_heads"], latent),
            layers=len(layers),
            dtype=kept,
            rank_bytes=sum(layer.on_a_rank(ranks) for layer in layers) * BYTES[kept],
            # Every rank has the same latent, so lmkv stores one copy.
            parts=1 if latent else ranks,
            states=state_size(text, BYTES[_loaded_as(given) if dtype is not KVDtype.FLOAT32 else dtype]),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{model} does not describe a transformer that generates text: {error!r}") from None


def _file_of(model: Path) -> Path:
    """Return the path of a model's config.json. `model`: a folder, or a name such as Qwen/Qwen3-8B in the Hugging Face
    cache.
    """
    if model.is_dir():
        return model / "config.json"
    name = str(model)
    if model.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return model
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = sorted((hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))
    if not found:
        raise ValueError(f"{name} is neither a folder here nor in {hub}: run hf download {name} config.json")
    return found[-1]


def _read(file: Path) -> Settings:
    try:
        config = json.loads(read_named(file, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error.strerror).lower() if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"{file} cannot be read: {why}; name a model's folder, with config.json in it") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object")
    return config


def _layers(text: Settings) -> Iterator[Layer]:
    """Yield the attention layers of the model that have their own KV."""
    mixed = layer_kinds(text) if state_size(text, 1) is not None else None
    if mixed is not None:
        yield from (_layer(text, kind) for kind in mixed if kind in KINDS)
        return
    count = text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0)
    kinds = text.get("layer_types") or ["full_attention"] * count
    names = {name for name, value in text.items() if name.startswith(NOT_CACHED) and value}
    if strange := sorted({*kinds[:count]} - KINDS | names):
        raise ValueError(f"lmkv cannot tell the KV size of this model, because the model has {', '.join(strange)}")
    per_layer = text.get("per_layer_config") or {}
    for number, kind in enumerate(kinds[:count]):
        yield _layer({**text, **per_layer.get(str(number), {})}, kind)


def _layer(text: Settings, kind: str) -> Layer:
    if text.get("kv_lora_rank"):
        return Layer(1, text["kv_lora_rank"] + text["qk_rope_head_dim"])
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    wide = text.get("global_head_dim") if kind == "full_attention" else None
    width = (
        wide
        or text.get("head_dim")
        or text.get("attention_head_dim")
        or text["hidden_size"] // text["num_attention_heads"]
    )
    return Layer(heads, 2 * width)


def _loaded_as(dtype: object) -> KVDtype:
    """Return the type in which vLLM loads a model's weights.

    vLLM loads float32 models, and models without a type, in a type with two bytes per value.
    """
    name = str(dtype).removeprefix("torch.")
    return KVDtype(name) if name in {KVDtype.FLOAT16, KVDtype.BFLOAT16} else KVDtype.BFLOAT16


def _name(layer: Layer, query_heads: int, latent: bool) -> str:
    if latent:
        return f"MLA, a latent of {layer.values}"
    kind = {query_heads: "MHA", 1: "MQA"}.get(layer.heads, "GQA")
    return f"{kind}, {layer.heads} KV heads of {layer.values // 2}"
