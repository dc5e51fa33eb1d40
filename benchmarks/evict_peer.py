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

import statistics
from collections.abc import Iterator

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.cli.measure.calls import BATCH, full_store, storing
from lmkv.cli.measure.vllm_manager import SLOTS, TARGET, manager_storing
from lmkv.policies import POLICIES


def rows(rounds: int) -> Iterator[Row]:
    peers = {f"vLLM {name}": manager_storing(name) for name in ("lru", "arc")}
    for policy in POLICIES:
        store, _ = full_store(policy, SLOTS)
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
