"""Users who talk with one vLLM engine: their words, their order, and the process of the engine.

`python -m lmkv.cli.measure.conversations FOLDER` is such a process. It takes lines of JSON: an engine's specification
first, then loads.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from lmkv.cli.measure.process import ChildProcess, Questions
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import SEVERAL_PROCESSES, SHARED_DEVICE, VOCABULARY, EngineSpec, leave, open_engine

MODEL = SmallModel(layers=4, hidden=256)
KV_SPACE = 3
"""Conversations of full length that vLLM's KV space takes."""
AT_ONCE = 4
"""Requests in flight: the next turn is sent as soon as one is answered."""
PACES = 4.0
"""How many times longer the slowest user thinks than the fastest."""
SKIPPED = {"lmkv.skip_save": True, "lmkv.skip_load": True}
"""Parameters with which the connector neither stores nor loads a request."""
_SKIPPED = ", neither storing nor loading"


@frozen(kw_only=True)
class Load:
    """Users who each send so many turns: a question of so many tokens, answered with so many.

    `new`: nothing is said again, every prompt is as long as in the conversation, and new. `skipped`: requests have the
    connector neither store nor load, and say something else, in the same order.
    """

    users: int
    turns: int
    question: int = 250
    answer: int = 10
    new: bool = False
    skipped: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a conversation of full length."""
        return self.turns * (self.question + self.answer)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return self.users * sum(self.question + turn * (self.question + self.answer) for turn in range(self.turns))

    def order(self, number: int) -> list[int]:
        """Who speaks, in the round of this number.

        Before each turn a user thinks for a random, exponentially distributed time; some users think longer.
        """
        chance = random.Random(f"order {number}")
        due = []
        for user in range(self.users):
            pace, now = PACES ** chance.random(), 0.0
            for _ in range(self.turns):
                now += chance.expovariate(1 / pace)
                due.append((now, user))
        return [user for _, user in sorted(due)]

    def prompt(self, number: int, user: int, before: Sequence[int], turn: int) -> list[int]:
        """The prompt of a user's turn, which follows his conversation so far, in the round of this number."""
        said = [] if self.new else list(before)
        seed = f"{number} {user} {turn}{' skipped' * self.skipped}{' new' * self.new}"
        fresh = random.Random(seed).choices(range(VOCABULARY), k=len(before) + self.question)
        return said + fresh[len(said) :]


@frozen(kw_only=True)
class Round:
    """One round of one engine. `cached`: prompt tokens that were not computed. `answers`: by user and turn.

    `cpu`: seconds of CPU time of all the engine's processes.
    """

    seconds: float
    cpu: float = 0.0
    ttfts: list[float]
    cached: int
    answers: dict[str, list[int]] = field(repr=False)


def first_tokens(rounds: Sequence[Round]) -> list[float]:
    """Seconds to the first token of all requests of all rounds."""
    return [ttft for one in rounds for ttft in one.ttfts]


def skipped(name: str) -> str:
    """The name of rounds of the engine `name` whose requests its connector neither stores nor loads."""
    return name + _SKIPPED


def is_skipped(name: str) -> bool:
    return name.endswith(_SKIPPED)


def differing(one: Round, other: Round) -> list[str]:
    """User and turn of each answer that is another one in the other engine's round."""
    return [which for which, answer in one.answers.items() if answer != other.answers[which]]


def rounds_that_differ(rounds: Sequence[Round], others: Sequence[Round]) -> Iterator[tuple[int, str]]:
    """Number of each round with answers that the other engine did not give, and which: user-turn."""
    for number, (one, other) in enumerate(zip(rounds, others, strict=True)):
        if wrong := differing(one, other):
            yield number, ", ".join(wrong)


class Engine(ChildProcess):
    """An engine in processes of its own, which run `program`.

    `python`: an interpreter of an environment with vLLM and the other imports of this module. `env`: variables beside
    those of this process. Raises ChildFailedError.
    """

    program: Sequence[str] = ("-m", __name__)

    def __init__(
        self, spec: EngineSpec, folder: Path, env: Mapping[str, str] | None = None, *, python: str = sys.executable
    ) -> None:
        # -P: nothing in the current folder is meant to be imported.
        super().__init__([python, "-P", *self.program, str(folder)], folder, {**SEVERAL_PROCESSES, **(env or {})})
        try:
            self.ask(asdict(spec))
        except BaseException:
            self.kill()
            self.close()
            raise

    def run(self, load: Load, number: int) -> Round:
        """Run the load with conversations of this number, which no other number shares."""
        before = cpu_seconds(self._child.pid)
        found: dict[str, Any] = self.ask([asdict(load), number])
        return Round(**{**found, "cpu": cpu_seconds(self._child.pid) - before})


def cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            values = stat.read_text().rpartition(")")[2].split()
            ticks += int(values[11]) + int(values[12]) if int(values[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def host_gib(load: Load, over: float) -> float:
    """Memory that all conversations, at full length, oversubscribe so many times."""
    return load.users * load.tokens * MODEL.kv_bytes_per_token / over / 2**30


def spec(load: Load, settings: dict[str, Any] | None = None) -> EngineSpec:
    """An engine with prefix caching, and room for few conversations. `settings`: of a connector, if it has one."""
    return EngineSpec(
        model=MODEL,
        max_tokens=load.tokens + 16,
        kv_bytes=int(KV_SPACE * (load.tokens + 64) * MODEL.kv_bytes_per_token),
        prefix_caching=True,
        settings=settings,
        options=SHARED_DEVICE,
    )


# -- in the child -----------------------------------------------------------------------------------------


def run(engine: Any, load: Load, number: int) -> Round:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=load.answer, ignore_eos=True, detokenize=False)
    if load.skipped:
        params.extra_args = {"kv_transfer_params": SKIPPED}
    talks: list[list[int]] = [[] for _ in range(load.users)]
    answers: dict[str, list[int]] = {}
    ttfts: list[float] = []
    cached, waiting = 0, load.order(number)
    turn, busy = [0] * load.users, set[int]()

    def send() -> None:
        """Send the next turns of the order whose users have got the answer before."""
        while len(busy) < AT_ONCE:
            user = next((user for user in waiting if user not in busy), None)
            if user is None:
                return
            waiting.remove(user)
            busy.add(user)
            talks[user] = load.prompt(number, user, talks[user], turn[user])
            engine.add_request(f"{user}-{turn[user]}", {"prompt_token_ids": list(talks[user])}, params)

    started = time.perf_counter()
    send()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            user = int(output.request_id.split("-")[0])
            answers[output.request_id] = list(output.outputs[0].token_ids)
            talks[user] += answers[output.request_id]
            ttfts.append(output.metrics.first_token_latency)
            cached += output.num_cached_tokens or 0
            turn[user] += 1
            busy.remove(user)
        send()
    return Round(seconds=time.perf_counter() - started, ttfts=ttfts, cached=cached, answers=answers)


def main() -> None:
    questions = Questions()  # before vLLM prints anything
    llm = open_engine(EngineSpec(**next(questions)), Path(sys.argv[1]))
    questions.answer("ready")
    for load, number in questions:
        questions.answer(asdict(run(llm.llm_engine, Load(**load), number)))
    leave(llm)


if __name__ == "__main__":
    main()
