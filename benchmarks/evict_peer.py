"""Evicting and inserting a chunk beside vLLM's own manager of host memory, in one run. No bytes move.

    python benchmarks/evict_peer.py [--quick] [--json]

CPU time over 32,768 chunks, 64 at a time. lmkv: reserve, which evicts and takes the slots, and commit, which publishes.
vLLM: `prepare_store` and `complete_store` of its `CPUOffloadingManager`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
import statistics
from collections.abc import Callable, Iterator

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from benchmarks.evict import SLOTS, full_store
from lmkv.cli.measure.calls import BATCH, storing
from lmkv.policies import POLICIES

TARGET = 0.6


def vllm_storing(policy: str) -> tuple[Callable[[], None], Callable[[], None]]:
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(SLOTS, policy)
    numbers = itertools.count()

    def new() -> list[object]:
        return [make_offload_key(next(numbers).to_bytes(32, "little"), 0) for _ in range(BATCH)]

    def context() -> object:
        return ReqContext(req_id=str(next(numbers)))

    ready: list[object] = [new(), context()]

    def run() -> None:
        keys, request = ready
        assert manager.prepare_store(keys, request) is not None
        manager.complete_store(keys, request)

    def prepare() -> None:
        ready[:] = new(), context()

    for _ in range(SLOTS // BATCH + 1):
        run()
        prepare()
    return run, prepare


def rows(rounds: int) -> Iterator[Row]:
    peers = {f"vLLM {name}": vllm_storing(name) for name in ("lru", "arc")}
    for policy in POLICIES:
        store, _ = full_store(policy, 0)
        cases = {policy: storing(store), **peers}
        runs = {name: run for name, (run, _) in cases.items()}
        times = interleaved(runs, rounds, before=lambda name, cases=cases: cases[name][1]())
        micros = statistics.median(times[policy]) / BATCH * 1e6
        yield Row(f"evict and insert a chunk, {policy}", micros, "us")
        for peer in peers:
            ratio = median_ratio(times, policy, peer)
            yield Row(f"{policy} to {peer}", ratio, "x", peer, ratio, TARGET, ratio <= TARGET)
        store.close()


def main() -> int:
    options = arguments_of(__doc__).parse_args()
    return finish(list(rows(50 if options.quick else 300)), options.json)


if __name__ == "__main__":
    sys.exit(main())
