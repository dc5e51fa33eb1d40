"""Time to first token of a repeated prompt: vLLM's own prefix cache, and lmkv's tiers compared with their limits.

    python -m benchmarks.ttft [--redis URL] [--lmcache PYTHON] [--tokens 8000] [--rounds 25] [--only disk,...]
                              [--disk FOLDER] [--within-vllm] [--quick] [--json] [--write FILE]

All engines run at once, in separate processes. They are asked in turn, in shuffled order, so that a disturbance of a
round disturbs all engines. In its turn an engine is asked twice. The first time is after a pause, in which its
processes fell asleep. The second time is a quarter of a second after the first answer. The processes then still poll
each other, as in a server in use.

The engine of a lower tier keeps another prompt in host memory. It is asked for both prompts in separate turns, because
equal engines differ by more than tiers do. The limit of a lower tier is the sum of two times in the same round: its
engine's time from host memory, and 1.1 times a plain read of the same number of bytes. For a folder, one thread reads
files of the tier: from a disk with O_DIRECT, from shared memory with checksums. For Redis, redis-py reads values. In
shared memory, another engine has stored the chunks and has ended. Lower tiers are always used, even if they are slow.

With --within-vllm, more engines are asked in turn. Their connector makes a request wait until one plain thread has read
the prompt's part in the disk or Redis. The KV comes from vLLM's prefix cache. The time of this read is a second limit.
`--only` names the lower tiers that take part, because engines that wait for their turn disturb the others. `--lmcache`
takes the interpreter of an environment that has vLLM, LMCache and the packages that lmkv needs. LMCacheMPConnector then
takes part with its default route and with its fastest route.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from attrs import evolve

from benchmarks.peers import ENVIRONMENT, ROUTES, LMCacheServer, files_of, seconds_of, values_of, whole_database
from benchmarks.rounds import Row, arguments, compared, finish, turns
from lmkv.cli.bench import RAM_TARGET
from lmkv.cli.engines import SEVERAL_PROCESSES, Answer, EngineProcess, EngineSpec, wait_until_settled
from lmkv.cli.small_model import SmallModel

COMPUTED = "first token, computed"
OWN, WITHIN, BETWEEN = "vllm prefix cache", "lmkv ram, within the step", "lmkv ram, between steps"
SHARED, DISK, REDIS = "lmkv shared memory", "lmkv disk", "lmkv redis"
BELOW = (SHARED, DISK, REDIS)
TARGETS = {WITHIN: RAM_TARGET, BETWEEN: 1.10}
MARGIN = 1.1
"""Factor for the limit of a lower tier. A hit may take the time of a hit from host memory, plus this factor times a
plain read.
"""
HOST_GIB, MEMORY = 0.5, Path("/dev/shm")
HELD_S = 86_000.0
"""Seconds for which an engine with a lower tier keeps prefetched chunks in host memory."""
OTHER_PROMPT, PROMPT, PAUSE = 1, 2, 0.25
USED, PAUSED = "in use", "after a pause"
READERS = {tier: f"vllm prefix cache, once a plain thread has read {tier}" for tier in (DISK, REDIS)}
"""For each tier, the name of an engine whose requests wait until a plain thread has read the tier."""
Seconds = Mapping[str, Sequence[float]]


def engine_specs(folder: Path, tokens: int, redis: str | None) -> dict[str, EngineSpec]:
    """Return the engines to start, by name. `folder`: where a disk tier, or a tier in shared memory, stores its chunks.

    Host memory above a lower tier keeps prefetched chunks and nothing else.
    """
    small = SmallModel(dtype="bfloat16", max_position=max(32_768, 2 * tokens))
    plain = EngineSpec(model=small, max_tokens=tokens, kv_bytes=3 * (tokens + 256) * small.kv_bytes_per_token)
    host = {"max_local_cpu_size": HOST_GIB}
    below = {"local_cpu": False, "prefetch_deadline": 30.0, "load_or_recompute": False, "pin_ttl": HELD_S, **host}
    disk = {"local_disk": str(folder / "kv"), "max_local_disk_size": 2 * HOST_GIB, "disk_min_free": 0.0}
    shared = {"shared_memory": str(folder / "kv"), "max_shared_memory_size": 2 * HOST_GIB}
    return {
        OWN: evolve(plain, prefix_caching=True),
        WITHIN: evolve(plain, settings={"load_mode": "sync", **host}),
        BETWEEN: evolve(plain, settings={"load_mode": "async", **host}),
        DISK: evolve(plain, settings={**below, **disk}),
        SHARED: evolve(plain, settings={**below, **shared}),
        REDIS: evolve(plain, settings={**below, "remote_url": redis}),
        "nothing": plain,
    }


def own_ram(name: str) -> str:
    """Return the name of a hit in the host memory of the engine that has the lower tier `name`."""
    return f"{name}'s own host memory"


def plain_read_of(name: str) -> str:
    """Return the name of a plain read of those bytes of a prompt that are in the lower tier `name`."""
    return f"a plain read of {name}"


def read_within(name: str) -> str:
    return f"a plain read of {name} within vLLM"


def send(engine: EngineProcess, tokens: int, seed: int = PROMPT, *, prefetch: bool = False) -> Answer:
    """Send a prompt after a pause, and return the engine's answer."""
    time.sleep(PAUSE)
    # A second token, since vLLM wants the report of a request that ends before it tells of its copy.
    return engine.send(seed, tokens, 2, prefetch=prefetch)


