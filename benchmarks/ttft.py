"""Time to first token of a repeated prompt: vLLM's own prefix cache beside lmkv's tiers on one node.

    python benchmarks/ttft.py [--lmcache PYTHON] [--tokens 8000] [--rounds 25] [--one-process] [--quick]
                              [--json]

All engines run at once, each in processes of its own, and are asked in turn, in shuffled order, so that what
disturbs one round disturbs all engines in it. Ratios are taken within a round; their median counts. The
engine core runs in a process of its own, as vLLM does by default, or with --one-process in that of the API.
With --lmcache, the interpreter of an environment that has vLLM, LMCache and what lmkv needs,
LMCacheMPConnector takes its turns too, by its default route and by its fastest. With --json the last line is
the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import statistics
import tempfile
from contextlib import ExitStack, closing

from benchmarks._lmcache_server import ENVIRONMENT, ROUTES, Server
from benchmarks._timing import Row, arguments_of, finish, median_ratio, turns
from lmkv.cli.measure.ttft import OWN, first_time, send
from lmkv.cli.measure.vllm_engines import ONE_PROCESS, SEVERAL_PROCESSES, EngineProcess, EngineSpec, engine_specs

WITHIN_TARGET, BETWEEN_TARGET = 1.05, 1.10
WITHIN, BETWEEN, DISK = "lmkv ram, within the step", "lmkv ram, between steps", "lmkv disk"
SHARED = "lmkv shared memory"
NAMES = (OWN, WITHIN, BETWEEN, DISK, SHARED)
HOST_GIB = 0.5


def main() -> int:
    parser = arguments_of(__doc__, quick="five rounds")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--lmcache", metavar="PYTHON", help="interpreter that has vllm and lmcache")
    options = parser.parse_args()
    if options.lmcache and options.one_process:
        parser.error("vLLM 0.32 in one process does not start with LMCache 0.5.6")
    env, how = (ONE_PROCESS, "one process") if options.one_process else (SEVERAL_PROCESSES, "as by default")
    tokens: int = options.tokens
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-ttft-")))
        engines: dict[str, EngineProcess] = {}
        cold: dict[str, float] = {}

        def start(name: str, spec: EngineSpec, env: dict[str, str], python: str = sys.executable) -> None:
            engine = EngineProcess(spec, folders[name], env, python=python)
            engines[name] = stack.enter_context(closing(engine))
            cold[name] = first_time(engine, folders[name], tokens).ttft_s
            print(f"{name}: cold {cold[name]:.3f} s", flush=True)

        folders = {name: root / str(number) for number, name in enumerate((*NAMES, *ROUTES))}
        memory = tempfile.TemporaryDirectory(prefix="lmkv-ttft-", dir="/dev/shm")
        folders[SHARED] = Path(stack.enter_context(memory))
        for name in NAMES:
            start(name, engine_specs(folders[name], tokens + 16, host_gib=HOST_GIB)[name], env)
        if options.lmcache:
            server = stack.enter_context(closing(Server(options.lmcache, 2 * HOST_GIB, root / "server.log")))
            plain = engine_specs(root, tokens + 16)["nothing"]
            for name in ROUTES:
                start(name, server.spec(name, plain), {**ENVIRONMENT, **env}, options.lmcache)
        warm: dict[str, list[float]] = {name: [] for name in engines}
        hits: dict[str, int] = {}
        for _, name in turns(engines, 5 if options.quick else options.rounds):
            answer = send(engines[name], folders[name], tokens)
            assert answer.hit_tokens > tokens // 2, f"{name}: a hit of {answer.hit_tokens} tokens"
            hits[name] = min(answer.hit_tokens, hits.get(name, tokens))
            warm[name].append(answer.ttft_s)
        for engine in engines.values():
            engine.leave()
    found = [Row(f"least hit of {tokens:,} tokens, {name}, {how}", hit, "tokens") for name, hit in hits.items()]
    return finish([*found, *rows(warm, cold, how)], options.json)


def rows(warm: dict[str, list[float]], cold: dict[str, float], how: str) -> list[Row]:
    found = []
    for name, seconds in warm.items():
        ratio, median = median_ratio(warm, name, OWN), statistics.median(seconds)
        target = {WITHIN: WITHIN_TARGET, BETWEEN: BETWEEN_TARGET}.get(name)
        met = None if target is None else ratio <= target
        found.append(Row(f"warm TTFT, {name}, {how}", median, "s", OWN, ratio, target, met))
        found.append(Row(f"speed-up over cold, {name}, {how}", cold[name] / median, "x"))
        if name in ROUTES:
            found.append(Row(f"{name} beside {WITHIN}, {how}", median_ratio(warm, name, WITHIN), "x"))
    return found


if __name__ == "__main__":
    sys.exit(main())
