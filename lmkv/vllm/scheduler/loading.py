"""Loading: what is promised to vLLM, how chunks of lower tiers come up in time, and what is ordered.

Chunks in host memory are loaded within the step that needs them, where vLLM can be told that such a load
failed. Until it is known to have succeeded nobody else is let in on its blocks, which vLLM shares from the
moment that they are allocated; if it fails they are not shared any more.

Chunks below are brought up while the request waits in vLLM's queue, so that they cost the batch nothing. What
host memory cannot hold at once is streamed through it between steps.
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
from lmkv.vllm.metadata import JobReport, Outbox
from lmkv.vllm.scheduler.async_load import Holding, Piece, Stream
from lmkv.vllm.scheduler.load_policy import LoadCost, LoadMode
from lmkv.vllm.scheduler.request import BlockTables, Tracked

logger = logging.getLogger("lmkv.vllm")

_MAX_STREAMS = 3


@define(eq=False)
class _Job:
    tracked: Tracked
    lease: Lease
    first_chunk: int
    stream: Stream | None = None
    start: int = 0
    unproven: list[int] = field(factory=list)
    """Blocks from token `start` on, filled in this step by the load or on top of it, and shared already."""


class Loading:
    """`deadline`: seconds that a request waits for chunks of lower tiers, or for more of a stream.

    `min_tokens`: smaller hits are left to the model. `volatile_tail`: the KV at the end of a chunk depends
    on the token behind it, too, which its key does not cover: the last chunk of a hit is left out. Called on
    the scheduling thread only; waits for nothing.
    """

    def __init__(
        self,
        store: TieredStore,
        geometry: Geometry,
        outbox: Outbox,
        cost: LoadCost,
        mode: LoadMode,
        *,
        deadline: float,
        min_tokens: int,
        volatile_tail: bool,
        clock: Clock,
    ) -> None:
        self._store = store
        self._geometry = geometry
        self._chunk_size = geometry.chunk_size
        self._outbox = outbox
        self._cost = cost
        self._mode = mode
        self._deadline = deadline
        self._min_tokens = min_tokens
        self._volatile_tail = volatile_tail
        self._clock = clock
        # One stream holds two pieces at most: half of the tier, the other half serves everybody else.
        self._piece = max(1, store.slab.num_slots // 4)
        self._at_once = max(1, store.slab.num_slots // 2)
        # Of a load that fails within a step vLLM hears by block ids, not unique where tables are several.
        self._within_step = len(geometry.groups) == 1 and mode.mode != "async"
        self._jobs: dict[int, _Job] = {}
        self._streams: dict[str, tuple[Tracked, Stream]] = {}
        self._promised: dict[str, Tracked] = {}
        self.holding = Holding(geometry)
        self.stop_sharing: Callable[[set[int]], None] = lambda blocks: None

    # -- before the request is scheduled ------------------------------------------------------------------

    def arrived(self, tracked: Tracked, keys: Sequence[ChunkKey]) -> None:
        """Have what lower tiers hold of a new request brought up while it queues."""
        ready, found = self._store.match(keys)
        if ready < found <= self._at_once and self._is_worth(tracked, keys, ready, found):
            tracked.promotion = self._promote(keys[:found], Priority.PREFETCH)

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

    def is_unproven(self, tracked: Tracked, num_computed_tokens: int) -> bool:
        """Whether vLLM's own hit may include blocks of a load of which it is not known that it succeeded.

        That its first block has the same tokens is enough: to wait a step in vain does no harm.
        """
        size = self._geometry.groups[0].block_size
        return any(
            job.start < num_computed_tokens
            and job.tracked.tokens(job.start, size) == tracked.tokens(job.start, size)
            for job in self._jobs.values()
            if job.unproven
        )

    def match(self, tracked: Tracked, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(tokens beyond those computed, whether they are loaded between steps)`, and a lease on them.

        None instead of tokens: ask again in the next step. Chunks are on their way up, or the blocks that it
        would hold while they are loaded might be missing elsewhere.
        """
        self.holding.end(tracked)
        tracked.computed, tracked.streamed = num_computed_tokens, False
        # The last token is always computed: vLLM needs its logits.
        keys = tracked.keys((tracked.request.num_tokens - 1) // self._chunk_size)
        first = num_computed_tokens // self._chunk_size
        ready, found = self._store.match(keys)
        if found > max(ready, first):
            if self._must_wait(tracked, keys, ready, found):
                return None, False
            ready, found = self._store.match(keys)
        chunks, streamed = self._offer(tracked, keys, ready, found)
        if streamed and not self.holding.admits(tracked):
            if self._has_time(tracked):
                return None, False
            chunks = 0
        chunks -= self._volatile_tail and chunks > 0
        need = max(0, chunks * self._chunk_size - num_computed_tokens)
        self._log(tracked, chunks * self._chunk_size, need)
        if not need or need < self._min_tokens:
            tracked.drop_promotion()
            return 0, False
        self._promise(tracked, keys, first, ready, chunks, streamed)
        return need, streamed

    def _must_wait(self, tracked: Tracked, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether chunks of lower tiers, that fit host memory, are still worth waiting for."""
        if found > self._at_once or not self._is_worth(tracked, keys, ready, found):
            return False
        if not self._has_time(tracked):
            tracked.drop_promotion()
            return False
        promotion = tracked.promotion
        if promotion is None or (promotion.done and len(promotion) < found):
            # Asked for anew with a demand's priority: a prefetch may have been cut short by its share.
            demanded = self._promote(keys[:found], Priority.LOAD)
            tracked.drop_promotion()
            promotion = tracked.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    def _has_time(self, tracked: Tracked) -> bool:
        """Whether the request has not waited for its deadline yet. The first time is when it begins to."""
        now = self._clock()
        if tracked.waiting_since is None:
            tracked.waiting_since = now
        return now - tracked.waiting_since <= self._deadline

    def _is_worth(self, tracked: Tracked, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether loading what is below beats computing it; decided once for each request."""
        if tracked.worth is None:
            tier, chunks = self._store.tier_of(keys[ready]), found - ready
            nbytes = chunks * self._store.slab.slot_bytes
            tracked.worth = tier is None or self._cost.worth_loading(tier, chunks * self._chunk_size, nbytes)
        return tracked.worth

    def _offer(self, tracked: Tracked, keys: Sequence[ChunkKey], ready: int, found: int) -> tuple[int, bool]:
        """`(chunks, streamed)`: how much to promise, and whether it is loaded between steps.

        Streamed is what is too long for host memory; and everything where no load within a step may fail.
        """
        if tracked.streams >= _MAX_STREAMS:
            # Preempted again and again. A loading request holds blocks that vLLM cannot take back: two of
            # them could take turns for ever, where computing ones make progress.
            return (ready, False) if self._within_step else (0, False)
        too_long = max(ready, self._at_once) < found
        if too_long and self._is_worth(tracked, keys, ready, found):
            return found, True
        first = tracked.computed // self._chunk_size
        nbytes = max(0, ready - first) * self._store.slab.slot_bytes
        return ready, nbytes > 0 and (not self._within_step or self._mode.between_steps(nbytes))

    def _promise(
        self,
        tracked: Tracked,
        keys: Sequence[ChunkKey],
        first: int,
        ready: int,
        chunks: int,
        streamed: bool,
    ) -> None:
        tracked.sources = self._sources(tracked, keys[max(first, ready) : chunks], first, chunks)
        tracked.streamed = streamed
        if not streamed:
            tracked.lease = self._store.lease(keys[first:chunks])
            tracked.drop_promotion()
        self._promised[tracked.request_id] = tracked

    def _sources(
        self, tracked: Tracked, below: Sequence[ChunkKey], first: int, chunks: int
    ) -> dict[str, int]:
        """Tokens to load by tier: what was just promoted counts for the tier that it came from."""
        host = self._store.primary_name
        need = chunks * self._chunk_size - tracked.computed
        promoted = tracked.promotion.sources if tracked.promotion is not None else {}
        lower = {name: count * self._chunk_size for name, count in promoted.items() if name != host}
        if below:
            lower[self._store.tier_of(below[0]) or host] = len(below) * self._chunk_size
        lower = {name: min(tokens, need) for name, tokens in lower.items()}
        return {host: max(0, need - sum(lower.values())), **lower}

    def _log(self, tracked: Tracked, hit: int, need: int) -> None:
        # A request that waits is asked about in every step: only news is logged.
        if tracked.logged != (hit, need):
            tracked.logged = (hit, need)
            total = tracked.request.num_tokens
            message = "lmkv: request %s: total tokens %d, hit tokens %d, to load %d"
            logger.info(message, tracked.request_id, total, hit, need)

    # -- once it is scheduled -----------------------------------------------------------------------------

    def allocated(self, tracked: Tracked, tables: BlockTables, tokens: int) -> None:
        """Blocks are there: order the load of `tokens` tokens that was promised, or let go of it."""
        self._promised.pop(tracked.request_id, None)
        lease, tracked.lease = tracked.lease, None
        if tokens <= 0:
            self.holding.end(tracked)
            if lease is not None:
                lease.release()
            return
        tracked.hit_tokens = tokens
        end = tracked.computed + tokens
        if tracked.streamed:
            self._begin_stream(tracked, tables, end)
        else:
            self._order(tracked, lease or self._store.lease(()), tables, end)

    def _order(self, tracked: Tracked, lease: Lease, tables: BlockTables, end: int) -> None:
        start = tracked.computed
        copies = self._geometry.load_copies(lease.slots, tables, start, end)
        covered = self._geometry.covers(copies, start, end)
        failed = [] if covered else self._geometry.blocks_between(tables, start, end)
        order = self._outbox.load(copies if covered else [], failed)
        unproven = list(tables[0][start // self._geometry.groups[0].block_size :])
        self._jobs[order.job] = _Job(
            tracked, lease, start // self._chunk_size, start=start, unproven=unproven
        )

    def _begin_stream(self, tracked: Tracked, tables: BlockTables, end: int) -> None:
        start, size = tracked.computed, self._chunk_size
        stream = Stream(
            self._store,
            self._geometry,
            tracked.keys(-(-end // size))[start // size :],
            [list(table) for table in tables],
            start,
            end,
            self._piece,
            self._deadline,
            self._clock,
        )
        tracked.streams += 1
        self.holding.begin(tracked)
        self._streams[tracked.request_id] = (tracked, stream)

    def end_step(self) -> None:
        """Order what streams have ready. Promises that were not taken up in this step end with it."""
        for request_id, (tracked, stream) in list(self._streams.items()):
            piece = self._advance(stream)
            if piece is not None:
                tracked.bypass |= bool(piece.failed_blocks)
                finishes = request_id if piece.last else None
                order = self._outbox.load(
                    piece.copies, piece.failed_blocks, between_steps=True, finishes=finishes
                )
                self._jobs[order.job] = _Job(tracked, piece.lease, stream.first_chunk, stream)
            if stream.ended:
                del self._streams[request_id]
        for tracked in self._promised.values():
            tracked.drop_lease()
        self._promised.clear()

    @staticmethod
    def _advance(stream: Stream) -> Piece | None:
        try:
            return stream.advance()
        except Exception:
            # A request must not wait for ever for a load that nobody drives any more.
            logger.exception("lmkv: a stream broke; the rest of it is recomputed")
            return stream.give_up()

    # -- when it is done ----------------------------------------------------------------------------------

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered. What failed is dropped, recomputed, and not offered to it again."""
        job = self._jobs.pop(number)
        tracked, keys = job.tracked, job.lease.keys
        job.lease.release()
        if job.stream is not None:
            job.stream.copied() if report.ok else job.stream.stop()
        if report.ok:
            tracked.load_bytes += report.nbytes
            tracked.load_seconds += report.seconds
            self._mode.observe(report.nbytes, report.seconds)
            return
        logger.warning("lmkv: a load for request %s failed; it is recomputed", tracked.request_id)
        self._store.drop(keys)
        # vLLM would go on sharing them until they are computed, by a request that may be aborted before.
        self.stop_sharing(set(job.unproven))
        self.holding.end(tracked)
        tracked.bypass = True
        tracked.hit_tokens = 0
        tracked.stored = min(tracked.stored, job.first_chunk)

    def forget(self, tracked: Tracked) -> None:
        self._promised.pop(tracked.request_id, None)
        self.holding.end(tracked)
        tracked.release()
        owner, stream = self._streams.get(tracked.request_id, (None, None))
        if stream is not None and owner is tracked:
            # It ends with its next piece: the blocks stay allocated until the load is reported as ended.
            stream.stop()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._streams)
