"""Speculative decoding of every kind, on engines: outputs, hits, and drafts that are accepted after a hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import frozen

from tests.vllm import drafts
from tests.vllm.alone import Alone
from tests.vllm.drafts import DRAFTS, Drafts
from tests.vllm.harness import Engine, engine, external_hits, generated

# numba warns about vLLM's search for n-grams.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Encountered the use of a type that is scheduled for deprecation")

TOKENS = 3
"""Drafts at a time."""
REQUESTS, LENGTH, ANSWER = 12, 132, 24
CHUNK = 64
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": False,
}

MARKS = {"MTP": pytest.mark.runner_v2}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(5, drafts.VOCAB) for _ in range(LENGTH)] for _ in range(REQUESTS)]


@frozen
class Case:
    """An engine with drafts of this kind, and what it should say: what the target says alone, without a connector."""

    name: str
    kind: Drafts
    running: Engine
    expected: list[list[int]]

    @property
    def own_hit(self) -> int:
        """Tokens that vLLM's prefix cache has of a repeated prompt: whole blocks, less one where drafts look ahead."""
        return (LENGTH - 1) // self.kind.block * self.kind.block - self.kind.block * bool(self.kind.lookahead)

    def ask(self, salt: str, length: int = LENGTH, **params: object) -> Answers:
        before = self.running.accepted_drafts
        begun = [ids[:length] for ids in prompts()]
        outputs = self.running.run(begun, max_tokens=ANSWER, salts=[salt] * REQUESTS, params=params)
        hits = [(output.num_cached_tokens - external_hits(output), external_hits(output)) for output in outputs]
        said = generated(outputs)
        return Answers(said, set(hits), self.running.accepted_drafts - before)


@frozen
class Answers:
    """`hits`: the tokens of a prompt that vLLM had, and those that lmkv had. `accepted`: drafts."""

    said: list[list[int]]
    hits: set[tuple[int, int]]
    accepted: int


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in DRAFTS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[Case]:
    kind = DRAFTS[request.param]
    target = kind.target(tmp_path_factory.mktemp("target"))
    expected = alone(target, OPTIONS | kind.options, lambda plain: plain.ids(prompts(), max_tokens=ANSWER))
    model, config = kind.write(tmp_path_factory.mktemp("drafts"), TOKENS)
    options = {**OPTIONS, **kind.options, "speculative_config": config, "extra": {"chunk_size": CHUNK}}
    with engine(model, **options) as running:
        yield Case(request.param, kind, running, expected)


def test_a_repeated_prompt_is_loaded_and_the_answer_is_the_same(case: Case) -> None:
    assert case.ask("a").said == case.expected
    case.running.forget_local()
    again = case.ask("a")
    assert again.said == case.expected
    # With the prompt's tail. The last token is computed in any case.
    assert again.hits == {(0, LENGTH - max(1, case.kind.lookahead))}
    case.running.assert_nothing_leaked()


def test_as_many_drafts_are_accepted_as_after_vllms_own_hit(case: Case) -> None:
    """Though the KV of draft layers was stored up to a position after which another token came."""
    lookahead = case.kind.lookahead
    case.ask("own")
    own = case.ask("own", **{"lmkv.skip_load": True})
    # On most CPUs vLLM caches no prefixes with MLA: then all is computed.
    caches = "attention_backend" not in case.kind.options
    assert (own.said, own.hits) == (case.expected, {(case.own_hit if caches else 0, 0)})

    case.ask("tails", case.own_hit + lookahead)
    case.running.forget_local()
    loaded = case.ask("tails")
    assert (loaded.said, loaded.hits) == (case.expected, {(0, case.own_hit)})
    assert loaded.accepted == own.accepted

    # The same where prompts go on otherwise after a whole chunk.
    case.ask("chunks", CHUNK)
    case.running.forget_local()
    loaded = case.ask("chunks")
    assert (loaded.said, loaded.hits) == (case.expected, {(0, CHUNK - lookahead)})
    assert loaded.accepted == own.accepted
    case.running.assert_nothing_leaked()


def test_drafts_are_accepted(case: Case) -> None:
    """Else the counts above mean nothing."""
    most = REQUESTS * ANSWER
    assert case.ask("b").accepted > (0 if case.name == "n-grams" else most / 3)
