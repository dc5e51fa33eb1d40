"""The calls that a scheduler waits for: keys, lookups, evictions, pins, slots, and each call of vLLM's scheduler side.

    python -m benchmarks.calls [--only keys,lookups,evictions,pins,vllm,scheduler] [--quick] [--json] [--write FILE]

keys, lookups: CPU time from the tokens of a prompt, compared with bare hashing of the tokens. evictions: the work of a
store for each chunk once all 32,768 slots are taken, 64 chunks at a time, with each policy. Either nothing is pinned,
or 4,096 of the oldest chunks. The reference replaces the oldest key of a bare OrderedDict. pins: pins and slots, with
the same reference. vllm: evictions, compared with vLLM's own `CPUOffloadingManager`, if vLLM is installed. No bytes
move.

scheduler: p50 and p99 of each call that the connector makes, in wall time with the garbage collector on. Requests have
1, 2 and 128 chunks. Either all chunks are found, or none is found and all are stored by evicting others. The reference
of a p99 is the p99 of bare hashing of 32k other tokens. The call on_new_request hashes, so the p99 of hashing its
tokens is subtracted.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from attrs import define, field, frozen

from benchmarks.rounds import Row, arguments, beside, compared, finish, interleaved, percentile
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.chunks.hashing import chunk_keys
from lmkv.chunks.namespace import Namespace
from lmkv.cli.bench import BLOCK, CHUNK, LOOKUP_TARGET, bare_chain
from lmkv.memory.slab import Slab
from lmkv.policies import POLICIES, make_policy
from lmkv.protocols import ChunkKey, Tier
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import JobReport, StepPlan, WorkerReport
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.scheduler import Scheduler

SLOTS, SLOT_BYTES, BATCH, PINNED = 32_768, 4096, 64, 4096
LONGEST, LONG, STEP = 131_072, 32_768, 8192
"""Numbers of tokens: of the longest prompts, of long prompts, and of a step that vLLM schedules."""
KEYS_TARGET, EVICT_TARGET, PIN_TARGET, SLOT_TARGET, PINS_COST, VLLM_TARGET, P99_TARGET = 1.15, 10, 2.5, 1, 1.2, 0.6, 1.5
ARRAY, ORDERED = "array + streaming sha256", "a bare OrderedDict"
LIMIT, BARE = "bare hashing of 32k tokens", "bare hashing"
HASHING, BEYOND = "on_new_request", "on_new_request without its hashing"
Case = tuple[Callable[[], object], Callable[[], object]]
"""`(run, prepare)`: a call to measure, and a call before each measurement, which is not measured."""

_numbers = itertools.count()


def new_keys(count: int) -> list[ChunkKey]:
    return [next(_numbers).to_bytes(32, "little") for _ in range(count)]


def timed(cases: Mapping[str, Case], rounds: int, items: int) -> dict[str, list[float]]:
    """Return by case the microseconds of CPU time for one item, in each round. `items`: number of items of a call."""
    runs = {name: run for name, (run, _) in cases.items()}
    times = interleaved(runs, rounds, before=lambda name: cases[name][1]())
    return {name: [each / items * 1e6 for each in seconds] for name, seconds in times.items()}


# -- bookkeeping ------------------------------------------------------------------------------------------


def keys(rounds: int) -> Iterator[Row]:
    tokens = random.Random(0).choices(range(150_000), k=LONGEST)
    assert bare_chain(tokens) == chunk_keys(tokens, bytes(32), CHUNK)
    cases = {ARRAY: lambda: bare_chain(tokens), "lmkv": lambda: chunk_keys(tokens, bytes(32), CHUNK)}
    times = interleaved(cases, rounds)
    found = {name: [1e3 * each for each in seconds] for name, seconds in times.items()}
    yield from compared(f"keys of {LONGEST:,} tokens", "ms", found, ARRAY, {"lmkv": KEYS_TARGET})


def full_store(policy: str, pinned: int = 0) -> tuple[TieredStore, list[ChunkKey]]:
    """Return `(store, keys)`: a store with a chunk in every slot, and the keys of these chunks. `pinned`: number of
    the oldest chunks to pin.
    """
    host = CPUPinnedBackend(SLOTS * SLOT_BYTES, SLOT_BYTES, populate=False)
    store, keys = TieredStore(Tier(host, make_policy(policy))), new_keys(SLOTS)
    for start in range(0, SLOTS, BATCH):
        store.reserve(keys[start : start + BATCH]).commit()
    assert store.slab.free_slots == 0
    assert store.pin(keys[:pinned], 3600.0) == pinned
    return store, keys


def renewed(work: Callable[[list[ChunkKey]], object], batch: int = BATCH) -> Case:
    """Return a case that does the work with a batch of new keys each time."""
    ready = [new_keys(batch)]

    def prepare() -> None:
        ready[0] = new_keys(batch)

    return lambda: work(ready[0]), prepare


def storing(store: TieredStore) -> Case:
    return renewed(lambda keys: store.reserve(keys).commit())


def replacing(batch: int = BATCH) -> Case:
    """Return a case that does the least possible bookkeeping: it replaces keys of a bare OrderedDict of the same
    size.
    """
    table = OrderedDict.fromkeys(new_keys(SLOTS))

    def run(keys: list[ChunkKey]) -> None:
        for key in keys:
            table.popitem(last=False)
            table[key] = None

    return renewed(run, batch)


def evictions(rounds: int) -> Iterator[Row]:
    for policy in POLICIES:
        stores = {name: full_store(policy, count)[0] for name, count in (("nothing pinned", 0), ("pins", PINNED))}
        found = timed({name: storing(store) for name, store in stores.items()} | {ORDERED: replacing()}, rounds, BATCH)
        title = f"evict and insert a chunk, {policy}"
        yield from compared(title, "us", found, ORDERED, dict.fromkeys(stores, EVICT_TARGET))
        found.pop(ORDERED)
        yield list(compared(f"{title}, what pins cost", "us", found, "nothing pinned", {"pins": PINS_COST}))[1]
        for store in stores.values():
            store.close()


def pins(rounds: int) -> Iterator[Row]:
    count = 8 * BATCH
    for policy in POLICIES:
        store, keys = full_store(policy)
        turn = itertools.cycle([keys[start : start + count] for start in range(0, SLOTS, count)])
        wanted = [next(turn)]

        def fresh(store: TieredStore = store, turn: Iterator[Any] = turn, wanted: list[Any] = wanted) -> None:
            store.unpin(wanted[0])
            wanted[0] = next(turn)

        def pinned(store: TieredStore = store, fresh: Any = fresh, wanted: list[Any] = wanted) -> None:
            fresh()
            store.pin(wanted[0], 3600.0)

        pin = (lambda store=store, wanted=wanted: store.pin(wanted[0], 3600.0)), fresh
        unpin = (lambda store=store, wanted=wanted: store.unpin(wanted[0])), pinned
        found = timed({"pin": pin, "unpin": unpin, ORDERED: replacing(count)}, rounds, count)
        targets = dict.fromkeys(("pin", "unpin"), PIN_TARGET)
        yield from compared(f"a chunk, {policy}", "us", found, ORDERED, targets)
        store.close()
    slab = Slab(SLOT_BYTES, SLOTS * SLOT_BYTES)

    def take_and_give_back() -> None:
        for slot in [slab.allocate() for _ in range(count)]:
            slab.free(slot)

    found = timed({"lmkv": (take_and_give_back, lambda: None), ORDERED: replacing(count)}, rounds, count)
    yield from compared("take and free a slot", "us", found, ORDERED, {"lmkv": SLOT_TARGET})
    slab.close()


def vllm_manager(policy: str) -> Case:
    """Return a case that stores a request's chunks in vLLM's manager, which is full. Each time the keys are those of
    another request.
    """
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(SLOTS, policy)

    def new() -> tuple[list[Any], Any]:
        return [make_offload_key(key, 0) for key in new_keys(BATCH)], ReqContext(req_id=str(next(_numbers)))

    ready = [new()]

    def store() -> None:
        assert manager.prepare_store(*ready[0]) is not None
        manager.complete_store(*ready[0])

    def prepare() -> None:
        ready[0] = new()

    for _ in range(SLOTS // BATCH + 1):
        store()
        prepare()
    return store, prepare


def beside_vllm(rounds: int) -> Iterator[Row]:
    peers = {f"vLLM, {name}": vllm_manager(name) for name in ("lru", "arc")}
    for policy in POLICIES:
        store, _ = full_store(policy)
        found = timed({"lmkv": storing(store), **peers}, rounds, BATCH)
        for peer in peers:
            both = {peer: found[peer], "lmkv": found["lmkv"]}
            targets = {"lmkv": VLLM_TARGET} if policy.lower() in peer else {}
            yield from compared(f"evict and insert a chunk, {policy}", "us", both, peer, targets)
        store.close()


# -- vLLM's calls of the scheduler side -------------------------------------------------------------------


@define(eq=False)
class Request:
    """A vLLM request, with the attributes that the scheduler side reads."""

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
    """Milliseconds of each call, of each garbage collection, and of each call without the collections during the
    call.
    """

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
class Side:
    """A scheduler side over a full store, and the prompts in this store, which have `SLOTS` chunks in all."""

    store: TieredStore
    scheduler: Scheduler
    prompts: list[list[int]]

    @classmethod
    def make(cls, *lower: Tier) -> Side:
        host = CPUPinnedBackend(SLOTS * SLOT_BYTES, SLOT_BYTES, shared=True, populate=False)
        store = TieredStore(Tier(host, make_policy("LRU")), lower)
        namespace = Namespace(model="lookup", dtype="bfloat16", chunk_size=CHUNK, block_size=BLOCK)
        side = cls(store, Scheduler(store, namespace, BlockMap(CHUNK, (Group(BLOCK),))), [])
        # Until then each plan names the slab.
        side.scheduler.on_report(WorkerReport(mapped={0}))
        side.prompts.extend(tokens_of(LONGEST, seed) for seed in range(SLOTS * CHUNK // LONGEST))
        side.refill()
        if store.slab.free_slots:
            raise RuntimeError("the prompts left slots free, so that nothing would be evicted")
        # As vLLM does once it has started: what the benchmark keeps is not what an engine does.
        gc.collect()
        gc.freeze()
        return side

    def refill(self) -> None:
        """Store the prompts, and store again those that others have evicted."""
        for prompt in self.prompts:
            self.serve(self.request(prompt), Recorder())

    def request(self, tokens: list[int]) -> Request:
        return Request(f"r{next(_numbers)}", tokens)

    def known(self, length: int) -> Request:
        """Return a request with tokens that are all stored except the last token."""
        return self.request([*random.choice(self.prompts)[:length], 0])

    def unknown(self, length: int) -> Request:
        return self.request([*tokens_of(length, None), 0])

    def lookup(self, request: Request) -> int | None:
        self.scheduler.on_new_request(request)
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0]

    def serve(self, request: Request, timed: Recorder) -> None:
        """Pass one request through its calls from arrival to end, as vLLM makes them: steps of `STEP` tokens, then a
        step that decodes.

        After each step, wait until the lower tiers have written the request's chunks.
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

    def record(self, make: Callable[[int], Request], length: int, into: Recorder) -> None:
        """Serve a request and record its calls. Before, hash other tokens, and the tokens of another such prompt."""
        into(LIMIT, bare_chain, tokens_of(LONG, None))
        into(BARE, bare_chain, make(length).all_token_ids)
        gc.callbacks.append(into.on_collection)
        self.serve(make(length), into)
        gc.callbacks.remove(into.on_collection)


