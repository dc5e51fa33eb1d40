"""KV connectors, compared with vLLM alone on one GPU. Every speed has a share `alike` of equal answers.

    python -m benchmarks.gpu --engines alone,lmkv,native,lmcache [--steps facts,tests,torture,script,long-8k,...]
                             [--out DIR] [--box 540] [--shape 8B] [--graphs decode] [--rounds 5] [--tiny]

Engines: vLLM `alone`; with a connector that does nothing (`idle`); with `lmkv`; with vLLM's own `native` and `simple`
connectors for host memory; with LMCache in vLLM's process (`lmcache`) and with LMCache's server (`lmcache-mp`). Any
other name is the name of a connector in vLLM, and `--settings` has its settings: `--settings '{"MyConnector":
{"cpu_gib": 8}}'`.

Engines that fit the GPU are started together and answer in turns, in shuffled order. A ratio is the median over rounds
of one engine's figure divided by another engine's figure in the same round. A run ends after `--box` seconds. The file
DIR/gpu.json has the finished steps, and the same command continues with the next step. Models have Qwen3's shape and
random weights that make every answer depend on every layer's KV. `alike` is the share of answers that equal the answers
to the same prompts without hits. The same engine has given these answers before, or, in some steps, vLLM alone has. In
bfloat16, batches of other shapes round differently.

  facts     the device, its bus, versions
  tests     lmkv's tests for GPUs
  torture   kv_connector_torture around each connector: requests with aborts, preemptions, resets and restarts
  script    ten long prompts, one token each: computed, again with vLLM's own prefix cache emptied, again with it full
  long-*    first token of one prompt: computed, loaded by the connector, and from vLLM's own prefix cache
  talks     conversations: more than vLLM's own prefix cache can hold, and a quarter more than host memory can hold
  decode    milliseconds of a step that decodes, 1 and 8 requests
  mixed     time between two tokens of requests that decode, while long prompts come, which are stored, then loaded
  sleep     levels 1 and 2 between a store and a load, in separate engines
  128k      as long-*, in separate engines

`--tiny`: a model for a CPU, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import SHAPES, Engine
from benchmarks.gpu.plan import GRAPHS, Plan, together
from benchmarks.peers import LMCacheServer
from benchmarks.rounds import ROOT, where
from lmkv.cli.engines import ENVIRONMENT

NOTHING_LOADED = ("alone", "idle")
SETTLE = 0.6
"""Seconds after which the stores of a prompt have ended."""
FACTS, TESTS, TORTURE, SLEEP = "facts", "tests", "torture", "sleep"
COUNTS = ("hit", "alike", "cached", "requests")
"""Prefixes of the names of facts that are not compared between engines."""
PROBE = """
import json, os, time, torch
found = {"torch": torch.__version__, "cores": os.cpu_count(), "device": "cpu", "bytes": 0}
if torch.cuda.is_available():
    found |= {"device": torch.cuda.get_device_name(), "bytes": torch.cuda.get_device_properties(0).total_memory}
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    for name, to, of in (("to the device", there, host), ("from the device", host, there)):
        took = []
        for _ in range(6):
            torch.cuda.synchronize()
            started = time.perf_counter()
            to.copy_(of, non_blocking=True)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - started)
        found["GB/s " + name] = round((1 << 30) / min(took) / 1e9, 1)
