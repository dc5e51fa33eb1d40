"""`lmkv model`: writes a small model with random weights and a tokenizer, to measure and test without a download."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import Factory, asdict, field, frozen, validators

from lmkv.cli.server import give
from lmkv.errors import how_to_install

# With vLLM's dummy weights all tokens are equally likely, which would hide a wrong KV cache. With this
# standard deviation the outputs depend on every byte of it.
WEIGHT_STD = 0.15

HEAD_DIM = 64
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


@frozen(kw_only=True)
class SmallModel:
    """Describes a Qwen3-like model with random weights. The same shape and seed give the same weights."""

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
        """Bytes of the keys and values of one token, for all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE[self.dtype]

    def write(self, folder: Path) -> None:
        """Write configuration and weights into `folder`, in the format of transformers and vLLM."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar

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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Qwen3ForCausalLM(config)
        disable_progress_bar()
        model.to(getattr(torch, self.dtype)).save_pretrained(folder)

    def write_tokenizer(self, folder: Path, texts: Iterable[str] = ()) -> None:
        """Write a tokenizer. Frequent byte pairs of `texts` become tokens. Without `texts`, each byte is a token."""
        from transformers import PreTrainedTokenizerFast

        wrapped: Any = PreTrainedTokenizerFast(
            tokenizer_object=_filled_up(_trained(self.vocab, texts), self.vocab),
            eos_token=END_OF_TURN,
            additional_special_tokens=list(SPECIAL),
            clean_up_tokenization_spaces=False,
        )
        wrapped.chat_template = CHAT_TEMPLATE
        wrapped.save_pretrained(folder)


# -- its tokenizer ----------------------------------------------------------------------------------------

END_OF_TURN = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _trained(size: int, texts: Iterable[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _filled_up(tokenizer: Any, size: int) -> Any:
    """Add tokens that occur in no text until the vocabulary has `size` tokens, because random weights generate any
    token.

    Each added token is decoded as a blank and its id.
    """
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary.update({f"Ġ<{token}>": token for token in range(len(vocabulary), size)})
    return type(tokenizer).from_str(json.dumps(described))


def whole_heads(hidden: int) -> int:
    if hidden < HEAD_DIM or hidden % HEAD_DIM:
        raise typer.BadParameter(f"{hidden} is not a multiple of {HEAD_DIM}")
    return hidden


def model(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Folder to write; created if it is missing.")],
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 8,
    hidden: Annotated[int, typer.Option(callback=whole_heads, help="Hidden size, a multiple of 64.")] = 512,
    dtype: Annotated[str, typer.Option(help=f"Data type: {', '.join(BYTES_PER_VALUE)}.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with a text; its frequent byte pairs become tokens.",
            show_default="a token per byte",
        ),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(min=512, help="Size of the vocabulary, in tokens.", show_default="1024; 8192 with --text"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a small Qwen3-like model with random weights and a tokenizer for text, with a chat template."""
    if text and text.is_char_device():
        sys.exit(f"{text} is not a file")  # it may have no end
    size = vocab or (8192 if text else 1024)
    made = SmallModel(layers=layers, hidden=hidden, dtype=dtype, seed=seed, vocab=size)
    try:
        for needed in ("transformers", "safetensors", "tokenizers"):
            import_module(needed)  # before anything is written
        made.write(folder)
        made.write_tokenizer(folder, lines_of(text) if text else ())
    except ImportError as error:
        sys.exit(f"lmkv model needs transformers and safetensors: {how_to_install('cli')} ({error})")
    except OSError as error:
        why = f"{error.filename}: {str(error.strerror).lower()}" if error.strerror else str(error)
        sys.exit(f"the model cannot be written: {why}; name a folder that you can write to")
    answer = {"path": str(folder), **asdict(made), "kv_bytes_per_token": made.kv_bytes_per_token}
    words = f"{folder}: {layers} layers, {made.kv_bytes_per_token:,} bytes of KV per token ({dtype})"
    give(answer, lambda: typer.echo(words), as_json=as_json)


def lines_of(text: Path) -> Iterator[str]:
    """Yield the lines of a file, without reading the whole file into memory."""
    with text.open(encoding="utf-8", errors="replace") as file:
        yield from file
