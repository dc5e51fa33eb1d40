"""Users who talk with one vLLM engine: the users' words, the order in which they speak, and the process of the engine.

`python -m benchmarks.users FOLDER` runs the process of an engine. If the variable BENCHMARK_CLOCKS is set, the process
measures the time within lmkv.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from lmkv.cli.engines import SHARED_DEVICE, VOCABULARY, EngineProcess, EngineSpec, serve
from lmkv.cli.small_model import SmallModel

MODEL = SmallModel(layers=4, hidden=256)
KV_SPACE = 3
"""Number of conversations of full length that fit into vLLM's KV space."""
PACES = 4.0
"""Ratio of the thinking times of the slowest and the fastest user."""
SKIPPED = {"lmkv.skip_save": True, "lmkv.skip_load": True}
"""Options of requests that the connector neither stores nor loads."""
CLOCKS = {"BENCHMARK_CLOCKS": "1"}
_SKIPPED = ", neither storing nor loading"


@frozen(kw_only=True)
class Load:
    """Users who each send `turns` prompts. A prompt has a new question of `question` tokens, and its answer has
    `answer` tokens.

    `thinking`: number of tokens before each answer. `stripped`: whether the next prompt leaves out the thinking tokens.
    `at_once`: number of requests in flight.

    `new`: whether all prompts are new, with the same lengths as in a conversation. `pool`: number of different prompts,
    one of which is each prompt, without a conversation; 0 for conversations. `skipped`: whether the connector neither
    stores nor loads the requests. The order stays the same, but the words differ.
    """

    users: int
    turns: int
    question: int = 250
    thinking: int = 0
    answer: int = 10
    at_once: int = 4
    stripped: bool = False
    new: bool = False
    pool: int = 0
    skipped: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens of a conversation of full length."""
        return self.turns * (self.question + self.answer + (not self.stripped) * self.thinking) + self.thinking

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts together."""
        each = 0 if self.pool else self.question + self.answer + (not self.stripped) * self.thinking
        return self.users * sum(self.question + turn * each for turn in range(self.turns))

    def order(self, number: int) -> list[int]:
        """Return the users in the order in which they speak in round `number`.

        Before each turn a user thinks for a random, exponentially distributed time. Some users think longer.
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
        """Return the prompt of a user's turn in round `number`, which continues the conversation `before`."""
        if self.pool:
            which = (number * self.users * self.turns + turn * self.users + user) % self.pool
            return random.Random(f"pool {which}").choices(range(VOCABULARY), k=self.question)
        said = [] if self.new else list(before)
        seed = f"{number} {user} {turn}{' skipped' * self.skipped}{' new' * self.new}"
        fresh = random.Random(seed).choices(range(VOCABULARY), k=len(before) + self.question)
        return said + fresh[len(said) :]


@frozen(kw_only=True)
class Round:
    """One round of one engine. `cached`: number of prompt tokens that were not computed. `answers`: token ids by user
    and turn.

    `cpu`: CPU seconds of all processes of the engine. `within`: seconds within parts of lmkv. `stored`: number of
    stored chunks so far, if the engine core is in the process that answers.
    """

    seconds: float
    cpu: float = 0.0
    ttfts: list[float]
    cached: int
    answers: dict[str, list[int]] = field(repr=False)
    within: dict[str, float] = field(factory=dict)
    stored: int = 0


def skipped(name: str) -> str:
    """Return the name for rounds of the engine `name` with requests that its connector neither stores nor loads."""
    return name + _SKIPPED


def is_skipped(name: str) -> bool:
    return name.endswith(_SKIPPED)


def differing(one: Round, other: Round) -> list[str]:
    """Return the user and turn of each answer that differs between the two rounds."""
    return [which for which, answer in one.answers.items() if answer != other.answers[which]]


class Users(EngineProcess):
    """An engine in separate processes, with which users talk."""

    module = "benchmarks.users"

    def run(self, load: Load, number: int) -> Round:
        """Run the load with the conversations of round `number`, which no other round has."""
        before = cpu_seconds(self._child.pid)
        found: dict[str, Any] = self.ask([asdict(load), number])
        return Round(**{**found, "cpu": cpu_seconds(self._child.pid) - before})


