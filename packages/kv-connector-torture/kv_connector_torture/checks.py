"""The checks of answers, of reported hits, and of leaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from kv_connector_torture.engine import Engine
from kv_connector_torture.schedule import Operation, Schedule


@define
class Problem:
    """A failed check. `kind`: difference, truthfulness, leak, hang, alarm (of `--around`), or death (of the process).

    `request`: the name of the request with the wrong answer. `expected`: the tokens of the right answer. `given`: the
    tokens of the wrong answer. `position`: the index of the first token that differs.
    """

    kind: str
    text: str
    request: str = ""
    expected: list[int] = field(factory=list)
    given: list[int] = field(factory=list)
    position: int | None = None

    @property
    def nature(self) -> str:
        """A text that is equal for problems of the same kind. Deaths must also have the same exception."""
        return f"{self.kind} {self.text.partition(':')[0]}" if self.kind == "death" else self.kind

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@define
class Prefixes:
    """The tokens of all requests so far, by salt, adapter and weights. An engine can have cached only these tokens."""

    _seen: dict[Hashable, list[Sequence[int]]] = field(factory=dict)

    def add(self, scope: Hashable, tokens: Sequence[int]) -> None:
        self._seen.setdefault(scope, []).append(tokens)

    def longest(self, scope: Hashable, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of `tokens` that an earlier request in the same scope had as well.
        `scope`: salt, adapter and weights.
        """
        return max((_common(tokens, seen) for seen in self._seen.get(scope, ())), default=0)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def untrue(cached: int, prompt: int, longest: int) -> str | None:
    """Return the reason why `cached` cached tokens are too many for a prompt of `prompt` tokens, or None if the number
    is possible.

    `longest`: the length of the longest prefix that an earlier request shared. vLLM computes the last token of a prompt
    in any case.
    """
    if cached > prompt - 1:
        return f"{cached} tokens are reported as cached, of a prompt of {prompt}, whose last one is always computed"
    if cached > longest:
        others = "no earlier request with the same salt, adapter and weights"
        return f"{cached} tokens are reported as cached, and {others} began with more than {longest} of them"
    return None


def leak(left_over: Callable[[], str], patience: float, tick: Callable[[], None]) -> Problem | None:
    """Call `tick()` until `left_over()` returns "". After `patience` seconds, return a problem with the text that
    `left_over` returned last. Returns None if there is no leak.
    """
    deadline = time.monotonic() + patience
    while left := left_over():
        if time.monotonic() > deadline:
            return Problem("leak", f"{left}, {patience:.0f} s after the last request")
        tick()
        time.sleep(0.002)
    return None


NEAR_TIE = 1e-3
"""If the log-probabilities of two tokens differ by less than `NEAR_TIE`, either token is a right answer. In another
batch, float32 numbers are summed in another order. Measured runs agree to about 1e-5.
"""

CLOSE_ENOUGH = 1e-3
"""Largest difference of log-probabilities that counts as equal. Another order of float32 sums causes smaller
differences, a wrong page larger ones.
"""


@frozen
class Key:
    """Everything on which the answer to a request depends. Requests with equal keys have equal answers."""

    tokens: tuple[int, ...]
    max_tokens: int
    lora: int
    weights: int