def first_time(engine: EngineProcess, folder: Path, tokens: int) -> Answer:
    """Send the cold prompt after another prompt, because the first long prompt also allocates buffers and loads
    kernels.

    Returns the answer to the cold prompt once the tier in `folder` has written the chunks of both prompts.
    """
    for seed in (OTHER_PROMPT, PROMPT):
        answer = send(engine, tokens, seed)
        wait_until_settled(lambda: sum(1 for _ in (folder / "kv").rglob("*")))
    return answer


def is_hit_in(name: str, answer: Answer, tokens: int) -> bool:
    """Return whether most of a prompt was found, and every found token was in the tier `name`."""
    below = sum(count for tier, count in answer.sources.items() if tier != "cpu")
    mixed = below and answer.sources.get("cpu")
    return answer.hit_tokens > tokens // 2 and (name in BELOW) == bool(below) and not mixed


class Engines:
    """Engines that run at once, the prompts that each of them is asked for, and plain reads, which also take turns."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options, self._stack = options, stack
        self._root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-ttft-", dir=options.disk)))
        self._engines: dict[str, EngineProcess] = {}
        self._folders: dict[str, Path] = {}
        self.asked: dict[str, tuple[str, int]] = {}
        self.plain: dict[str, Any] = {}
        self.waits: dict[str, tuple[str, Path]] = {}
        self.computed: list[float] = []
        """Seconds to the first token of the prompt when nothing was found, once in each engine."""

    def start(self, name: str, spec: EngineSpec | None = None, env: Mapping[str, str] | None = None) -> None:
        folder, tokens = self._root / str(len(self._engines)), self._options.tokens
        if name == SHARED:
            made = tempfile.TemporaryDirectory(prefix="lmkv-ttft-", dir=MEMORY)
            folder = Path(self._stack.enter_context(made))
        spec = spec or engine_specs(folder, tokens + 16, self._options.redis)[name]
        env = {**SEVERAL_PROCESSES, **(env or {})}
        if name == SHARED:
            # An engine stores the prompts and ends, so that another one finds them.
            with closing(EngineProcess(spec, folder, env)) as other:
                self.computed.append(first_time(other, folder, tokens).ttft_s)
                other.leave()
        python = self._options.lmcache if name in ROUTES else sys.executable
        engine = self._stack.enter_context(closing(EngineProcess(spec, folder, env, python=python)))
        self._engines[name], self._folders[name], self.asked[name] = engine, folder, (name, PROMPT)
        first = first_time(engine, folder, tokens)
        if first.hit_tokens < tokens // 2:
            self.computed.append(first.ttft_s)
        print(f"{name}: at first {first.ttft_s:.3f} s", file=sys.stderr, flush=True)
        if name in BELOW:
            # Its host memory keeps the other prompt.
            send(engine, tokens, OTHER_PROMPT, prefetch=True)
            self.asked[own_ram(name)] = name, OTHER_PROMPT
            read = values_of(self._options.redis) if name == REDIS else files_of(folder, in_memory=name == SHARED)
            self.plain[plain_read_of(name)] = read

    def start_reader(self, tier: str) -> None:
        """Start an engine whose requests, except the first, wait until a plain thread has read the tier."""
        waits = self._root / f"waits-{len(self._engines)}"
        redis = self._options.redis if tier == REDIS else None
        settings = {"plain_folder": str(self._folders[tier]), "waits": str(waits), "redis": redis}
        plain = engine_specs(self._root, self._options.tokens + 16, None)[OWN]
        connector = {"connector": "ReadingConnector", "connector_module": "benchmarks.bound_connectors"}
        self.start(READERS[tier], evolve(plain, settings=settings, **connector))
        self.waits[READERS[tier]] = read_within(tier), waits

    def start_lmcache(self) -> None:
        log = self._root / "server.log"
        server = self._stack.enter_context(closing(LMCacheServer(self._options.lmcache, 2 * HOST_GIB, log)))
        for name in ROUTES:
            plain = engine_specs(self._root, self._options.tokens + 16, None)["nothing"]
            self.start(name, server.spec(name, plain), ENVIRONMENT)

    def run(self, rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[Answer]]]:
        """Return the seconds by moment and name, and the answers of engines in use."""
        found: dict[str, dict[str, list[float]]] = {when: defaultdict(list) for when in (PAUSED, USED)}
        answers: dict[str, list[Answer]] = defaultdict(list)
        for _, name in turns((*self.asked, *self.plain), rounds):
            for when, seconds in found.items():
                if name in self.plain:
                    seconds[name].append(seconds_of(self.plain[name]))
                    continue
                engine, seed = self.asked[name]
                answer = send(self._engines[engine], self._options.tokens, seed)
                if not is_hit_in(name, answer, self._options.tokens):
                    raise RuntimeError(f"{name}: a hit of {answer.hit_tokens}, by tier: {dict(answer.sources)}")
                seconds[name].append(answer.ttft_s)
                if name in self.waits:
                    read, waits = self.waits[name]
                    seconds[read].append(float(waits.read_text().split()[-1]))
                if when == USED:
                    answers[name].append(answer)
        for process in self._engines.values():
            process.leave()
        return found, answers


def rows_of(when: str, seconds: Seconds) -> Iterator[Row]:
    """Yield rows that compare all cases with vLLM's prefix cache, and each lower tier with its limits."""
    yield from compared(f"first token, {when}", "s", seconds, OWN, TARGETS)
    for name in (name for name in BELOW if name in seconds):
        for read in (read for read in (plain_read_of(name), read_within(name)) if read in seconds):
            bound = f"{own_ram(name)}, and {MARGIN} times {read}"
            both = zip(seconds[own_ram(name)], seconds[read], strict=True)
            shown = {bound: [ram + MARGIN * other for ram, other in both], name: seconds[name]}
            yield from compared(f"first token, {when}", "s", shown, bound, {name: 1.0})