print(json.dumps(found))
"""
Facts = dict[str, Any]
Turn = Callable[[Engine, str, int], Facts]
"""A function `turn(engine, name, seed)` that returns the facts of one engine in a round."""


class Book:
    """The facts of each step, in a JSON file that is written after each step. A run that was interrupted continues
    at its last step.
    """

    def __init__(self, path: Path, box: float) -> None:
        self.path, self._deadline = path, time.monotonic() + box
        self.facts: dict[str, Facts] = {}
        with suppress(OSError, ValueError):
            self.facts = json.loads(path.read_text())

    @property
    def left(self) -> float:
        return self._deadline - time.monotonic()

    def done(self, step: str) -> bool:
        return self.facts.get(step, {}).get("status") == "done"

    def note(self, step: str, **facts: Any) -> None:
        self.facts.setdefault(step, {}).update(facts)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.facts, indent=1))
        scratch.replace(self.path)


class Group:
    """Engines that run at the same time. If an engine does not start, or fails, the error is noted as a fact."""

    def __init__(self, plan: Plan, members: Sequence[str], book: Book, seconds: float) -> None:
        self.plan, self.book, self.label = plan, book, "+".join(members)
        self._deadline = time.monotonic() + seconds
        self._server: LMCacheServer | None = None
        self.engines: dict[str, Engine] = {}
        self._members, self._number = members, int(time.time()) % 1_000_000 * 1000

    def __enter__(self) -> Group:
        folder, stamp = self.plan.options.out, int(time.time())
        if "lmcache-mp" in self._members:
            gib = self.plan.host_bytes / 2**30
            self._server = LMCacheServer(sys.executable, gib, folder / f"{stamp}-server.log")

        def start(name: str) -> None:
            spec, env = self.plan.spec(name, self._server), self.plan.env(name)
            patience = min(self.plan.options.start, max(30.0, self.book.left - 10))
            try:
                self.engines[name] = Engine(spec, folder / f"{stamp}-{name}", env, patience)
                fact = self.engines[name].info
            except Exception as error:  # noqa: BLE001
                fact = {"failed": str(error)[-3000:]}
            self.book.note(f"{self.label}: engines", **{name: fact})
            print(f"{self.label}: {name}: {fact}", flush=True)

        with ThreadPoolExecutor(len(self._members)) as pool:
            list(pool.map(start, self._members))
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(max(1, len(self.engines))) as pool:
            list(pool.map(Engine.close, self.engines.values()))
        if self._server is not None:
            self._server.close()

    @property
    def left(self) -> float:
        """Seconds that are left to this group of the time of the whole run."""
        return min(self.book.left, self._deadline - time.monotonic())

    def run(self, step: str, turn: Turn, most: int, least: float, share: float) -> None:
        """Run up to `most` rounds, each with a turn of every engine, while time is `left`. The first round is a
        warm-up.

        `least`: seconds that another round takes. `share`: share of the time that is left that this step may take.
        """
        key = f"{self.label}: {step}"
        if self.book.done(key):
            return
        failed: dict[str, str] = {}
        rounds: list[dict[str, Facts]] = []
        enough = time.monotonic() + share * self.left
        for number in range(-1, most):
            if rounds and (self.left < least or time.monotonic() > enough):
                break
            if self.left < least / 2:
                print(f"{key}: no time left; run the same command again", flush=True)
                return
            found = self._round(turn, failed)
            if number >= 0:
                rounds.append(found)
                self.book.note(key, rounds=rounds, failed=failed)
        self.book.note(key, status="done", summary=summary(rounds))
        for engine, facts in self.book.facts[key]["summary"].items():
            print(f"{key}: {engine}: {json.dumps(facts)}", flush=True)
        for engine, error in failed.items():
            print(f"{key}: {engine} FAILED: {error[-800:]}", flush=True)

    def _round(self, turn: Turn, failed: dict[str, str]) -> dict[str, Facts]:
        self._number += 1
        found: dict[str, Facts] = {}
        for name in random.sample(list(self.engines), len(self.engines)):
            if name in failed:
                continue
            try:
                found[name] = turn(self.engines[name], name, 1000 * self._number)
            except Exception as error:  # noqa: BLE001
                failed[name] = f"{type(error).__name__}: {error}"[-2500:]
                if self.engines[name].ended:
                    self.engines.pop(name).close()
        computed = {name: facts.pop("tokens") for name, facts in found.items() if "tokens" in facts}
        if "alone" in computed:
            for name, tokens in computed.items():
                found[name].setdefault("alike", alike(tokens, computed["alone"]))
        return found


def alike(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of answers in `one` whose first token equals that of the same answer in `other`."""
    return statistics.mean(mine[:1] == theirs[:1] for mine, theirs in zip(one, other, strict=True))


def summary(rounds: Sequence[Mapping[str, Facts]]) -> dict[str, Facts]:
    """Return the medians by engine and fact, and the median ratios to vLLM alone and to lmkv in the same round."""
    found: dict[str, Facts] = {}
    for engine in dict.fromkeys(engine for one in rounds for engine in one):
        mine = [one for one in rounds if engine in one]
        facts: Facts = {}
        for name in mine[0][engine]:
            facts[name] = round(statistics.median(one[engine][name] for one in mine if name in one[engine]), 4)
            for other in ("alone", "lmkv"):
                both = [(one[engine].get(name), one.get(other, {}).get(name)) for one in mine]
                ratios = [value / of for value, of in both if value is not None and of]
                if ratios and other != engine and not name.startswith(COUNTS):
                    facts[f"{name}, of {other}"] = round(statistics.median(ratios), 3)
        found[engine] = facts
    return found


# -- steps ------------------------------------------------------------------------------------------------


