"""Conversations under load, of which host memory takes a part: vLLM alone, and with lmkv."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from attrs import evolve

from lmkv.cli.measure.conversations import (
    Engine,
    Load,
    Round,
    first_tokens,
    host_gib,
    is_skipped,
    rounds_that_differ,
    skipped,
    spec,
)
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import percentile, turns

LOAD, QUICK = Load(users=32, turns=5), Load(users=8, turns=3)
ROUNDS = 3
ALONE, HALF, EIGHTH = "vLLM alone", "lmkv, RAM for half", "lmkv, RAM for an eighth"
OVER = {HALF: 2, EIGHTH: 8}
"""How many times more memory all conversations take than lmkv has."""
NEW_TARGET = 0.995
"""Least share of vLLM's throughput where nothing is asked again."""
Found = Mapping[str, list[Round]]


def measure_load(*, quick: bool, say: Callable[[str], None]) -> Iterator[Comparison]:
    """Throughput, hits and times to first token of a small model, beside vLLM alone with its prefix cache.

    All engines run at once, each in processes of its own, and are asked in turn, with new conversations in each round.
    Two equal engines may be a tenth apart: so those with lmkv are asked once more, with requests that lmkv neither
    stores nor loads, and compared with themselves.
    """
    load, rounds, names = (QUICK, 1, (ALONE, HALF)) if quick else (LOAD, ROUNDS, (ALONE, HALF, EIGHTH))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-bench-")))
        engines = dict[str, Engine]()
        try:
            for name in names:
                say(f"vLLM: conversations of {load.users} users, {name}")
                settings = {"max_local_cpu_size": host_gib(load, OVER[name])} if name in OVER else None
                engine = Engine(spec(load, settings), folder / str(len(engines)))
                engines[name] = stack.enter_context(closing(engine))
                # Only the first long prompts allocate buffers and load kernels, and memory is full after them.
                engine.run(load, -1)
            talks = in_turn(engines, load, rounds)
            new = in_turn({name: engines[name] for name in (ALONE, HALF)}, evolve(load, new=True), rounds)
        except BaseException:
            for engine in engines.values():
                engine.kill()
            raise
        for engine in engines.values():
            engine.leave()
    yield from throughputs("Conversations", talks, 1.0)
    hits = {name: 100 * sum(one.cached for one in found) / rounds / load.prompt_tokens for name, found in talks.items()}
    yield Comparison("Conversations, prompt tokens not computed", "%", hits, ALONE)
    for share in (0.5, 0.9, 0.99):
        bars = {name: percentile(first_tokens(found), share) for name, found in talks.items()}
        yield Comparison(f"Conversations, first token, p{share * 100:.0f}", "s", bars, ALONE)
    yield from throughputs("Prompts that are all new", new, NEW_TARGET)


def in_turn(engines: Mapping[str, Engine], load: Load, rounds: int) -> Found:
    """The rounds of each engine, by name, and of those with lmkv once more, with requests that it skips."""
    asked = {name: (engine, load) for name, engine in engines.items()}
    asked |= {skipped(name): (engines[name], evolve(load, skipped=True)) for name in engines if name in OVER}
    found: dict[str, list[Round]] = {name: [] for name in asked}
    for number, name in turns(asked, rounds):
        engine, load = asked[name]
        found[name].append(engine.run(load, number))
    return found


def speeds(rounds: Sequence[Round]) -> list[float]:
    """Requests per second of each round."""
    return [len(one.answers) / one.seconds for one in rounds]


def throughputs(title: str, found: Found, target: float) -> Iterator[Comparison]:
    """All engines beside vLLM alone, and each with lmkv beside itself, which is what has a target."""
    unit, shown = "requests/s", {name: speeds(rounds) for name, rounds in found.items() if not is_skipped(name)}
    yield Comparison.of_rounds(title, unit, shown, ALONE, {}, note=answers(found))
    for name in (name for name in shown if name in OVER):
        itself = skipped(name)
        both = {itself: speeds(found[itself]), name: shown[name]}
        title_of_both = f"{title}, {name.removeprefix('lmkv, ')}"
        yield Comparison.of_rounds(title_of_both, unit, both, itself, {name: target})


def answers(found: Found) -> str:
    """Whether all engines gave the same answers; if not, which gave other ones than vLLM alone."""
    wrong = [
        f"{name}, round {number}: {which}"
        for name, rounds in found.items()
        if not is_skipped(name)
        for number, which in rounds_that_differ(rounds, found[ALONE])
    ]
    return "ANSWERS DIFFER (user-turn): " + "; ".join(wrong) if wrong else "all answers are equal"
