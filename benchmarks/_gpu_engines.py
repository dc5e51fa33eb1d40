"""An engine in a process of its own that answers batches of prompts, and forgets its own prefix cache when asked to.

Run with a folder and -P, else benchmarks/copy.py would be imported as the standard library's. Takes lines of JSON:
an engine's specification first, then batches.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from lmkv.cli.measure import conversations
from lmkv.cli.measure.process import Questions
from lmkv.cli.measure.vllm_engines import VOCABULARY, EngineSpec, leave, open_engine

RESETS = 50


@frozen(kw_only=True)
class Batch:
    """Prompts of `tokens` random tokens each, one for each seed, that are sent together.

    `forget`: first empty vLLM's own prefix cache, so that hits can only come from a connector.
    """

    seeds: Sequence[int]
    tokens: int
    answer: int = 1
    forget: bool = False


@frozen(kw_only=True)
class Answers:
    """Seconds until all are answered, and of each prompt the time to its first token and the tokens not computed."""

    seconds: float
    ttfts: list[float]
    hits: list[int] = field(repr=False)


class Engine(conversations.Engine):
    program = (__file__,)

    def answer(self, batch: Batch) -> Answers:
        return Answers(**self.ask(asdict(batch)))


# -- in the child -----------------------------------------------------------------------------------------


def forget(llm: Any, wait: Callable[[], object]) -> None:
    """Empty vLLM's own prefix cache, so that hits can only come from a connector. Raises RuntimeError.

    Blocks are in use until the transfers that need them have ended: `wait` is called until then.
    """
    for _ in range(RESETS):
        if llm.reset_prefix_cache():
            return
        wait()
    raise RuntimeError("vLLM does not reset its prefix cache: some blocks stay in use")


def answers(llm: Any, batch: Batch) -> Answers:
    from vllm import SamplingParams

    if batch.forget:
        forget(llm, lambda: time.sleep(0.04))
    prompts = [
        {"prompt_token_ids": random.Random(seed).choices(range(VOCABULARY), k=batch.tokens)} for seed in batch.seeds
    ]
    params = SamplingParams(temperature=0, max_tokens=batch.answer, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Answers(
        seconds=time.perf_counter() - started,
        ttfts=[output.metrics.first_token_latency for output in outputs],
        hits=[output.num_cached_tokens or 0 for output in outputs],
    )


def main() -> None:
    questions = Questions()  # before vLLM prints anything
    llm = open_engine(EngineSpec(**next(questions)), Path(sys.argv[1]))
    questions.answer("ready")
    for batch in questions:
        questions.answer(asdict(answers(llm, Batch(**batch))))
    leave(llm)


if __name__ == "__main__":
    main()
