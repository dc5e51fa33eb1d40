"""Time to first token of a repeated prompt: vLLM's own prefix cache, and lmkv's tiers beside their bounds.

    python benchmarks/ttft.py [--redis URL] [--lmcache PYTHON] [--tokens 8000] [--rounds 25] [--one-process]
                              [--only disk,...] [--disk FOLDER] [--within-vllm] [--quick] [--json]

All engines run at once, each in processes of its own, and are asked in turn, in shuffled order, so that what disturbs
one round disturbs all engines in it. In its turn an engine is asked twice: after a pause, in which its processes fell
asleep, and again a quarter of a second after that answer, while they still poll each other as they do in a server in
use. Ratios are taken within a round; their median counts. The engine core runs in a process of its own, as vLLM does by
default, or with --one-process in that of the API. The engine of a lower tier keeps another prompt in host memory, and
is asked for both, each in a turn of its own: equal engines differ by more than tiers do. A lower tier is shown beside
the sum of its engine's time from host memory and 1.1 times that of a plain read of as many bytes in the same round: of
as many files of the tier by one thread, from a disk with O_DIRECT, from shared memory with their checksums; of as many
values of Redis by redis-py. The plain read, too, is timed after a pause, in a turn of its own, and again right after
the tier's second answer, while that engine's processes poll. In shared memory an engine that has ended has
stored the chunks. Lower tiers are always loaded from, however slow they are. With --within-vllm more
engines are asked in turn. Those for the disk and for Redis have a request wait until one plain thread has read, and
take the rest from vLLM's prefix cache. Shown are the seconds to the end of that read, and those by which the first
token comes later than that of a prompt which does not wait: they include vLLM's steps until the request goes on.
`--only` names those that take part, since engines that wait
for their turn disturb the others. With --lmcache, the interpreter of an environment that has vLLM, LMCache and what
lmkv needs, LMCacheMPConnector takes its turns too, by its default route and by its fastest. With --json the last line
is the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

from attrs import evolve

from benchmarks._lmcache_server import ENVIRONMENT, ROUTES, Server
from benchmarks._timing import Row, arguments_of, finish, median_ratio, sure_within, turns
from lmkv.cli.measure.plain import MARGIN, files_of, seconds_of, values_of, whole_database
from lmkv.cli.measure.ttft import (
    DISK,
    MEMORY,
    OTHER_PROMPT,
    OWN,
    PROMPT,
    RAM_TARGET,
    REDIS,
    SHARED,
    first_time,
    hold,
    is_hit_in,
    own_ram,
    send,
    store_and_end,
)
from lmkv.cli.measure.vllm_engines import (
    ONE_PROCESS,
    SEVERAL_PROCESSES,
    Answer,
    EngineProcess,
    EngineSpec,
    engine_specs,
)

BETWEEN_TARGET = 1.10
WITHIN, BETWEEN = "lmkv ram, within the step", "lmkv ram, between steps"
ALWAYS = (OWN, WITHIN, BETWEEN)
HOST_GIB = 0.5
PLAIN = {
    DISK: "a plain O_DIRECT read",
    SHARED: "a plain read of files in memory, and their checksums,",
    REDIS: "redis-py's bare read",
}
"""The plain read that each round times beside a tier: its bound."""
USED, PAUSED = "in use", "after a pause"
POLLING, INSIDE, STEPS = " while the engine's processes poll", " within vLLM", " within vLLM, and its steps"
READERS = {tier: f"vllm prefix cache, once a plain thread has read the {tier} tier" for tier in (DISK, REDIS)}
"""Engines whose connector has each request wait for that, but for a prompt that is served at once."""


def main() -> int:
    parser = arguments_of(__doc__, quick="five rounds")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--only", default="disk,shared memory", help="tiers below host memory that take part")
    parser.add_argument("--within-vllm", action="store_true", help="both are read plainly within vLLM, too")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder for the disk tier")
    parser.add_argument("--redis", metavar="URL", help="a Redis on loopback, whose database is used")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has vllm and lmcache")
    options = parser.parse_args()
    if options.lmcache and options.one_process:
        parser.error("vLLM 0.32 in one process does not start with LMCache 0.5.6")
    below = [f"lmkv {tier.strip()}" for tier in options.only.split(",")]
    if not set(below) <= {DISK, SHARED}:
        parser.error(f"--only takes disk and shared memory, not {options.only}; Redis comes with --redis")
    env, how = (ONE_PROCESS, "one process") if options.one_process else (SEVERAL_PROCESSES, "as by default")
    tokens: int = options.tokens
    with ExitStack() as stack:
        stack.enter_context(whole_database(options.redis))
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-ttft-", dir=options.disk)))
        names = [*ALWAYS, *below, *([REDIS] if options.redis else [])]
        engines: dict[str, EngineProcess] = {}
        asked: dict[str, tuple[str, int]] = {}

        def start(name: str, spec: EngineSpec, env: dict[str, str], python: str = sys.executable) -> None:
            if name == SHARED:
                store_and_end(spec, folders[name], tokens, env)
            engine = EngineProcess(spec, folders[name], env, python=python)
            engines[name] = stack.enter_context(closing(engine))
            asked[name] = name, PROMPT
            print(f"{name}: at first {first_time(engine, folders[name], tokens).ttft_s:.3f} s", flush=True)
            if name in PLAIN:
                hold(engine, tokens)
                asked[own_ram(name)] = name, OTHER_PROMPT
            if name in READERS.values():
                asked[at_once(name)] = name, OTHER_PROMPT

        def waits_of(name: str) -> Path:
            return folders[name] / "waits"

        folders = {name: root / str(number) for number, name in enumerate((*names, *READERS.values(), *ROUTES))}
        memory = tempfile.TemporaryDirectory(prefix="lmkv-ttft-", dir=MEMORY)
        folders[SHARED] = Path(stack.enter_context(memory))
        for name in names:
            specs = engine_specs(folders[name], tokens + 16, host_gib=HOST_GIB, remote_url=options.redis)
            start(name, specs[name], env)
        plain = {PLAIN[name]: files_of(folders[name], in_memory=name == SHARED) for name in below}
        if options.redis:
            plain[PLAIN[REDIS]] = values_of(options.redis)
        specs = engine_specs(root, tokens + 16)
        if options.within_vllm:
            for tier in (tier for tier in READERS if tier in names):
                name = READERS[tier]
                settings = {"plain_folder": str(folders[tier]), "waits": str(waits_of(name))}
                settings["redis"] = options.redis if tier == REDIS else None
                connector = {"connector": "ReadingConnector", "connector_module": "benchmarks._bound_connectors"}
                spec = evolve(specs[OWN], **connector)
                start(name, evolve(spec, settings=settings), env)
        if options.lmcache:
            server = stack.enter_context(closing(Server(options.lmcache, 2 * HOST_GIB, root / "server.log")))
            for name in ROUTES:
                start(name, server.spec(name, specs["nothing"]), {**ENVIRONMENT, **env}, options.lmcache)
        read_within = {READERS[tier]: f"{PLAIN[tier]}{INSIDE}" for tier in READERS if READERS[tier] in asked}
        paused: dict[str, list[float]] = {name: [] for name in (*asked, *read_within.values(), *plain)}
        used = {name: list[float]() for name in (*paused, *(f"{name}{POLLING}" for name in plain))}
        answers: dict[str, dict[str, list[Answer]]] = {when: {name: [] for name in asked} for when in (USED, PAUSED)}
        for _, name in turns((*asked, *plain), 5 if options.quick else options.rounds):
            if name in plain:
                paused[name].append(seconds_of(plain[name]))
                continue
            for when, times in ((PAUSED, paused), (USED, used)):
                engine, seed = asked[name]
                answer = send(engines[engine], tokens, seed)
                check(name, answer, tokens)
                times[name].append(answer.ttft_s)
                if name in read_within:
                    times[read_within[name]].append(float(waits_of(name).read_text().split()[-1]))
                answers[when][name].append(answer)
            if name in PLAIN:
                used[f"{PLAIN[name]}{POLLING}"].append(seconds_of(plain[PLAIN[name]]))
        for process in engines.values():
            process.leave()
    hits = {name: min(each.hit_tokens for given in answers.values() for each in given[name]) for name in asked}
    found = [Row(f"least hit of {tokens:,} tokens, {name}, {how}", hit, "tokens") for name, hit in hits.items()]
    used |= {name: paused[name] for name in plain}
    for when, times in ((USED, used), (PAUSED, paused)):
        for name, read in read_within.items():
            both = zip(times[name], times[at_once(name)], strict=True)
            times[read.removesuffix(INSIDE) + STEPS] = [waited - other for waited, other in both]
        found += [*rows(times, f"{when}, {how}"), *parts(answers[when], when)]
    return finish(found, options.json)


def at_once(name: str) -> str:
    """The name of a prompt for which the engine `name` of `READERS` does not wait."""
    return f"{name}: another prompt, at once"


def check(name: str, answer: Answer, tokens: int) -> None:
    """Raise RuntimeError for an answer that did not come from where it should."""
    if not is_hit_in(name, answer, tokens):
        raise RuntimeError(f"{name}: a hit of {answer.hit_tokens} tokens, by tier: {dict(answer.sources)}")


def rows(warm: dict[str, list[float]], how: str) -> list[Row]:
    found = []
    for name, seconds in warm.items():
        median = statistics.median(seconds)
        if any(name == f"{read}{when}" for read in PLAIN.values() for when in ("", POLLING, INSIDE, STEPS)):
            title = f"{name} of as many bytes, {how}"
            found.append(Row(title, median, "s", WITHIN, median_ratio(warm, name, WITHIN)))
            continue
        ratio = median_ratio(warm, name, OWN)
        target = {WITHIN: RAM_TARGET, BETWEEN: BETWEEN_TARGET}.get(name)
        met = None if target is None else ratio <= target
        found.append(Row(f"warm TTFT, {name}, {how}", median, "s", OWN, ratio, target, met))
        own = own_ram(name)
        title = f"{name}, {how}: longer than from host memory"
        for read in (f"{PLAIN.get(name)}{when}" for when in ("", POLLING, INSIDE, STEPS)):
            if read in warm:
                bound = [ram + MARGIN * each for ram, each in zip(warm[own], warm[read], strict=True)]
                found.append(beside(title, warm, name, bound, f"{own}, and {MARGIN} times {read}", 1.0))
        if name in ROUTES:
            found.append(Row(f"{name} beside {WITHIN}, {how}", median_ratio(warm, name, WITHIN), "x"))
    return found


def parts(answers: Mapping[str, Sequence[Answer]], when: str) -> Iterator[Row]:
    """Where the time to a first token goes, as lmkv reports it."""
    for name in (name for name in answers if name.startswith("lmkv")):
        of_name: dict[str, Callable[[Answer], float]] = {
            "waiting for the tier": lambda answer: answer.wait_s,
            "copying into vLLM's blocks": lambda answer: answer.load_s,
            "the rest": lambda answer: answer.ttft_s - answer.wait_s - answer.load_s,
        }
        for part, seconds in of_name.items():
            yield Row(f"{name}, {when}: {part}", statistics.median(map(seconds, answers[name])), "s")


def beside(title: str, warm: dict[str, list[float]], name: str, bound: list[float], of: str, target: float) -> Row:
    """A lower tier beside its bound in the same rounds."""
    ratios = [one / other for one, other in zip(warm[name], bound, strict=True)]
    ratio = statistics.median(ratios)
    seconds = statistics.median(one - own for one, own in zip(warm[name], warm[own_ram(name)], strict=True))
    return Row(f"{title}; {sure_within(ratios)} of the bound", seconds, "s", of, ratio, target, ratio <= target)


if __name__ == "__main__":
    sys.exit(main())
