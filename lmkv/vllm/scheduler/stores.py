"""Plans copies of chunks, and of recurrent layers' states, into host memory. A chunk or state is copied in the step
that computes its last token.

`FinishedRequests` applies the pins and priorities that a request asks for, once its last store has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define

from lmkv.chunks.hashing import TailKey, token_bytes
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Reservation
from lmkv.vllm.plan import JobReport
from lmkv.vllm.plan.request import BlockTables, Request
from lmkv.vllm.scheduler.audit import HitAudits
from lmkv.vllm.scheduler.context import Job, PlanContext, Planner

logger = logging.getLogger("lmkv.vllm")


RetainedState = tuple[int, int, int]
"""A state that vLLM retains for lmkv: `(group, block, tokens)`. `tokens`: number of tokens before the state."""


@define(eq=False)
class _ChunkJob(Job):
    reservation: Reservation
    first_chunk: int
    stored: int
    total: int
    """How many of the request's first tokens are stored after this job, which itself stores `stored` tokens."""
    chunks: int


class ChunkStores(Planner):
    """Decides which chunks to store in each step, and plans their copies into host memory."""

    def __init__(self, context: PlanContext) -> None:
        super().__init__(context)
        # The KV of a chunk's last positions is recomputed once the tokens that it depends on are known.
        self._late = max(0, context.options.lookahead - 1)
        # With windows a hit ends where a chunk or tail ends: a tail is found by its prompt only.
        self._by_prefix = context.options.save_unfull_chunk and not context.block_map.windowed

    def completes(self, request: Request, computed: int) -> int:
        """Return how many of the first chunks are complete after `computed` tokens. Return 0 if none of them must still
        be stored.
        """
        if computed < (request.storing.stored + 1) * self._chunk_size:
            # The usual case.
            return 0
        # With asynchronous scheduling, tokens are computed before their ids are known here.
        known = min(computed, request.num_tokens) - self._late
        if not self._options.save_decode:
            known = min(known, request.prompt_tokens)
        if request.options.max_offload_tokens is not None:
            known = min(known, request.options.max_offload_tokens)
        complete = known // self._chunk_size
        return complete if complete > request.storing.stored and not request.options.skip_save else 0

    def store(self, request: Request, complete: int, tables: BlockTables) -> None:
        """Plan copies of the first `complete` chunks, except chunks that some tier already has.

        Chunks for which there is no slot are tried again in the request's next step.
        """
        keys = request.keys(complete)
        # Some may be loaded, or stored by another request with the same prefix.
        request.storing.stored += self._store.catalog.count_prefix(keys[request.storing.stored :])[1]
        self._observer.track(request, keys[: request.storing.stored])
        first = request.storing.stored
        if first == complete:
            return
        self._store.hints.prompt(keys[first:], request.num_tokens)
        # Protected: storing the end of a prompt must not evict its beginning, without which the end is not found.
        reservation = self._reserve(request, keys, first, request.chain.token_bytes(first, complete))
        request.storing.stored = first + reservation.accepted
        if request.storing.stored < complete:
            self._observer.telemetry.found_no_room()
        copies = self._copies(reservation, keys, first, request.storing.stored, tables)
        if copies:
            task = self._builder.store(copies)
            stored, total = len(copies) * self._chunk_size, request.storing.stored * self._chunk_size
            self._jobs.begin(task.job, _ChunkJob(self, request, reservation, first, stored, total, len(copies)))
            request.storing.copying += 1

    def completes_tail(self, request: Request, computed: int) -> bool:
        """Return whether the prompt's tail (the tokens after its last whole chunk) must still be stored, and is
        complete after `computed` tokens.
        """
        if request.tail is None or not request.storing.tail_due or request.options.skip_save:
            return False
        end = request.tail_chunk * self._chunk_size + request.tail.tokens
        if request.options.max_offload_tokens is not None and end > request.options.max_offload_tokens:
            return False
        return end <= computed < (request.tail_chunk + 1) * self._chunk_size

    def store_tail(self, request: Request, tables: BlockTables) -> None:
        """Plan the copy of the prompt's tail (the tokens after its last whole chunk).

        Nothing is planned if a chunk in host memory has the same prefix and begins with the tail's tokens. No chunk of
        the prompt is evicted for the tail, because the tail is useless without these chunks.
        """
        tail, count, size = request.tail, request.tail_chunk, self._chunk_size
        assert tail is not None
        if request.storing.stored < count:
            return
        origin, tokens = request.chain.origin(count), token_bytes(request.tokens(count * size, tail.tokens))
        request.storing.tail_due = False
        if self._by_prefix and self._store.catalog.longest_prefix(origin, tokens)[1] == tail.tokens:
            return
        reservation = self._reserve(request, request.keys_with_tail(count), count, tokens)
        slot = reservation.slots.get(tail)
        copy = None if slot is None else self._block_map.store_copy(slot, tables, count, tail.tokens)
        if copy is None:
            reservation.abort()
            return
        task = self._builder.store([copy])
        job = _ChunkJob(self, request, reservation, count, tail.tokens, count * size + tail.tokens, 1)
        self._jobs.begin(task.job, job)
        request.storing.copying += 1

    def _reserve(self, request: Request, chain: Sequence[ChunkKey], first: int, tokens: bytes) -> Reservation:
        """Reserve slots for the chunks of `chain` from index `first` on. `tokens`: their token ids, as bytes."""
        keys, of = chain[first:], request.chain
        self._store.hints.label(keys, request.tenants)
        origins = [of.origin(index) for index in range(first, len(chain))] if self._by_prefix else ()
        return self._store.reserve(keys, parent=of.parent(first), tokens=tokens, origins=origins, protect=chain)

    def _copies(
        self, reservation: Reservation, keys: Sequence[ChunkKey], first: int, end: int, tables: BlockTables
    ) -> list[ChunkCopy]:
        """Return the copies into the reserved slots. Free the slots of chunks whose blocks are incomplete."""
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

    def storing(self, keys: Sequence[ChunkKey]) -> Request | None:
        """Return a request that is storing any of these chunks, or None."""
        wanted = set(keys)
        found = (job.request for job in self._jobs.of(_ChunkJob) if not wanted.isdisjoint(job.reservation.slots))
        return next(found, None)

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Make the copied chunks visible to lookups, after all ranks have copied. If the job has failed, free their
        slots.
        """
        assert isinstance(job, _ChunkJob)
        try:
            self._end(job, report)
        finally:
            job.request.storing.copy_ended()

    def _end(self, job: _ChunkJob, report: JobReport) -> None:
        request, kept = job.request, report.ok and not job.distrusted
        job.reservation.commit() if kept else job.reservation.abort()
        self._telemetry.stored({"tokens": job.stored, "chunks": job.chunks}, report, kept=kept)
        if not kept:
            request.storing.begin_again(job.first_chunk)
            # A copy that failed once would fail in every later step.
            request.options.skip_save |= not report.ok
            return
        if job.first_chunk == 0:
            self._observer.explainer.first_stored(request)
        self._observer.track(request, request.keys_with_tail(job.total // self._chunk_size))
        logger.info("lmkv: request %s: stored %d of %d tokens", request.name, job.stored, job.total)


@define(eq=False)
class _StateJob(Job):
    reservation: Reservation
    chunks: int
    replaces: int
    """How many chunks are before the older states that the new states replace; 0 to replace none."""


class StateStores(Planner):
    """Decides which states of recurrent layers to store in each step, and plans their copies.

    States are stored at the end of prompts, where prompts diverge, and at the end of the generated tokens. If a prompt
    is computed in several steps, some states within the prompt are stored as well.
    """

    def __init__(self, context: PlanContext, audit: HitAudits) -> None:
        super().__init__(context)
        self._interval = context.options.state_interval or context.block_map.states
        self._audit = audit

    def take(self, request: Request, computed: int, tables: BlockTables, offers: Sequence[RetainedState] = ()) -> None:
        """Plan copies of the states that this step completes, if all chunks before these states are stored.

        `computed`: number of the request's tokens with valid KV after the step, without drafts. `tables`: the block
        tables after the step. `offers`: the states that vLLM retains for lmkv.
        """
        saves = self._options.stores and not request.options.skip_save
        if not saves and request.auditing.audit is None:
            return
        handed: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            index = self._block_map.index(group)
            # With asynchronous scheduling, an offered block may be another request's by now.
            if self._block_map.state_blocks(tables, tokens).get(index) == block:
                handed.setdefault(tokens, {})[index] = block
        for tokens, blocks in handed.items():
            if self._keyed(request, tokens):
                self._audit.compare_states(request, tokens // self._chunk_size, blocks)
                if saves:
                    request.storing.kept = max(request.storing.kept, tokens // self._chunk_size)
                    self._order(request, tokens // self._chunk_size, blocks)
        # With asynchronous scheduling, the step computes tokens that become known later; a step before has computed
        # the known ones. With drafts, that step may have ended behind its first token.
        for tokens in {min(computed, request.num_tokens), self._accepted(request)} - handed.keys():
            if self._keyed(request, tokens):
                blocks = self._block_map.state_blocks(tables, tokens)
                self._audit.compare_states(request, tokens // self._chunk_size, blocks)
                if saves:
                    self._step_ended(request, tokens // self._chunk_size, blocks)

    def _accepted(self, request: Request) -> int:
        """Return how many tokens finished steps have computed, including accepted drafts; 0 until the prompt is
        computed.
        """
        tokens = request.vllm.num_computed_tokens - request.vllm.num_in_flight_tokens
        return tokens if tokens > request.prompt_tokens else 0

    def _keyed(self, request: Request, tokens: int) -> bool:
        """Return whether the first `tokens` tokens are whole chunks that may be stored."""
        prompt = request.prompt_tokens
        limits = [request.num_tokens]
        if not self._options.save_decode:
            limits.append(prompt)
        if request.options.max_offload_tokens is not None:
            limits.append(request.options.max_offload_tokens)
        return tokens % self._chunk_size == 0 and 0 < tokens <= min(limits)

    def _step_ended(self, request: Request, chunks: int, blocks: Mapping[int, int]) -> None:
        """Store states after a step that ends after `chunks` chunks: some states of a prompt, and the last states of
        the generated tokens.
        """
        prompt = request.prompt_tokens
        if chunks * self._chunk_size > prompt:
            if chunks <= request.storing.last_states:
                return
            replaces, request.storing.last_states = request.storing.last_states, chunks
            if replaces - request.storing.kept >= self._interval:
                request.storing.kept, replaces = replaces, 0
            self._order(request, chunks, blocks, replaces)
        elif chunks - request.storing.kept >= self._interval:
            request.storing.kept = chunks
            self._order(request, chunks, blocks)

    def _order(self, request: Request, chunks: int, blocks: Mapping[int, int], replaces: int = 0) -> None:
        """Plan copies of the states after `chunks` chunks, except states that some tier already has."""
        keys, chain = request.state_keys(chunks), request.keys(chunks)
        missing = keys[self._store.catalog.count_prefix(keys)[1] :]
        if not missing or request.storing.stored < chunks:
            return
        self._store.hints.label(missing, request.tenants)
        reservation = self._store.reserve(missing, parent=chain[-1], protect=chain)
        slots = reservation.slots
        copies = [self._block_map.state_copy(slots[key], key.number, blocks) for key in missing if key in slots]
        task = [copy for copy in copies if copy is not None]
        if reservation.accepted < len(missing) or not task or len(task) < len(copies):
            # Some are useless without the others.
            reservation.abort()
            return
        number = self._builder.store(task).job
        self._jobs.begin(number, _StateJob(self, request, reservation, chunks, replaces))
        request.storing.copying += 1

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Make the copied states visible to lookups, after all ranks have copied. If the job has failed, free their
        slots.
        """
        assert isinstance(job, _StateJob)
        try:
            self._end(job, report)
        finally:
            job.request.storing.copy_ended()

    def _end(self, job: _StateJob, report: JobReport) -> None:
        request, kept = job.request, report.ok and not job.distrusted
        self._telemetry.stored({"states": len(job.reservation)}, report, kept=kept)
        job.reservation.commit() if kept else job.reservation.abort()
        if not kept:
            request.options.skip_save |= not report.ok
            return
        keys: list[ChunkKey] = [*request.keys(job.chunks), *request.state_keys(job.chunks)]
        # States are evicted before the chunks that they need.
        self._store.touch(keys)
        self._observer.track(request, keys)
        if job.replaces:
            replaced = request.state_keys(job.replaces)
            self._store.delete(replaced)
            self._observer.explainer.evictions.forget(replaced)
        tokens = job.chunks * self._chunk_size
        logger.info("lmkv: request %s: stored the state after %d tokens", request.name, tokens)


