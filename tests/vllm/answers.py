"""Answers of models whose numbers vary a little, compared by their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lmkv.vllm.scheduler.loads import AsyncLoad
from tests.vllm.harness import CHUNK, Engine

Answers = list[list[dict[int, float]]]
"""For each token of each answer: that token first, then the likeliest, with their log-probabilities."""


def ask(running: Engine, prompts: Sequence[list[int]], *, max_tokens: int = 8) -> list[Any]:
    return running.run(prompts, max_tokens=max_tokens, logprobs=3)


def one_by_one(running: Engine, prompts: Sequence[list[int]], *, max_tokens: int = 8) -> list[Any]:
    """The order of a batch decides the last bits of bfloat16."""
    return [ask(running, [ids], max_tokens=max_tokens)[0] for ids in prompts]


def answers_of(outputs: Sequence[Any]) -> Answers:
    found = []
    for output in outputs:
        tokens, likely = output.outputs[0].token_ids, output.outputs[0].logprobs
        found.append(
            [
                {token: each[token].logprob, **{other: entry.logprob for other, entry in each.items()}}
                for token, each in zip(tokens, likely, strict=True)
            ]
        )
    return found


def distance(found: Answers, expected: Answers) -> float:
    """The largest difference of two log-probabilities of the same token after the same tokens.

    Where another token was chosen, by how much the expected one was likelier than the next.
    """
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            worst = max(worst, *(abs(mine[token] - its[token]) for token in mine.keys() & its.keys()), 0.0)
            if next(iter(mine)) != next(iter(its)):
                first, second = sorted(its.values(), reverse=True)[:2]
                worst = max(worst, first - second)
                break
    return worst


def off(outputs: Sequence[Any], expected: Answers) -> float:
    """How far these answers are from those."""
    return distance(answers_of(outputs), expected)


@contextmanager
def without_states() -> Iterator[None]:
    """Loads leave out the states in here: what a test that compares answers has to see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncLoad, "_state_copies", lambda self, lease: [])
        yield


def slot_bytes(running: Engine) -> int:
    """Bytes of a slot of lmkv's for this engine, which may be one without a connector."""
    from lmkv.vllm.model import describe

    return describe(running.scheduler.vllm_config, running.scheduler.kv_cache_config, CHUNK).layout.slot_bytes
