"""`LoadJobs`: the loads that were ordered, within a step and between steps, until every rank has answered.

vLLM's prefix cache shares the blocks of a load within a step from their allocation on. Until the load is known
to have succeeded no other request may share them, and if it fails they are evicted from that cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from attrs import define, field

from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.requests.patience import STALL
from lmkv.vllm.requests.request import BlockTables, RequestState
from lmkv.vllm.scheduler.async_load import AsyncLoad, AsyncLoadAdmission, LoadWindow
from lmkv.vllm.scheduler.auditor import Auditor
from lmkv.vllm.scheduler.context import PlanContext
from lmkv.vllm.scheduler.load_audit import AuditedLoad, LoadAudits
from lmkv.vllm.scheduler.load_policy import MIN_STEP_TOKENS, LoadMode
from lmkv.vllm.scheduler.tier_wait import TierWait

logger = logging.getLogger("lmkv.vllm")


@define(eq=False)
class _LoadJob:
    state: RequestState
    lease: Lease
    first_chunk: int
    tokens: int
    load: AsyncLoad | None = None
    between_steps: bool = False
    start: int = 0
    unconfirmed: list[int] = field(factory=list)
    """Blocks from token `start` on that this step loads, or computes from those; vLLM shares them already."""
    audit: AuditedLoad | None = None


class LoadJobs:
    """Orders loads and follows them to their end. Called on the scheduling thread only; never waits.

    `admission`: of loads between steps. `mode`: whether a load is within a step or between steps.
    `evict_blocks(blocks)`: takes blocks out of vLLM's prefix cache. `on_failed_load(request_id)`: called before
    vLLM goes on with that request.
    """

    def __init__(self, context: PlanContext, wait: TierWait, audit: Auditor) -> None:
        options = context.options
        self._store = context.store
        self._telemetry = context.observer.telemetry
        self._block_map = context.block_map
        self._chunk_size = context.chunk_size
        self._builder = context.builder
        self._wait = wait
        self.audits = LoadAudits(context, audit)
        self._deadline, self._clock = options.prefetch_deadline, options.clock
        # An asynchronous load references two windows at most: half of the slots, and leaves the other half.
        self._window = max(1, context.store.slab.num_slots // 4)
        self._jobs: dict[int, _LoadJob] = {}
        self._async_loads: dict[str, tuple[RequestState, AsyncLoad]] = {}
        self._steps: dict[int, tuple[int, float]] = {}
        """Tokens of each step under way, and when it was scheduled, by the step's number."""
        self._last_step, self._last_end = 0, 0.0
        self.mode = LoadMode(options.load_mode, concurrent=options.concurrent_copies)
        self.admission = AsyncLoadAdmission(context.block_map)
        self.evict_blocks: Callable[[set[int]], None] = lambda blocks: None
        self.on_failed_load: Callable[[str], None] = lambda request_id: None

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    @property
    def busy(self) -> bool:
        """Whether the end of a load has not been reported yet."""
        return bool(self._jobs or self._async_loads)

    @property
    def between_steps(self) -> dict[str, AsyncLoad]:
        """The loads between steps that have not ended, by request id."""
        return {request_id: load for request_id, (_, load) in self._async_loads.items()}

    @property
    def timed_steps(self) -> int:
        """How many timed steps are under way."""
        return len(self._steps)

    def is_unconfirmed(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Whether vLLM's own hit may include blocks of a load that is not known to have succeeded.

        Compares the tokens of the load's first block only: waiting a step in vain does no harm.
        """
        size = self._block_map.groups[0].block_size
        return any(
            job.start < num_computed_tokens and job.state.tokens(job.start, size) == state.tokens(job.start, size)
            for job in self._jobs.values()
            if job.unconfirmed
        )

    def may_have_been_read(self, job: int) -> bool:
        """Whether a step may have computed from the blocks of this load: none does before a load between steps ends."""
        return job in self._jobs and not self._jobs[job].between_steps

    # -- orders -------------------------------------------------------------------------------------------

    def order(self, state: RequestState, lease: Lease, tables: BlockTables, end: int) -> None:
        """Load the leased chunks up to token `end` within the step that is being scheduled."""
        start = state.computed
        copies = self._block_map.load_copies(lease.slots, tables, start, end)
        covered = self._block_map.covers(copies, start, end)
        if not covered:
            self.fail(state, tables, end, lease)
            return
        audit = self.audits.take(state, copies, start // self._chunk_size, end, between_steps=False)
        order = self._builder.load(copies, [], audited=audit is not None)
        self._follow(order.job, state, lease, tables, end)
        self._jobs[order.job].audit = audit

    def fail(self, state: RequestState, tables: BlockTables, end: int, lease: Lease | None = None) -> None:
        """Report the blocks of a load up to token `end`, which was promised, as failed. `lease`: of chunks to drop."""
        owner, load = self._async_loads.get(state.request_id, (None, None))
        if load is not None and owner is state:
            # It has begun. `end_step` reports its end.
            load.stop()
            return
        failed = self._block_map.blocks_between(tables, state.computed, end)
        finishes = state.request_id if state.between_steps else None
        order = self._builder.load([], failed, between_steps=state.between_steps, finishes=finishes)
        # A job like others, so that whatever is computed from these blocks is not stored.
        self._follow(order.job, state, lease or self._store.lease(()), tables, end)

    def _follow(self, job: int, state: RequestState, lease: Lease, tables: BlockTables, end: int) -> None:
        start = state.computed
        unconfirmed = list(tables[0][start // self._block_map.groups[0].block_size :])
        first = start // self._chunk_size
        tokens, between = end - start, state.between_steps
        self._jobs[job] = _LoadJob(state, lease, first, tokens, None, between, start, unconfirmed)

    def begin(self, state: RequestState, keys: list[ChunkKey], tables: BlockTables, end: int) -> None:
        """Load `keys` up to token `end` between steps; the first of them has the first token that is not computed."""
        here = self._store.count_prefix(keys)[0]
        patience = self._wait.limit(keys, here, len(keys)) if here < len(keys) else None
        load = AsyncLoad(
            self._store,
            self._block_map,
            keys,
            [list(table) for table in tables],
            state.computed,
            end,
            # Chunks that are in host memory already are one window, if others still find slots meanwhile.
            here if here == len(keys) <= self._wait.max_promoted else self._window,
            # Seconds without a chunk, and all seconds without one to copy, after which the rest is computed.
            min(self._deadline, STALL if patience is None else patience),
            self._clock,
            math.inf if patience is None else patience,
            self._wait.promote,
        )
        state.async_loads += 1
        self.admission.begin(state)
        self._async_loads[state.request_id] = (state, load)

    def end_step(self, scheduled_tokens: int, requests: int) -> None:
        """A step was scheduled: order the windows that are ready."""
        if scheduled_tokens >= MIN_STEP_TOKENS:
            self._begin_timing(scheduled_tokens)
        self.mode.computing = requests
        for state, load in list(self._async_loads.values()):
            window = self._advance(load)
            if window is not None:
                try:
                    self._order_window(state, load, window)
                except Exception:
                    # No worker will report it, and `give_up` waits for what is being copied.
                    window.lease.release()
                    load.copied(ok=False)
                    raise
            if load.ended:
                del self._async_loads[state.request_id]

    def give_up(self) -> None:
        """A step could not be planned: end the loads between steps, those that are being copied with a later call."""
        # Blocks that were given up are written into by this step, without having been read again.
        self.audits.forget()
        for state, load in list(self._async_loads.values()):
            load.stop()
            if not load.copying:
                self._order_window(state, load, load.give_up())
                del self._async_loads[state.request_id]

    def _begin_timing(self, tokens: int) -> None:
        self._last_step += 1
        self._steps[self._last_step] = (tokens, self._clock())
        self._builder.timed = self._last_step

    def _order_window(self, state: RequestState, load: AsyncLoad, window: LoadWindow) -> None:
        state.disabled |= bool(window.failed_blocks)
        finishes = state.request_id if window.last else None
        audit = self.audits.take(state, window.copies, window.first, load.end, between_steps=True)
        made = window.copies, window.failed_blocks
        order = self._builder.load(*made, between_steps=True, finishes=finishes, audited=audit is not None)
        self._jobs[order.job] = _LoadJob(state, window.lease, load.first_chunk, window.tokens, load, True, audit=audit)

    @staticmethod
    def _advance(load: AsyncLoad) -> LoadWindow | None:
        try:
            return load.advance()
        except Exception:
            # vLLM keeps a request that loads until the load is reported as ended.
            logger.exception("lmkv: an asynchronous load failed; the rest of it is recomputed")
            return load.give_up()

    # -- ends ---------------------------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """The output of a timed step has come. vLLM may have scheduled it before the step before it had ended."""
        tokens, scheduled = self._steps.pop(step, (0, 0.0))
        now = self._clock()
        self._wait.cost.observe_step(tokens, now - max(scheduled, self._last_end))
        self._last_end = now
        # Reports come in the order of the steps: an earlier one that is missing never comes.
        self._steps = {number: timed for number, timed in self._steps.items() if number > step}

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered. Chunks of a failed load are dropped, and the request offered no more."""
        job = self._jobs.pop(number)
        # The end of a load that was stopped, for its request or a copy before it failed, is no failure of its own.
        counts = job.tokens or job.load is None or not job.load.stopped
        # Not before the last rank has answered: until then they read the slots.
        keys = job.lease.keys
        job.lease.release()
        if job.load is not None:
            job.load.copied(report.ok)
        if not report.ok:
            # A copy that was wrong says nothing against the chunks.
            self._failed(job, [] if report.differences else keys)
        if job.audit is not None:
            self.audits.ended(number, job.audit, report)
        if counts:
            self._telemetry.loaded(job.tokens, report)
        if report.ok:
            job.state.load_bytes += report.nbytes
            job.state.load_seconds += report.seconds
            self.mode.observe(report.nbytes, report.seconds)

    def _failed(self, job: _LoadJob, keys: Sequence[ChunkKey]) -> None:
        """`keys`: of chunks that may be wrong."""
        state = job.state
        if job.load is None or not job.load.abandoned:
            logger.warning("lmkv: a load for request %s failed; it is recomputed", state.name)
            # vLLM shares them until a request has computed them, and that request may be aborted before it does.
            self.evict_blocks(set(job.unconfirmed))
            self.on_failed_load(state.request_id)
            self.admission.end(state)
            self.audits.forget(state)
            state.disabled = True
            state.hit_tokens = 0
            state.stored, state.tail_due = min(state.stored, job.first_chunk), True
        self._store.drop(keys)

    def stop(self, state: RequestState) -> set[int]:
        """Have the request compute what its load between steps has not filled by now; returns the load's blocks."""
        owner, load = self._async_loads.get(state.request_id, (None, None))
        if load is None or owner is not state:
            return set()
        load.stop()
        return {block for table in load.block_ids for block in table}

    def forget(self, state: RequestState) -> None:
        """The request has ended: stop its load between steps."""
        self.admission.end(state)
        if self.stop(state):
            # Not deleted: the next step reports it as ended, and only then vLLM frees the blocks.
            self._async_loads[state.request_id][1].abandoned = True
