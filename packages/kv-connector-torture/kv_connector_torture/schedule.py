"""Schedules: the operations that a trial runs on engines. `make` makes a schedule from a seed. `shrink` makes a failing
schedule smaller.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from attrs import asdict, define, evolve, field, fields_dict, frozen

VOCAB = 256
"""Tokens of prompts are numbers from 5 to `VOCAB` - 1. Every vocabulary has these tokens."""

LONGEST = 420
_AT_ONCE = 6
_HOT = 16
_BEGINNINGS = (0, 40, 90, 150, 200, 260)
_TAILS = (1, 3, 16, 30, 64, 90, 128)
_ANSWERS = (1, 2, 9, 20, 40)

Run = tuple[str, int]
"""A part of a prompt, `(name, count)`: the first `count` tokens of a document, or of the answer to a request."""


@frozen
class Operation:
    """One operation on an engine. `do`: the name of the operation. Each operation uses some of the other fields.

    "ask": begin the request `name` with `prompt`, `max_tokens`, `salt` and `lora` (the number of an adapter, or 0).
    "abort": abort the request `name`. "step": run `count` steps, or with 0, steps until all requests have ended.
    "reset": empty vLLM's prefix cache. With `running`, running requests are preempted first; with `connector`, the
    connector's cache is emptied, too. "restart": start another engine over the same storage, with the model's weights
    of id `weights`. "fault": break a stored item by a fault of `kind`. `pick`: the place of the item, from 0 (first) to
    1 (last).
    """

    do: str
    name: str = ""
    prompt: tuple[Run, ...] = ()
    max_tokens: int = 0
    salt: str = ""
    lora: int = 0
    count: int = 1
    running: bool = False
    connector: bool = False
    weights: int = 0
    kind: str = ""
    pick: float = 0.0

    def as_json(self) -> dict[str, Any]:
        defaults = {name: each.default for name, each in fields_dict(Operation).items()}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Operation:
        prompt = tuple((str(name), int(count)) for name, count in found.get("prompt", ()))
        return cls(**{**found, "prompt": prompt})

    def __str__(self) -> str:
        if self.do != "ask":
            return " ".join(f"{name}={value}" if name != "do" else value for name, value in self.as_json().items())
        runs = " + ".join(f"{name}[:{count}]" for name, count in self.prompt)
        extras = f"{f', salt {self.salt}' if self.salt else ''}{f', adapter {self.lora}' if self.lora else ''}"
        return f"ask {self.name}: {runs}, {self.max_tokens} tokens{extras}"


@frozen
class Schedule:
    """The operations of a trial. `kind`: the kind of the model. `engine`: options of the engines.

    `said`: the answers that later prompts contain, by the name of the request, from an engine without a connector. All
    other tokens of prompts are random, and depend only on `seed` and the name of the document.
    """

    seed: int
    kind: str
    operations: tuple[Operation, ...]
    engine: dict[str, Any] = field(factory=dict)
    said: dict[str, list[int]] = field(factory=dict)

    def tokens(self, prompt: Iterable[Run]) -> list[int]:
        return [token for name, count in prompt for token in self._run(name, count)]

    def _run(self, name: str, count: int) -> list[int]:
        if name in self.said:
            return self.said[name][:count]
        rng = random.Random(f"{self.seed} {name}")
        return [rng.randrange(5, VOCAB) for _ in range(count)]

    @property
    def asked(self) -> list[Operation]:
        return [operation for operation in self.operations if operation.do == "ask"]

    def cut(self, operations: Sequence[Operation]) -> Schedule:
        """Return a schedule with only the given operations, and only the answers that their prompts need."""
        needed = {name for operation in operations for name, _ in operation.prompt}
        said = {name: tokens for name, tokens in self.said.items() if name in needed}
        return evolve(self, operations=tuple(operations), said=said)

    def to_json(self) -> str:
        """Return the schedule as JSON, with one line for each operation."""
        head = {"seed": self.seed, "kind": self.kind, "engine": self.engine, "said": self.said}
        lines = ",\n".join(f"  {json.dumps(operation.as_json())}" for operation in self.operations)
        return f'{json.dumps(head)[:-1]}, "operations": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        found = json.loads(text)
        operations = tuple(map(Operation.from_json, found.pop("operations")))
        return cls(operations=operations, **found)


@define
class _Maker:
    rng: random.Random
    adapters: int
    asked: list[Operation] = field(factory=list)
    documents: int = 0

    def ask(self) -> Operation:
        before = self.rng.choice(self.asked[-_HOT:]) if self.asked and self.rng.random() < 0.8 else None
        salt, lora = (before.salt, before.lora) if before is not None else ("", 0)
        if self.rng.random() < 0.2:
            salt, lora = self.rng.choice(("", "a", "b")), self.rng.randint(0, self.adapters)
        prompt = self._prompt(before)
        made = Operation(
            "ask", f"r{len(self.asked) + 1}", prompt, max_tokens=self.rng.choice(_ANSWERS), salt=salt, lora=lora
        )
        self.asked.append(made)
        return made

    def _prompt(self, before: Operation | None) -> tuple[Run, ...]:
        if before is None:
            number = self.rng.randrange(len(_BEGINNINGS))
            beginning = [(f"b{number}", _BEGINNINGS[number])] if _BEGINNINGS[number] else []
            return (*beginning, self._tail())
        dice = self.rng.random()
        if dice < 0.3:
            return before.prompt
        if dice < 0.65 and _length(before.prompt) + before.max_tokens + max(_TAILS) < LONGEST:
            return (*before.prompt, (before.name, before.max_tokens), self._tail())
        return (*_beginning(before.prompt, self.rng.randint(0, _length(before.prompt))), self._tail())

    def _tail(self) -> Run:
        self.documents += 1
        return f"d{self.documents}", self.rng.choice(_TAILS)


def _length(prompt: Iterable[Run]) -> int:
    return sum(count for _, count in prompt)


def _beginning(prompt: Iterable[Run], tokens: int) -> list[Run]:
    """Return the parts of a prompt that have its first `tokens` tokens; fewer if a new tail would not fit."""
    left, found = min(tokens, LONGEST - max(_TAILS)), []
    for name, count in prompt:
        if left > 0:
            found.append((name, min(count, left)))
            left -= count
    return found


def make(
    seed: int,
    kind: str,
    requests: int,
    engine: dict[str, Any],
    *,
    adapters: int = 0,
    weights: int = 1,
    faults: Sequence[str] = (),
) -> Schedule:
    """Return a random schedule with `requests` requests. Equal arguments make equal schedules."""
    rng = random.Random(f"{seed} {kind}")
    # A generator of its own, so that schedules of older versions stay the same.
    deep = random.Random(f"{seed} {kind} resets")
    maker, operations = _Maker(rng, adapters), list[Operation]()
    lives = sorted(rng.randint(requests // 4, requests) for _ in range(2))
    while len(maker.asked) < requests:
        if lives and len(maker.asked) >= lives[0]:
            lives.pop(0)
            operations.append(Operation("restart", weights=rng.randrange(weights)))
        for _ in range(min(rng.randint(1, _AT_ONCE), requests - len(maker.asked))):
            operations.append(maker.ask())
        operations.append(Operation("step", count=rng.randint(0, 10)))
        if rng.random() < 0.3:
            operations.append(Operation("abort", rng.choice(maker.asked[-_AT_ONCE:]).name))
        if rng.random() < 0.12:
            operations.append(Operation("reset", running=rng.random() < 0.5, connector=deep.random() < 0.2))
        if faults and rng.random() < 0.3:
            operations.append(Operation("fault", kind=rng.choice(faults), pick=round(rng.random(), 3)))
    return Schedule(seed, kind, tuple(operations), engine)


T = TypeVar("T")


def shrink(
    items: Sequence[T],
    fails: Callable[[list[T]], bool],
    *,
    simpler: Callable[[T], Iterable[T]] = lambda item: (),
    over: Callable[[], bool] = lambda: False,
) -> list[T]:
    """Return the items without which the failure does not come, some of them replaced by simpler items.

    `fails(items)`: a function that returns whether a list of items still fails. `simpler(item)`: a function that
    returns simpler items. `over()`: a function that returns whether the time is over.
    """
    found = _without_parts(list(items), fails, over)
    for index in range(len(found)):
        found = _with_simpler(found, index, fails, simpler, over)
    return found


def _without_parts(items: list[T], fails: Callable[[list[T]], bool], over: Callable[[], bool]) -> list[T]:
    size = max(1, len(items) // 2)
    while True:
        start, before = 0, len(items)
        while start < len(items):
            if over():
                return items
            rest = items[:start] + items[start + size :]
            if rest and fails(rest):
                items = rest
            else:
                start += size
        if size == 1 and len(items) == before:
            return items
        size = max(1, size // 2)


def _with_simpler(
    items: list[T],
    index: int,
    fails: Callable[[list[T]], bool],
    simpler: Callable[[T], Iterable[T]],
    over: Callable[[], bool],
) -> list[T]:
    """Return the items, with the item at `index` replaced by the simplest item with which the list still fails."""
    again = True
    while again:
        again = False
        for candidate in simpler(items[index]):
            if over():
                return items
            changed = [*items[:index], candidate, *items[index + 1 :]]
            if fails(changed):
                items, again = changed, True
                break
    return items


def simpler(operation: Operation) -> Iterator[Operation]:
    """Yield operations that are simpler than `operation` in one field each."""
    if operation.salt:
        yield evolve(operation, salt="")
    if operation.lora:
        yield evolve(operation, lora=0)
    if operation.max_tokens > 1:
        yield evolve(operation, max_tokens=1)
    if len(operation.prompt) > 1:
        yield evolve(operation, prompt=operation.prompt[:-1])
        yield evolve(operation, prompt=operation.prompt[1:])
    if operation.running:
        yield evolve(operation, running=False)
    if operation.connector:
        yield evolve(operation, connector=False)
    if operation.weights:
        yield evolve(operation, weights=0)
    if operation.do == "step" and operation.count > 1:
        yield evolve(operation, count=1)
