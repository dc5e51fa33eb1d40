"""Small models with drafts that are often right, though all weights are random.

Each target has one layer, over embeddings of equal length, and its heads compute the same from their own KV: for
a position what the target will compute for the next one, of which a head knows the token. So a draft is accepted
where the KV of the draft layers is right, and one wrong position in it costs some.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen

from tests.vllm import families
from tests.vllm.families import WEIGHT_STD

VOCAB = 256
HIDDEN = 64
_SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MODULES = 3
_DEEP = {**_SHAPE, "num_key_value_heads": 2, "first_k_dense_replace": 9, "max_position_embeddings": 4096}
del _DEEP["head_dim"]
_LAYER = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)
_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
_SHARP, _STRONG = 2.0, 4.0
"""Factors: of scores, so that a few positions decide; of attention's output, so that a token's own part is small."""

Weights = dict[str, Any]


def _target() -> Weights:
    """Weights of the target, by Llama's names."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * WEIGHT_STD

    inner, width = _SHAPE["intermediate_size"], 32
    embedding = random(VOCAB, HIDDEN)
    layer = {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": random(2 * width, HIDDEN) * _SHARP,
        "self_attn.k_proj.weight": random(width, HIDDEN),
        "self_attn.v_proj.weight": random(width, HIDDEN),
        "self_attn.o_proj.weight": random(HIDDEN, 2 * width) * _STRONG,
        "mlp.gate_proj.weight": random(inner, HIDDEN),
        "mlp.up_proj.weight": random(inner, HIDDEN),
        "mlp.down_proj.weight": random(HIDDEN, inner),
    }
    return {
        "model.embed_tokens.weight": embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
        **{f"model.layers.0.{name}": weight for name, weight in layer.items()},
    }


def _layer(target: Weights, stem: str = "") -> Weights:
    return {f"{stem}{name}": target[f"model.layers.0.{name}"].clone() for name in _LAYER}


def _save(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_SHAPE, "torch_dtype": "float32", **config}))
    return folder


def _llama(*, architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": [architecture], **more}


def write_llama(folder: Path) -> Path:
    return _save(folder, _llama(), _target())


def write_mimo(folder: Path) -> Path:
    """Write a MiMo with one layer that predicts the token after the next."""
    import torch

    target = _target()
    stem, one = "model.mtp_layers.0.", torch.ones(HIDDEN)
    biases = {name: torch.zeros(64 if "q_proj" in name else 32) for name in _BIASES}
    weights = {
        **target,
        **{f"model.layers.0.{name}": bias for name, bias in biases.items()},
        **_layer(target, stem),
        **{f"{stem}{name}": bias.clone() for name, bias in biases.items()},
        # Only the token, of what a head gets.
        f"{stem}input_proj.weight": torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1),
        **{f"{stem}{name}_layernorm.weight": one.clone() for name in ("token", "hidden", "input", "final")},
    }
    config = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _save(folder, config, weights)


def write_deepseek(folder: Path) -> Path:
    """Write a DeepSeek with three modules, each of which looks one token further ahead."""
    import torch

    stem, first = "model.layers.0.", 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = families.deepseek_v3(**{**_DEEP, "num_nextn_predict_layers": MODULES})
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD * (_STRONG if "o_proj" in name else 1.0))
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    layer = {name.removeprefix(stem): weight for name, weight in weights.items() if name.startswith(stem)}
    own = {
        **layer,
        "enorm.weight": torch.ones(HIDDEN),
        "hnorm.weight": torch.ones(HIDDEN),
        "shared_head.norm.weight": torch.ones(HIDDEN),
        "shared_head.head.weight": weights["lm_head.weight"],
        "embed_tokens.weight": embedding,
        "eh_proj.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
    }
    for number in range(first, first + MODULES):
        weights |= {f"model.layers.{number}.{name}": weight.clone() for name, weight in own.items()}
    config = json.loads(model.config.to_json_string(use_diff=False))
    return _save(folder, {**config, "architectures": ["DeepseekV3ForCausalLM"]}, weights)


def write_eagle(folder: Path) -> Path:
    import torch

    weights = {
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1),
        **_layer(_target(), "layers.0."),
    }
    return _save(folder, _llama(), weights)


