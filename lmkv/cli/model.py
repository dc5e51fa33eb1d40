"""`lmkv model`: writes a small model, to try and test without a download."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from attrs import asdict

from lmkv.cli.server import give
from lmkv.cli.small_model import BYTES_PER_VALUE, HEAD_DIM, SmallModel
from lmkv.errors import how_to_install


def whole_heads(hidden: int) -> int:
    if hidden < HEAD_DIM or hidden % HEAD_DIM:
        raise typer.BadParameter(f"{hidden} is not a multiple of {HEAD_DIM}")
    return hidden


def model(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where to write it; made if missing.")],
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(callback=whole_heads, help="Hidden size, in heads of 64.")] = 512,
    dtype: Annotated[str, typer.Option(help=" | ".join(BYTES_PER_VALUE))] = "float32",
    seed: int = 0,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Make tokens of its frequent byte pairs.", show_default="a token per byte"
        ),
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=512, help="Tokens of the vocabulary.", show_default="1024; 8192 with --text")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
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
        sys.exit(f"the model cannot be written: {error}")
    answer = {"path": str(folder), **asdict(made), "kv_bytes_per_token": made.kv_bytes_per_token}
    words = f"{folder}: {layers} layers, {made.kv_bytes_per_token:,} bytes of KV per token ({dtype})"
    give(answer, lambda: typer.echo(words), as_json=as_json)


def lines_of(text: Path) -> Iterator[str]:
    """The file's lines, one by one, because it may be large."""
    with text.open(encoding="utf-8", errors="replace") as file:
        yield from file
