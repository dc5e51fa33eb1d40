"""Tokens of a text or of a chat's messages, as vLLM makes them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lmkv.errors import UsageError


def tokenizer(vllm_config: Any) -> Callable[[Any, Mapping[str, Any]], list[int]]:
    """A function that makes tokens of a text or a chat, as vLLM does; it reads the tokenizer at its first call."""

    def tokenize(prompt: Any, template: Mapping[str, Any]) -> list[int]:
        from vllm.tokenizers import cached_tokenizer_from_config

        found: Any = cached_tokenizer_from_config(vllm_config.model_config)
        if found is None:
            raise UsageError("this engine has no tokenizer (skip_tokenizer_init): give tokens")
        if isinstance(prompt, str):
            return list(found.encode(prompt))
        if theirs := sorted(_of_the_tokenizer(found) & template.keys()):
            raise UsageError(f"chat_template_kwargs are for the template: {', '.join(theirs)} would be the tokenizer's")
        given = {**template, "tokenize": True, "return_dict": False}
        if template.get("tools"):
            given["tools"] = _tools(template["tools"])
        return list(found.apply_chat_template([_message(each) for each in prompt], **given))

    return tokenize


_FOR_TEMPLATES = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
"""Arguments of `apply_chat_template` that templates read; all others say how to make tokens, as vLLM does by itself."""


def _of_the_tokenizer(tokenizer: Any) -> set[str]:
    """Names that a request's `chat_template_kwargs` may not have: some make a prompt of any length."""
    from transformers import PreTrainedTokenizerBase

    # A tokenizer's own method may pass on arguments that it does not name.
    methods = (PreTrainedTokenizerBase.apply_chat_template, type(tokenizer).apply_chat_template)
    return {name for each in methods for name in inspect.signature(each).parameters} - _FOR_TEMPLATES


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as vLLM gives them to a template: with its order of fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    return [ChatCompletionToolsParam(**each).model_dump() for each in given]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a template: with a text, and with mappings as the arguments of its calls."""
    message = {**given, "content": given.get("content") or ""}
    calls = message.pop("tool_calls", None) or []
    return {**message, "tool_calls": [_call(each) for each in calls]} if calls else message


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given["function"].get("arguments")
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**given, "function": {**given["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}
