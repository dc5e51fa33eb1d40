"""`LoadPlanner`: what a lookup promises vLLM, and the orders that fulfil it.

Chunks in host memory are loaded within the step that needs them, where vLLM can be told that such a load
failed. vLLM's prefix cache shares the blocks from their allocation on; until the load is known to have
succeeded no other request may share these blocks, and if it fails they are evicted from that cache.

Chunks of lower tiers are promoted while the request waits in vLLM's queue, so that the batch does not wait
for them. Hits that are too long for host memory are loaded through it between steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from attrs import define, field

from lmkv.chunks.hashing import TailKey, token_bytes
from lmkv.outcomes import Presence
from lmkv.protocols import ChunkKey
from lmkv.store.discovery import Discovery
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.iopool import Priority
from lmkv.vllm.geometry import Geometry
from lmkv.vllm.metadata import JobReport, StepPlanBuilder
from lmkv.vllm.scheduler.async_load import AsyncLoad, AsyncLoadAdmission, LoadWindow
from lmkv.vllm.scheduler.events import EventRecorder
from lmkv.vllm.scheduler.explain import Explainer
from lmkv.vllm.scheduler.load_policy import MIN_STEP_TOKENS, LoadCost, LoadMode
from lmkv.vllm.scheduler.miss import Miss
from lmkv.vllm.scheduler.options import SchedulerOptions
from lmkv.vllm.scheduler.patience import STALL, Patience
from lmkv.vllm.scheduler.request import BlockTables, RequestState
from lmkv.vllm.scheduler.telemetry import Telemetry

logger = logging.getLogger("lmkv.vllm")

_MAX_ASYNC_LOADS = 3
_QUESTION = "?"
"""Name for shared tiers, all of them, when they are asked whether they have chunks."""


@define(eq=False)
class _Job:
    state: RequestState
    lease: Lease
    first_chunk: int
    tokens: int
    load: AsyncLoad | None = None
    start: int = 0
    unconfirmed: list[int] = field(factory=list)
    """Blocks from token `start` on that this step loads, or computes from those; vLLM shares them already."""


class LoadPlanner:
    """Which chunks are loaded, and when. Called on the scheduling thread only; never waits."""

    def __init__(
        self,
        store: TieredStore,
        geometry: Geometry,
        builder: StepPlanBuilder,
        options: SchedulerOptions,
        telemetry: Telemetry,
        explainer: Explainer,
        events: EventRecorder | None = None,
    ) -> None:
        self._store = store
        self._telemetry = telemetry
        self._explainer = explainer
        self._events = events
        self._geometry = geometry
        self._chunk_size = geometry.chunk_size
        self._builder = builder
        self._options = options
        self._clock = options.clock
        self._cost = LoadCost(enabled=options.load_or_recompute)
        self._mode = LoadMode(options.load_mode, concurrent=options.concurrent_copies)
        # An asynchronous load references two windows at most: half of the slots, and leaves the other half.
        self._window = max(1, store.slab.num_slots // 4)
        self._max_promoted = max(1, store.slab.num_slots // 2)
        self._may_load_within_step = geometry.one_full_table and options.load_mode != "async"
        self._jobs: dict[int, _Job] = {}
        self._async_loads: dict[str, tuple[RequestState, AsyncLoad]] = {}
        self._promised: dict[str, RequestState] = {}
        self._steps: dict[int, tuple[int, float]] = {}
        """Of steps under way, by number: tokens, and when they were scheduled."""
        self._last_step, self._last_end = 0, 0.0
        self.admission = AsyncLoadAdmission(geometry)
        self.evict_blocks: Callable[[set[int]], None] = lambda blocks: None
        self.on_failed_load: Callable[[str], None] = lambda request_id: None

    # -- before the request is scheduled ------------------------------------------------------------------

    def arrived(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """Begin to discover and promote a new request's chunks while it waits in vLLM's queue."""
        if state.options.max_load_tokens == 0:
            return
        state.discovery = self._store.discover(keys)
        ready, found = self._match(state, keys)
        if ready < found <= self._max_promoted:
            state.promotion = self._promote(keys[:found], Priority.PREFETCH)

    def _promote(
        self,
        keys: Sequence[ChunkKey],
        priority: Priority = Priority.LOAD,
        *,
        limit: int | None = None,
        ttl: float | None = None,
    ) -> Promotion:
        """Promote chunks, and measure how fast their tiers deliver them, waiting in the queue included."""
        started = self._clock()
        promotion = self._store.promote(keys, priority=priority, limit=limit, ttl=ttl)

        def measure() -> None:
            for tier, (count, at) in promotion.delivered.items():
                if tier != self._store.primary_name:
                    self._cost.observe_load(tier, count * self._store.slab.slot_bytes, at - started)
                    self._telemetry.promoted(tier, at - started)

        promotion.add_done_callback(measure)
        return promotion

    def _probe(self, keys: Sequence[ChunkKey]) -> None:
        """Measure a tier again that was too slow; its request does not wait for it."""
        probe = self._promote(keys, Priority.PREFETCH, ttl=self._options.prefetch_deadline)
        probe.add_done_callback(probe.release)

    def is_unconfirmed(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Whether vLLM's own hit may include blocks of a load that is not known to have succeeded.

        Compares the tokens of the load's first block only: waiting a step in vain does no harm.
        """
        size = self._geometry.groups[0].block_size
        return any(
            job.start < num_computed_tokens and job.state.tokens(job.start, size) == state.tokens(job.start, size)
            for job in self._jobs.values()
            if job.unconfirmed
        )

    def match(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(tokens, between_steps)`: the tokens that can be loaded beyond the computed ones, and how.

        None instead of tokens: ask again in the next step, because shared tiers have not answered yet,
        chunks are still being promoted, or no further asynchronous load is admitted. A promise ends with the
        step that is being scheduled.
        """
        self.admission.end(state)
        state.computed, state.between_steps = num_computed_tokens, False
        keys = wanted = self._keys(state)
        first = num_computed_tokens // self._chunk_size
        if state.discovery is not None and self._is_asking(state, state.discovery, keys):
            return None, False
        if state.options.wait_for and self._is_being_stored(state, keys, self._store.match(keys)[1]):
            return None, False
        ready, found = self._match(state, keys)
        if found > max(ready, first):
            if self._must_wait(state, keys, ready, found):
                return None, False
            # The promotion has ended, now or before: its chunks are in host memory.
            ready, found = self._match(state, keys)
        state.patience.end(self._clock())
        keys, last = self._extended(state, keys[:found])
        if ready == found:
            ready = len(keys)
        chunks, between_steps = self._offer(state, keys, ready, len(keys))
        if between_steps and not self.admission.admits(state):
            if state.patience.lasts(self._clock(), lambda: math.inf, 0):
                return None, False
            chunks = 0
        chunks -= self._options.tail_depends_on_next and chunks > 0
        hit = (chunks - 1) * self._chunk_size + (last if chunks == len(keys) else self._chunk_size) if chunks else 0
        hit = min(hit, state.last_token)
        if self._options.whole_blocks:
            hit -= hit % self._geometry.groups[0].block_size
        need = max(0, hit - num_computed_tokens)
        few = 0 < need < self._options.min_retrieve_tokens
        end = num_computed_tokens + (0 if few else need)
        state.miss = self._explainer.explain(state, wanted, end, few=few, late=state.patience.late)
        self._log(state, hit, need)
        if few or not need:
            state.drop_promotion()
            return 0, False
        self._promise(state, keys[:chunks], first, ready, need, between_steps)
        return need, between_steps

    def _keys(self, state: RequestState) -> list[ChunkKey]:
        """Those of the chunks that a load may end with."""
        total, size = state.request.num_tokens, self._chunk_size
        if state.loadable < state.last_token:
            return state.keys(state.loadable // size)
        if self._options.save_unfull_chunk:
            return state.keys_with_tail(total // size)
        return state.keys((total - 1) // size)

    def _extended(self, state: RequestState, keys: list[ChunkKey]) -> tuple[list[ChunkKey], int]:
        """`(keys, tokens)`: with a chunk in host memory that goes on as the prompt does, for a while at least.

        `tokens`: those of the last chunk that are the prompt's.
        """
        size, at = self._chunk_size, len(keys) * self._chunk_size
        if keys and isinstance(keys[-1], TailKey):
            shorter, last = self._extended(state, keys[:-1])
            return (shorter, last) if len(shorter) == len(keys) and last > keys[-1].tokens else (keys, keys[-1].tokens)
        limited = state.loadable < state.last_token
        if not self._options.save_unfull_chunk or self._geometry.windowed or limited or at >= state.last_token:
            return keys, size
        tokens = token_bytes(state.tokens(at, size))
        key, count = self._store.longest_prefix(state.chain.origin(len(keys)), tokens)
        left = state.last_token - at
        usable = min(count, left)
        # A few tokens with which many prompts begin alike are sooner computed than loaded.
        few = usable < min(left, self._geometry.groups[0].block_size)
        return (keys, size) if few else ([*keys, key], count)

    def _is_being_stored(self, state: RequestState, keys: Sequence[ChunkKey], found: int) -> bool:
        """Whether another server has still to store what the request is to wait for; if so it is asked for again.

        What comes after has a deadline of its own.
        """
        wanted = state.options.wait_for
        missing = found < min(-(-wanted // self._chunk_size), len(keys)) and state.computed < wanted
        waits = missing and state.patience.lasts(self._clock(), lambda: self._compute_seconds(wanted), found)
        asked = self._store.discover(keys) if waits else None
        if asked is not None:
            state.discovery = asked
            return True
        if missing:
            message = "lmkv: request %s: of %d tokens that another server stores %d were found within %.1f s"
            logger.warning(message, state.request_id, wanted, found * self._chunk_size, state.patience.spent)
        state.options.wait_for, state.patience = 0, self.new_patience()
        return False

    def new_patience(self) -> Patience:
        """For a request that has not waited yet."""
        return Patience(self._options.prefetch_deadline)

    def _compute_seconds(self, tokens: int) -> float:
        """Seconds that so many tokens take to compute; infinite while that is not known."""
        seconds = self._cost.patience(None, tokens, 0)
        return math.inf if seconds is None else seconds

    def _is_asking(self, state: RequestState, discovery: Discovery, keys: Sequence[ChunkKey]) -> bool:
        """Whether shared tiers have still to answer, and the request may wait for it."""
        now, tokens, wanted = self._clock(), len(keys) * self._chunk_size, state.options.wait_for
        if not discovery.done:
            # The wait for what another server stores is one, however often is asked in it.
            answer = partial(self._cost.patience, _QUESTION, tokens, 1)
            return state.patience.lasts(now, partial(self._compute_seconds, wanted) if wanted else answer, 0)
        self._cost.observe_load(_QUESTION, 1, discovery.seconds)
        # What was found besides may be worth it.
        state.discovery, state.pays = None, None
        if not wanted:
            state.patience.end(now)
        return False

    def _must_wait(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether chunks of lower tiers fit host memory and are still worth waiting for."""
        if found > self._max_promoted:
            return False
        promotion = state.promotion
        if not state.patience.lasts(self._clock(), lambda: self._patience(keys, ready, found), ready):
            self._give_up(state, keys, ready, found)
            return False
        if promotion is None or (promotion.done and len(promotion) < found):
            # Promoted again, now as a load: a prefetch may have been cut short by its share of the slots.
            # The old promotion is released afterwards, so that its chunks stay referenced.
            demanded = self._promote(keys[:found], Priority.LOAD)
            state.drop_promotion()
            promotion = state.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    def _patience(self, keys: Sequence[ChunkKey], ready: int, found: int) -> float | None:
        """Seconds that a request may wait for chunks `ready` to `found`; None while that is not known."""
        tokens, nbytes = (found - ready) * self._chunk_size, self._store.slab.slot_bytes
        tiers = self._store.by_tier(keys[ready:found])
        limits = [self._cost.patience(tier, tokens, count * nbytes) for tier, count in tiers.items()]
        known = [limit for limit in limits if limit is not None]
        return max(known) if known else None

    def _give_up(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> None:
        """Some of chunks `ready` to `found` have not come in time. Their tiers count as twice as slow as was seen."""
        missing = [
            key
            for key, presence in zip(keys[ready:found], self._store.lookup(keys[ready:found]), strict=True)
            if presence is not Presence.READY
        ]
        for tier, count in self._store.by_tier(missing).items() if state.promotion is not None else ():
            if tier is not None:
                self._cost.observe_load(tier, count * self._store.slab.slot_bytes, 2 * state.patience.spent)
        state.drop_promotion()

    def _match(self, state: RequestState, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks in host memory, and leading chunks anywhere that are worth loading."""
        ready, found = self._store.match(keys)
        if found > max(ready, state.computed // self._chunk_size):
            found = max(ready, min(found, self._paying(state, keys, ready, found)))
        return ready, found

    def _paying(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> int:
        """The leading chunks before those of a tier from which loading does not beat computing.

        Decided once per request, and again once shared tiers have answered.
        """
        if state.pays is None:
            state.pays = math.inf
            for tier, count in self._store.by_tier(keys[ready:found]).items():
                nbytes = count * self._store.slab.slot_bytes
                if tier is not None and not self._cost.worth_loading(tier, count * self._chunk_size, nbytes):
                    state.pays = next(n for n in range(ready, found) if self._store.tier_of(keys[n]) == tier)
                    if self._cost.wants_probe(tier):
                        self._probe(keys[: min(found, self._max_promoted)])
                    break
        return found if state.pays == math.inf else int(state.pays)

    def _offer(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> tuple[int, bool]:
        """`(chunks, between_steps)`: how many chunks to promise, and whether they are loaded between steps.

        Between steps: hits that are too long for host memory, and all where a load within a step may not
        fail.
        """
        if state.async_loads >= _MAX_ASYNC_LOADS:
            # Preempted again and again. vLLM cannot preempt a request that is loading: two of them could
            # preempt each other in turns for ever, where requests that compute make progress.
            return (ready, False) if self._may_load_within_step else (0, False)
        if max(ready, self._max_promoted) < found:
            return found, True
        first = state.computed // self._chunk_size
        nbytes = max(0, ready - first) * self._store.slab.slot_bytes
        return ready, nbytes > 0 and (not self._may_load_within_step or self._mode.between_steps(nbytes))

    def _promise(
        self, state: RequestState, keys: list[ChunkKey], first: int, ready: int, need: int, between_steps: bool
    ) -> None:
        state.source_chunks = self._sources(state, len(keys) - first, keys[max(first, ready) :])
        state.sources = self._in_tokens(state.source_chunks, need)
        state.promised, state.between_steps = keys, between_steps
        if self._events is not None:
            self._events.learn(state, keys)
        if not between_steps:
            # Leased before the promotion is released: in between the chunks could be evicted.
            state.lease = self._store.lease(keys[first:])
            state.drop_promotion()
        self._promised[state.request_id] = state

    def _sources(self, state: RequestState, total: int, below: Sequence[ChunkKey]) -> dict[str, int]:
        """The `total` chunks to load by tier. Those that were just promoted count for the tier that they came from."""
        host = self._store.primary_name
        state.note_promoted()
        lower = {name: count for name, count in state.promoted.items() if name != host}
        if below:
            lower[self._store.tier_of(below[0]) or host] = len(below)
        lower = {name: min(count, total) for name, count in lower.items()}
        return {host: max(0, total - sum(lower.values())), **lower}

    def _in_tokens(self, chunks: dict[str, int], need: int) -> dict[str, int]:
        """The `need` tokens to load by tier: the first tier, which is host memory, has what the others do not."""
        host, *lower = chunks
        tokens = {name: min(chunks[name] * self._chunk_size, need) for name in lower}
        return {host: max(0, need - sum(tokens.values())), **tokens}

    def _log(self, state: RequestState, hit: int, need: int) -> None:
        # vLLM asks about a waiting request in every step: only changes are logged.
        if state.logged != (hit, need):
            state.logged = (hit, need)
            missed = "" if state.miss is None else f" ({state.miss})"
            message = "lmkv: request %s: total tokens %d, hit tokens %d, to load %d%s"
            logger.info(message, state.request_id, state.request.num_tokens, hit, need, missed)

    def refuse(self, state: RequestState, num_computed_tokens: int, reason: str) -> None:
        """The request loads nothing."""
        state.computed = num_computed_tokens
        state.miss = Miss(reason, max(0, state.last_token - num_computed_tokens))

    # -- once it is scheduled -----------------------------------------------------------------------------

    def allocated(self, state: RequestState, tables: BlockTables, tokens: int) -> None:
        """Blocks are allocated: order the promised load of `tokens` tokens, or release its lease for 0."""
        promised = self._promised.pop(state.request_id, None)
        lease, state.lease = state.lease, None
        if not state.counted:
            self._count(state, tokens, not_taken=promised is not None and tokens <= 0)
        if tokens <= 0:
            self.admission.end(state)
            if lease is not None:
                lease.release()
            return
        state.hit_tokens = tokens
        end = state.computed + tokens
        if state.between_steps:
            self._begin_async_load(state, tables, end)
        else:
            self._order(state, lease or self._store.lease(()), tables, end)

    def _count(self, state: RequestState, tokens: int, *, not_taken: bool) -> None:
        """Count what the request found, and what it did not: once, whether or not it is preempted later."""
        state.counted = True
        if not_taken:
            state.miss = Miss("not_taken", max(0, state.last_token - state.computed))
        found = tokens > 0
        self._telemetry.looked_up(state.sources if found else {}, state.source_chunks if found else {}, state.miss)

    def _order(self, state: RequestState, lease: Lease, tables: BlockTables, end: int) -> None:
        start = state.computed
        copies = self._geometry.load_copies(lease.slots, tables, start, end)
        covered = self._geometry.covers(copies, start, end)
        failed = [] if covered else self._geometry.blocks_between(tables, start, end)
        order = self._builder.load(copies if covered else [], failed)
        unconfirmed = list(tables[0][start // self._geometry.groups[0].block_size :])
        first = start // self._chunk_size
        self._jobs[order.job] = _Job(state, lease, first, end - start, start=start, unconfirmed=unconfirmed)

    def _begin_async_load(self, state: RequestState, tables: BlockTables, end: int) -> None:
        start = state.computed
        keys = state.promised[start // self._chunk_size :]
        here = self._store.match(keys)[0]
        patience = self._patience(keys, here, len(keys)) if here < len(keys) else None
        load = AsyncLoad(
            self._store,
            self._geometry,
            keys,
            [list(table) for table in tables],
            start,
            end,
            # What is in host memory already is copied as one window, if others still find slots meanwhile.
            here if here == len(keys) <= self._max_promoted else self._window,
            # Seconds without a chunk, and all seconds without one to copy, after which the rest is computed.
            min(self._options.prefetch_deadline, STALL if patience is None else patience),
            self._clock,
            math.inf if patience is None else patience,
            self._promote,
        )
        state.async_loads += 1
        self.admission.begin(state)
        self._async_loads[state.request_id] = (state, load)

    def end_step(self, scheduled_tokens: int, requests: int) -> None:
        """A step was scheduled: order the windows that are ready, and withdraw the promises not taken up."""
        if scheduled_tokens >= MIN_STEP_TOKENS:
            self._begin_timing(scheduled_tokens)
        self._mode.computing = requests
        for state, load in list(self._async_loads.values()):
            window = self._advance(load)
            if window is not None:
                self._order_window(state, load, window)
            if load.ended:
                del self._async_loads[state.request_id]
        # Not scheduled after all. A lease that waited with its request would keep its chunks from eviction.
        for state in self._promised.values():
            state.drop_lease()
        self._promised.clear()

    def _begin_timing(self, tokens: int) -> None:
        self._last_step += 1
        self._steps[self._last_step] = (tokens, self._clock())
        self._builder.timed = self._last_step

    def step_ended(self, step: int) -> None:
        """The output of a timed step has come. vLLM may have scheduled it before the step before it had ended."""
        tokens, scheduled = self._steps.pop(step, (0, 0.0))
        now = self._clock()
        self._cost.observe_step(tokens, now - max(scheduled, self._last_end))
        self._last_end = now
        # Reports come in the order of the steps: what has not been reported before never will be.
        self._steps = {number: timed for number, timed in self._steps.items() if number > step}

    def _order_window(self, state: RequestState, load: AsyncLoad, window: LoadWindow) -> None:
        state.disabled |= bool(window.failed_blocks)
        finishes = state.request_id if window.last else None
        order = self._builder.load(window.copies, window.failed_blocks, between_steps=True, finishes=finishes)
        self._jobs[order.job] = _Job(state, window.lease, load.first_chunk, window.tokens, load)

    @staticmethod
    def _advance(load: AsyncLoad) -> LoadWindow | None:
        try:
            return load.advance()
        except Exception:
            # vLLM keeps a request that loads until the load is reported as ended.
            logger.exception("lmkv: an asynchronous load failed; the rest of it is recomputed")
            return load.give_up()

    # -- when it is done ----------------------------------------------------------------------------------

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def may_have_been_read(self, job: int) -> bool:
        """Whether a step may have computed from the blocks of this load: none does before a load between steps ends."""
        return job in self._jobs and self._jobs[job].load is None

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered. Chunks of a failed load are dropped, and the request offered no more."""
        job = self._jobs.pop(number)
        state, keys = job.state, job.lease.keys
        # Not before the last rank has answered: until then they read the slots.
        job.lease.release()
        # What ends a load that was stopped, for its request or a copy before it failed, is no failure of its own.
        if job.tokens or job.load is None or not job.load.stopped:
            self._telemetry.loaded(job.tokens, report)
        if job.load is not None:
            job.load.copied(report.ok)
        if report.ok:
            state.load_bytes += report.nbytes
            state.load_seconds += report.seconds
            self._mode.observe(report.nbytes, report.seconds)
            return
        self._store.drop(keys)
        if job.load is not None and job.load.abandoned:
            return
        logger.warning("lmkv: a load for request %s failed; it is recomputed", state.request_id)
        # vLLM shares them until a request has computed them, and that request may be aborted before it does.
        self.evict_blocks(set(job.unconfirmed))
        self.on_failed_load(state.request_id)
        self.admission.end(state)
        state.disabled = True
        state.hit_tokens = 0
        state.stored, state.tail_due = min(state.stored, job.first_chunk), True

    def forget(self, state: RequestState) -> None:
        """The request has ended: release what it references."""
        self._promised.pop(state.request_id, None)
        self.admission.end(state)
        state.release()
        owner, load = self._async_loads.get(state.request_id, (None, None))
        if load is not None and owner is state:
            # Not deleted: the next step reports it as ended, and only then vLLM frees the blocks.
            load.abandoned = True
            load.stop()

    @property
    def busy(self) -> bool:
        """Whether the end of a load has not been reported yet."""
        return bool(self._jobs or self._async_loads)
