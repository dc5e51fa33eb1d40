"""Evicting and inserting a chunk beside vLLM's own manager of host memory. CPU time, and no bytes move.

`python -m lmkv.cli.measure.vllm_manager ROUNDS` measures it, in a process of its own: vLLM is imported there only.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator

from lmkv.cli.measure.calls import BATCH, Case, compared, full_store, storing
from lmkv.cli.measure.report import Comparison
from lmkv.cli.measure.scale import run
from lmkv.cli.measure.timing import interleaved

SLOTS = 32_768
TARGET = 0.6
"""Times that lmkv may take of vLLM's manager."""
MANAGER = "vLLM's CPUOffloadingManager"


def manager_storing(policy: str) -> Case:
    """Store a request's chunks in vLLM's manager, which is full, with the keys of another request each time."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(SLOTS, policy)
    numbers = itertools.count()

    def new() -> list[object]:
        return [make_offload_key(next(numbers).to_bytes(32, "little"), 0) for _ in range(BATCH)]

    def context() -> object:
        return ReqContext(req_id=str(next(numbers)))

    ready: list[object] = [new(), context()]

    def store() -> None:
        keys, request = ready
        assert manager.prepare_store(keys, request) is not None
        manager.complete_store(keys, request)

    def prepare() -> None:
        ready[:] = new(), context()

    for _ in range(SLOTS // BATCH + 1):
        store()
        prepare()
    return store, prepare


def measure_vllm_manager(*, quick: bool) -> Iterator[Comparison]:
    """LRU on either side, in turn."""
    times = run([sys.executable, "-P", "-m", __name__, "50" if quick else "300"])
    title = "Evict a chunk and insert another, beside vLLM's manager"
    yield compared(title, "us", 1e6 / BATCH, times, {"lmkv": TARGET})


def main() -> None:
    store, _ = full_store("LRU", SLOTS)
    cases = {MANAGER: manager_storing("lru"), "lmkv": storing(store)}
    runs = {name: call for name, (call, _) in cases.items()}
    times = interleaved(runs, int(sys.argv[1]), before=lambda name: cases[name][1]())
    store.close()
    print(json.dumps(times))


if __name__ == "__main__":
    main()