class FinishedRequests(Planner):
    """Applies the pins and priorities of ended requests, after each request's last store. `stores`: knows which stores
    are running.
    """

    def __init__(self, context: PlanContext, stores: ChunkStores) -> None:
        super().__init__(context)
        self._stores = stores

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Apply the request's options as soon as its last store has ended. Return the `kv_transfer_params` of the
        response, or None if there are none.
        """
        keys = request.keys_with_tail(len(request.chain.keys))
        self._observer.finished(request, keys)
        request.storing.once_stored(partial(self._once_all_stored, request, keys))
        return self._answer(request) or None

    def _once_all_stored(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Apply the request's options once no other request, such as one with the same prompt, is storing these
        chunks.
        """
        other = self._stores.storing(keys)
        if other is not None:
            other.storing.once_stored(partial(self._once_all_stored, request, keys))
        else:
            self._carry_out(request, keys)

    def _carry_out(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Apply the options of an ended request, such as pins and priorities. All its chunks are stored by now."""
        wanted, hint = self._boundaries.keys_to_promote(keys), request.options.hint
        # States are evicted before the chunks that they need.
        self._store.touch([*wanted, *keys[self._boundaries.without_states(len(wanted)) :]])
        if self._options.stores and not request.options.skip_save:
            self._store.write_lost(wanted)
        if request.options.pin_seconds:
            self._store.pin(wanted, request.options.pin_seconds, request.root)
        if hint.session or hint.ended:
            self._store.hints.session(request.root, hint.session, wanted, ended=hint.ended)
        if not hint.ended and (hint.priority or hint.waits or hint.ttl):
            seconds = hint.waits or hint.ttl or self._options.pin_ttl
            self._store.hints.set_priority(wanted, hint.priority or 1, seconds, request.root, hint.session)

    def _answer(self, request: Request) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the response."""
        answer: dict[str, Any] = {"lmkv": request.answer} if request.options.report else {}
        hands_over = request.options.remote_decode and not self._options.loads and not request.options.skip_save
        shared = self._share(request) if hands_over else 0
        return {**answer, "lmkv.wait_for": shared} if shared else answer

    def _share(self, request: Request) -> int:
        """Write the prompt's chunks to shared tiers, for other servers. Return the number of tokens in these chunks."""
        keys = self._boundaries.keys_to_promote(request.keys_with_tail(request.prompt_tokens // self._chunk_size))
        count = self._store.write_to_shared(keys)
        if self._boundaries.states:
            return self._boundaries.without_states(count) * self._chunk_size if count == len(keys) else 0
        last = keys[count - 1] if count else None
        return (count - 1) * self._chunk_size + last.tokens if isinstance(last, TailKey) else count * self._chunk_size
