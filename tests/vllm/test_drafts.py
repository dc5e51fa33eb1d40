"""Speculative decoding of every kind, on engines: outputs, hits, and drafts that are accepted after a hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import drafts
from tests.vllm.drafts import DRAFTS, Drafts
from tests.vllm.harness import BLOCK, Engine, engine, external_hits

# What numba says of vLLM's search for n-grams.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type that is scheduled for deprecation")

TOKENS = 3
"""Drafts at a time."""
REQUESTS, LENGTH, ANSWER = 12, 132, 24
CHUNK = 2 * BLOCK
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 4 << 20,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": False,
}
LOOKS_AHEAD = {"EAGLE", "EAGLE-3", "MTP"}
"""Their KV at a position depends on the token after it."""
OWN_HIT = (LENGTH - 1) // BLOCK * BLOCK
"""Of vLLM's prefix cache, less a block for those."""


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(5, drafts.VOCAB) for _ in range(LENGTH)] for _ in range(REQUESTS)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], Path]], list[list[int]]]:
    """What a model says by itself, without drafts and without a connector."""
    known: dict[Any, list[list[int]]] = {}

    def ask(target: Callable[[Path], Path]) -> list[list[int]]:
        if target not in known:
            with engine(target(tmp_path_factory.mktemp("target")), connector=None, **OPTIONS) as plain:
                known[target] = plain.ids(prompts(), max_tokens=ANSWER)
        return known[target]

    return ask


@pytest.fixture(scope="module", params=DRAFTS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, answers: Callable[..., list[list[int]]]
) -> Iterator[tuple[str, Engine, list[list[int]]]]:
    """A kind of drafts, an engine with it, and what it should say."""
    kind: Drafts = DRAFTS[request.param]
    expected = answers(kind.target)
    model, config = kind.write(tmp_path_factory.mktemp("drafts"), TOKENS)
    with engine(model, speculative_config=config, extra={"chunk_size": CHUNK}, **OPTIONS) as running:
        yield request.param, running, expected


def accepted(running: Engine) -> int:
    """Drafts that were accepted since the engine's start, as vLLM counts them."""
    (metric,) = (one for one in running.llm.get_metrics() if one.name.endswith("spec_decode_num_accepted_tokens"))
    return int(metric.value)


def ask(
    running: Engine, salt: str, length: int = LENGTH, **params: object
) -> tuple[list[list[int]], list[int], list[int], int]:
    """The answers, the tokens that vLLM and lmkv had of each prompt, and how many drafts were accepted."""
    before = accepted(running)
    begun = [ids[:length] for ids in prompts()]
    outputs = running.run(begun, max_tokens=ANSWER, salts=[salt] * REQUESTS, params=params)
    loaded = [external_hits(output) for output in outputs]
    own = [output.num_cached_tokens - hit for output, hit in zip(outputs, loaded, strict=True)]
    return [list(output.outputs[0].token_ids) for output in outputs], own, loaded, accepted(running) - before


def test_a_repeated_prompt_is_loaded_and_the_answer_is_the_same(drafting: tuple[str, Engine, list[list[int]]]) -> None:
    _, running, expected = drafting
    assert ask(running, "a")[0] == expected
    running.forget_local()
    again, own, loaded, _ = ask(running, "a")
    assert again == expected
    assert (set(own), set(loaded)) == ({0}, {LENGTH - 1}), "with the prompt's tail, but for the last token"
    running.assert_nothing_leaked()


def test_as_many_drafts_are_accepted_as_after_vllms_own_hit(drafting: tuple[str, Engine, list[list[int]]]) -> None:
    """Up to a position whose KV in draft layers was computed for another token after it, and stored so."""
    name, running, expected = drafting
    looks_ahead = name in LOOKS_AHEAD
    own_hit = OWN_HIT - BLOCK * looks_ahead
    ask(running, "own")
    said, own, loaded, as_vllm = ask(running, "own", **{"lmkv.skip_load": True})
    assert (said, set(own), set(loaded)) == (expected, {own_hit}, {0})

    ask(running, "tails", own_hit + looks_ahead)
    running.forget_local()
    said, own, loaded, count = ask(running, "tails")
    assert (said, set(own), set(loaded)) == (expected, {0}, {own_hit})
    assert count == as_vllm

    # The same where the prompts go on otherwise after a whole chunk.
    ask(running, "chunks", CHUNK)
    running.forget_local()
    said, own, loaded, count = ask(running, "chunks")
    assert (said, set(own), set(loaded)) == (expected, {0}, {CHUNK - looks_ahead})
    assert count == as_vllm
    running.assert_nothing_leaked()


def test_drafts_are_accepted(drafting: tuple[str, Engine, list[list[int]]]) -> None:
    """Else the counts above mean nothing."""
    name, running, _ = drafting
    of = REQUESTS * ANSWER
    assert ask(running, "b")[3] > (0 if name == "n-grams" else of / 3)
