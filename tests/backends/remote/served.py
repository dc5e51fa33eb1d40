"""An engine's scheduler and worker side over a real remote store: each call that vLLM would make is timed."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import define, field, frozen

from lmkv.build import build_store
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.memory.paged import PagedMemory
from lmkv.store.health import TierStats
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.scheduler import Scheduler
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.worker import Worker
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest

T = TypeVar("T")
CHUNK, PAGE, LAYERS = 16, 1 << 15, 2
LAYOUT = KVLayout(CHUNK, (LayerPages(PAGE, 1),) * LAYERS)
NAMESPACE = Namespace(model="m", dtype="u8", chunk_size=CHUNK, block_size=CHUNK)
SLOTS, AT_ONCE, CHUNKS = 12, 3, 2
"""Of host memory; requests that run at once; whole chunks of a prompt, which has one token more."""
DEADLINE = 0.3
"""Seconds that a request waits for the store, at most."""
STEP = 0.004
"""Seconds of a step of the model."""
Prompt = tuple[int, ...]


@functools.lru_cache(1024)
def kv_of(tokens: Prompt, layer: int) -> np.ndarray:
    """The KV of a block that ends with these tokens."""
    return np.frombuffer(hashlib.shake_128(bytes(tokens) + bytes([layer])).digest(PAGE), np.uint8)


@frozen
class Times:
    """Seconds of calls, but those in which their thread had no processor: `worst` names the longest."""

    median: float
    most: float
    """99 of 100 take no longer."""
    longest: float
    worst: str
    calls: int


@define
class Timer:
    """Notes how long calls take, all of the same thread."""

    _taken: list[tuple[float, str]] = field(factory=list)
    _waits: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._waits = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def _waited(self) -> float:
        """Seconds that this thread was ready to run, and others were running."""
        return int(os.pread(self._waits, 100, 0).split()[1]) / 1e9

    def __call__(self, call: Callable[..., T], *args: Any) -> T:
        waited, started = self._waited(), time.monotonic()
        try:
            return call(*args)
        finally:
            took = time.monotonic() - started - (self._waited() - waited)
            self._taken.append((took, getattr(call, "__name__", "")))

    def take(self) -> Times:
        taken, self._taken = sorted(self._taken), []
        seconds = [each for each, _ in taken]
        return Times(statistics.median(seconds), seconds[len(seconds) * 99 // 100], *taken[-1], len(taken))

    def close(self) -> None:
        os.close(self._waits)


class Served:
    """An engine that answers prompts. What it loads is compared with what was stored."""

    def __init__(self, url: str, timeout: float, **settings: Any) -> None:
        size = SLOTS * LAYOUT.slot_bytes / 2**30
        given: dict[str, Any] = {
            "chunk_size": CHUNK,
            "max_local_cpu_size": size,
            "remote_url": url,
            "remote_timeout": timeout,
        }
        config = Config(**given, **settings)
        self.store = build_store(config, NAMESPACE, LAYOUT)
        options = SchedulerOptions(load_or_recompute=False, prefetch_deadline=DEADLINE, load_mode="sync")
        self.scheduler = Scheduler(self.store, NAMESPACE, BlockMap(CHUNK, (Group(CHUNK),)), options)
        self._rows = [torch.zeros((1 + AT_ONCE * (CHUNKS + 1), PAGE), dtype=torch.uint8) for _ in range(LAYERS)]
        self._worker = Worker(0, LAYOUT)
        self._worker.register(PagedMemory(self._rows, fuse=False))
        self.timed = Timer()
        self._prompts = 0
        # As vLLM: a collection of all that there is takes a tenth of a second, whatever lmkv does.
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        gc.unfreeze()
        self._worker.close()
        self.scheduler.close()
        self.timed.close()

    @property
    def remote(self) -> TierStats:
        return self.store.stats().tiers[1]

    def new_prompt(self) -> Prompt:
        """One that nobody has asked for."""
        self._prompts += 1
        return tuple(hashlib.sha512(b"%d" % self._prompts).digest()[: CHUNKS * CHUNK + 1])

    def forget(self, *prompts: Prompt) -> None:
        """Have host memory lose their chunks. Those that are just being written are not stored either."""
        self.store.drop([key for prompt in prompts for key in self.scheduler.keys_of(prompt, "", {})])

    def serve(self, *prompts: Prompt) -> list[int]:
        """Answer them at once; how many tokens of each were loaded."""
        requests = []
        for number, prompt in enumerate(prompts):
            request = SimulatedRequest(f"{id(prompt)}-{number}", list(prompt), len(prompt), 1, "")
            first = 1 + number * (CHUNKS + 1)
            request.blocks = [list(range(first, first + CHUNKS + 1))]
            requests.append(request)
            self.timed(self.scheduler.on_new_request, request)
        waiting, loaded = deque(requests), {}
        while waiting or self.scheduler.busy:
            running = []
            for request in list(waiting):
                tokens, _ = self.timed(self.scheduler.get_num_new_matched_tokens, request, 0)
                if tokens is not None:
                    self.timed(self.scheduler.update_state_after_alloc, request, request.blocks, tokens)
                    waiting.remove(request)
                    running.append(request)
                    loaded[request.request_id] = tokens
            self._step(running, loaded)
        return [loaded[request.request_id] for request in requests]

    def _step(self, running: Sequence[SimulatedRequest], loaded: dict[str, int]) -> None:
        progress = {request.request_id: request.num_tokens for request in running}
        tables = {request.request_id: request.blocks for request in running}
        self.timed(self.scheduler.plan_step, progress, tables.get, sum(progress.values()))
        self._worker.begin(self.timed(self.scheduler.take_plan))
        self._worker.load()
        for layer in range(LAYERS):
            self._worker.wait_for_layer(layer)
        assert not self._worker.take_failed_blocks()
        for request in running:
            self._compute(request, loaded[request.request_id])
        time.sleep(STEP)
        self._worker.save()
        self._worker.poll()
        if (report := self._worker.take_report()) is not None:
            self.timed(self.scheduler.on_report, report)
        self.timed(self.scheduler.take_samples)
        for request in running:
            self.timed(self.scheduler.request_finished, request)

    def _compute(self, request: SimulatedRequest, loaded: int) -> None:
        """Compare the blocks that were loaded, and write the others."""
        for number, block in enumerate(request.blocks[0]):
            end = min((number + 1) * CHUNK, request.num_tokens)
            for layer, row in enumerate(self._rows):
                right = kv_of(tuple(request.all_token_ids[:end]), layer)
                if end <= loaded:
                    assert np.array_equal(row[block].numpy(), right), f"{request.request_id}: wrong KV up to {end}"
                row[block] = torch.from_numpy(right.copy())
