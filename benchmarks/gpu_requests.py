"""First tokens and throughput on a GPU: vLLM alone, with lmkv, and with vLLM's own offloading connector.

    python benchmarks/gpu_requests.py [--tokens 8192] [--rounds 9] [--layers 32] [--graphs] [--disk FOLDER]
                                      [--only NAME,...] [--small] [--json]

The model has random weights, bfloat16, and with 32 layers 6.2e9 of them. All engines run at once on one GPU, each in
processes of its own, and are asked in turn, in shuffled order. In its turn an engine answers a new prompt; the same
prompt again, once vLLM's own prefix cache was emptied, so that a connector loads it; the same once more, from vLLM's
own prefix cache; and then four new prompts together in the same three ways. Ratios are taken within a round; their
median counts. `--small`: a model for a CPU, whose figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from statistics import median
from typing import Any

from attrs import evolve

from benchmarks._gpu_engines import Answers, Batch, Engine
from benchmarks._timing import REPOSITORY, Row, arguments_of, finish, interval, turns
from lmkv.cli.measure.small_model import SmallModel
from lmkv.cli.measure.vllm_engines import EngineSpec

ALONE, LMKV, OWN, DISK = "vLLM alone", "lmkv", "vLLM's own connector", "lmkv with a disk"
COMPUTED, LOADED, INSIDE = "computed", "loaded", "from vLLM's prefix cache"
TOGETHER, WARM_UPS = 4, 2
ONE, SEVERAL = "first token of one prompt", f"all of {TOGETHER} prompts"
SETTLE = 0.5
"""Seconds in which the stores of a prompt end."""
Found = dict[str, dict[str, list[Answers]]]


def specs(options: Any) -> dict[str, EngineSpec]:
    tokens = options.tokens
    if options.small:
        model = SmallModel(layers=2, hidden=128, dtype="bfloat16")
    else:
        model = SmallModel(
            layers=options.layers, hidden=4096, heads=32, kv_heads=8, dtype="bfloat16", max_position=4 * tokens
        )
    room = TOGETHER * tokens * model.kv_bytes_per_token
    host_gib = 3 * room / 2**30
    plain = EngineSpec(
        model=model,
        max_tokens=tokens + 64,
        kv_bytes=int(1.2 * room),
        prefix_caching=True,
        options={"load_format": "dummy", "gpu_memory_utilization": 0.05, "enforce_eager": not options.graphs},
    )
    lmkv = {"max_local_cpu_size": host_gib}
    found = {
        ALONE: plain,
        LMKV: evolve(plain, settings=lmkv),
        OWN: evolve(plain, connector="OffloadingConnector", settings={"cpu_bytes_to_use": int(host_gib * 2**30)}),
    }
    if options.disk:
        # Always loaded from, however slow it is.
        always = {"local_cpu": False, "load_or_recompute": False, "prefetch_deadline": 30.0}
        disk = {"local_disk": str(options.disk), "max_local_disk_size": 2 * host_gib, **always}
        found[DISK] = evolve(plain, settings={**lmkv, **disk})
    only = list(filter(None, options.only.split(",")))
    return {name: spec for name, spec in found.items() if not only or name in only}


def turn(engine: Engine, name: str, number: int, tokens: int) -> dict[str, Answers]:
    """Ask one engine for all of a round."""
    found = {}
    # The number of the round makes the prompts new. Seeds of either sign are the same to Python.
    seeds = [1000 * (number + WARM_UPS) + each for each in range(1 + TOGETHER)]
    for kind, batch in {
        ONE: Batch(seeds=seeds[:1], tokens=tokens, answer=2),
        SEVERAL: Batch(seeds=seeds[1:], tokens=tokens, answer=16),
    }.items():
        found[f"{kind}, {COMPUTED}"] = engine.answer(batch)
        time.sleep(SETTLE)
        if name != ALONE:
            found[f"{kind}, {LOADED}"] = engine.answer(evolve(batch, forget=True))
            time.sleep(0.1)
        found[f"{kind}, {INSIDE}"] = engine.answer(batch)
    for kind, answers in found.items():
        right = max(answers.hits) == 0 if kind.endswith(COMPUTED) else min(answers.hits) > tokens // 2
        assert right, f"{name}, {kind}: hits of {answers.hits} tokens"
    return found


def seconds_of(kind: str, answers: Answers) -> float:
    """Until the first token of one prompt, or the last one of several."""
    return answers.ttfts[0] if kind.startswith(ONE) else answers.seconds


def rows(found: Found) -> list[Row]:
    made = []
    for name, kinds in found.items():
        for kind, answers in kinds.items():
            values = [seconds_of(kind, each) for each in answers]
            of = f"{kind.rpartition(', ')[0]}, {COMPUTED}"
            if ALONE not in found:
                made.append(Row(f"{name}: {kind}", median(values), "s"))
                continue
            others = [seconds_of(of, each) for each in found[ALONE][of]]
            ratios = [mine / other for mine, other in zip(values, others, strict=True)]
            low, high = interval(ratios)
            title = f"{name}: {kind} ({low:.3f} to {high:.3f})"
            made.append(Row(title, median(values), "s", f"{ALONE}, {COMPUTED}", median(ratios)))
    return made


def main() -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--only", default="", help="names of engines, with commas between them")
    parser.add_argument("--disk", type=Path, help="a folder for another engine's disk tier")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    chosen = specs(options)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-gpu-")))
        engines: dict[str, Engine] = {}

        def start(name: str) -> None:
            engine = Engine(chosen[name], root / str(list(chosen).index(name)), REPOSITORY)
            engines[name] = stack.enter_context(closing(engine))

        with ThreadPoolExecutor(len(chosen)) as pool:
            list(pool.map(start, chosen))
        print("started", flush=True)
        for warm_up in range(-WARM_UPS, 0):
            for name, engine in engines.items():
                turn(engine, name, warm_up, options.tokens)
        found: Found = {name: {} for name in chosen}
        for number, name in turns(engines, options.rounds):
            for kind, answers in turn(engines[name], name, number, options.tokens).items():
                found[name].setdefault(kind, []).append(answers)
                print(f"round {number}, {name}: {kind}: {answers}", flush=True)
        for engine in engines.values():
            engine.leave()
    return finish(rows(found), options.json)


if __name__ == "__main__":
    sys.exit(main())
