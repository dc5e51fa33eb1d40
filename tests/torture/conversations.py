"""The prompts, and the answers of an engine without a connector."""

from __future__ import annotations

import random
from typing import Any

from attrs import define, field, frozen

from tests.vllm.harness import Engine

VOCAB = 256
NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities are nearer than this may change places when a batch is another one:
float32 sums in another order. Runs were seen to agree to about 1e-5."""

_LONGEST = 420
_PREFIXES = (0, 40, 90, 150, 200, 260)


@frozen
class Turn:
    """A prompt, and the reference's answer to it with each token's log-probability."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


@define
class Conversation:
    """Its history so far and the turns that were answered; each turn's prompt continues the one before."""

    history: list[int]
    turns: list[Turn] = field(factory=list)


def converse(plain: Engine, rng: random.Random, count: int) -> list[Turn]:
    """The turns of `count` conversations over a few shared beginnings.

    Turns that a near tie decided are left out: there the reference is not an answer but a coin.
    """
    beginnings = [_tokens(rng, length) for length in _PREFIXES]
    open_ones = [Conversation(list(rng.choice(beginnings))) for _ in range(count)]
    turns: list[Turn] = []
    while open_ones:
        prompts = [one.history + _tokens(rng, rng.choice((3, 30, 64, 90, 128))) for one in open_ones]
        answers = ask(plain, prompts, [rng.choice((1, 2, 9, 20, 40)) for _ in prompts])
        turns += [turn for turn, certain in answers if certain]
        for one, (turn, _) in zip(open_ones, answers, strict=True):
            one.history = turn.prompt + turn.answer
        open_ones = [one for one in open_ones if len(one.history) < _LONGEST and rng.random() < 0.8]
    return turns


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(5, VOCAB) for _ in range(length)]


def ask(plain: Engine, prompts: list[list[int]], lengths: list[int]) -> list[tuple[Turn, bool]]:
    """Each prompt's turn, and whether no near tie had a part in it."""
    from vllm import SamplingParams

    settings = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=2)
        for length in lengths
    ]
    outputs = plain.llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
    return [_turn(prompt, output.outputs[0]) for prompt, output in zip(prompts, outputs, strict=True)]


def _turn(prompt: list[int], output: Any) -> tuple[Turn, bool]:
    answer, best, gap = list(output.token_ids), [], float("inf")
    for token, likely in zip(answer, output.logprobs, strict=True):
        first, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
        best.append(likely[token].logprob)
        gap = min(gap, first - second)
    return Turn(prompt, answer, best), gap > NEAR_TIE
