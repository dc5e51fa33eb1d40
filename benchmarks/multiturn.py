"""Users who talk for several turns: vLLM alone, with lmkv and with LMCache, where no memory takes all conversations.

    python benchmarks/multiturn.py [--users 32] [--turns 5] [--rounds 6] [--over 2,8] [--lmcache PYTHON]
                                   [--policies LRU,ADAPTIVE] [--disk FOLDER] [--quick] [--json]
                                   [--picture docs/multiturn.svg]
    python benchmarks/multiturn.py --new [--rounds 15]
    python benchmarks/multiturn.py --pairs [--rounds 15]
    python benchmarks/multiturn.py --audits 0.1
    python benchmarks/multiturn.py --drawn-from turns.json --picture docs/multiturn.svg

Each user sends a prompt, waits for the answer, thinks, and sends it all again with the next question behind it. Four
requests are in flight at any time. Who speaks next follows from random thinking times, longer for some users: nobody
talks in a fixed circle, and with one LRU would have nothing for anyone. vLLM's own prefix cache is on in every engine,
and its KV space takes three conversations of full length. `--over`: how many times more memory all conversations take
at full length than lmkv has, and LMCache's server; with `--disk` another engine has a disk below that. With
`--lmcache`, the interpreter of an environment that has vLLM, LMCache and what lmkv needs, LMCacheMPConnector takes part
by its fastest route. All engines run at once, each in processes of its own, and are asked in turn, in shuffled order,
with new conversations in each round. Throughputs are compared within a round, times to first token over all rounds.
In float32, so that answers should be equal: the last row of an engine says how many are.

A second vLLM alone shows how far two equal engines are apart. vLLM also takes part with a connector that only copies
the blocks that are full, and finds nothing, into as much memory as lmkv has where it has least: copies alone cost so
much. Rows of ", neither storing nor loading" are of the same engine, whose connector skips all requests.

`--new`: no prompt begins like another one, so that nothing can hit, and lmkv evicts all the time; another connector
does nothing at all. `--audits`: lmkv with and without audits of this share of the hits. An audit costs the same
whatever the rate is, so a higher rate shows the cost of a lower one, less its noise. Two engines differ by more than a
connector costs. Therefore `--pairs` compares engines with themselves: pairs of small batches of new prompts, one of
which the connector stores and one that it skips, in random order right after each other. vLLM alone, where both are the
same, shows what is left of noise. lmkv hashes and looks at requests that it skips, too: that cost is on both sides.
The picture needs matplotlib (`pip install "lmkv[plot]"`).
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

from attrs import evolve

from benchmarks._lmcache_server import ENVIRONMENT, Server
from benchmarks._timing import REPOSITORY, Row, arguments_of, finish, interval, machine, percentile, sure_within, turns
from lmkv.cli.measure.conversations import (
    AT_ONCE,
    Engine,
    Load,
    Round,
    differing,
    first_tokens,
    host_gib,
    is_skipped,
    rounds_that_differ,
    skipped,
    spec,
)
from lmkv.cli.measure.load import ALONE, NEW_TARGET
from lmkv.cli.measure.process import LOG
from lmkv.cli.measure.report import Comparison, draw

TITLE = "Conversations"
AGAIN, AUDITED = "vLLM alone, again", "lmkv, audited"
IDLE, COPYING = "vLLM, connector that does nothing", "vLLM, connector that only copies"
BOUNDS = {IDLE: "IdleConnector", COPYING: "CopyingConnector"}
ROUTE = "LMCache, shared memory"
AUDIT_TARGET_RATE, AUDIT_TARGET = 0.01, 0.015
"""Share of the throughput that audits of so many hits may cost."""
PAIRS = 20
"""Pairs of batches of an engine in each round."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Found = Mapping[str, list[Round]]
Pairs = Mapping[str, list[tuple[float, float]]]
"""Each engine's pairs: the seconds of a batch that its connector stores, and those of a batch that it skips."""


