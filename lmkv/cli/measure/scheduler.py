"""vLLM's calls of the scheduler side over a full host memory, while chunks below it are being found. Without vLLM.

`python -m lmkv.cli.measure.scheduler COUNT REQUESTS` measures them in a process of its own. So many chunks lie below;
first requests hit, then others store by evicting, of 32k tokens and of one chunk in turn. After each step the writes of
the lower tier are waited for: they disturb `on_report` alone, which begins them.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import asdict, define, field, frozen

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.namespace import Namespace
from lmkv.cli.measure.limits import BLOCK, CHUNK, bare_chain
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.scale import MANY, SLOT_BYTES, MadeUp, run
from lmkv.cli.measure.timing import percentile
from lmkv.policies import make_policy
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.scanner import PAUSE_SECONDS
from lmkv.vllm.block_map import BlockMap, Group
from lmkv.vllm.metadata import JobReport, StepPlan, WorkerReport
from lmkv.vllm.scheduler.scheduler import Scheduler

SLOTS = 32_768
LIMIT, BARE = "bare hashing of 32k tokens", "array + streaming sha256"
HASHING, BEYOND = "on_new_request", "on_new_request without its hashing"
HASHED = "how much longer bare hashing takes than while nothing is found"
LONGEST, LONG = 131_072, 32_768
STEP = 8192
"""Tokens that vLLM schedules in a step."""
TARGET = 1.5
"""The p99 of a call may be so many times that of `LIMIT`."""
HIT, STORED = "hit", "stored by evicting"
COLLECTION = "a collection of garbage that looks at 32k tokens"
DURING, ALONE, KEYS = "while chunks are found", "while nothing is found", "beside a thread that only makes keys"
REQUESTS, FEWEST = 300, 30
"""Requests of each length in each case, and with `--quick`. While chunks are found there may be more, but not fewer."""
QUICK = 200_000


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
        store = TieredStore(Tier(host, make_policy("LRU")), lower)
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
        if self.store.slab.free_slots:
            raise RuntimeError("the prompts left slots free, so that nothing would be evicted")

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

        After each step it waits until the lower tiers have written its chunks.
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
    tokens: list[int] = np.random.default_rng(seed).integers(150_000, size=length).tolist()
    return tokens


def size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else f"{tokens // CHUNK} chunk{'s'[: tokens > CHUNK]}"


def beyond(times: Sequence[float], own: float) -> float:
    """The p99 beyond `own`."""
    return max(0.0, percentile(times, 0.99) - own)


@frozen
class Call:
    """One call of requests of `length` tokens, in milliseconds.

    `kind`: `HIT` or `STORED`. `p99`: one for each case, such as `ALONE`. The p99 that bare hashing of such prompts has
    while nothing is found is taken off that of `BEYOND` and of `HASHED`. `uncollected`: the same without Python's
    collections of garbage.
    """

    name: str
    length: int
    kind: str
    p50: float
    p99: dict[str, float]
    uncollected: dict[str, float]


@frozen
class Calls:
    """`bare`: the p99 of `LIMIT` while nothing is found. `collection`: that of `COLLECTION`. Milliseconds."""

    bare: float
    collection: float
    calls: list[Call]


class Meanwhile:
    """A scheduler side above a tier of so many chunks, which are found once they may be."""

    def __init__(self, count: int, requests: int) -> None:
        self._requests = requests
        self._below = MadeUp(count)
        self.bench = Bench.make(Tier(self._below, make_policy("LRU")))
        self.bench.store.drain(600)
        self.begin = self._below.begin.set

    def while_found(self, make: Callable[[int], Request], until: Callable[[], bool]) -> dict[int, Recorder]:
        """Requests of both lengths in turn until then. Raises RuntimeError if too few have ended."""
        numbers = itertools.takewhile(lambda number: not until(), itertools.count())
        during = self._serve(make, numbers)
        if (served := len(during[LONG].calls[HASHING])) < self._requests:
            raise RuntimeError(f"{served} requests ended before {self._below.count:,} chunks were found: take more")
        return during

    def while_nothing(self, make: Callable[[int], Request]) -> dict[int, Recorder]:
        """The same while nothing is found."""
        return self._serve(make, range(self._requests))

    def beside_keys(self, make: Callable[[int], Request]) -> dict[int, Recorder]:
        """The same beside a thread that makes keys as the listing does, and indexes none."""
        ended, other = threading.Event(), MadeUp(self._below.count)
        other.begin.set()

        def make_keys() -> None:
            while not ended.is_set():
                for _ in other.list_keys():
                    time.sleep(PAUSE_SECONDS)
                    if ended.is_set():
                        return

        thread = threading.Thread(target=make_keys)
        thread.start()
        try:
            return self.while_nothing(make)
        finally:
            ended.set()
            thread.join()

    def _serve(self, make: Callable[[int], Request], numbers: Iterable[int]) -> dict[int, Recorder]:
        """One request of each length for each number; before each, others are hashed that are not served."""
        during = {length: Recorder() for length in (LONG, CHUNK)}
        for _ in numbers:
            for length, timed in during.items():
                timed(LIMIT, bare_chain, tokens_of(LONG, None))
                timed(BARE, bare_chain, make(length).all_token_ids)
                gc.callbacks.append(timed.on_collection)
                self.bench.serve(make(length), timed)
                gc.callbacks.remove(timed.on_collection)
        return during


def collecting(rounds: int) -> list[float]:
    """Milliseconds of young collections, each of which looks at one new prompt of 32k tokens."""
    timed = Recorder()
    for _ in range(rounds):
        gc.collect()
        prompt = tokens_of(LONG, None)
        timed("", gc.collect, 0)
        del prompt
    return timed.calls[""]


def calls_meanwhile(count: int, requests: int) -> Calls:
    """The scheduler's calls while so many chunks are being found, of so many requests at least.

    Beside them the same calls while nothing is being found, and beside a thread that only makes keys: what a listing
    that indexes nothing takes from the interpreter.
    """
    side = Meanwhile(count, requests)
    bench, store = side.bench, side.bench.store

    def half_found() -> bool:
        return store.stats().tiers[1].chunks >= count // 2

    def calls(kind: str, when: dict[str, dict[int, Recorder]]) -> Iterator[Call]:
        for length, timed in when[DURING].items():
            hashing = percentile(when[ALONE][length].calls[BARE], 0.99)
            shown = {name: (name, 0.0) for name in timed.calls if name != LIMIT}
            shown |= {HASHING: (BEYOND, hashing), BARE: (HASHED, hashing)}
            for name, (title, own) in shown.items():
                p99 = {each: beyond(other[length].calls[name], own) for each, other in when.items()}
                median = statistics.median(timed.calls[name])
                without = {each: beyond(other[length].without[name], own) for each, other in when.items()}
                yield Call(title, length, kind, median, p99, without)

    quiet, beside = side.while_nothing(bench.known), side.beside_keys(bench.known)
    side.begin()
    hits = side.while_found(bench.known, half_found)
    stores = side.while_found(bench.unknown, lambda: store.wait_indexed(0))
    quiet_later, beside_later = side.while_nothing(bench.unknown), side.beside_keys(bench.unknown)
    found = [
        *calls(HIT, {DURING: hits, ALONE: quiet, KEYS: beside}),
        *calls(STORED, {DURING: stores, ALONE: quiet_later, KEYS: beside_later}),
    ]
    bench.scheduler.close()
    bare = [time for each in (quiet, quiet_later) for timed in each.values() for time in timed.calls[LIMIT]]
    return Calls(percentile(bare, 0.99), percentile(collecting(requests), 0.99), found)


def calls_in_a_process(count: int, requests: int = REQUESTS) -> Calls:
    found = run([sys.executable, "-P", "-m", __name__, str(count), str(requests)])
    return Calls(found["bare"], found["collection"], [Call(**each) for each in found["calls"]])


def measure_scheduler(*, quick: bool) -> Iterator[Comparison]:
    """The p99 of each call of requests of 32k tokens, in one round."""
    count = QUICK if quick else MANY
    found = calls_in_a_process(count, FEWEST if quick else REQUESTS)
    for kind in (HIT, STORED):
        those = [each for each in found.calls if (each.length, each.kind) == (LONG, kind)]
        for when in (ALONE, DURING):
            calls = {f"lmkv {each.name}": each.p99[when] for each in those if each.name != HASHED}
            title = f"Scheduler's calls, 32k tokens, {kind}, {when.replace('chunks', f'{count:,} chunks')}"
            bars, note = {LIMIT: found.bare, COLLECTION: found.collection, **calls}, "p99 of one round"
            yield Comparison(title, "ms", bars, LIMIT, note=note, targets=dict.fromkeys(calls, TARGET))


def main() -> None:
    print(json.dumps(asdict(calls_meanwhile(*map(int, sys.argv[1:])))))


if __name__ == "__main__":
    main()
