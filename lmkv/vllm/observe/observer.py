"""`SchedulerObserver`: receives each event of the scheduler side, for metrics, explanations and KV events."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiered import TieredStore
from lmkv.vllm.observe.events import Event, EventRecorder
from lmkv.vllm.observe.explain import Explainer
from lmkv.vllm.observe.recent import RecentRequests
from lmkv.vllm.observe.recorder import TraceRecorder
from lmkv.vllm.observe.telemetry import Telemetry
from lmkv.vllm.observe.value import MemoryValue
from lmkv.vllm.requests.request import RequestState


class SchedulerObserver:
    """Passes each event of the scheduler side to those that want it. Called on the scheduling thread; never waits.

    `telemetry` counts for vLLM's `/metrics`, `explainer` finds the reasons of misses, `recent` keeps the reports
    of the last requests for the agent API, `recorder` their chunks for `lmkv record`, and `value` estimates the
    hits with more memory. `events` makes KV events; None if vLLM publishes none.
    """

    def __init__(self, store: TieredStore, chunk_size: int, clock: Clock, events: EventRecorder | None) -> None:
        self.telemetry = Telemetry(store, clock)
        self.explainer = Explainer(store, chunk_size, clock)
        self.recent = RecentRequests()
        self.recorder = TraceRecorder(chunk_size, store.slab.slot_bytes, time.time)
        self.value = MemoryValue(store, chunk_size)
        self.telemetry.predicted = self.value.report
        self.events = events

    def __repr__(self) -> str:
        return f"<SchedulerObserver: {self.events or 'no KV events'}>"

    def scheduled(self, state: RequestState, *, found: bool) -> None:
        """Count a request's hit and miss: once, whether or not it is preempted later."""
        state.counted = True
        tokens, chunks = (state.sources, state.source_chunks) if found else ({}, {})
        self.telemetry.looked_up(tokens, chunks, state.miss)

    def step(self) -> None:
        """Have the estimate of hits with more memory replay a little of what has finished."""
        self.value.step()

    def finished(self, state: RequestState, chain: Sequence[ChunkKey]) -> None:
        """Note that a request has ended: its chunks count as used. `chain`: their keys, with the tail's."""
        self.recent.finished(state)
        keys = state.chain.keys
        self.recorder.finished(state, keys)
        self.value.finished(keys, getattr(state.request, "num_prompt_tokens", state.request.num_tokens))
        # A tier may have chunks of it that it has neither loaded nor stored, after a failed store for instance.
        # Before a reset it had another meaning.
        if not state.options.skip_load:
            self.track(state, chain)

    def track(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """Publish KV events of these chunks, the leading ones of a request, from now on."""
        if self.events is not None:
            self.events.track(state, keys)

    def take_events(self) -> list[Event]:
        """The chunks that have come into a tier or left it since the last call."""
        return [] if self.events is None else self.events.take()

    def reannounce(self) -> None:
        """Publish the present places of all tracked chunks again, after vLLM has published that all blocks are gone."""
        if self.events is not None:
            self.events.reannounce()

    def reset(self) -> None:
        """Note that everything was deleted: publish that, and let earlier evictions explain nothing any more."""
        self.explainer.clear()
        if self.events is not None:
            self.events.reset()
