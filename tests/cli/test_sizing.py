"""How large a model's KV is, and how many tokens a tier holds of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lmkv.backends import LocalDiskBackend
from lmkv.cli.app import app
from lmkv.cli.doctor import show
from lmkv.cli.findings import examine
from lmkv.cli.sizing import KVDtype, kv_size
from lmkv.cli.small_model import SmallModel
from tests.tables import raised

QWEN3_8B = {
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_2_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "torch_dtype": "float16"}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def model(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_ten_thousand_tokens_of_qwen3_8b_take_one_and_a_half_gb(folder: Path) -> None:
    size = kv_size(model(folder, QWEN3_8B))
    assert size.token_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert round(10_000 * size.token_bytes / 1e9, 1) == 1.5
    assert (size.tokens_in(10**9), size.tokens_in(2**30)) == (6781, 7281)


@pytest.mark.parametrize(
    ("config", "attention", "token_bytes"),
    [
        (QWEN3_8B, "GQA, 8 KV heads of 128", 147_456),
        (LLAMA_2_7B, "MHA, 32 KV heads of 128", 2 * 32 * 4096 * 2),
        ({**LLAMA_2_7B, "num_key_value_heads": 1}, "MQA, 1 KV heads of 128", 2 * 32 * 128 * 2),
        (DEEPSEEK_V3, "MLA, a latent of 576", 61 * 576 * 2),
        ({"text_config": QWEN3_8B, "vision_config": {}}, "GQA, 8 KV heads of 128", 147_456),
    ],
)
def test_kinds_of_attention(config: dict[str, Any], attention: str, token_bytes: int, folder: Path) -> None:
    size = kv_size(model(folder, config))
    assert (size.attention, size.token_bytes) == (attention, token_bytes)


def test_data_types(folder: Path) -> None:
    for asked, given, bytes_per_value in (
        (KVDtype.AUTO, "float32", 2),  # as vLLM loads it
        (KVDtype.AUTO, "torch.float16", 2),
        (KVDtype.FLOAT32, "bfloat16", 4),
        (KVDtype.FP8, "bfloat16", 1),
    ):
        size = kv_size(model(folder, QWEN3_8B, torch_dtype=given), asked)
        assert size.token_bytes == 2 * 36 * 8 * 128 * bytes_per_value


@pytest.mark.parametrize(
    ("config", "ranks", "rank_bytes", "token_bytes"),
    [
        (QWEN3_8B, 4, 147_456 // 4, 147_456),
        # Fewer heads than ranks: each rank has a head, and stores it.
        (QWEN3_8B, 16, 147_456 // 8, 2 * 147_456),
        # The latent is the same on every rank: one copy is stored.
        (DEEPSEEK_V3, 8, 61 * 576 * 2, 61 * 576 * 2),
    ],
)
def test_ranks(config: dict[str, Any], ranks: int, rank_bytes: int, token_bytes: int, folder: Path) -> None:
    size = kv_size(model(folder, config), ranks=ranks)
    assert (size.rank_bytes, size.token_bytes) == (rank_bytes, token_bytes)


def test_a_small_model_has_the_size_that_it_says(folder: Path) -> None:
    small = SmallModel(layers=3, hidden=256)
    pytest.importorskip("transformers")
    small.write(folder)
    assert kv_size(folder, KVDtype.FLOAT32).token_bytes == small.kv_bytes_per_token


def test_a_file_has_the_size_that_the_disk_tier_gives_it(folder: Path) -> None:
    size, disk = kv_size(model(folder, QWEN3_8B)), LocalDiskBackend(folder / "kv", bytes(32), chunk_tokens=256)
    assert size.file_bytes(256) == disk.stored_bytes(size.slot_bytes(256))


def test_what_has_no_such_size_is_refused(folder: Path) -> None:
    for config, reason in (
        ({}, "num_hidden_layers"),
        ({**QWEN3_8B, "num_hidden_layers": 0}, "generates text"),
        ({**QWEN3_8B, "num_hidden_layers": "many"}, "generates text"),
        ({**QWEN3_8B, "layer_types": ["full_attention", "linear_attention"] * 18}, "linear_attention"),
        ({**QWEN3_8B, "mamba_d_ssm": 128}, "mamba_d_ssm"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
    ):
        raised(ValueError, reason, kv_size, model(folder, config))
    split = "8 KV heads cannot be split over 3 ranks"
    raised(ValueError, split, kv_size, model(folder, QWEN3_8B), ranks=3)
    (folder / "config.json").write_text("[" * 100_000)
    raised(ValueError, "cannot be read", kv_size, folder)


QWEN3_NEXT_80B = {
    "num_hidden_layers": 48, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "dtype": "bfloat16",
}  # fmt: skip


def test_a_recurrent_layers_state(folder: Path) -> None:
    size = kv_size(model(folder, QWEN3_NEXT_80B))
    assert size.states is not None
    assert (size.layers, size.token_bytes) == (12, 12 * 2 * 2 * 256 * 2)
    # One layer: 32 heads of 128 x 128 in float32, and the last three inputs of a convolution over 8,192 values.
    assert size.states.nbytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == 77_266_944
    assert size.chunk_tokens(256) == 1056
    assert size.slot_bytes(256) == 1056 * size.token_bytes


def doctor(*options: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *options], env={"COLUMNS": "80"})


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it takes long, and is another test's business."""
    monkeypatch.setattr("lmkv.cli.findings.examine_vllm", lambda env: iter(()))