def script(plan: Plan) -> Turn:
    def turn(engine: Engine, name: str, seed: int) -> Facts:
        # As in LMCache's example: "[Prompt i]", and one word again and again.
        prompts = [[(seed + n, 8), (17, 8 - plan.script_tokens)] for n in range(10)]
        question = {"do": "batch", "prompts": prompts}
        first = engine.ask(question)
        time.sleep(SETTLE)
        second, third = engine.ask({**question, "forget": True}), engine.ask(question)
        total = 10 * plan.script_tokens
        return {
            "first": first["seconds"],
            "second": second["seconds"],
            "third": third["seconds"],
            "hits of second": sum(second["hits"]) / total,
            "hits of third": sum(third["hits"]) / total,
            "alike": alike(second["tokens"], first["tokens"]),
        }

    return turn


def long_prompt(tokens: int) -> Turn:
    def turn(engine: Engine, name: str, seed: int) -> Facts:
        question = {"do": "batch", "prompts": [[(seed, tokens)]], "answer": 4}
        computed = engine.ask(question)
        found: Facts = {"computed": computed["ttfts"][0], "tokens": computed["tokens"]}
        time.sleep(SETTLE)
        if name not in NOTHING_LOADED:
            loaded = engine.ask({**question, "forget": True})
            found |= {"loaded": loaded["ttfts"][0], "hit": loaded["hits"][0] / tokens}
            found["alike"] = alike(loaded["tokens"], computed["tokens"])
            time.sleep(0.1)
        inside = engine.ask(question)
        return found | {"vLLM's cache": inside["ttfts"][0], "hit of vLLM's cache": inside["hits"][0] / tokens}

    return turn


def talks(plan: Plan) -> Turn:
    def turn(engine: Engine, name: str, seed: int) -> Facts:
        found = engine.ask({"do": "talks", "seed": seed, **plan.talk})
        ordered = sorted(found["ttfts"])
        return {
            "talks/s": len(ordered) / found["seconds"],
            "first token p50": ordered[len(ordered) // 2],
            "first token p90": ordered[int(0.9 * (len(ordered) - 1))],
            "cached": found["cached"] / found["prompt tokens"],
            "tokens": found["tokens"],
        }

    return turn


def decode(plan: Plan) -> Turn:
    def turn(engine: Engine, name: str, seed: int) -> Facts:
        length, steps = (64, 8) if plan.tiny else (1000, 128)
        question = {"do": "decode", "seed": seed, "length": length, "steps": steps}
        one, eight = (engine.ask({**question, "count": count}) for count in (1, 8))
        return {"ms a step, 1": one["ms"], "ms a step, 8": eight["ms"], "tokens": one["tokens"] + eight["tokens"]}

    return turn


def mixed(plan: Plan) -> Turn:
    def turn(engine: Engine, name: str, seed: int) -> Facts:
        size = {"count": 4, "answer": 40, "length": 256, "prompts": 3} if plan.tiny else {}
        size = size or {"count": 8, "answer": 400, "length": 4096, "prompts": 8}
        question = {"do": "mixed", "seed": seed, "every": 0.25, **size}
        found: Facts = engine.ask(question)
        if name not in NOTHING_LOADED:
            # The same prompts again: now they are loaded, not stored.
            engine.ask({"do": "batch", "prompts": [[(7, 20)]], "forget": True})
            again = engine.ask(question)
            found["alike"] = alike(again.pop("tokens"), found["tokens"])
            found |= {f"loading: {what}": value for what, value in again.items()}
        return found

    return turn


def sleeping(plan: Plan, engine: str, book: Book) -> Facts:
    """Measure a hit after each level of sleep. Level 1 keeps the weights. Level 2 discards the weights, so only the
    loaded bytes count.
    """
    spec = plan.spec(engine, None, enable_sleep_mode=not plan.tiny)
    started = Engine(spec, plan.options.out / f"{int(time.time())}-sleep-{engine}", plan.env(engine), book.left)
    question = {"do": "batch", "prompts": [[(seed, plan.script_tokens)] for seed in range(5)]}
    try:
        computed, found = started.ask(question), dict[str, Any]()
        time.sleep(SETTLE)
        for level in () if plan.tiny else (1, 2):
            found[f"level {level}"] = started.ask({"do": "sleep", "level": level})
        loaded = started.ask({**question, "forget": True})
        hit = sum(loaded["hits"]) / (5 * plan.script_tokens)
        return {**found, "hit": hit, "alike": alike(loaded["tokens"], computed["tokens"])}
    finally:
        started.close()


def command(words: Sequence[str], seconds: float) -> Facts:
    """Return the exit code and the last lines of a Python program, which is ended after `seconds` seconds."""
    program = [sys.executable, *words]
    # Triton multiplies float32 in tf32 by default, which would look like wrong KV.
    env = {**os.environ, **ENVIRONMENT, "TRITON_F32_DEFAULT": "ieee", "VLLM_CPU_KVCACHE_SPACE": "1"}
    try:
        done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"exit code": None, "last lines": [f"ended after {seconds:.0f} s"]}
    return {"exit code": done.returncode, "last lines": (done.stdout + done.stderr).strip().splitlines()[-8:]}