class Engines:
    """Engines that run at once, each in a folder of its own, and LMCache's servers."""

    def __init__(self, load: Load, root: Path, stack: ExitStack) -> None:
        self._load, self._root, self._stack = load, root, stack
        self._engines: dict[str, Engine] = {}
        self._skipped: set[str] = set()
        self._logs: dict[str, Path] = {}

    def add(self, name: str, over: float | None = None, **settings: Any) -> None:
        """vLLM alone, or with lmkv that has so much host memory."""
        host = {} if over is None else {"max_local_cpu_size": host_gib(self._load, over), **settings}
        self._start(name, spec(self._load, host or None), sys.executable, {})

    def add_bound(self, name: str, over: float) -> None:
        """vLLM with a connector that does nothing, or with one that copies into as much memory as lmkv has."""
        settings = {"copied_tokens": int(self._load.users * self._load.tokens / over)}
        plain = spec(self._load, settings)
        bound = evolve(plain, connector=BOUNDS[name], connector_module="benchmarks._bound_connectors")
        self._start(name, bound, sys.executable, {})

    def add_skipped(self, name: str) -> None:
        """The same engine once more, with requests that its connector neither stores nor loads."""
        self._engines[skipped(name)] = self._engines[name]
        self._skipped.add(skipped(name))

    def add_disk(self, name: str, over: float, parent: Path) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-turns-", dir=parent))
        size = {"max_local_disk_size": 2 * host_gib(self._load, 1) + 1, "disk_min_free": 0.0}
        self.add(name, over, local_disk=folder, **size)

    def add_lmcache(self, name: str, over: float, python: str) -> None:
        log = self._root / f"server-{len(self._engines)}.log"
        server = self._stack.enter_context(closing(Server(python, host_gib(self._load, over), log)))
        self._start(name, server.spec(ROUTE, spec(self._load)), python, ENVIRONMENT)

    def _start(self, name: str, what: Any, python: str, env: dict[str, str]) -> None:
        folder = self._root / str(len(self._engines))
        engine = Engine(what, folder, {"LMKV_LOG_LEVEL": "WARNING", **REPOSITORY, **env}, python=python)
        self._logs[name] = folder / LOG
        self._engines[name] = self._stack.enter_context(closing(engine))

    def logged(self, name: str) -> list[str]:
        """The log of this engine from the first line on in which lmkv warns of something."""
        lines = self._logs[name].read_text(errors="replace").splitlines()
        return lines[next((at for at, line in enumerate(lines) if "lmkv:" in line), len(lines)) :]

    def run(self, rounds: int, minutes: float) -> Found:
        """All engines in each round; none begins after so many minutes."""
        self._warm_up()
        found: dict[str, list[Round]] = {name: [] for name in self._engines}
        started = time.monotonic()
        for number, name in turns(self._engines, rounds):
            if all(len(each) == number for each in found.values()) and time.monotonic() - started > 60 * minutes:
                break
            load = evolve(self._load, skipped=name in self._skipped)
            one = self._engines[name].run(load, number)
            found[name].append(one)
            print(f"round {number}, {name}: {one.seconds:.1f} s", flush=True)
        return found

    def _warm_up(self) -> None:
        """Only the first long prompts allocate buffers and load kernels. Memory for half of the talks is full then."""
        for engine in set(self._engines.values()):
            engine.run(evolve(self._load, users=(self._load.users + 1) // 2), -1)

    def pairs(self, rounds: int) -> Pairs:
        """Batches of as many new prompts as are in flight at a time, of the load's average length."""
        length = self._load.prompt_tokens // (self._load.users * self._load.turns)
        batch = evolve(self._load, users=AT_ONCE, turns=1, question=length, new=True)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self._engines}
        self._warm_up()
        for number, name in turns(self._engines, rounds):
            for pair in range(PAIRS):
                seconds = {
                    skip: self._engines[name].run(evolve(batch, skipped=skip), number * PAIRS + pair).seconds
                    for skip in random.sample((False, True), 2)
                }
                found[name].append((seconds[False], seconds[True]))
        return found

    def leave(self) -> None:
        for engine in set(self._engines.values()):
            engine.leave()


def rows(load: Load, found: Found) -> list[Row]:
    made = [row for name, rounds in found.items() for row in rows_of(load, name, rounds, found[ALONE])]
    for name in (name for name in found if skipped(name) in found):
        ratios, cpu = time_ratios(found[skipped(name)], found[name]), cpu_ratios(found[name], found[skipped(name)])
        value = median(ratios)
        target = 1.0 if name.startswith("lmkv") else None
        met = None if target is None else value >= target
        beside = "beside the same engine, whose requests neither store nor load"
        made += [
            Row(
                f"{name}: throughput {beside}, {sure_within(ratios, 4)}", value, "x", skipped(name), value, target, met
            ),
            Row(f"{name}: CPU time {beside}, {sure_within(cpu, 4)}", median(cpu), "x"),
        ]
        for title, share in SHARES.items():
            mine, skips = (percentile(first_tokens(found[each]), share) for each in (name, skipped(name)))
            made.append(Row(f"{name}: time to first token, {title}, {beside}", mine, "s", skipped(name), mine / skips))
    return made


def pair_rows(pairs: Pairs) -> Iterator[Row]:
    """Throughput of what is stored beside that of what is skipped. The target is met only where the lower end is."""
    for name, seconds in pairs.items():
        ratios = [skip / stored for stored, skip in seconds]
        value, (least, _) = median(ratios), interval(ratios)
        title = (
            f"{name}: throughput beside batches that the connector skips, {len(ratios)} pairs, {sure_within(ratios, 4)}"
        )
        target = NEW_TARGET if name.startswith("lmkv") else None
        yield Row(title, value, "x", "itself", value, target, None if target is None else least >= target)


def rows_of(load: Load, name: str, rounds: list[Round], alone: list[Round]) -> list[Row]:
    """One engine beside vLLM alone. lmkv has targets: never worse."""
    ours, of = name.startswith("lmkv") and not is_skipped(name), None if name == ALONE else ALONE

    def row(
        title: str, value: float, unit: str, ratio: float | None = None, target: float = 1.0, met: bool | None = None
    ) -> Row:
        """`ratio` beside vLLM alone, which is at most its `target`, unless `met` says whether it is reached."""
        if of is None or ratio is None:
            return Row(f"{name}: {title}", value, unit)
        if not ours:
            return Row(f"{name}: {title}", value, unit, of, ratio)
        return Row(f"{name}: {title}", value, unit, of, ratio, target, ratio <= target if met is None else met)

    ratios = time_ratios(alone, rounds)
    throughput = median(len(one.answers) / one.seconds for one in rounds)
    target = NEW_TARGET if load.new else 1.0
    # Where nothing can be won, only the lower end counts: noise must not pass for no cost.
    met = (interval(ratios)[0] if load.new else median(ratios)) >= target
    made = [row("throughput", throughput, "requests/s", median(ratios), target, met)]
    for title, share in SHARES.items():
        mine, theirs = (percentile(first_tokens(each), share) for each in (rounds, alone))
        made.append(row(f"time to first token, {title}", mine, "s", mine / theirs))
    hit = sum(one.cached for one in rounds) / (len(rounds) * load.prompt_tokens)
    made.append(row("prompt tokens not computed", 100 * hit, "%"))
    if of:
        cpu = cpu_ratios(rounds, alone)
        made += [
            row(f"throughput beside {of}, {sure_within(ratios, 4)}", median(ratios), "x"),
            row(f"throughput beside {of}, worst round of {len(ratios)}", min(ratios), "x"),
            row(f"CPU time beside {of}, {sure_within(cpu, 4)}", median(cpu), "x"),
        ]
        if not is_skipped(name):
            made.append(row(f"answers equal to those of {of}", 100 * equal_answers(rounds, alone), "%"))
    return made


def time_ratios(rounds: list[Round], others: list[Round]) -> list[float]:
    return [one.seconds / other.seconds for one, other in zip(rounds, others, strict=True)]


def cpu_ratios(rounds: list[Round], others: list[Round]) -> list[float]:
    """Other programs disturb CPU times less than throughput."""
    return [one.cpu / other.cpu for one, other in zip(rounds, others, strict=True)]


def equal_answers(rounds: list[Round], others: list[Round]) -> float:
    wrong = sum(len(differing(one, other)) for one, other in zip(rounds, others, strict=True))
    return 1 - wrong / sum(len(one.answers) for one in rounds)


def differences(found: Found, logged: Callable[[str], list[str]]) -> Iterator[str]:
    """Which answers of which round differ from those of vLLM alone: an engine whose KV is right has none.

    `logged`: what lmkv has warned of in an engine; shown once.
    """
    for name in (name for name in found if not is_skipped(name) and ALONE in found):
        lines = [
            f"round {number}, {name}: other answers than of {ALONE} for {wrong} (user-turn)"
            for number, wrong in rounds_that_differ(found[name], found[ALONE])
        ]
        yield from [*lines, *logged(name)] if lines else ()


def audit_rows(load: Load, plain: list[Round], audited: list[Round]) -> list[Row]:
    ratios = time_ratios(audited, plain)
    slower, (_, high) = median(ratios) - 1, interval(ratios)
    hits = sum(one.cached for one in plain)
    again = (hits - sum(one.cached for one in audited)) / hits
    scale = AUDIT_TARGET_RATE / again if again > 0 else 0.0
    cost = slower * scale
    all_tokens = len(plain) * load.prompt_tokens
    cpu = cpu_ratios(audited, plain)
    # Met only where the upper end is: noise must not pass for cheap audits.
    aim = "time that audits of one token in 100 would take"
    return [
        Row("prompt tokens that hit", 100 * hits / all_tokens, "%"),
        Row("tokens of hits that audits computed again", 100 * again, "%"),
        Row("computed tokens that these are more", 100 * again * hits / (all_tokens - hits), "%"),
        Row(f"time that these audits took, {sure_within(ratios, 4)} of that without", 100 * slower, "%"),
        Row(aim, 100 * cost, "%", "lmkv", cost, AUDIT_TARGET, (high - 1) * scale <= AUDIT_TARGET),
        Row(f"CPU time with these audits, {sure_within(cpu, 4)}", median(cpu), "x"),
        Row("answers equal", 100 * equal_answers(audited, plain), "%"),
    ]


def comparisons(rows: list[Row]) -> list[Comparison]:
    """A chart for each thing that was measured of vLLM alone, with a bar for each engine."""
    charts: dict[str, dict[str, float]] = {}
    units = {}
    for row in rows:
        engine, title = row.name.split(": ")
        charts.setdefault(title, {})[engine] = row.value
        units[title] = row.unit
    shown = {
        title: {name: value for name, value in bars.items() if not is_skipped(name)}
        for title, bars in charts.items()
        if ALONE in bars
    }
    return [Comparison(title.capitalize(), units[title], bars, ALONE) for title, bars in shown.items()]


def draw_earlier(file: Path, picture: Path) -> int:
    """Draw an earlier run from the last line that it printed with --json."""
    found = json.loads(file.read_text().splitlines()[-1])
    draw(comparisons([Row(**row) for row in found["rows"]]), found["machine"], picture, title=TITLE)
    return 0


def main() -> int:
    parser = arguments_of(__doc__, quick="eight users, three turns, one round")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--question", type=int, default=250, help="tokens of each question")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=20.0, help="after them no round begins")
    parser.add_argument("--over", default="2,8", help="times that all conversations oversubscribe host memory")
    parser.add_argument("--policies", default="LRU", help="lmkv's order of eviction, of an engine for each")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has vllm and lmcache")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where to keep a disk tier for another engine")
    parser.add_argument("--new", action="store_true", help="no prompt begins like another one")
    parser.add_argument("--pairs", action="store_true", help="storing beside skipping, in the same engine")
    parser.add_argument("--audits", type=float, metavar="RATE", help="measure what audits of this share of hits cost")
    parser.add_argument("--picture", type=Path, help="where to draw the comparison, as SVG or PNG")
    parser.add_argument("--drawn-from", type=Path, help="what an earlier run printed with --json; measures nothing")
    options = parser.parse_args()
    if options.pairs and any((options.new, options.audits, options.lmcache, options.disk, options.picture)):
        parser.error("--pairs takes no option but --users, --turns, --question, --rounds and the first of --over")
    if options.drawn_from:
        if not options.picture:
            parser.error("--drawn-from needs --picture")
        return draw_earlier(options.drawn_from, options.picture)
    users, number, rounds = (8, 3, 1) if options.quick else (options.users, options.turns, options.rounds)
    load = Load(users=users, turns=number, question=options.question, new=options.new)
    levels = [float(each) for each in options.over.split(",")]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-turns-")))
        engines = Engines(load, root, stack)
        if options.audits:
            engines.add("lmkv", levels[0])
            engines.add(AUDITED, levels[0], audit_rate=options.audits)
            found = engines.run(rounds, options.minutes)
            engines.leave()
            return finish(audit_rows(load, found["lmkv"], found[AUDITED]), options.json)
        engines.add(ALONE)
        if options.pairs:
            engines.add_bound(COPYING, levels[0])
            engines.add(f"lmkv, RAM for 1 in {levels[0]:g}", levels[0])
            paired = engines.pairs(rounds)
            engines.leave()
            return finish([*pair_rows(paired)], options.json)
        engines.add(AGAIN)
        for name in BOUNDS if options.new else (COPYING,):
            engines.add_bound(name, max(levels))
            if not options.new:
                engines.add_skipped(name)
        for over in levels:
            memory = f"RAM for 1 in {over:g}"
            for policy in options.policies.split(","):
                name = "lmkv" if policy == "LRU" else f"lmkv {policy}"
                engines.add(f"{name}, {memory}", over, cache_policy=policy)
                if policy == "LRU" and not options.new:
                    # Another one would learn from the requests that skip it.
                    engines.add_skipped(f"{name}, {memory}")
            if options.disk:
                engines.add_disk(f"lmkv, {memory}, disk", over, options.disk)
            if options.lmcache:
                engines.add_lmcache(f"LMCache, {memory}", over, options.lmcache)
        found = engines.run(rounds, options.minutes)
        for line in differences(found, engines.logged):
            print(line)
        result = rows(load, found)
        engines.leave()
    if options.picture:
        draw(comparisons(result), machine(), options.picture, title=TITLE)
    return finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
