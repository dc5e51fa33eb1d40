"""`StorePlanner`: orders the copy of each chunk into host memory, in the step that completes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import define

from lmkv.chunks.hashing import token_bytes
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Reservation
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.requests.request import BlockTables, RequestState
from lmkv.vllm.scheduler.context import PlanContext

logger = logging.getLogger("lmkv.vllm")


@define(eq=False)
class _StoreJob:
    state: RequestState
    reservation: Reservation
    first_chunk: int
    stored: int
    total: int
    """Leading tokens that are stored once this job has ended; `stored` of them by the job."""
    chunks: int = 1
    tainted: bool = False
    """Ordered before a failed load was reported: its KV may have been computed from unfilled blocks."""


class StorePlanner:
    """Decides which chunks are stored in which step. Called on the scheduling thread only."""

    def __init__(self, context: PlanContext) -> None:
        self._store = context.store
        self._observer = context.observer
        self._block_map = context.block_map
        self._chunk_size = context.chunk_size
        self._builder = context.builder
        self._save_decode = context.options.save_decode
        # The KV of a chunk's last positions is computed again once the tokens are known that it depends on.
        self._late = max(0, context.options.lookahead - 1)
        # With windows a hit ends where a chunk or tail ends: a tail is found by its prompt only.
        self._by_prefix = context.options.save_unfull_chunk and not context.block_map.windowed
        self._jobs: dict[int, _StoreJob] = {}

    def completes(self, state: RequestState, computed: int) -> int:
        """How many leading chunks are complete after `computed` tokens; 0 when all of them are stored."""
        if computed < (state.stored + 1) * self._chunk_size:
            # Most steps of most requests.
            return 0
        # With asynchronous scheduling, tokens are computed before their ids are known here.
        known = min(computed, state.request.num_tokens) - self._late
        if not self._save_decode:
            known = min(known, getattr(state.request, "num_prompt_tokens", known))
        if state.options.max_offload_tokens is not None:
            known = min(known, state.options.max_offload_tokens)
        complete = known // self._chunk_size
        return complete if complete > state.stored and not state.options.skip_save else 0

    def store(self, state: RequestState, complete: int, tables: BlockTables) -> None:
        """Order copies of those of the first `complete` chunks that no tier stores.

        When no slot can be allocated the rest is tried again in the request's next step.
        """
        keys = state.keys(complete)
        # Some may have been loaded, or stored by another request with the same prefix.
        state.stored += self._store.count_prefix(keys[state.stored :])[1]
        self._observer.track(state, keys[: state.stored])
        first = state.stored
        if first == complete:
            return
        self._store.hints.label(keys[first:], state.tenants)
        self._store.hints.prompt(keys[first:], state.request.num_tokens)
        # Protected: to store the end of a prompt must not evict its beginning, without which it is not found.
        reservation = self._store.reserve(
            keys[first:],
            parent=state.chain.parent(first),
            tokens=state.chain.token_bytes(first, complete),
            origins=[state.chain.origin(index) for index in range(first, complete)] if self._by_prefix else (),
            protect=keys,
        )
        state.stored = first + reservation.accepted
        if state.stored < complete:
            self._observer.telemetry.found_no_room()
        copies = self._copies(reservation, keys, first, state.stored, tables)
        if copies:
            order = self._builder.store(copies)
            stored, total = len(copies) * self._chunk_size, state.stored * self._chunk_size
            self._jobs[order.job] = _StoreJob(state, reservation, first, stored, total, len(copies))
            state.copying += 1

    def completes_tail(self, state: RequestState, computed: int) -> bool:
        """Whether the prompt's tail is computed after `computed` tokens, is not stored, and in no whole chunk."""
        if state.tail is None or not state.tail_due or state.options.skip_save:
            return False
        end = state.tail_chunk * self._chunk_size + state.tail.tokens
        if state.options.max_offload_tokens is not None and end > state.options.max_offload_tokens:
            return False
        return end <= computed < (state.tail_chunk + 1) * self._chunk_size

    def store_tail(self, state: RequestState, tables: BlockTables) -> None:
        """Order the copy of the prompt's tail, unless a chunk in host memory begins with it.

        A tail is of use only with the chunks before it, so none of these is evicted for it.
        """
        tail, count, size = state.tail, state.tail_chunk, self._chunk_size
        assert tail is not None
        if state.stored < count:
            return
        origin, tokens = state.chain.origin(count), token_bytes(state.tokens(count * size, tail.tokens))
        state.tail_due = False
        if self._by_prefix and self._store.catalog.longest_prefix(origin, tokens)[1] == tail.tokens:
            return
        chain = state.keys_with_tail(count)
        self._store.hints.label([tail], state.tenants)
        reservation = self._store.reserve(
            [tail],
            parent=state.chain.parent(count),
            tokens=tokens,
            origins=[origin] if self._by_prefix else (),
            protect=chain,
        )
        slot = reservation.slots.get(tail)
        copy = None if slot is None else self._block_map.store_copy(slot, tables, count, tail.tokens)
        if copy is None:
            reservation.abort()
            return
        order = self._builder.store([copy])
        self._jobs[order.job] = _StoreJob(state, reservation, count, tail.tokens, count * size + tail.tokens)
        state.copying += 1

    def _copies(
        self, reservation: Reservation, keys: Sequence[ChunkKey], first: int, end: int, tables: BlockTables
    ) -> list[ChunkCopy]:
        """Copies into the reserved slots. Slots of chunks whose blocks are not all there are freed."""
        slots = reservation.slots
        copies, unusable = [], []
        for index in range(first, end):
            slot = slots.get(keys[index])
            copy = None if slot is None else self._block_map.store_copy(slot, tables, index)
            if copy is not None:
                copies.append(copy)
            elif slot is not None:
                unusable.append(keys[index])
        reservation.abort(unusable)
        return copies

    def storing(self, keys: Sequence[ChunkKey]) -> RequestState | None:
        """A request that is storing any of these chunks."""
        wanted = set(keys)
        found = (job.state for job in self._jobs.values() if not wanted.isdisjoint(job.reservation.slots))
        return next(found, None)

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def taint_all(self) -> None:
        """A load failed, or everything was reset: throw away every chunk that was ordered before this was known.

        After a failed load its KV may depend on the unfilled blocks, which other requests share through vLLM's
        prefix cache. After a reset nobody looks for it.
        """
        for job in self._jobs.values():
            job.tainted = True

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered: publish the chunks, or free their slots."""
        job = self._jobs.pop(number)
        try:
            self._end(job, report)
        finally:
            job.state.copy_ended()

    def _end(self, job: _StoreJob, report: JobReport) -> None:
        state, kept = job.state, report.ok and not job.tainted
        job.reservation.commit() if kept else job.reservation.abort()
        self._observer.telemetry.stored(job.stored, job.chunks, report, kept=kept)
        if not kept:
            state.stored, state.tail_due = min(state.stored, job.first_chunk), True
            # A copy that failed once would fail in every step that followed.
            state.options.skip_save |= not report.ok
            return
        if job.first_chunk == 0:
            self._observer.explainer.first_chunks.stored(state)
        self._observer.track(state, state.keys_with_tail(job.total // self._chunk_size))
        logger.info("lmkv: request %s: stored %d of %d tokens", state.name, job.stored, job.total)

    @property
    def busy(self) -> bool:
        """Whether the end of a store has not been reported yet."""
        return bool(self._jobs)