def cpu_seconds(session: int) -> float:
    """Return the CPU seconds of all processes of a session so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            values = stat.read_text().rpartition(")")[2].split()
            ticks += int(values[11]) + int(values[12]) if int(values[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def host_gib(load: Load, over: float) -> float:
    """Return the GiB of memory of which all conversations, at full length, take `over` times as much."""
    return load.users * load.tokens * MODEL.kv_bytes_per_token / over / 2**30


def spec(load: Load, settings: Mapping[str, Any] | None = None) -> EngineSpec:
    """Return an engine with prefix caching and space for few conversations. `settings`: the settings of lmkv's
    connector, or None without a connector.
    """
    return EngineSpec(
        model=MODEL,
        max_tokens=load.tokens + 16,
        kv_bytes=int(KV_SPACE * (load.tokens + 64) * MODEL.kv_bytes_per_token),
        prefix_caching=True,
        settings=settings,
        options=SHARED_DEVICE,
    )


# -- in the child -----------------------------------------------------------------------------------------


class Clock:
    """The seconds that the creating thread spends within methods of classes. A method that another one calls is not
    counted again.
    """

    def __init__(self, *owners: type) -> None:
        self.seconds = 0.0
        self._within = False
        self._thread = threading.get_ident()
        for owner in owners:
            for name, method in list(vars(owner).items()):
                if inspect.isfunction(method):
                    setattr(owner, name, self._clocked(method))

    def _clocked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._within or threading.get_ident() != self._thread:
                return method(*args, **kwargs)
            self._within, started = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self._within = False

        return call


def clocks() -> dict[str, Clock]:
    """Return clocks for the connector's methods, for copies within these methods, and for metrics on vLLM's thread."""
    from lmkv.memory.copiers import CPUCopier
    from lmkv.vllm.connector import LMKVConnector
    from lmkv.vllm.publishing import LMKVPromMetrics, LMKVStats
    from lmkv.vllm.scheduler.telemetry import Samples, Telemetry

    metrics = Clock(Samples, Telemetry, LMKVStats, LMKVPromMetrics)
    return {"connector": Clock(LMKVConnector), "copies": Clock(CPUCopier), "metrics": metrics}


def run(llm: Any, load: Load, number: int, clocks: Mapping[str, Clock]) -> Round:
    from vllm import SamplingParams

    engine, length = llm.llm_engine, load.thinking + load.answer
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    if load.skipped:
        params.extra_args = {"kv_transfer_params": SKIPPED}
    talks: list[list[int]] = [[] for _ in range(load.users)]
    answers: dict[str, list[int]] = {}
    ttfts: list[float] = []
    cached, waiting = 0, load.order(number)
    turn, busy = [0] * load.users, set[int]()
    before = {part: clock.seconds for part, clock in clocks.items()}

    def send() -> None:
        """Send the next turns in the order, for users who have got the answer to their previous turn."""
        while len(busy) < load.at_once:
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
            talks[user] += answers[output.request_id][load.thinking * load.stripped :]
            ttfts.append(output.metrics.first_token_latency)
            cached += output.num_cached_tokens or 0
            turn[user] += 1
            busy.remove(user)
        send()
    seconds = time.perf_counter() - started
    within = {part: clock.seconds - before[part] for part, clock in clocks.items()}
    found = {"ttfts": ttfts, "cached": cached, "answers": answers, "within": within, "stored": stored(engine)}
    return Round(seconds=seconds, **found)


def stored(engine: Any) -> int:
    """Return the number of chunks that were stored in host memory, including evicted chunks; 0 without lmkv in this
    process.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    side = getattr(core and core.scheduler.connector, "_scheduler", None)
    if side is None:
        return 0
    stats = side.store.stats().primary
    return int(stats.chunks + stats.evictions)


def main() -> None:
    found: dict[str, Clock] = {}

    def prepare() -> None:
        if "BENCHMARK_CLOCKS" in os.environ:
            found.update(clocks())

    serve(lambda llm, asked: asdict(run(llm, Load(**asked[0]), asked[1], found)), prepare)


if __name__ == "__main__":
    main()