@pytest.mark.usefixtures("no_vllm")
class TestDoctor:
    def test_it_says_how_many_tokens_each_tier_holds(self, folder: Path) -> None:
        path = model(folder, QWEN3_8B)
        extra = {
            "max_local_cpu_size": 0.5,
            "local_disk": str(folder / "kv"),
            "max_local_disk_size": 1,
            "disk_min_free": 0,
        }
        result = doctor("--model", str(path), "--json", "--extra", json.dumps(extra))
        answer = json.loads(result.stdout)
        found = {row["name"]: row for row in answer["findings"] if row["area"] == "model"}
        assert answer["model"]["token_bytes"] == 147_456
        assert found["one token"]["value"] == "147,456 bytes"
        assert found["10,000 tokens"]["value"] == "1.47 GB"
        # 14 chunks of 36 MiB are in half a GiB; a file has a page more.
        assert found["in host memory"]["value"] == f"{14 * 256:,} tokens"
        assert found["in the disk tier"]["value"] == f"{28 * 256:,} tokens"

    def test_a_tier_without_room_for_a_chunk_is_a_problem(self, folder: Path) -> None:
        extra = {"max_local_cpu_size": 0.03, "local_disk": str(folder / "kv"), "max_local_disk_size": 0.03}
        result = doctor("--model", str(model(folder, QWEN3_8B)), "--json", "--extra", json.dumps(extra))
        problems = [text for text in json.loads(result.stdout)["problems"] if "chunk" in text]
        assert result.exit_code == 1
        assert ["max_local_cpu_size" in problems[0], "max_local_disk_size" in problems[1]] == [True, True]

    @pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "empty"])
    def test_what_is_not_there_is_refused_without_a_download(self, name: str, folder: Path) -> None:
        (folder / "empty").mkdir()
        result = doctor("--model", str(folder / name))
        assert result.exit_code == 2
        assert "name a model's folder" in " ".join(result.output.replace("│", " ").split())

    def test_no_word_is_broken_at_80_columns(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        findings = list(examine({}, {}, kv_size(model(folder, QWEN3_8B))))
        show(findings, show_all=True)
        printed = capsys.readouterr().out
        words = {word for found in findings for word in f"{found.name} {found.value} {found.note}".split()}
        assert max(map(len, printed.splitlines())) <= 80
        assert words <= set(printed.split())