def parts(answers: Mapping[str, Sequence[Answer]]) -> Iterator[Row]:
    """Yield the smallest hit, and the parts of the time to a first token, as lmkv reports them."""
    for name, given in answers.items():
        yield Row(f"least hit, {name}", min(answer.hit_tokens for answer in given), "tokens")
        if not name.startswith("lmkv"):
            continue
        rest = [answer.ttft_s - answer.wait_s - answer.load_s for answer in given]
        yield Row(f"{name}: waiting for the tier", statistics.median(answer.wait_s for answer in given), "s")
        yield Row(f"{name}: copying into vLLM's blocks", statistics.median(answer.load_s for answer in given), "s")
        yield Row(f"{name}: the rest", statistics.median(rest), "s")


def rows(options: argparse.Namespace, below: Sequence[str]) -> Iterator[Row]:
    with ExitStack() as stack:
        stack.enter_context(whole_database(options.redis))
        engines = Engines(options, stack)
        names = [OWN, WITHIN, BETWEEN, *below, *([REDIS] if options.redis else [])]
        for name in names:
            engines.start(name)
        for tier in READERS if options.within_vllm else ():
            if tier in names:
                engines.start_reader(tier)
        if options.lmcache:
            engines.start_lmcache()
        found, answers = engines.run(3 if options.quick else options.rounds)
        yield Row(COMPUTED, statistics.median(engines.computed), "s")
    for when, seconds in found.items():
        yield from rows_of(when, seconds)
    yield from parts(answers)


def parsed(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the lower tiers that take part."""
    parser = arguments(__doc__, quick="three rounds")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="disk,shared memory", help="tiers below host memory that take part")
    parser.add_argument("--within-vllm", action="store_true", help="both are read plainly within vLLM, too")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder for the disk tier")
    parser.add_argument("--redis", metavar="URL", help="a Redis on loopback, whose database is used")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has vllm and lmcache")
    options = parser.parse_args(words)
    below = [f"lmkv {tier.strip()}" for tier in options.only.split(",") if tier]
    if not set(below) <= {DISK, SHARED}:
        parser.error(f"--only takes disk and shared memory, not {options.only}; Redis comes with --redis")
    return options, below


def main() -> int:
    options, below = parsed()
    return finish(rows(options, below), options)


if __name__ == "__main__":
    sys.exit(main())
