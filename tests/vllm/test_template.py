"""Prompts of the agent API become tokens as vLLM makes them, and nothing but the template is a caller's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.errors import UsageError
from lmkv.vllm.assemble import tokenizer
from tests.tables import raised

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenize(model: Path) -> Any:
    from vllm.config import ModelConfig

    config: Any = SimpleNamespace(model_config=ModelConfig(model=str(model)))
    return tokenizer(config)


def test_a_template_is_given_what_it_reads(tokenize: Any) -> None:
    plain = tokenize(MESSAGES, {})
    assert len(tokenize(MESSAGES, {"add_generation_prompt": True})) > len(plain)
    assert tokenize(MESSAGES, {"enable_thinking": False, "documents": [], "max_tokens": 5}) == plain


@pytest.mark.parametrize(
    "given",
    [
        {"padding": "max_length", "max_length": 50_000_000},
        {"max_length": 1},
        {"truncation": True},
        {"tokenize": False},
        {"return_tensors": "pt"},
        {"return_dict": True},
        {"return_assistant_tokens_mask": True},
        {"tokenizer_kwargs": {"padding": "max_length", "max_length": 50_000_000}},
        {"chat_template": "{{ 1 }}"},
        {"conversation": []},
        {"kwargs": {}},
        {"self": 1},
    ],
    ids=lambda given: ",".join(given),
)
def test_a_tokenizer_is_given_nothing(tokenize: Any, given: dict[str, Any]) -> None:
    raised(UsageError, ", ".join(sorted(given)), tokenize, MESSAGES, given)