def tokens_of(length: int, seed: int | None) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(150_000, size=length).tolist()
    return tokens


def size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else f"{tokens // CHUNK} chunk{'s'[: tokens > CHUNK]}"


def beyond(times: Sequence[float], own: float) -> float:
    """Return how much the 99th percentile of `times` exceeds `own`."""
    return max(0.0, percentile(times, 0.99) - own)


def lookups(side: Side, rounds: int) -> Iterator[Row]:
    for length in (2048, LONG, LONGEST):
        for kind, make in (("hit", side.known), ("miss", side.unknown)):
            ready = [make(length)]

            def fresh(_: str, make: Any = make, length: int = length, ready: list[Request] = ready) -> None:
                side.scheduler.request_finished(ready[0])
                ready[0] = make(length)

            cases = {
                BARE: lambda ready=ready: bare_chain(ready[0].all_token_ids),
                "lmkv": lambda ready=ready: side.lookup(ready[0]),
            }
            times = interleaved(cases, rounds, before=fresh)
            side.scheduler.request_finished(ready[0])
            found = {name: [1e3 * each for each in seconds] for name, seconds in times.items()}
            targets = {"lmkv": LOOKUP_TARGET} if length == LONGEST else {}
            yield from compared(f"lookup with lease, {size(length)} tokens, {kind}", "ms", found, BARE, targets)


