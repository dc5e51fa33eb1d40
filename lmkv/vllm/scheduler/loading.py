"""LoadPlanner: what is promised to vLLM, how chunks of lower tiers come up in time, and what is ordered.

Chunks in host memory are loaded within the step that needs them, where vLLM can be told that such a load
failed. Until it is known to have succeeded nobody else is let in on its blocks, which vLLM shares from the
moment that they are allocated; if it fails they are not shared any more.

Chunks below are brought up while the request waits in vLLM's queue, so that they cost the batch nothing. What
host memory cannot hold at once is between_steps through it between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from attrs import define, field

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.leases import Lease
from lmkv.store.promotion import Promotion
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.iopool import Priority
from lmkv.vllm.geometry import Geometry
from lmkv.vllm.metadata import JobReport, StepPlanBuilder
from lmkv.vllm.scheduler.async_load import AsyncLoad, AsyncLoadAdmission, LoadWindow
from lmkv.vllm.scheduler.load_policy import LoadCost, LoadMode
from lmkv.vllm.scheduler.request import BlockTables, RequestState

logger = logging.getLogger("lmkv.vllm")

_MAX_ASYNC_LOADS = 3


@define(eq=False)
class _Job:
    state: RequestState
    lease: Lease
    first_chunk: int
    load: AsyncLoad | None = None
    start: int = 0
    unconfirmed: list[int] = field(factory=list)
    """Blocks from token `start` on, filled in this step by the load or on top of it, and shared already."""


class LoadPlanner:
    """`deadline`: seconds that a request waits for chunks of lower tiers, or for more of a load.

    `min_tokens`: smaller hits are left to the model. `tail_depends_on_next`: the KV at the end of a chunk
    depends on the token behind it, too, which its key does not cover: the last chunk of a hit is left out.
    Called on the scheduling thread only; waits for nothing.
    """

    def __init__(
        self,
        store: TieredStore,
        geometry: Geometry,
        builder: StepPlanBuilder,
        cost: LoadCost,
        mode: LoadMode,
        *,
        deadline: float,
        min_tokens: int,
        tail_depends_on_next: bool,
        clock: Clock,
    ) -> None:
        self._store = store
        self._geometry = geometry
        self._chunk_size = geometry.chunk_size
        self._builder = builder
        self._cost = cost
        self._mode = mode
        self._deadline = deadline
        self._min_tokens = min_tokens
        self._tail_depends_on_next = tail_depends_on_next
        self._clock = clock
        # One load holds two pieces at most: half of the tier, the other half serves everybody else.
        self._window = max(1, store.slab.num_slots // 4)
        self._at_once = max(1, store.slab.num_slots // 2)
        # Of a load that fails within a step vLLM hears by block ids, not unique where tables are several.
        self._within_step = len(geometry.groups) == 1 and mode.mode != "async"
        self._jobs: dict[int, _Job] = {}
        self._async_loads: dict[str, tuple[RequestState, AsyncLoad]] = {}
        self._promised: dict[str, RequestState] = {}
        self.admission = AsyncLoadAdmission(geometry)
        self.evict_blocks: Callable[[set[int]], None] = lambda blocks: None

    # -- before the request is scheduled ------------------------------------------------------------------

    def arrived(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """Have what lower tiers hold of a new request brought up while it queues."""
        ready, found = self._store.match(keys)
        if ready < found <= self._at_once and self._is_worth(state, keys, ready, found):
            state.promotion = self._promote(keys[:found], Priority.PREFETCH)

    def _promote(self, keys: Sequence[ChunkKey], priority: Priority) -> Promotion:
        """Begin to bring chunks up, and measure how fast their tier delivers them, queueing included."""
        started = self._clock()
        promotion = self._store.promote(keys, priority=priority)

        def measure() -> None:
            chunks = dict(promotion.sources)
            chunks.pop(self._store.primary_name, None)
            if len(chunks) == 1 and promotion.ready == len(promotion):
                ((tier, count),) = chunks.items()
                nbytes = count * self._store.slab.slot_bytes
                self._cost.observe_load(tier, nbytes, self._clock() - started)

        promotion.add_done_callback(measure)
        return promotion

    def is_unconfirmed(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Whether vLLM's own hit may include blocks of a load of which it is not known that it succeeded.

        That its first block has the same tokens is enough: to wait a step in vain does no harm.
        """
        size = self._geometry.groups[0].block_size
        return any(
            job.start < num_computed_tokens
            and job.state.tokens(job.start, size) == state.tokens(job.start, size)
            for job in self._jobs.values()
            if job.unconfirmed
        )

    def match(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(tokens beyond those computed, whether they are loaded between steps)`, and a lease on them.

        None instead of tokens: ask again in the next step. Chunks are on their way up, or the blocks that it
        would hold while they are loaded might be missing elsewhere.
        """
        self.admission.end(state)
        state.computed, state.between_steps = num_computed_tokens, False
        # The last token is always computed: vLLM needs its logits.
        keys = state.keys((state.request.num_tokens - 1) // self._chunk_size)
        first = num_computed_tokens // self._chunk_size
        ready, found = self._store.match(keys)
        if found > max(ready, first):
            if self._must_wait(state, keys, ready, found):
                return None, False
            ready, found = self._store.match(keys)
        chunks, between_steps = self._offer(state, keys, ready, found)
        if between_steps and not self.admission.admits(state):
            if self._has_time(state):
                return None, False
            chunks = 0
        chunks -= self._tail_depends_on_next and chunks > 0
        need = max(0, chunks * self._chunk_size - num_computed_tokens)
        self._log(state, chunks * self._chunk_size, need)
        if not need or need < self._min_tokens:
            state.drop_promotion()
            return 0, False
        self._promise(state, keys, first, ready, chunks, between_steps)
        return need, between_steps

    def _must_wait(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether chunks of lower tiers, that fit host memory, are still worth waiting for."""
        if found > self._at_once or not self._is_worth(state, keys, ready, found):
            return False
        if not self._has_time(state):
            state.drop_promotion()
            return False
        promotion = state.promotion
        if promotion is None or (promotion.done and len(promotion) < found):
            # Asked for anew with a demand's priority: a prefetch may have been cut short by its share.
            demanded = self._promote(keys[:found], Priority.LOAD)
            state.drop_promotion()
            promotion = state.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    def _has_time(self, state: RequestState) -> bool:
        """Whether the request has not waited for its deadline yet. The first time is when it begins to."""
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        return now - state.waiting_since <= self._deadline

    def _is_worth(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether loading what is below beats computing it; decided once for each request."""
        if state.worth is None:
            tier, chunks = self._store.tier_of(keys[ready]), found - ready
            nbytes = chunks * self._store.slab.slot_bytes
            state.worth = tier is None or self._cost.worth_loading(tier, chunks * self._chunk_size, nbytes)
        return state.worth

    def _offer(
        self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int
    ) -> tuple[int, bool]:
        """`(chunks, between_steps)`: how much to promise, and whether it is loaded between steps.

        Streamed is what is too long for host memory; and everything where no load within a step may fail.
        """
        if state.async_loads >= _MAX_ASYNC_LOADS:
            # Preempted again and again. A loading request holds blocks that vLLM cannot take back: two of
            # them could take turns for ever, where computing ones make progress.
            return (ready, False) if self._within_step else (0, False)
        too_long = max(ready, self._at_once) < found
        if too_long and self._is_worth(state, keys, ready, found):
            return found, True
        first = state.computed // self._chunk_size
        nbytes = max(0, ready - first) * self._store.slab.slot_bytes
        return ready, nbytes > 0 and (not self._within_step or self._mode.between_steps(nbytes))

    def _promise(
        self,
        state: RequestState,
        keys: Sequence[ChunkKey],
        first: int,
        ready: int,
        chunks: int,
        between_steps: bool,
    ) -> None:
        state.sources = self._sources(state, keys[max(first, ready) : chunks], first, chunks)
        state.between_steps = between_steps
        if not between_steps:
            state.lease = self._store.lease(keys[first:chunks])
            state.drop_promotion()
        self._promised[state.request_id] = state

    def _sources(
        self, state: RequestState, below: Sequence[ChunkKey], first: int, chunks: int
    ) -> dict[str, int]:
        """Tokens to load by tier: what was just promoted counts for the tier that it came from."""
        host = self._store.primary_name
        need = chunks * self._chunk_size - state.computed
        promoted = state.promotion.sources if state.promotion is not None else {}
        lower = {name: count * self._chunk_size for name, count in promoted.items() if name != host}
        if below:
            lower[self._store.tier_of(below[0]) or host] = len(below) * self._chunk_size
        lower = {name: min(tokens, need) for name, tokens in lower.items()}
        return {host: max(0, need - sum(lower.values())), **lower}

    def _log(self, state: RequestState, hit: int, need: int) -> None:
        # A request that waits is asked about in every step: only news is logged.
        if state.logged != (hit, need):
            state.logged = (hit, need)
            total = state.request.num_tokens
            message = "lmkv: request %s: total tokens %d, hit tokens %d, to load %d"
            logger.info(message, state.request_id, total, hit, need)

    # -- once it is scheduled -----------------------------------------------------------------------------

    def allocated(self, state: RequestState, tables: BlockTables, tokens: int) -> None:
        """Blocks are there: order the load of `tokens` tokens that was promised, or let go of it."""
        self._promised.pop(state.request_id, None)
        lease, state.lease = state.lease, None
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

    def _order(self, state: RequestState, lease: Lease, tables: BlockTables, end: int) -> None:
        start = state.computed
        copies = self._geometry.load_copies(lease.slots, tables, start, end)
        covered = self._geometry.covers(copies, start, end)
        failed = [] if covered else self._geometry.blocks_between(tables, start, end)
        order = self._builder.load(copies if covered else [], failed)
        unconfirmed = list(tables[0][start // self._geometry.groups[0].block_size :])
        self._jobs[order.job] = _Job(
            state, lease, start // self._chunk_size, start=start, unconfirmed=unconfirmed
        )

    def _begin_async_load(self, state: RequestState, tables: BlockTables, end: int) -> None:
        start, size = state.computed, self._chunk_size
        load = AsyncLoad(
            self._store,
            self._geometry,
            state.keys(-(-end // size))[start // size :],
            [list(table) for table in tables],
            start,
            end,
            self._window,
            self._deadline,
            self._clock,
        )
        state.async_loads += 1
        self.admission.begin(state)
        self._async_loads[state.request_id] = (state, load)

    def end_step(self) -> None:
        """Order what async_loads have ready. Promises that were not taken up in this step end with it."""
        for request_id, (state, load) in list(self._async_loads.items()):
            window = self._advance(load)
            if window is not None:
                state.disabled |= bool(window.failed_blocks)
                finishes = request_id if window.last else None
                order = self._builder.load(
                    window.copies, window.failed_blocks, between_steps=True, finishes=finishes
                )
                self._jobs[order.job] = _Job(state, window.lease, load.first_chunk, load)
            if load.ended:
                del self._async_loads[request_id]
        for state in self._promised.values():
            state.drop_lease()
        self._promised.clear()

    @staticmethod
    def _advance(load: AsyncLoad) -> LoadWindow | None:
        try:
            return load.advance()
        except Exception:
            # A request must not wait for ever for a load that nobody drives any more.
            logger.exception("lmkv: a load broke; the rest of it is recomputed")
            return load.give_up()

    # -- when it is done ----------------------------------------------------------------------------------

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered. What failed is dropped, recomputed, and not offered to it again."""
        job = self._jobs.pop(number)
        state, keys = job.state, job.lease.keys
        job.lease.release()
        if job.load is not None:
            job.load.copied() if report.ok else job.load.stop()
        if report.ok:
            state.load_bytes += report.nbytes
            state.load_seconds += report.seconds
            self._mode.observe(report.nbytes, report.seconds)
            return
        logger.warning("lmkv: a load for request %s failed; it is recomputed", state.request_id)
        self._store.drop(keys)
        # vLLM would go on sharing them until they are computed, by a request that may be aborted before.
        self.evict_blocks(set(job.unconfirmed))
        self.admission.end(state)
        state.disabled = True
        state.hit_tokens = 0
        state.stored = min(state.stored, job.first_chunk)

    def forget(self, state: RequestState) -> None:
        self._promised.pop(state.request_id, None)
        self.admission.end(state)
        state.release()
        owner, load = self._async_loads.get(state.request_id, (None, None))
        if load is not None and owner is state:
            # It ends with its next window: the blocks stay allocated until the load is reported as ended.
            load.stop()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._async_loads)
