"""The scheduler side, call by call: vLLM waits for each of these in every step.

    python benchmarks/lookup.py [--quick] [--json]

A store of 32,768 chunks, all slots taken, behind the scheduler side that the connector drives. First the
lookup with its lease, from tokens, beside what any chain of sha256 costs; then each call's p50 and p99 over
requests of 1, 2 and 128 chunks, of which all is found, or nothing and everything is stored by evicting. p99
is wall time with the garbage collector on; rows name its pauses. It is shown beside the p99 of bare hashing of 32,768
other tokens before each request. on_new_request hashes the prompt: what counts there is the time beyond the p99 of bare
hashing of as many tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import gc
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from attrs import define, field, frozen

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio, percentile
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.namespace import Namespace
from lmkv.cli.measure.limits import bare_chain
from lmkv.policies import LRU
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore
from lmkv.vllm.block_map import BlockMap, Group
from lmkv.vllm.metadata import JobReport, StepPlan, WorkerReport
from lmkv.vllm.scheduler.scheduler import Scheduler

BLOCK, CHUNK, SLOTS = 16, 256, 32_768
SLOT_BYTES = 4096
LIMIT = "bare hashing of 32k tokens"
BARE, HASHING = "array + streaming sha256", "on_new_request"
LOOKUP_TARGET, P99_TARGET = 1.8, 1.5
LONGEST, LONG = 131_072, 32_768
STEP = 8192
"""Tokens that vLLM schedules in a step."""


@define(eq=False)
class Request:
    """A vLLM request as the scheduler side sees it."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: None = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    num_prompt_tokens = num_tokens


