"""How large a recurrent layer's state is, from a model's config.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

Settings = Mapping[str, Any]

_RECURRENT = frozenset({"linear_attention", "mamba", "conv"})
_ATTENTION = {"attention": "full_attention", "full_attention": "full_attention"}
_MAMBA_2 = (
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
)
"""Names of heads, values of a head, groups, values of a state and of the convolution, in several models."""
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


@frozen
class StateSize:
    """The states of a model's recurrent `layers`. `layer_bytes`: bytes of one layer's state, all ranks together."""

    kind: str
    layers: int
    layer_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that are kept at one boundary, all layers together."""
        return self.layers * self.layer_bytes

    def block_tokens(self, layer_token_bytes: int) -> int:
        """Tokens of vLLM's blocks, which hold a state each. `layer_token_bytes`: of a token in an attention layer."""
        return -(-self.layer_bytes // (16 * layer_token_bytes)) * 16


def layer_kinds(text: Settings) -> list[str] | None:
    """The kind of each layer of a model with recurrent layers beside attention; None for any other model."""
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
    """The states of a model, of `value_bytes` per value; None without recurrent layers, or with an unknown kind."""
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
