"""A small model with random weights, to measure and test without a download."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attrs import Factory, field, frozen, validators

from lmkv.cli.measure.text_tokenizer import write_text_tokenizer

# With vLLM's dummy weights all tokens are equally likely, which would hide a wrong KV cache. With this
# standard deviation the outputs depend on every byte of it.
WEIGHT_STD = 0.15

HEAD_DIM = 64
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


@frozen(kw_only=True)
class SmallModel:
    """The shape of a Qwen3-like model; the same shape and seed give the same weights."""

    layers: int = field(default=8, validator=validators.gt(0))
    hidden: int = field(default=512, validator=validators.gt(0))
    heads: int = Factory(lambda self: max(1, self.hidden // HEAD_DIM), takes_self=True)
    kv_heads: int = Factory(lambda self: max(1, self.heads // 2), takes_self=True)
    dtype: str = field(default="float32", validator=validators.in_(BYTES_PER_VALUE))
    max_position: int = 32_768
    vocab: int = 1024
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE[self.dtype]

    def write(self, folder: Path, *, weights: bool = True) -> None:
        """Write configuration and weights into `folder`, in the format of transformers and vLLM.

        Without `weights` only vLLM's load format "dummy" can load the model.
        """
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position_embeddings=self.max_position,
            initializer_range=WEIGHT_STD,
            architectures=["Qwen3ForCausalLM"],
            dtype=self.dtype,
        )
        if not weights:
            config.save_pretrained(folder)
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Qwen3ForCausalLM(config)
        model.to(getattr(torch, self.dtype)).save_pretrained(folder)

    def write_tokenizer(self, folder: Path, texts: Iterable[str] = ()) -> None:
        """Write a tokenizer for text, of byte pairs that are frequent in `texts`; without them a token per byte."""
        write_text_tokenizer(folder, self.vocab, texts)
