"""`lmkv model`: what it writes, and what it says where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkv.cli.app import app
from lmkv.errors import how_to_install

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as Python has it: not to be imported
sys.argv[1:2] = ["model"]
from lmkv.cli import main
main()
"""


def test_it_writes_a_model_and_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "new" / "model"
    result = CliRunner().invoke(app, ["model", str(folder), "--layers", "1", "--hidden", "64"])
    assert result.exit_code == 0, result.output
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert "bytes of KV per token" in result.output


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def written(folder: Path, *options: str) -> Path:
    pytest.importorskip("transformers")
    result = CliRunner().invoke(app, ["model", str(folder), "--layers", "1", "--hidden", "64", *options])
    assert result.exit_code == 0, result.output
    return folder


TEXT = "Hello, how are you? " * 30 + "Grüße, \t <600>"


def test_it_says_as_json_what_it_has_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["model", str(tmp_path / "model"), "--layers", "1", "--hidden", "64", "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert (found["path"], found["layers"], found["kv_bytes_per_token"]) == (words[1], 1, 512)


def test_without_a_text_a_token_is_a_byte(tmp_path: Path) -> None:
    """And a chat has a template whose marks are tokens, with tools and their calls in it."""
    tokenizer = tokenizer_of(written(tmp_path))
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(chat)) == 3 + len("user\nHi\nassistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    call = {"type": "function", "function": {"name": "search", "arguments": {"word": "a"}}}
    asked = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    chat = tokenizer.apply_chat_template(asked, tools=[{"type": "function"}], tokenize=False)
    assert chat.startswith('<|im_start|>system\n[{"type": "function"}]<|im_end|>\n<|im_start|>assistant\n<tool_call>{')


def test_of_a_text_frequent_pairs_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    tokenizer = tokenizer_of(written(tmp_path / "model", "--text", str(tmp_path / "text"), "--vocab", "512"))
    assert len(tokenizer.encode("Hello, how are you? " * 100)) == 6 * 100 + 1
    for text in (TEXT, "other words, 漢字"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_id_of_the_model_is_a_token_that_can_be_told_from_others(tmp_path: Path) -> None:
    """A model with random weights generates any of them."""
    tokenizer = tokenizer_of(written(tmp_path, "--vocab", "700"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) == 700
    assert len({tokenizer.decode([token]) for token in range(259, 700)}) == 700 - 259


@pytest.mark.parametrize("missing", ["transformers", "safetensors", "tokenizers"])
def test_without_its_extra_it_says_what_to_install(missing: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT, missing, str(tmp_path / "model"), "--layers", "1", "--hidden", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    assert f"needs transformers and safetensors: {how_to_install('cli')}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["model", str(tmp_path / "file")])
    assert result.exit_code == 2, result.output


def test_a_place_where_nothing_can_be_written_is_an_error_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["model", str(tmp_path / "file" / "[/x]"), "--layers", "1", "--hidden", "64"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"the model cannot be written: {tmp_path}" in str(result.exception) + result.output


def test_a_device_is_no_text(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", str(tmp_path / "model"), "--text", "/dev/zero"])
    assert (result.exit_code, str(result.exception)) == (1, "/dev/zero is not a file")
    assert not (tmp_path / "model").exists()
