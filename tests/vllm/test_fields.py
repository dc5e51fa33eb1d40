"""Each field of vLLM's configuration has a place: in the key, in what is loaded, refused, or it has no influence."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.vllm.code import DRAFT_KEY, ENVIRONMENT, KEY, as_json, described
from tests.vllm.harness import ENVIRONMENT as OF_TESTS

PLACED = {
    kind: {reason: set(names.split()) for reason, names in reasons.items()}
    for kind, reasons in json.loads((Path(__file__).parent / "placed.json").read_text()).items()
}
"""By class of vLLM's configuration, the fields that are not in `lmkv.vllm.code`, by the reason why not.

"elsewhere in the key": block tables, ranks, layout, states, device. "in what is loaded": weights, constants of layers
and the built configuration. "rounding": the same function, computed in another order. "refused": by `check_model` and
its like. "no": no KV depends on it.
"""
OWNERS = {
    "": "VllmConfig",
    "model_config": "ModelConfig",
    "model_config.multimodal_config": "MultiModalConfig",
    "cache_config": "CacheConfig",
    "attention_config": "AttentionConfig",
    "kernel_config": "KernelConfig",
    "parallel_config": "ParallelConfig",
    "lora_config": "LoRAConfig",
    "compilation_config": "CompilationConfig",
    "ec_manager_config": "EncoderCacheManagerConfig",
    "speculative_config": "SpeculativeConfig",
}
IN_THE_KEY = [(path, name) for path, names in {**KEY, "speculative_config": DRAFT_KEY}.items() for name in names]


def configurations() -> Iterator[tuple[str, set[str]]]:
    """The classes of vLLM's configuration, and their fields."""
    os.environ.update(OF_TESTS)
    import vllm.config

    for module in pkgutil.iter_modules(vllm.config.__path__):
        found = importlib.import_module(f"vllm.config.{module.name}")
        for kind in vars(found).values():
            if inspect.isclass(kind) and kind.__module__ == found.__name__ and dataclasses.is_dataclass(kind):
                yield kind.__name__, {field.name for field in dataclasses.fields(kind)}


def test_every_field_has_a_place() -> None:
    """If this fails, vLLM has got a field: does the KV of a token depend on it, how, and where does lmkv learn it?"""
    known = {kind: set[str]().union(*reasons.values()) for kind, reasons in PLACED.items()}
    for path, name in IN_THE_KEY:
        known.setdefault(OWNERS[path], set()).add(name)
    found = {kind: sorted(names - known.get(kind, set())) for kind, names in configurations()}
    assert {kind: names for kind, names in found.items() if names} == {}


def test_every_environment_variable_has_a_place() -> None:
    import vllm.envs

    known = set(ENVIRONMENT).union(*PLACED["envs"].values())
    assert sorted(set(vllm.envs.environment_variables) - known) == []


def test_no_field_has_two_places() -> None:
    for path, name in IN_THE_KEY:
        reasons = PLACED.get(OWNERS[path], {})
        assert [reason for reason, names in reasons.items() if name in names] == [], (path, name)
    for kind, reasons in PLACED.items():
        assert sum(map(len, reasons.values())) == len(set[str]().union(*reasons.values())), kind
    assert set(ENVIRONMENT).isdisjoint(set[str]().union(*PLACED["envs"].values()))


def nested(path: str, **values: Any) -> Any:
    """A configuration that has nothing but these values, at the end of the path."""
    config = SimpleNamespace(**values)
    for step in reversed(path.split(".") if path else ()):
        config = SimpleNamespace(**{step: config})
    return config


@pytest.mark.parametrize(("path", "name"), IN_THE_KEY)
def test_each_field_of_the_key_changes_it(path: str, name: str) -> None:
    values: list[Any] = ["a", "b", {"a": 1}, {"a": 2}, None, 3, {"x", "y"}]
    found = [described(nested(path, **{name: value}), drafts=True) for value in values]
    assert len(set(found)) == len(values)
    again = described(nested(path, **{name: {"y", "x"}}), drafts=True)
    assert again == found[-1]


def test_drafts_from_the_prompt_change_nothing() -> None:
    config = nested("speculative_config", method="ngram", kv_cache_dtype="fp8")
    assert described(config, drafts=False) == described(nested("speculative_config"), drafts=False)
    assert described(config, drafts=True) != described(config, drafts=False)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_each_environment_variable_of_the_key_changes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    unset = described(SimpleNamespace(), drafts=False)
    monkeypatch.setenv(name, "1")
    one = described(SimpleNamespace(), drafts=False)
    monkeypatch.setenv(name, "2")
    assert len({unset, one, described(SimpleNamespace(), drafts=False)}) == 3


class Foreign:
    """A part of a configuration that only a platform knows."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_a_value_has_the_same_text_wherever_it_is_in_memory() -> None:
    assert as_json([Foreign(1), Foreign]) == as_json([Foreign(1), Foreign]) != as_json([Foreign(2), Foreign])
