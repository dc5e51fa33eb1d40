"""Runs a schedule on engines, one after the other, and compares every answer. Hooks can take part in a trial."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from attrs import define, field

from kv_connector_torture.checks import Answer, Answers, Prefixes, Problem, by_weights, key_of, leak, untrue
from kv_connector_torture.engine import Engine
from kv_connector_torture.schedule import Operation, Schedule
from kv_connector_torture.storage import Storage

_AT_ONCE = 12


@define
class _Asked:
    operation: Operation
    tokens: list[int]
    expected: Answer
    since: float


class Hooks:
    """Hooks that take part in a trial: a context manager of `--around` may return a subclass. These hooks do nothing.

    `counts`: counts of events by name, which are added to the trial's counts. If a count is 0 after all trials, the run
    fails, because the counted event was not tested.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def begins(self, schedule: Schedule, folder: Path) -> None:
        """Called when a trial begins. `folder`: the folder of the connector's files, which replaces `{folder}`."""

    def started(self, engine: Engine) -> None:
        """Called when an engine has started: the first engine of a trial, or a later engine over the same storage."""

    def transfer(self, name: str, tokens: Sequence[int]) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` for the request called `name`, or None. `tokens`: the prompt."""
        return None

    def strike(self) -> None:
        """Break something, or do nothing. Called before each step."""

    def aborts(self, names: Iterable[str]) -> Iterable[str]:
        """Return the names of the running requests to abort now."""
        return ()

    def alarm(self) -> str:
        """Return a text about a failed check of the hooks, or "". Called after each step."""
        return ""

    def left(self) -> str:
        """Return a text about leaks, or "". When no request is left, `left` is called again and again, with steps in
        between, until it returns "".
        """
        return ""

    def ended(self) -> str:
        """Return a text about leaks, or "". Called once, after the engine has ended."""
        return ""


@define
class Execution:
    """Runs one schedule. `engine_of`: a function that makes an engine, given the id of the weights. `patience`: seconds
    after which a wait counts as a hang.

    `run` ends at the first problem, and returns this problem. `reached`: a function that is called with the index of
    each operation before the operation.
    """

    schedule: Schedule
    answers: Answers
    engine_of: Callable[[int], AbstractContextManager[Engine]]
    adapters: Sequence[Path]
    storage: Storage
    patience: float
    alive: Callable[[], None]
    reached: Callable[[int], None]
    hooks: Sequence[Hooks] = ()
    counts: Counter[str] = field(factory=Counter)
    _prefixes: Prefixes = field(factory=Prefixes)
    _asked: dict[str, _Asked] = field(factory=dict)
    _held: dict[str, float] = field(factory=dict)
    _weights: int = 0
    _next: int = 0

    def run(self) -> Problem | None:
        for hooks in self.hooks:
            hooks.begins(self.schedule, self.storage.folder)
        try:
            return self._run()
        finally:
            for hooks in self.hooks:
                self.counts.update(hooks.counts)

    def _run(self) -> Problem | None:
        for number, (weights, life) in enumerate(by_weights(self.schedule.operations)):
            self._weights = weights
            if number:
                self.counts["restarts"] += 1
                self._reach_next()
            with self.engine_of(self._weights) as engine:
                for hooks in self.hooks:
                    hooks.started(engine)
                problem = self._live(engine, life)
                self.counts.update(engine.all_counts())
            if problem is None and (left := "; ".join(filter(None, [hooks.ended() for hooks in self.hooks]))):
                problem = Problem("leak", left)
            if problem is not None:
                return problem
        return None

    def _reach_next(self) -> None:
        self.reached(self._next)
        self._next += 1

    def _live(self, engine: Engine, life: list[Operation]) -> Problem | None:
        for operation in life:
            self._reach_next()
            problem = self._do(engine, operation)
            if problem is not None:
                return problem
        problem = self._finish(engine, 0)
        return problem or leak(lambda: self._left(engine), self.patience, lambda: self._tick(engine)) or self._alarm()

    def _left(self, engine: Engine) -> str:
        return "; ".join(filter(None, [engine.left(), *(hooks.left() for hooks in self.hooks)]))

    def _do(self, engine: Engine, operation: Operation) -> Problem | None:
        match operation.do:
            case "ask":
                problem = self._finish(engine, _AT_ONCE - 1)
                self._ask(engine, operation)
                return problem
            case "step" if operation.count == 0:
                return self._finish(engine, 0)
            case "step":
                return next(filter(None, (self._step(engine) for _ in range(operation.count))), None)
            case "abort":
                self._abort(engine, operation.name)
            case "reset":
                self.counts["resets"] += 1
                engine.reset(running=operation.running, connector=operation.connector)
            case "fault":
                self.counts["faults"] += self.storage.strike(operation.kind, operation.pick)
            case unknown:
                raise ValueError(f"a schedule has the operation {unknown!r}")
        return None

    def _ask(self, engine: Engine, operation: Operation) -> None:
        key = key_of(self.schedule, operation, self._weights)
        tokens = list(key.tokens)
        adapter = self.adapters[operation.lora - 1] if operation.lora else None
        given = [params for hooks in self.hooks if (params := hooks.transfer(operation.name, tokens))]
        transfer = {name: value for params in given for name, value in params.items()} or None
        more: dict[str, Any] = {"salt": operation.salt, "adapter": adapter, "transfer": transfer}
        engine.ask(operation.name, tokens, operation.max_tokens, **more)
        self._asked[operation.name] = _Asked(operation, tokens, self.answers[key], time.monotonic())

    def _abort(self, engine: Engine, name: str) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None:
            self.counts["aborts"] += 1
            engine.abort(name)
            # Any part of it may have been computed, and stored.
            self._prefixes.add(self._scope(asked), asked.tokens + asked.expected.tokens)

    def _finish(self, engine: Engine, left: int) -> Problem | None:
        """Run steps until at most `left` requests are left, or until a problem comes."""
        problem = None
        while len(self._asked) > left and problem is None:
            problem = self._step(engine)
        return problem

    def _step(self, engine: Engine) -> Problem | None:
        if not self._asked:
            return None
        if not engine.scheduler.running:
            time.sleep(0.0005)  # A connector's threads want to get on, too.
        for hooks in self.hooks:
            for name in list(hooks.aborts(list(self._asked))):
                self._abort(engine, name)
            hooks.strike()
        outputs = engine.step()
        self.counts["steps"] += 1
        self.alive()
        problems = [self._check(output) for output in outputs if output.request_id in self._asked]
        return next(filter(None, [*problems, self._alarm(), self._stuck(engine)]), None)

    def _alarm(self) -> Problem | None:
        found = "; ".join(filter(None, [hooks.alarm() for hooks in self.hooks]))
        return Problem("alarm", found) if found else None

    def _stuck(self, engine: Engine) -> Problem | None:
        """Return a problem if a request has not ended within `patience` seconds. The problem is a leak if ended
        requests have held blocks for the same time, because the request may wait for these blocks. Otherwise it is a
        hang.
        """
        now = time.monotonic()
        self._held = {name: self._held.get(name, now) for name in engine.held()}
        oldest = min(self._held.values(), default=now)
        for name, asked in self._asked.items():
            if now - asked.since > self.patience:
                text = f"request {name} has not ended after {self.patience:.0f} s"
                if not self._held:
                    return Problem("hang", text, name)
                if now - oldest > self.patience:
                    ended = f"{len(self._held)} that have ended hold blocks, one for {now - oldest:.0f} s"
                    return Problem("leak", f"{text}, and {ended}", name)
        return None

    def _tick(self, engine: Engine) -> None:
        """Run one step of an engine that has no requests."""
        engine.step()
        self.alive()

    def _scope(self, asked: _Asked) -> tuple[str, int, int]:
        return asked.operation.salt, asked.operation.lora, self._weights

    def _check(self, output: Any) -> Problem | None:
        asked = self._asked.pop(output.request_id)
        self.counts["requests"] += 1
        given, cached = Answer.of(output), int(output.num_cached_tokens or 0)
        self.counts["cached_tokens"] += cached
        scope, others = self._scope(asked), self._others(asked)
        self._prefixes.add(scope, asked.tokens + given.tokens)
        where = f"request {asked.operation.name}, {len(asked.tokens)} tokens, {cached} of them cached"
        difference, why = asked.expected.differs(given), untrue(cached, len(asked.tokens), others)
        texts, more = [where, *filter(None, [why])], tuple[Any, ...]()
        if difference is not None:
            position, how = difference
            texts.append(f"token {position} of the answer differs: {how}")
            more = (asked.expected.tokens, given.tokens, position)
        # A hit that cannot be is why an answer differs.
        kind = "truthfulness" if why else "difference" if difference else None
        return Problem(kind, ": ".join(texts), asked.operation.name, *more) if kind else None

    def _others(self, asked: _Asked) -> int:
        """Return the length of the longest prefix that the request shares with an earlier or running request."""
        scope = self._scope(asked)
        running = Prefixes()
        for other in self._asked.values():
            running.add(self._scope(other), other.tokens + other.expected.tokens)
        return max(each.longest(scope, asked.tokens) for each in (self._prefixes, running))
