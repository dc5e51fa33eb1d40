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
import statistics
from collections.abc import Callable, Iterator

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio, percentile
from lmkv.cli.measure.calls import LOOKUP_TARGET
from lmkv.cli.measure.limits import CHUNK, bare_chain
from lmkv.cli.measure.scheduler import (
    BARE,
    HASHING,
    LIMIT,
    LONG,
    LONGEST,
    TARGET,
    Bench,
    Recorder,
    Request,
    beyond,
    size,
    tokens_of,
)


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
            ratio = beyond(found, bare if call == HASHING else 0.0) / limit
            yield Row(f"{name}: p99", p99, "ms", f"{LIMIT}, p99", ratio, TARGET, ratio <= TARGET)
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