@define
class Recorder:
    """Milliseconds of each call, of each collection of garbage, and of each call less the collections within it."""

    calls: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    collected: list[float] = field(factory=list)
    without: dict[str, list[float]] = field(factory=lambda: defaultdict(list))
    _began: float = 0.0

    def __call__(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        start, before = time.perf_counter(), len(self.collected)
        result = call(*args)
        self.calls[name].append((time.perf_counter() - start) * 1e3)
        self.without[name].append(self.calls[name][-1] - sum(self.collected[before:]))
        return result

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.collected.append((time.perf_counter() - self._began) * 1e3)


@frozen
class Bench:
    """A scheduler side over a full store, and the prompts that are in it: `SLOTS` chunks in all."""

    store: TieredStore
    scheduler: Scheduler
    prompts: list[list[int]]
    _numbers: Iterator[int] = field(factory=itertools.count)

    @classmethod
    def make(cls, *lower: Tier) -> Bench:
        host = CPUPinnedBackend(SLOTS * SLOT_BYTES, SLOT_BYTES, shared=True, populate=False)
        store = TieredStore(Tier(host, LRU()), lower)
        namespace = Namespace(model="lookup", dtype="bfloat16", chunk_size=CHUNK, block_size=BLOCK)
        bench = cls(store, Scheduler(store, namespace, BlockMap(CHUNK, (Group(BLOCK),))), [])
        # Until then each plan names the slab.
        bench.scheduler.on_report(WorkerReport(mapped={0}))
        bench.fill()
        # As vLLM does once it has started: what the benchmark keeps is not what an engine does.
        gc.collect()
        gc.freeze()
        return bench

    def fill(self) -> None:
        """Fill every slot with prompts of the greatest length."""
        for seed in range(SLOTS * CHUNK // LONGEST):
            self.prompts.append(tokens_of(LONGEST, seed))
            self.serve(self.request(self.prompts[-1]), Recorder())
        assert not self.store.slab.free_slots

    def request(self, tokens: list[int]) -> Request:
        return Request(f"r{next(self._numbers)}", tokens)

    def known(self, length: int) -> Request:
        """A request whose tokens are all stored but the last."""
        return self.request([*random.choice(self.prompts)[:length], 0])

    def unknown(self, length: int) -> Request:
        return self.request([*tokens_of(length, None), 0])

    def lookup(self, request: Request) -> int | None:
        self.scheduler.on_new_request(request)
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def serve(self, request: Request, timed: Recorder) -> None:
        """One request from arrival to end, as vLLM calls: steps of `STEP` tokens, then a decode.

        Lower tiers write a step's chunks before the next step: what their threads take from its calls is not measured.
        """
        side, name = self.scheduler, request.request_id
        timed(HASHING, side.on_new_request, request)
        hit, _ = timed("get_num_new_matched_tokens", side.get_num_new_matched_tokens, request, 0)
        tables = [list(range(1, request.num_tokens // BLOCK + 2))]
        timed("update_state_after_alloc", side.update_state_after_alloc, request, tables, hit)
        computed = hit
        while computed < request.num_tokens:
            step = min(STEP, request.num_tokens - computed)
            computed += step
            plan = timed("plan_step + take_plan", self.plan, {name: computed}, {name: tables}.get, step)
            jobs = {order.job: JobReport(1, True, 1, 0.1) for order in (*plan.loads, *plan.stores)}
            if jobs:
                timed("on_report", side.on_report, WorkerReport(jobs))
                self.store.drain()
        timed("plan of a decode", self.plan, {name: computed}, {name: tables}.get, 1)
        timed("request_finished", side.request_finished, request)

    def plan(self, progress: dict[str, int], blocks_of: Callable[[str], Any], tokens: int) -> StepPlan:
        self.scheduler.plan_step(progress, blocks_of, tokens)
        return self.scheduler.take_plan()


def tokens_of(length: int, seed: int | None) -> list[int]:
    return random.Random(seed).choices(range(150_000), k=length)


def size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else f"{tokens // CHUNK} chunk{'s'[: tokens > CHUNK]}"


def lookups(bench: Bench, rounds: int) -> Iterator[Row]:
    """From tokens to a lease, beside the hashing that it cannot do without. CPU time."""
    for length in (2048, LONG, LONGEST):
        yield lookup(bench, f"{size(length)} tokens, hit", lambda n=length: bench.known(n), rounds)
        yield lookup(bench, f"{size(length)} tokens, miss", lambda n=length: bench.unknown(n), rounds)


def lookup(bench: Bench, name: str, make: Callable[[], Request], rounds: int) -> Row:
    request = make()

    def fresh(case: str) -> None:
        nonlocal request
        bench.scheduler.request_finished(request)
        request = make()

    cases = {"limit": lambda: bare_chain(request.all_token_ids), "lookup": lambda: bench.lookup(request)}
    times = interleaved(cases, rounds, before=fresh)
    bench.scheduler.request_finished(request)
    value = statistics.median(times["lookup"]) * 1e3
    target = LOOKUP_TARGET if request.num_tokens > LONGEST else None
    ratio = median_ratio(times, "lookup", "limit")
    met = None if target is None else ratio <= target
    return Row(f"lookup with lease, {name}", value, "ms", BARE, ratio, target, met)


def calls(bench: Bench, length: int, requests: int) -> Iterator[Row]:
    """p50 and p99 of each call over so many requests of `length` tokens."""
    for kind, make in (("hit", bench.known), ("miss, evicting", bench.unknown)):
        timed = Recorder()
        gc.callbacks.append(timed.on_collection)
        for _ in range(requests):
            timed(LIMIT, bare_chain, tokens_of(LONG, None))
            timed(BARE, bare_chain, make(length).all_token_ids)
            bench.serve(make(length), timed)
        gc.callbacks.remove(timed.on_collection)
        bare, limit = (percentile(timed.calls.pop(name), 0.99) for name in (BARE, LIMIT))
        for call, found in timed.calls.items():
            name = f"{call}, {size(length)}, {kind}"
            yield Row(f"{name}: p50", statistics.median(found), "ms")
            p99 = percentile(found, 0.99)
            ratio = (p99 - (bare if call == HASHING else 0.0)) / limit
            yield Row(f"{name}: p99", p99, "ms", f"{LIMIT}, p99", ratio, P99_TARGET, ratio <= P99_TARGET)
        if timed.collected:
            pauses = f"{len(timed.collected)} collections in {requests} requests of {size(length)}, {kind}"
            yield Row(f"{pauses}: longest", max(timed.collected), "ms")
        refill(bench)


def refill(bench: Bench) -> None:
    """Store again the chunks that misses evicted."""
    for prompt in bench.prompts:
        bench.serve(bench.request(prompt), Recorder())


def main() -> int:
    options = arguments_of(__doc__).parse_args()
    bench = Bench.make()
    rows = list(lookups(bench, 15 if options.quick else 101))
    for length, requests in ((CHUNK, 2000), (2 * CHUNK, 2000), (LONG, 1000)):
        rows += calls(bench, length, requests // 10 if options.quick else requests)
    bench.scheduler.close()
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
