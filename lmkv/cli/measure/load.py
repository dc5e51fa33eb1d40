"""Conversations under load, of which host memory takes a part: vLLM alone, and with lmkv."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from attrs import evolve

from lmkv.cli.measure.conversations import Engine, Load, Round, host_gib, spec
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.timing import percentile, turns

LOAD, QUICK = Load(users=32, turns=5), Load(users=8, turns=3)
ROUNDS = 3
ALONE = "vLLM alone"
OVER = {"lmkv, RAM for half": 2, "lmkv, RAM for an eighth": 8}
"""How many times more memory all conversations take than lmkv has."""


def measure_load(*, quick: bool, say: Callable[[str], None]) -> Iterator[Comparison]:
    """Throughput and times to first token of a small model, beside vLLM alone with its prefix cache.

    All engines run at once, each in processes of its own, and are asked in turn, with new conversations in each round.
    """
    load, rounds = (QUICK, 1) if quick else (LOAD, ROUNDS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-bench-")))
        engines = dict[str, Engine]()
        for name, over in {ALONE: None, **OVER}.items():
            say(f"vLLM: conversations of {load.users} users, {name}")
            settings = None if over is None else {"max_local_cpu_size": host_gib(load, over)}
            engine = Engine(spec(load, settings), folder / str(len(engines)))
            engines[name] = stack.enter_context(closing(engine))
            # Only the first long prompts allocate buffers and load kernels.
            engine.run(evolve(load, users=8), -1)
        talks = in_turn(engines, load, rounds)
        half = next(iter(OVER))
        new = in_turn({name: engines[name] for name in (ALONE, half)}, evolve(load, new=True), rounds)
        for engine in engines.values():
            engine.leave()
    said = [[one.answers for one in of] for of in talks.values()]
    note = "all answers are equal" if all(each == said[0] for each in said) else "SOME ANSWERS DIFFER"
    yield Comparison("Conversations", "requests/s", throughputs(talks), ALONE, note=note)
    for share in (0.5, 0.9):
        bars = {name: percentile([ttft for one in of for ttft in one.ttfts], share) for name, of in talks.items()}
        yield Comparison(f"Conversations, first token, p{share * 100:.0f}", "s", bars, ALONE)
    yield Comparison("Prompts that are all new", "requests/s", throughputs(new), ALONE)


def in_turn(engines: Mapping[str, Engine], load: Load, rounds: int) -> dict[str, list[Round]]:
    """The rounds of each engine."""
    found: dict[str, list[Round]] = {name: [] for name in engines}
    for number, name in turns(engines, rounds):
        found[name].append(engines[name].run(load, number))
    return found


def throughputs(found: Mapping[str, list[Round]]) -> dict[str, float]:
    """Requests a second of each engine, all rounds together."""
    return {name: sum(len(one.answers) for one in of) / sum(one.seconds for one in of) for name, of in found.items()}