def scheduler_calls(side: Side, length: int, requests: int) -> Iterator[Row]:
    for kind, make in (("hit", side.known), ("stored by evicting", side.unknown)):
        timed = Recorder()
        for _ in range(requests):
            side.record(make, length, timed)
        bare, limit = (percentile(timed.calls.pop(name), 0.99) for name in (BARE, LIMIT))
        for call, found in timed.calls.items():
            name, own = (f"{BEYOND if call == HASHING else call}, {size(length)}, {kind}", bare * (call == HASHING))
            yield Row(f"{name}: p50", statistics.median(found), "ms")
            yield beside(f"{name}: p99", beyond(found, own), "ms", f"{LIMIT}, p99", limit, P99_TARGET)
        side.refill()


def rows(only: set[str], quick: bool) -> Iterator[Row]:
    rounds = 50 if quick else 500
    parts = {"keys": keys, "evictions": evictions, "pins": pins}
    for name in (name for name in parts if name in only):
        yield from parts[name](rounds // 5 if name == "keys" else rounds)
    if "vllm" in only and find_spec("vllm"):
        yield from beside_vllm(rounds)
    if only & {"lookups", "scheduler"}:
        side = Side.make()
        if "lookups" in only:
            yield from lookups(side, 15 if quick else 101)
        if "scheduler" in only:
            for length, requests in ((CHUNK, 2000), (2 * CHUNK, 2000), (LONG, 1000)):
                yield from scheduler_calls(side, length, requests // 20 if quick else requests)
        side.scheduler.close()


def main() -> int:
    parser = arguments(__doc__, quick="a tenth of the rounds")
    parser.add_argument("--only", default="keys,lookups,evictions,pins,vllm,scheduler")
    options = parser.parse_args()
    return finish(rows(set(options.only.split(",")), options.quick), options)


if __name__ == "__main__":
    sys.exit(main())
