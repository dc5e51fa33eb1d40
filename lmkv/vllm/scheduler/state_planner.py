"""`StatePlanner`: orders the copy of recurrent layers' states into host memory, in the step that completes them.

A state is at a boundary between chunks, and belongs to the chunks before it. It is taken where a step ends there, and
where vLLM hands one over: where it is at other times only vLLM knows.

With drafts a step has as many ends as tokens may be accepted. Once it is known how many were, vLLM puts the state at
the last boundary up to there where that of a step without drafts would be. It keeps it for another step if nothing
was accepted behind the boundary; otherwise, only what the step is sure to compute can be ordered to be stored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from attrs import define

from lmkv.protocols import ChunkKey
from lmkv.store.leases import Reservation
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.requests.request import BlockTables, RequestState
from lmkv.vllm.scheduler.auditor import Auditor
from lmkv.vllm.scheduler.context import PlanContext

logger = logging.getLogger("lmkv.vllm")

Offer = tuple[int, int, int]
"""vLLM's hand-over of a state: group, block, and the tokens before it."""


@define(eq=False)
class _StateJob:
    state: RequestState
    reservation: Reservation
    chunks: int
    replaces: int
    """Leading chunks behind which this request's states are not needed any more, or 0."""
    tainted: bool = False


class StatePlanner:
    """Decides which states are stored in which step. Called on the scheduling thread only.

    It stores the states that vLLM keeps, at prompts' ends and where prompts part; one every few chunks, while a prompt
    is computed in several steps; and the last one of an answer.
    """

    def __init__(self, context: PlanContext, audit: Auditor) -> None:
        self._store = context.store
        self._observer = context.observer
        self._block_map = context.block_map
        self._chunk_size = context.chunk_size
        self._builder = context.builder
        self._stores = context.options.stores
        self._save_decode = context.options.save_decode
        self._interval = context.options.state_interval or context.block_map.states
        self._jobs: dict[int, _StateJob] = {}
        self._audit = audit

    def take(self, state: RequestState, computed: int, tables: BlockTables, offers: Sequence[Offer] = ()) -> None:
        """Order copies of the states that this step completes, once all chunks before them are stored.

        `computed`: tokens after the step, drafts excluded. `tables`: after the step.
        """
        saves = self._stores and not state.options.skip_save
        if not saves and state.audit is None:
            return
        handed: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            index = self._block_map.index(group)
            # With asynchronous scheduling a block that was offered since the last step may be another request's by now.
            if self._block_map.state_blocks(tables, tokens).get(index) == block:
                handed.setdefault(tokens, {})[index] = block
        for tokens, blocks in handed.items():
            if self._keyed(state, tokens):
                self._audit.compare_states(state, tokens // self._chunk_size, blocks)
                if saves:
                    state.kept = max(state.kept, tokens // self._chunk_size)
                    self._order(state, tokens // self._chunk_size, blocks)
        # With asynchronous scheduling the step computes tokens that become known later: what is known was computed by
        # a step before. With drafts that step may have ended behind its first token.
        for tokens in {min(computed, state.request.num_tokens), self._accepted(state)} - handed.keys():
            if self._keyed(state, tokens):
                blocks = self._block_map.state_blocks(tables, tokens)
                self._audit.compare_states(state, tokens // self._chunk_size, blocks)
                if saves:
                    self._step_ended(state, tokens // self._chunk_size, blocks)

    def _accepted(self, state: RequestState) -> int:
        """Tokens of its answer that steps whose end is known have computed, accepted drafts among them; or 0."""
        tokens = state.request.num_computed_tokens - state.request.num_in_flight_tokens
        return tokens if tokens > getattr(state.request, "num_prompt_tokens", 0) else 0

    def _keyed(self, state: RequestState, tokens: int) -> bool:
        """Whether these tokens are whole chunks with a key, and may be stored."""
        prompt: int = getattr(state.request, "num_prompt_tokens", tokens)
        limits = [state.request.num_tokens]
        if not self._save_decode:
            limits.append(prompt)
        if state.options.max_offload_tokens is not None:
            limits.append(state.options.max_offload_tokens)
        return tokens % self._chunk_size == 0 and 0 < tokens <= min(limits)

    def _step_ended(self, state: RequestState, chunks: int, blocks: Mapping[int, int]) -> None:
        """A step ends behind `chunks` chunks: keep some of these states of a prompt, and the last of an answer."""
        prompt: int = getattr(state.request, "num_prompt_tokens", state.request.num_tokens)
        if chunks * self._chunk_size > prompt:
            if chunks <= state.last_states:
                return
            replaces, state.last_states = state.last_states, chunks
            if replaces - state.kept >= self._interval:
                state.kept, replaces = replaces, 0
            self._order(state, chunks, blocks, replaces)
        elif chunks - state.kept >= self._interval:
            state.kept = chunks
            self._order(state, chunks, blocks)

    def _order(self, state: RequestState, chunks: int, blocks: Mapping[int, int], replaces: int = 0) -> None:
        """Order copies of the states behind `chunks` chunks that no tier has."""
        keys, chain = state.state_keys(chunks), state.keys(chunks)
        missing = keys[self._store.count_prefix(keys)[1] :]
        if not missing or state.stored < chunks:
            return
        self._store.hints.label(missing, state.tenants)
        reservation = self._store.reserve(missing, parent=chain[-1], protect=chain)
        slots = reservation.slots
        copies = [self._block_map.state_copy(slots[key], key.number, blocks) for key in missing if key in slots]
        order = [copy for copy in copies if copy is not None]
        if reservation.accepted < len(missing) or not order or len(order) < len(copies):
            # Some would be of no use without the others.
            reservation.abort()
            return
        job = self._builder.store(order).job
        self._jobs[job] = _StateJob(state, reservation, chunks, replaces)
        state.copying += 1

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def taint_all(self) -> None:
        """Throw away all states that were ordered before now: see `StorePlanner.taint_all`."""
        for job in self._jobs.values():
            job.tainted = True

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered: publish the states, or free their slots."""
        job = self._jobs.pop(number)
        try:
            self._end(job, report)
        finally:
            job.state.copy_ended()

    def _end(self, job: _StateJob, report: JobReport) -> None:
        state, kept = job.state, report.ok and not job.tainted
        count = len(job.reservation)
        job.reservation.commit() if kept else job.reservation.abort()
        self._observer.telemetry.stored_states(count, report, kept=kept)
        if not kept:
            state.options.skip_save |= not report.ok
            return
        keys: list[ChunkKey] = [*state.keys(job.chunks), *state.state_keys(job.chunks)]
        # They are evicted before the chunks that they need.
        self._store.touch(keys)
        self._observer.track(state, keys)
        if job.replaces:
            replaced = state.state_keys(job.replaces)
            self._store.delete(replaced)
            self._observer.explainer.evictions.forget(replaced)
        tokens = job.chunks * self._chunk_size
        logger.info("lmkv: request %s: stored its state after %d tokens", state.name, tokens)

    @property
    def busy(self) -> bool:
        """Whether the end of a store has not been reported yet."""
        return bool(self._jobs)