def alone_steps(plan: Plan, book: Book, engines: Sequence[str]) -> Iterator[tuple[str, Callable[[], Facts]]]:
    """Yield `(name, call)` for each step without rounds."""
    cuda = ("-m", "not gpu") if plan.tiny else ("-m", "gpu")
    tests = ["-m", "pytest", "-q", "-x", "-o", "cache_dir=/tmp/pytest-gpu", *cuda, "tests/memory/test_cuda.py"]
    yield TESTS, lambda: command(tests, min(180.0, book.left))
    for engine in (engine for engine in engines if engine not in NOTHING_LOADED):
        connector = {"kv_role": "kv_both", **plan.connector(engine, None)}
        minutes = ["--minutes", "0.1" if plan.tiny else "1", "--kinds", "gqa", "--shrink-minutes", "0.1"]
        report = str(plan.options.out / f"torture-{engine}")
        words = ["-m", "kv_connector_torture", *minutes, "--report", report, "--connector", json.dumps(connector)]
        yield f"{TORTURE}, {engine}", lambda words=words: command(words, min(150.0, book.left))
        yield f"{SLEEP}, {engine}", lambda engine=engine: sleeping(plan, engine, book)


def rounds_of(plan: Plan, steps: Sequence[str]) -> list[tuple[str, Turn, int, float]]:
    """Return for each step the arguments of `Group.run`."""
    rounds = plan.options.rounds
    found = [
        (step, long_prompt(tokens), min(3, rounds) if plan.wide else rounds, 12.0) for step, tokens in plan.long.items()
    ]
    if not plan.wide:
        found = [
            ("script", script(plan), rounds, 25.0),
            *found,
            ("decode", decode(plan), min(3, rounds), 10.0),
            ("mixed", mixed(plan), min(2, rounds), 30.0),
            ("talks", talks(plan), min(3, rounds), 60.0),
        ]
    return [work for work in found if work[0] in steps]


@contextmanager
def noted(book: Book, step: str) -> Iterator[None]:
    """Note an error of a step as a fact, so that the other steps run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        book.note(step, status="failed", error=f"{type(error).__name__}: {error}"[-3000:])
        print(f"{step}: FAILED: {error}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="a folder for facts and logs")
    parser.add_argument("--box", type=float, default=540.0, help="seconds for all of it")
    parser.add_argument("--start", type=float, default=150.0, help="seconds for the start of a group's engines")
    parser.add_argument("--engines", default="alone,lmkv,native,lmcache")
    parser.add_argument("--steps", default="facts,tests,script,long-8k,long-32k,decode,mixed,talks")
    parser.add_argument("--shape", default="8B", choices=list(SHAPES))
    parser.add_argument("--graphs", default="decode", choices=list(GRAPHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings, by engine, as JSON")
    parser.add_argument("--llm", type=json.loads, default={}, help="more options of vLLM's, as JSON")
    parser.add_argument("--memory", type=float, default=0.0, help="bytes of GPU memory to plan with; default: all")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.shape, options.graphs = "tiny", "none"
    steps, engines, options.out = options.steps.split(","), options.engines.split(","), options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    book = Book(options.out / "gpu.json", options.box)
    book.note(FACTS, **where(), **json.loads(subprocess.check_output([sys.executable, "-c", PROBE], text=True)))
    print(f"{FACTS}: {json.dumps(book.facts[FACTS])}", flush=True)
    for step, work in alone_steps(Plan(options), book, engines):
        if step.partition(",")[0] in steps and not book.done(step):
            with noted(book, step):
                book.note(step, **work(), status="done")
                print(f"{step}: {json.dumps(book.facts[step])}", flush=True)
    for plan in (Plan(options), Plan(options, wide=True)):
        works = rounds_of(plan, steps)
        groups = together(engines, plan.bytes_each, options.memory or book.facts[FACTS]["bytes"]) if works else []
        for number, members in enumerate(groups):
            label = "+".join(members)
            if all(book.done(f"{label}: {work[0]}") for work in works):
                continue
            with noted(book, label), Group(plan, members, book, book.left / (len(groups) - number)) as group:
                for place, work in enumerate(works):
                    if group.engines:
                        group.run(*work, share=min(0.5, 1.6 / (len(works) - place)))
    print("written to", book.path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
