"""`Loads`: plans loads, within a step (synchronous) and between steps (asynchronous), and follows them to their end.

vLLM's prefix cache shares the blocks of a synchronous load before the load has ended. Until then, lmkv makes other
requests with these blocks wait. If the load fails, lmkv evicts the blocks from vLLM's prefix cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from attrs import define, field

from lmkv.chunks.hashing import StateKey
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import JobReport
from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.plan.request import STALL, BlockTables, Request
from lmkv.vllm.scheduler.audit import AuditedLoad, LoadAudits
from lmkv.vllm.scheduler.context import Job, PlanContext, Planner
from lmkv.vllm.scheduler.timing import MIN_STEP_TOKENS, Timing

logger = logging.getLogger("lmkv.vllm")


@define(eq=False)
class LoadWindow:
    """A part of an asynchronous load: the `copies` of `tokens` tokens, which the workers make in one step.

    `lease`: the lease of the chunks to copy. `failed_blocks`: blocks that nothing will fill, and that workers report as
    failed. `last`: whether the load ends with this window. `first`: index of the window's first chunk in the prompt.
    """

    copies: list[ChunkCopy]
    lease: Lease
    failed_blocks: list[int]
    last: bool
    tokens: int = 0
    first: int = 0


@define(eq=False)
class AsyncLoad:
    """An asynchronous load: loads tokens `start` to `end - 1` of one request, while vLLM does not schedule the request.

    `keys`: the keys of the chunks, beginning with the chunk that contains token `start`, and of recurrent layers'
    states after the last chunk. The load copies windows of up to `window` chunks. While one window is copied, the next
    is promoted into host memory, so a load uses at most 2 * `window` slots.

    The load ends early, and reports the unfilled blocks, in three cases: a chunk is lost, no chunk of a window arrives
    within `timeout` seconds, or all waits together exceed `limit` seconds.
    """

    store: TieredStore = field(repr=False)
    block_map: BlockMap = field(repr=False)
    keys: Sequence[ChunkKey] = field(repr=lambda keys: f"<{len(keys)} keys>")
    block_ids: Sequence[list[int]] = field(repr=False)
    start: int
    end: int
    window: int
    timeout: float
    limit: float
    clock: Clock = field(repr=False)
    promote: Callable[..., Promotion] = field(repr=False)
    """A function with the arguments and the result of `TieredStore.promote`."""
    stopped: bool = False
    abandoned: bool = False
    """Whether the request has ended, so that vLLM does not compute the remaining tokens."""
    ended: bool = False
    copying: int = 0
    """Number of chunks in the window that is being copied, or 0."""
    _copied: int = 0
    _promotion: Promotion | None = None
    _waits_since: float = field(default=0.0, repr=False)
    """The time when the current wait began: when the promotion began, or later when the previous copy ended."""
    _waited: float = field(default=0.0, repr=False)
    """Seconds of all earlier waits."""

    @property
    def first_chunk(self) -> int:
        """Index in the prompt of the first chunk that the load reads."""
        return self.start // self.block_map.chunk_size

    def advance(self) -> LoadWindow | None:
        """Return the next window (part of the load) if the workers can copy it now, else None. Never waits."""
        if self.stopped and not self.ended:
            # vLLM frees the blocks with the last window, so not while the one before it is being copied.
            return None if self.copying else self.give_up()
        self._promote_next()
        if self.ended or self.copying:
            return None
        promotion = self._promotion
        assert promotion is not None
        waits = self.clock() - self._waits_since
        too_long = self._waited + waits > self.limit
        if not promotion.done and not too_long and waits <= self.timeout:
            return None
        self._waited += waits
        if not promotion.done and too_long:
            # Copy the chunks that have arrived by now as the last.
            self.stopped = True
        # Leased before the promotion is released: in between the chunks could be evicted.
        lease = self.store.lease(promotion.keys)
        self._drop_promotion()
        if not lease:
            return self.give_up()
        return self._next_window(lease)

    def _promote_next(self) -> None:
        if self._promotion is None and not self.ended:
            upto = self._copied + self.copying
            if upto < len(self.keys):
                self._promotion = self.promote(self.keys[upto:], limit=self.window)
                self._waits_since = self.clock()

    def _next_window(self, lease: Lease) -> LoadWindow:
        size = self.block_map.chunk_size
        base = self.first_chunk + self._copied
        low, high = max(self.start, base * size), min(self.end, (base + len(lease)) * size)
        copies = self.block_map.load_copies(lease.slots, self.block_ids, low, high)
        copies += self._state_copies(lease)
        self.copying = len(lease)
        self.ended = high >= self.end and self._copied + len(lease) >= len(self.keys)
        return LoadWindow(copies, lease, [], self.ended, max(0, high - low), base)

    def _state_copies(self, lease: Lease) -> list[ChunkCopy]:
        """Return the copies of the states in `lease`. Raises ValueError if vLLM has no block for a state."""
        if not self.block_map.states:
            return []
        blocks = self.block_map.state_blocks(self.block_ids, self.end)
        copies = []
        for key, slot in zip(lease.keys, lease.slots, strict=True):
            if isinstance(key, StateKey):
                copy = self.block_map.state_copy(slot, key.number, blocks)
                if copy is None:
                    raise ValueError(f"vLLM has no block for state {key.number} after {self.end} tokens")
                copies.append(copy)
        return copies

    def give_up(self) -> LoadWindow:
        """End the load now. Return a `LoadWindow` that copies nothing and lists the unfilled blocks as failed."""
        self.ended = True
        self._drop_promotion()
        low = max(self.start, (self.first_chunk + self._copied) * self.block_map.chunk_size)
        unfilled = self.block_map.blocks_between(self.block_ids, low, self.end)
        return LoadWindow([], self.store.lease(()), unfilled, last=True)

    def copied(self, ok: bool) -> None:
        """Note that the copy of a window (part of the load) has ended on every rank.

        `ok`: whether every rank succeeded. If not, the load stops.
        """
        if ok:
            self._copied += self.copying
        else:
            self.stop()
        self.copying, self._waits_since = 0, self.clock()

    def stop(self) -> None:
        """Make the load end after the window (part of the load) that is being copied, if any.

        A later call of `advance` then reports the unfilled blocks. vLLM keeps the request's blocks until this report.
        """
        self.stopped = True
        self._drop_promotion()

    def _drop_promotion(self) -> None:
        if self._promotion is not None:
            self._promotion.release()
            self._promotion = None


class AsyncLoadAdmission:
    """Decides whether another request may begin an asynchronous load.

    vLLM cannot preempt a loading request. For layers with a sliding window, vLLM 0.32 reserves too few blocks for
    loading requests, so two of them can wait for each other's blocks forever. For such models, another load may begin
    only if the free blocks suffice for all loading requests. `free_blocks()`: a function that returns the number of
    vLLM's free blocks.
    """

    def __init__(self, block_map: BlockMap) -> None:
        self._block_map = block_map
        self._has_windows = any(group.window is not None for group in block_map.groups)
        self._requests: dict[str, Request] = {}
        self.free_blocks: Callable[[], int] = lambda: 0

    def admits(self, request: Request) -> bool:
        """Return whether the request may begin an asynchronous load now."""
        others = [other for other in self._requests.values() if other is not request]
        if not others or not self._has_windows:
            return True
        lengths = [other.vllm.num_tokens for other in (*others, request)]
        return sum(map(self._block_map.most_blocks, lengths)) <= self.free_blocks()

    def begin(self, request: Request) -> None:
        """Note that the request begins a load: its blocks are allocated, but not filled."""
        self._requests[request.request_id] = request

    def end(self, request: Request) -> None:
        """Note that the request does not load any more: it computes, has lost its blocks, or has ended."""
        self._requests.pop(request.request_id, None)


@define(eq=False)
class _LoadJob(Job):
    """A synchronous load, or a window of an asynchronous load.

    `tokens`: number of tokens to load. `load`: the asynchronous load of the window, else None. `unconfirmed`: the
    request's blocks from token `start` on, which depend on the load. vLLM's prefix cache already shares these blocks.
    """

    lease: Lease
    first_chunk: int
    tokens: int
    between_steps: bool
    audit: AuditedLoad | None
    load: AsyncLoad | None = None
    start: int = 0
    unconfirmed: Sequence[int] = ()


class Loads(Planner):
    """Plans loads and follows each load to its end.

    `admission`: decides whether a request may begin an asynchronous load. `evict_blocks(blocks)`: a function that
    removes blocks from vLLM's prefix cache. `on_failed_load(request_id)`: a function that is called after a failed
    load, before vLLM continues the request.
    """

    def __init__(self, context: PlanContext, timing: Timing, audits: LoadAudits) -> None:
        super().__init__(context)
        self._timing, self._audits = timing, audits
        # An asynchronous load references two windows at most: half of the slots, and leaves the other half.
        self._window = max(1, context.store.slab.num_slots // 4)
        self._async_loads: dict[str, tuple[Request, AsyncLoad]] = {}
        self._steps: dict[int, tuple[int, float]] = {}
        """For the number of each running timed step: its number of tokens, and the time when vLLM scheduled it."""
        self._last_step, self._last_end = 0, 0.0
        self.admission = AsyncLoadAdmission(context.block_map)
        self.evict_blocks: Callable[[set[int]], None] = lambda blocks: None
        self.on_failed_load: Callable[[str], None] = lambda request_id: None

    @property
    def between_steps(self) -> dict[str, AsyncLoad]:
        """The asynchronous loads that have not ended, by request id."""
        return {request_id: load for request_id, (_, load) in self._async_loads.items()}

    @property
    def busy(self) -> bool:
        """Whether some load has not ended yet."""
        return bool(self._async_loads) or any(True for _ in self._jobs.of(_LoadJob))

    @property
    def timed_steps(self) -> int:
        """Number of running steps of which the workers must report the end."""
        return len(self._steps)

    def is_unconfirmed(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether vLLM's own hit may include blocks of a load that has not succeeded yet.

        `num_computed_tokens`: number of tokens of vLLM's own hit. The result may be True without need: for each load,
        only the tokens of the first block are compared with the request's tokens.
        """
        size = self._block_map.groups[0].block_size
        jobs = [job for job in self._jobs.of(_LoadJob) if job.unconfirmed and job.start < num_computed_tokens]
        return any(job.request.tokens(job.start, size) == request.tokens(job.start, size) for job in jobs)

    def may_have_been_read(self, number: int) -> bool:
        """Return whether a step may have read the loaded blocks before load number `number` ended. True for synchronous
        loads.
        """
        job = self._jobs.get(number)
        return isinstance(job, _LoadJob) and not job.between_steps

    # -- tasks --------------------------------------------------------------------------------------------

    def plan(self, request: Request, lease: Lease, tables: BlockTables, end: int) -> None:
        """Plan a synchronous load of the leased chunks, up to token `end`, in the step that is being scheduled."""
        start = request.waiting.computed
        copies = self._block_map.load_copies(lease.slots, tables, start, end)
        if not self._block_map.covers(copies, start, end):
            self._plan_failed(request, tables, end, lease)
            return
        audit = self._audits.take(request, copies, start // self._chunk_size, end, between_steps=False)
        task = self._builder.load(copies, [], audited=audit is not None)
        self._follow(task.job, request, lease, tables, end, audit)

    def fail(self, request: Request, tables: BlockTables, end: int) -> None:
        """Report the blocks of a promised load, up to token `end`, as failed, because planning the load has failed."""
        request.loading.failed = True
        request.waiting.release_lease()
        owner, load = self._async_loads.get(request.request_id, (None, None))
        if load is not None and owner is request:
            # It has begun. `end_step` reports its end.
            load.stop()
        else:
            self._plan_failed(request, tables, end)

    def fail_unknown(self, tables: BlockTables) -> None:
        """Report the blocks of a promised load as failed, for a request that lmkv does not know."""
        unfilled = [block for table in tables for block in table if block]
        self.evict_blocks(set(unfilled))
        self._builder.load([], unfilled)

    def _plan_failed(self, request: Request, tables: BlockTables, end: int, lease: Lease | None = None) -> None:
        """Plan a load without copies, which makes the workers report its blocks as failed. `lease`: a lease on chunks
        to delete.
        """
        between = request.waiting.between_steps
        failed = self._block_map.blocks_between(tables, request.waiting.computed, end)
        finishes = request.request_id if between else None
        task = self._builder.load([], failed, between_steps=between, finishes=finishes)
        # A job like others, so that nothing computed from these blocks is stored.
        self._follow(task.job, request, lease or self._store.lease(()), tables, end)

    def _follow(
        self, job: int, request: Request, lease: Lease, tables: BlockTables, end: int, audit: AuditedLoad | None = None
    ) -> None:
        start = request.waiting.computed
        unconfirmed = tables[0][start // self._block_map.groups[0].block_size :]
        size = start // self._chunk_size, end - start
        made = _LoadJob(self, request, lease, *size, request.waiting.between_steps, audit, None, start, unconfirmed)
        self._jobs.begin(job, made)

    def begin(self, request: Request, keys: Sequence[ChunkKey], tables: BlockTables, end: int) -> None:
        """Begin an asynchronous load of the chunks of `keys`, up to token `end`. The first of these chunks contains the
        first token to load.
        """
        here = self._store.catalog.count_prefix(keys)[0]
        limit = self._timing.limit(keys, here, len(keys)) if here < len(keys) else None
        # Chunks all in host memory are one window, if others still find slots meanwhile.
        window = here if here == len(keys) <= self._timing.max_promoted else self._window
        # Stop waiting after this many seconds without a chunk, or in total. The rest is computed.
        timeout = min(self._options.prefetch_deadline, STALL if limit is None else limit)
        span = request.waiting.computed, end
        made = self._store, self._block_map, keys, [list(table) for table in tables], *span, window, timeout
        load = AsyncLoad(*made, math.inf if limit is None else limit, self._clock, self._timing.promote)
        request.loading.begun += 1
        self.admission.begin(request)
        self._async_loads[request.request_id] = (request, load)

    def end_step(self, scheduled_tokens: int, requests: int) -> None:
        """Plan the next window (part) of each asynchronous load, if the workers can copy it now.

        `scheduled_tokens`, `requests`: number of tokens and of requests in the step that vLLM has just scheduled.
        """
        if scheduled_tokens >= MIN_STEP_TOKENS:
            self._last_step += 1
            self._steps[self._last_step] = scheduled_tokens, self._clock()
            self._builder.time(self._last_step)
        self._timing.mode.computing = requests
        for request, load in list(self._async_loads.values()):
            window = self._advance(load)
            if window is not None:
                try:
                    self._plan_window(request, load, window)
                except Exception:
                    # No worker will report it, and `cancel` waits for running copies.
                    window.lease.release()
                    load.copied(ok=False)
                    raise
            if load.ended:
                del self._async_loads[request.request_id]

    def cancel(self) -> None:
        """Cancel all asynchronous loads, because planning failed. A load with a running copy ends in a later step."""
        # This step overwrites released blocks that were not reread.
        self._audits.forget()
        for request, load in list(self._async_loads.values()):
            load.stop()
            if not load.copying:
                self._plan_window(request, load, load.give_up())
                del self._async_loads[request.request_id]

    def _plan_window(self, request: Request, load: AsyncLoad, window: LoadWindow) -> None:
        request.loading.failed |= bool(window.failed_blocks)
        finishes = request.request_id if window.last else None
        audit = self._audits.take(request, window.copies, window.first, load.end, between_steps=True)
        made = window.copies, window.failed_blocks
        task = self._builder.load(*made, between_steps=True, finishes=finishes, audited=audit is not None)
        job = _LoadJob(self, request, window.lease, load.first_chunk, window.tokens, True, audit, load)
        self._jobs.begin(task.job, job)

    @staticmethod
    def _advance(load: AsyncLoad) -> LoadWindow | None:
        try:
            return load.advance()
        except Exception:
            # vLLM keeps a request that loads until the load is reported as ended.
            logger.exception("lmkv: an asynchronous load failed; vLLM computes the remaining tokens")
            return load.give_up()

    # -- ends ---------------------------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """Measure the time of a step from its scheduling to its end. If the previous step ended after the scheduling,
        measure from that end.
        """
        tokens, scheduled = self._steps.pop(step, (0, 0.0))
        now = self._clock()
        self._timing.cost.note_step(tokens, now - max(scheduled, self._last_end))
        self._last_end = now
        # Reports come in the order of the steps: a missing earlier one never comes.
        self._steps = {number: timed for number, timed in self._steps.items() if number > step}

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Process the result of a load. After a failure, load nothing more for the request, and delete the load's
        chunks, unless an audit has found that only the loaded blocks are wrong.
        """
        assert isinstance(job, _LoadJob)
        # The end of a stopped load is no separate failure.
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
            self._audits.load_ended(number, job.audit, report)
        if counts:
            self._observer.telemetry.loaded(job.tokens, report)
        self._observer.loaded(job.request, report)
        if report.ok:
            self._timing.mode.note_load(report.nbytes, report.seconds)

    def _failed(self, job: _LoadJob, keys: Sequence[ChunkKey]) -> None:
        """Process a failed load. `keys`: keys of the load's chunks, to delete."""
        request = job.request
        if job.load is None or not job.load.abandoned:
            logger.warning("lmkv: a load for request %s failed; vLLM computes the tokens instead", request.name)
            # vLLM may hand these blocks to others until this request recomputes them, and it may be aborted first.
            self.evict_blocks(set(job.unconfirmed))
            self.on_failed_load(request.request_id)
            self.admission.end(request)
            self._audits.forget(request)
            request.loading.failed = True
            self._observer.load_failed(request)
            request.storing.begin_again(job.first_chunk)
        self._store.drop(keys)

    def stop(self, request: Request) -> set[int]:
        """Stop a request's asynchronous load, so that vLLM computes the remaining tokens. Return the load's blocks, or
        an empty set if the request has no such load.
        """
        owner, load = self._async_loads.get(request.request_id, (None, None))
        if load is None or owner is not request:
            return set()
        load.stop()
        return {block for table in load.block_ids for block in table}

    def forget(self, request: Request) -> None:
        """Stop the asynchronous load of an ended request."""
        self.admission.end(request)
        if self.stop(request):
            # Kept: only when the next step reports its end does vLLM free the blocks.
            self._async_loads[request.request_id][1].abandoned = True
