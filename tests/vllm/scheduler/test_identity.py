"""Weights, adapters and code have identities of their own. These tests need no engine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from lmkv.vllm.model import config_digest
from lmkv.vllm.plan.identity import Adapters, Stamps, folder_of, stamps
from tests.vllm.families import write_adapter
from tests.vllm.scheduler.simulated_vllm import request_for
from tests.vllm.scheduler.test_explain import engine_of


def adapter(path: object, number: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name="a", lora_path=str(path), lora_int_id=number, **more)


def load(lora: Any) -> tuple[str, Stamps]:
    """As vLLM's workers do, which fail without one of the files."""
    folder = folder_of(lora.lora_path)
    before = stamps(folder)
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    return hashlib.sha256(b"".join(files)).hexdigest(), before


def identity(path: object) -> str:
    """As an engine sees it that has just started."""
    return Adapters(load).identity(adapter(path))


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    known = identity(folder)
    assert known
    assert identity(write_adapter(tmp_path / "copy", seed=1)) == known
    assert identity(write_adapter(tmp_path / "b", seed=2)) != known
    configure(folder, lora_alpha=64)
    assert identity(folder) != known


def test_files_that_change_under_an_adapter_that_vllm_may_have_read(tmp_path: Path) -> None:
    """Which of them vLLM computes with is not known: it has no identity, until it is loaded under another number."""
    folder, adapters = write_adapter(tmp_path / "a", seed=1), Adapters(load)
    known = adapters.identity(adapter(folder))
    assert adapters.identity(adapter(folder)) == known
    configure(folder, lora_alpha=64)
    assert [adapters.identity(adapter(folder)) for _ in range(2)] == ["", ""]
    assert adapters.identity(adapter(folder, number=2)) not in ("", known)
    configure(folder, lora_alpha=8)
    assert adapters.identity(adapter(folder, number=2)) == ""


def test_files_that_have_changed_since_vllm_read_them(tmp_path: Path) -> None:
    """It may read them again: an adapter that was loaded at the start, and asked for later."""
    folder = write_adapter(tmp_path / "a", seed=1)
    loaded = load(adapter(folder))
    configure(folder, lora_alpha=64)
    assert Adapters(lambda lora: loaded).identity(adapter(folder)) == ""


def test_an_adapter_that_is_read_in_every_step_is_not_cached(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    assert Adapters(load).identity(adapter(folder, load_inplace=True)) == ""


def test_a_path_with_a_tilde_is_where_vllm_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_adapter(tmp_path / "a", seed=1)
    assert identity("~/a") == identity(folder) != ""


def test_an_adapter_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--adapter"
    write_adapter(repository / "snapshots" / "abc", seed=1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert identity("some/adapter") == identity(repository / "snapshots" / "abc") != ""


@pytest.mark.parametrize("found", [None, ("", ()), ("digest", ())])
def test_an_adapter_without_an_identity_is_not_cached(
    tmp_path: Path, found: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_adapter(tmp_path / "a", seed=1)
    tokens = list(range(40))
    with engine_of() as engine, caplog.at_level("WARNING", "lmkv"):
        engine.scheduler._naming = evolve(engine.scheduler._naming, adapters=Adapters(lambda lora: found))
        request = request_for("r", tokens)
        request.lora_request = adapter(folder)
        engine.scheduler.on_new_request(request)
        options = engine.scheduler.requests["r"].options
        assert (options.skip_save, options.skip_load) == (True, True)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        missed = engine.scheduler.requests["r"].report.miss
        assert missed is not None
        assert (missed.reason, missed.looked_up) == ("unidentified", 0)
        engine.scheduler.request_finished(request)
    assert "not cached" in caplog.text


@pytest.mark.parametrize(
    "stray",
    [
        lambda path: path.with_suffix(".bin").symlink_to("nowhere"),
        lambda path: path.with_suffix(".pt").mkdir(),
        lambda path: os.mkfifo(path.with_suffix(".pth")),
    ],
    ids=["a broken link", "a folder", "a pipe"],
)
def test_what_is_no_file_beside_the_weights_is_no_part_of_them(tmp_path: Path, stray: Callable[[Path], None]) -> None:
    (tmp_path / "model.safetensors").write_bytes(os.urandom(10_000))
    known = stamps(tmp_path)
    stray(tmp_path / "stray")
    assert stamps(tmp_path) == known != ()


class Foreign:
    """A part of a configuration that transformers does not know."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_parts_of_a_configuration_count_by_what_they_are_and_not_where() -> None:
    def digest(value: int) -> str:
        config = SimpleNamespace(to_dict=lambda: {"part": Foreign(value), "kinds": [Foreign(value)]})
        return config_digest(SimpleNamespace(hf_config=config, max_model_len=1))

    assert digest(1) == digest(1) != digest(2)