def write_eagle3(folder: Path) -> Path:
    """Write a head that ignores the target's layers, so that only the token's own part is missing."""
    import torch

    target = _target()
    weights = _layer(target, "midlayer.")
    for name in ("q", "k", "v"):
        weight = f"midlayer.self_attn.{name}_proj.weight"
        weights[weight] = torch.cat([weights[weight], torch.zeros_like(weights[weight])], dim=1)
    weights |= {
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN),
        "lm_head.weight": target["lm_head.weight"].clone(),
    }
    return _save(
        folder,
        _llama(draft_vocab_size=VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1], num_aux_hidden_states=2),
        weights,
    )


def write_qwen3_next(folder: Path) -> Path:
    """Recurrent layers, and a layer that predicts the token after the next."""
    import torch
    from safetensors.torch import load_file, save_file

    families.RECURRENT["gated delta net, Qwen3-Next"].write(folder)
    weights = load_file(folder / "model.safetensors")
    layer = {name: weight for name, weight in weights.items() if name.startswith("model.layers.3.")}
    hidden = weights["model.norm.weight"].shape[0]
    # Most of what the target says next is decided by the last token alone.
    weights["model.embed_tokens.weight"] *= 200
    weights |= {name.replace("model.layers.3.", "mtp.layers.0."): weight.clone() for name, weight in layer.items()}
    # Only the token, of what a head gets.
    weights["mtp.fc.weight"] = torch.cat([10 * torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


class Known:
    """Drafts what a model is known to say, for vLLM's method `custom_class`; from a random token on something else.

    `said`: whole sequences, of which no two begin alike. `lengths`: of each, its tokens after each of its steps.
    """

    said: ClassVar[list[list[int]]] = []
    lengths: ClassVar[list[list[int]]] = []

    def __init__(self, vllm_config: Any) -> None:
        self._count = vllm_config.speculative_config.num_speculative_tokens
        self._vocab = vllm_config.model_config.get_vocab_size()

    @classmethod
    def tell(cls, said: list[list[int]]) -> None:
        cls.said, cls.lengths = said, [[] for _ in said]

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """One list of drafts for each sequence that has got a token; `tokens`: [sequence, token]."""
        return [
            self._drafts(tokens[row, : int(lengths[row])].tolist()) if new else [] for row, new in enumerate(sampled)
        ]

    def _drafts(self, tokens: list[int]) -> list[int]:
        at = len(tokens)
        number = next(number for number, said in enumerate(self.said) if said[:8] == tokens[:8])
        self.lengths[number].append(at)
        drafts = (self.said[number][at : at + self._count] + [0] * self._count)[: self._count]
        right = random.Random(f"{number} {at}").randint(0, self._count)
        return drafts[:right] + [(token + 1) % self._vocab for token in drafts[right:]]

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""


N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
KNOWN = {"method": "custom_class", "model": "tests.vllm.drafts.Known", "num_speculative_tokens": 3}


@frozen
class Drafts:
    """`method`: vLLM's name. `head`: writes the model that drafts; None, it is the target, or there is none.

    `options`: of engines with this target. `block`: the tokens of its blocks. `lookahead`: how many tokens after a
    position the KV of its draft layers depends on.
    """

    method: str
    target: Callable[[Path], Path] = write_llama
    head: Callable[[Path], Path] | None = None
    lookahead: int = 0
    options: dict[str, Any] = field(factory=dict)
    block: int = 32

    def write(self, folder: Path, tokens: int) -> tuple[Path, dict[str, Any]]:
        """The target, and vLLM's `speculative_config` for `tokens` drafts at a time."""
        model = self.target(folder / "target")
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": tokens}
        if "attention_backend" in self.options:
            # vLLM chooses that of draft layers anew.
            config["attention_backend"] = self.options["attention_backend"]
        if self.method == "ngram":
            return model, {**config, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        if self.head is not None:
            return model, {**config, "model": str(self.head(folder / "head"))}
        return model, {**config, **({"model": str(model)} if self.method == "draft_model" else {})}


DRAFTS = {
    "n-grams": Drafts("ngram"),
    "draft model": Drafts("draft_model"),
    "EAGLE": Drafts("eagle", head=write_eagle, lookahead=1),
    "EAGLE-3": Drafts("eagle3", head=write_eagle3, lookahead=1),
    "MTP": Drafts("mtp", write_mimo, lookahead=1),
    "MTP, three modules": Drafts("mtp", write_deepseek, lookahead=MODULES, options=families.REFERENCE_MLA, block=16),
}