@frozen
class Answer:
    """The answer to a request: the tokens, the log-probability of each token, and the positions of near ties (see
    `NEAR_TIE`).
    """

    tokens: list[int]
    logprobs: list[float]
    ties: frozenset[int]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """Return the answer in a `RequestOutput` of vLLM."""
        tokens, best, ties = list(output.outputs[0].token_ids), [], set()
        for position, (token, likely) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
            first, second = sorted((entry.logprob for entry in likely.values()), reverse=True)[:2]
            best.append(likely[token].logprob)
            if first - second < NEAR_TIE:
                ties.add(position)
        return cls(tokens, best, frozenset(ties))

    def differs(self, given: Answer) -> tuple[int, str] | None:
        """Return the first position at which the answer `given` differs from this answer, and a text that says how.
        Returns None if the answers are equal. A difference at a near tie, and all differences after it, do not count.
        """
        for position, token in enumerate(self.tokens):
            if position >= len(given.tokens):
                return position, "the answer ends"
            if given.tokens[position] != token:
                return None if position in self.ties else (position, f"{given.tokens[position]} instead of {token}")
            distance = abs(given.logprobs[position] - self.logprobs[position])
            if not distance <= CLOSE_ENOUGH:
                return position, f"the log-probability of {token} is off by {distance:.4f}"
        return None


Answers = dict[Key, Answer]
EngineOf = Callable[[int], AbstractContextManager[Engine]]


def key_of(schedule: Schedule, asked: Operation, weights: int) -> Key:
    return Key(tuple(schedule.tokens(asked.prompt)), asked.max_tokens, asked.lora, weights)


def by_weights(operations: Iterable[Operation]) -> list[tuple[int, list[Operation]]]:
    """Return, for each engine of a schedule, the id of the engine's weights and the engine's operations. Each restart
    begins another engine.
    """
    lives: list[tuple[int, list[Operation]]] = [(0, [])]
    for operation in operations:
        if operation.do == "restart":
            lives.append((operation.weights, []))
        else:
            lives[-1][1].append(operation)
    return lives


def answer(
    schedule: Schedule, known: Answers, engine_of: EngineOf, adapters: Sequence[Path], alive: Callable[[], None]
) -> tuple[Schedule, Answers]:
    """Return the schedule with its field `said` complete, and the right answers to its requests that are not in
    `known`.

    `engine_of`: a function that makes an engine without a connector, given the id of the weights. `alive`: a function
    that is called after each step.
    """
    found: Answers = {}

    def complete(engine: Engine | None, wanted: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(wanted) if key not in known and key not in found]
        if not missing:
            return
        assert engine is not None
        names = {str(number): key for number, key in enumerate(missing)}
        for name, key in names.items():
            adapter = adapters[key.lora - 1] if key.lora else None
            engine.ask(name, key.tokens, key.max_tokens, adapter=adapter)
        while names:
            for output in engine.step():
                found[names.pop(output.request_id)] = Answer.of(output)
            alive()

    wanted = _wanted_names(schedule)
    if wanted - schedule.said.keys():
        with engine_of(0) as engine:
            while wanted - schedule.said.keys():
                ready = [asked for asked in schedule.asked if _is_ready(asked, schedule, wanted)]
                complete(engine, [key_of(schedule, asked, 0) for asked in ready])
                said = {one.name: (known | found)[key_of(schedule, one, 0)].tokens for one in ready}
                schedule = evolve(schedule, said={**schedule.said, **said})
    needed: dict[int, set[Key]] = {}
    for weights, life in by_weights(schedule.operations):
        keys = {key_of(schedule, one, weights) for one in life if one.do == "ask"}
        needed.setdefault(weights, set()).update(keys - known.keys() - found.keys())
    for weights, keys in needed.items():
        if keys:
            with engine_of(weights) as engine:
                complete(engine, sorted(keys, key=lambda key: key.tokens))
    return schedule, found


def _wanted_names(schedule: Schedule) -> set[str]:
    """Return the names of the requests whose answers are parts of prompts."""
    return {name for asked in schedule.asked for name, _ in asked.prompt if name.startswith("r")}


def _is_ready(asked: Operation, schedule: Schedule, wanted: set[str]) -> bool:
    """Return whether the answer to the request `asked` is wanted, is not yet known, and can be computed now. A request
    can be computed once all answers in its prompt are known.
    """
    parts = {name for name, _ in asked.prompt if name.startswith("r")}
    return asked.name in wanted and asked.name not in schedule.said and parts <= schedule.said.keys()
