"""Users who talk for several turns with vLLM alone, with lmkv and with LMCache. No memory can hold all conversations.

    python -m benchmarks.talk [--users 32] [--turns 5] [--rounds 6] [--over 2,8] [--lmcache PYTHON]
                              [--policies LRU,ADAPTIVE] [--disk FOLDER] [--quick] [--json] [--write FILE]
    python -m benchmarks.talk --new [--rounds 15]
    python -m benchmarks.talk --pairs [--rounds 15]
    python -m benchmarks.talk --audits 0.1
    python -m benchmarks.talk --within [--rounds 40]
    python -m benchmarks.talk --decoded [--users 6]

Each user sends a prompt, waits for the answer, thinks, and sends the whole conversation again with the next question at
its end. Four requests are in flight at any time. Random thinking times, longer for some users, decide who speaks next.
In a fixed order of speakers, LRU would evict every conversation before its next turn. vLLM's own prefix cache is on in
every engine, and vLLM's KV space holds three conversations of full length.

`--over`: how many times more memory all conversations take at full length than lmkv, or LMCache's server, has. With
`--disk`, another engine has a disk below that memory. `--lmcache` takes the interpreter of an environment that has
vLLM, LMCache and the packages that lmkv needs. LMCacheMPConnector then takes part with its fastest route. All engines
run at once, in separate processes. They are asked in turn, in shuffled order, with new conversations in each round.
Throughputs are compared within a round, times to first token over all rounds. All engines use float32, so that answers
should be equal. The last row of an engine says how many answers are equal.

A second vLLM alone shows how far two equal engines are apart. vLLM also takes part with a connector that finds nothing
and only copies full blocks, into as much memory as the smallest that lmkv has. This engine shows the cost of copies
alone. Rows of ", neither storing nor loading" belong to the same engine with requests that its connector skips.

`--new`: no two prompts begin alike, so nothing can hit, and lmkv evicts all the time. Another connector does nothing at
all. `--audits`: lmkv with and without audits of this share of the hits. `--pairs` compares engines with themselves,
because two engines differ by more than a connector costs. A pair is two small batches of new prompts, right after each
other in random order: the connector stores one batch and skips the other. For vLLM alone both batches are the same, so
its rows show the noise.

`--within`: new prompts, and the share of an engine's time within the connector's methods, within copies, and within
metrics on vLLM's thread. `--decoded`: gain and cost of storing generated tokens, for chats and agents with templates
that keep or strip thinking. These rows are counts, which are the same on any machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from attrs import evolve

from benchmarks.peers import ENVIRONMENT, LMCacheServer
from benchmarks.rounds import Row, arguments, beside, compared, finish, interval, percentile, reached, turns
from benchmarks.users import CLOCKS, Load, Round, Users, differing, host_gib, is_skipped, skipped, spec
from lmkv.cli.engines import ONE_PROCESS, SEVERAL_PROCESSES, EngineSpec

ALONE, AGAIN, AUDITED = "vLLM alone", "vLLM alone, again", "lmkv, audited"
IDLE, COPYING = "vLLM, connector that does nothing", "vLLM, connector that only copies"
BOUNDS = {IDLE: "IdleConnector", COPYING: "CopyingConnector"}
ROUTE = "LMCache, shared memory"
NEW_TARGET, AUDIT_TARGET, WITHIN_TARGETS = 0.995, 0.015, {"connector": 0.01, "copies": None, "metrics": 0.002}
"""Targets: shares of the throughput (new prompts, audits), and shares of the time (within parts of lmkv)."""
AUDIT_RATE = 0.01
PAIRS, WARM = 20, 13
"""Number of pairs of batches of an engine in each round, and number of rounds of `--within` after which the tier is
full.
"""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WORKLOADS = {
    "chat": Load(users=1, turns=1, question=200, answer=300),
    "agent": Load(users=1, turns=1, question=600, answer=80),
    "thinking agent, kept": Load(users=1, turns=1, question=600, thinking=300, answer=80),
    "thinking agent, stripped": Load(users=1, turns=1, question=600, thinking=300, answer=80, stripped=True),
}
ROOMS = {"room for all": 0.83, "room for a third": 3.0}
"""How many times more memory the conversations of `--decoded` take than lmkv has, by the label of the row."""
PROMPTS, DECODED = "prompts alone", "generated tokens too"
Found = Mapping[str, list[Round]]


class Engines:
    """Engines that run at once, each in a separate folder, and LMCache's servers."""

    def __init__(self, load: Load, root: Path, stack: ExitStack) -> None:
        self._load, self._root, self._stack = load, root, stack
        self._engines: dict[str, Users] = {}

    def add(self, name: str, over: float | None = None, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Add an engine: vLLM alone if `over` is None, else with lmkv. `over`: how many times more memory all
        conversations take than lmkv has.
        """
        host = {} if over is None else {"max_local_cpu_size": host_gib(self._load, over), **settings}
        self._start(name, spec(self._load, host or None), {"LMKV_LOG_LEVEL": "WARNING", **(env or {})})

    def add_bound(self, name: str, over: float) -> None:
        """Add vLLM with a connector that does nothing, or with a connector that copies into as much memory as lmkv
        has.
        """
        settings = {"copied_tokens": int(self._load.users * self._load.tokens / over)}
        plain = spec(self._load, settings)
        self._start(name, evolve(plain, connector=BOUNDS[name], connector_module="benchmarks.bound_connectors"), {})

    def add_skipped(self, name: str) -> None:
        """Add the engine `name` once more, with requests that its connector neither stores nor loads."""
        self._engines[skipped(name)] = self._engines[name]

    def add_disk(self, name: str, over: float, parent: Path) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-talk-", dir=parent))
        size = {"max_local_disk_size": 2 * host_gib(self._load, 1) + 1, "disk_min_free": 0.0}
        self.add(name, over, local_disk=folder, **size)

    def add_lmcache(self, name: str, over: float, python: str) -> None:
        log = self._root / f"server-{len(self._engines)}.log"
        server = self._stack.enter_context(closing(LMCacheServer(python, host_gib(self._load, over), log)))
        self._start(name, server.spec(ROUTE, spec(self._load)), ENVIRONMENT, python)

    def _start(self, name: str, what: EngineSpec, env: Mapping[str, str], python: str = sys.executable) -> None:
        folder = self._root / str(len(self._engines))
        engine = Users(what, folder, {**SEVERAL_PROCESSES, **env}, python=python)
        self._engines[name] = self._stack.enter_context(closing(engine))
        # Only the first long prompts allocate buffers and load kernels. Memory for half of the talks is full then.
        engine.run(evolve(self._load, users=(self._load.users + 1) // 2), -1)

    def logged(self, name: str) -> list[str]:
        """Return the log of this engine, beginning with the first warning of lmkv."""
        lines = self._engines[name].log.read_text(errors="replace").splitlines()
        return lines[next((at for at, line in enumerate(lines) if "lmkv:" in line), len(lines)) :]

    def run(self, rounds: int) -> Found:
        found: dict[str, list[Round]] = {name: [] for name in self._engines}
        for number, name in turns(self._engines, rounds):
            one = self._engines[name].run(evolve(self._load, skipped=is_skipped(name)), number)
            found[name].append(one)
            print(f"round {number}, {name}: {one.seconds:.1f} s", file=sys.stderr, flush=True)
        return found

    def pairs(self, rounds: int) -> dict[str, list[tuple[float, float]]]:
        """Return the seconds of batches that the connector stores, and of batches that the connector skips. Prompts
        have the load's average length.
        """
        length = self._load.prompt_tokens // (self._load.users * self._load.turns)
        batch = evolve(self._load, users=self._load.at_once, turns=1, question=length, new=True)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in self._engines}
        for number, name in turns(self._engines, rounds):
            for pair in range(number * PAIRS, (number + 1) * PAIRS):
                seconds = {
                    skip: self._engines[name].run(evolve(batch, skipped=skip), pair).seconds
                    for skip in random.sample((False, True), 2)
                }
                found[name].append((seconds[False], seconds[True]))
        return found

    def leave(self) -> None:
        for engine in self._engines.values():
            engine.leave()


# -- rows -------------------------------------------------------------------------------------------------


def throughputs(rounds: Sequence[Round]) -> list[float]:
    """Requests per second of each round."""
    return [len(one.answers) / one.seconds for one in rounds]


def rows(load: Load, found: Found) -> Iterator[Row]:
    """Yield rows that compare all engines with vLLM alone, and engines with skipped requests with themselves."""
    shown = {name: rounds for name, rounds in found.items() if not is_skipped(name)}
    targets = {name: NEW_TARGET if load.new else 1.0 for name in shown if name.startswith("lmkv")}
    speeds = {name: throughputs(rounds) for name, rounds in found.items()}
    yield from compared(
        "throughput", "requests/s", {name: speeds[name] for name in shown}, ALONE, targets, surely=load.new
    )
    for name in (name for name in shown if skipped(name) in found):
        both = {skipped(name): speeds[skipped(name)], name: speeds[name]}
        yield from compared("throughput", "requests/s", both, skipped(name), {name: 1.0} if name in targets else {})
    cpu = {name: [one.cpu for one in rounds] for name, rounds in shown.items()}
    yield from compared("CPU time", "s", cpu, ALONE)
    for title, share in SHARES.items():
        alone = percentile(first_tokens(found[ALONE]), share)
        for name, rounds in shown.items():
            mine, target = percentile(first_tokens(rounds), share), 1.0 if name in targets else None
            yield beside(f"time to first token, {title}: {name}", mine, "s", ALONE, alone, target)
    for name, rounds in found.items():
        hit = sum(one.cached for one in rounds) / (len(rounds) * load.prompt_tokens)
        yield Row(f"prompt tokens not computed: {name}", 100 * hit, "%")
    for name, rounds in shown.items():
        yield Row(f"answers equal to those of {ALONE}: {name}", 100 * equal_answers(rounds, found[ALONE]), "%")


def first_tokens(rounds: Sequence[Round]) -> list[float]:
    return [ttft for one in rounds for ttft in one.ttfts]


def equal_answers(rounds: Sequence[Round], others: Sequence[Round]) -> float:
    wrong = sum(len(differing(one, other)) for one, other in zip(rounds, others, strict=True))
    return 1 - wrong / sum(len(one.answers) for one in rounds)


def differences(found: Found) -> Iterator[tuple[str, str]]:
    """Yield `(engine and round, answers)` for answers (user-turn) that differ from those of vLLM alone. An engine
    with right KV has no such answers.
    """
    for name in (name for name in found if not is_skipped(name)):
        for number, (one, other) in enumerate(zip(found[name], found[ALONE], strict=True)):
            if wrong := differing(one, other):
                yield name, f"round {number}, {name}: other answers than of {ALONE} for {', '.join(wrong)} (user-turn)"


def pair_rows(pairs: Mapping[str, list[tuple[float, float]]]) -> Iterator[Row]:
    """Yield rows that compare the throughput of stored batches with skipped batches. The lower end of the interval
    must reach the target.
    """
    for name, seconds in pairs.items():
        both = {"skipped": [1 / skip for _, skip in seconds], "stored": [1 / stored for stored, _ in seconds]}
        targets = {"stored": NEW_TARGET} if name.startswith("lmkv") else {}
        yield from compared(f"batches of {name}", "batches/s", both, "skipped", targets, surely=True)


def audit_rows(load: Load, plain: Sequence[Round], audited: Sequence[Round]) -> Iterator[Row]:
    hits = sum(one.cached for one in plain)
    again = (hits - sum(one.cached for one in audited)) / hits
    yield Row("prompt tokens that hit", 100 * hits / (len(plain) * load.prompt_tokens), "%")
    yield Row("tokens of hits that audits computed again", 100 * again, "%")
    seconds = {"lmkv": [one.seconds for one in plain], AUDITED: [one.seconds for one in audited]}
    yield from compared("time of a round", "s", seconds, "lmkv")
    scale = AUDIT_RATE / again if again > 0 else 0.0
    more = [scale * (mine / other - 1) for mine, other in zip(seconds[AUDITED], seconds["lmkv"], strict=True)]
    # Met only where the upper end is: noise must not pass for cheap audits.
    met = reached(more, AUDIT_TARGET, less=True, surely=True)
    title = "time that audits of one token in 100 would take more"
    cost = statistics.median(more)
    yield Row(title, 100 * cost, "%", "lmkv", cost, interval(more), AUDIT_TARGET, met)
    yield Row("answers equal", 100 * equal_answers(audited, plain), "%")


def within_rows(rounds: Sequence[Round]) -> Iterator[Row]:
    """Yield rows with the share of a round's time that parts of lmkv take."""
    for part, target in WITHIN_TARGETS.items():
        shares = [one.within[part] / one.seconds for one in rounds]
        met = None if target is None else reached(shares, target, less=True)
        value = statistics.median(one.within[part] for one in rounds)
        yield Row(f"within the {part}", value, "s", "a round", statistics.median(shares), interval(shares), target, met)


# -- what is run ------------------------------------------------------------------------------------------


def talk(options: argparse.Namespace, load: Load, engines: Engines, levels: Sequence[float]) -> Iterator[Row]:
    for name in (ALONE, AGAIN):
        engines.add(name)
    for name in BOUNDS if options.new else (COPYING,):
        engines.add_bound(name, max(levels))
        if not options.new:
            engines.add_skipped(name)
    for over in levels:
        memory = f"RAM for 1 in {over:g}"
        for policy in options.policies.split(","):
            name = f"lmkv{'' if policy == 'LRU' else f' {policy}'}, {memory}"
            engines.add(name, over, cache_policy=policy)
            if policy == "LRU" and not options.new:
                # Another one would learn from the requests that skip it.
                engines.add_skipped(name)
        if options.disk:
            engines.add_disk(f"lmkv, {memory}, disk", over, options.disk)
        if options.lmcache:
            engines.add_lmcache(f"LMCache, {memory}", over, options.lmcache)
    found = engines.run(options.rounds)
    for name, text in differences(found):
        print(text, *engines.logged(name), sep="\n", file=sys.stderr)
    yield from rows(load, found)


def within(load: Load, root: Path, stack: ExitStack, rounds: int) -> Iterator[Row]:
    load = evolve(load, users=load.at_once, turns=1, question=1500, answer=24, new=True)
    engines = Engines(load, root, stack)
    engines.add("lmkv", 1.0, {**ONE_PROCESS, **CLOCKS})
    found = engines.run(WARM + rounds)["lmkv"][WARM:]
    engines.leave()
    yield from within_rows(found)


def decoded(options: argparse.Namespace, root: Path) -> Iterator[Row]:
    for title, workload in list(WORKLOADS.items())[: 2 if options.quick else None]:
        load = evolve(workload, users=options.users, turns=options.turns)
        for room, over in ROOMS.items():
            found: dict[str, Round] = {}
            for what in (PROMPTS, DECODED):
                settings = {"chunk_size": 128, "save_decode_cache": what == DECODED, "load_or_recompute": False}
                made = spec(load, {"max_local_cpu_size": host_gib(load, over), **settings})
                folder = root / f"{title} {room} {what}".replace(" ", "-")
                with closing(Users(made, folder, ONE_PROCESS)) as engine:
                    found[what] = engine.run(load, 0)
                    engine.leave()
                hit = 100 * found[what].cached / load.prompt_tokens
                yield Row(f"{title}, {room}, {what}: prompt tokens not computed", hit, "%")
            chunks = [float(each.stored) for each in found.values()]
            yield beside(f"{title}, {room}, {DECODED}: stored", chunks[1], "chunks", PROMPTS, chunks[0])


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__, quick="eight users, three turns, one round")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--question", type=int, default=250, help="tokens of each question")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--over", default="2,8", help="times that all conversations oversubscribe host memory")
    parser.add_argument("--policies", default="LRU", help="lmkv's order of eviction, of an engine for each")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has vllm and lmcache")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where to keep a disk tier for another engine")
    parser.add_argument("--new", action="store_true", help="no prompt begins like another one")
    parser.add_argument("--pairs", action="store_true", help="storing beside skipping, in the same engine")
    parser.add_argument("--audits", type=float, metavar="RATE", help="measure what audits of this share of hits cost")
    parser.add_argument("--within", action="store_true", help="the time within lmkv where nothing repeats")
    parser.add_argument("--decoded", action="store_true", help="generated tokens stored, or not")
    options = parser.parse_args(words)
    if options.quick:
        options.users, options.turns, options.rounds = 8 if not options.decoded else 2, 3, 1
    return options


def measured(options: argparse.Namespace) -> Iterator[Row]:
    load = Load(users=options.users, turns=options.turns, question=options.question, new=options.new)
    levels = [float(each) for each in options.over.split(",")]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-talk-")))
        engines = Engines(load, root, stack)
        if options.decoded:
            yield from decoded(options, root)
        elif options.within:
            yield from within(load, root, stack, options.rounds)
        elif options.audits:
            engines.add("lmkv", levels[0])
            engines.add(AUDITED, levels[0], audit_rate=options.audits)
            found = engines.run(options.rounds)
            yield from audit_rows(load, found["lmkv"], found[AUDITED])
        elif options.pairs:
            engines.add(ALONE)
            engines.add_bound(COPYING, levels[0])
            engines.add(f"lmkv, RAM for 1 in {levels[0]:g}", levels[0])
            yield from pair_rows(engines.pairs(options.rounds))
        else:
            yield from talk(options, load, engines, levels)
        engines.leave()


def main() -> int:
    options = parsed()
    return finish(measured(options), options)


if __name__ == "__main__":
    sys.exit(main())
