"""`lmkv model`: what it writes, and what it says where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmkv.cli.app import app

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


@pytest.mark.parametrize("missing", ["transformers", "safetensors", "tokenizers"])
def test_without_its_extra_it_says_what_to_install(missing: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, str(tmp_path / "model"), "--layers", "1", "--hidden", "64"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1
    assert 'needs transformers and safetensors: pip install "lmkv[cli]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["model", str(tmp_path / "file")])
    assert result.exit_code == 2, result.output
