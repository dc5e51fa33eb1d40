"""The scheduler side: owns the index, decides what is loaded and stored, and for how long slots are held.

Free of vLLM types: requests and scheduler outputs are read through the few attributes named in the protocols
below, so that any schedule can be simulated. Nothing here waits or does I/O.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from lmkv.claims import Lease, Reservation
from lmkv.copier import ChunkCopy
from lmkv.hashing import KeyChain, chunk_keys, token_bytes
from lmkv.iopool import Priority
from lmkv.keys import Namespace
from lmkv.promotion import Promotion
from lmkv.protocols import ChunkKey, Clock
from lmkv.tiered import TieredStore
from lmkv.vllm.geometry import Geometry
from lmkv.vllm.identity import content_extras, request_root
from lmkv.vllm.loadcost import LoadCost
from lmkv.vllm.metadata import CopyOrder, JobReport, StepPlan, WorkerReport
from lmkv.vllm.options import RequestOptions
from lmkv.vllm.stream import Stream

logger = logging.getLogger("lmkv.vllm")

_MAX_STREAMS = 3


class Request(Protocol):
    """What is read of a vLLM request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Known tokens, without placeholders for those that are being sampled."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


@define(eq=False)
class _Tracked:
    """A request from its arrival to its end.

    `stored`: leading chunks that are stored or being stored. `offered`: tokens, from the prompt's start, that
    the last lookup found here. `lease`: what that lookup promised, until it is used or the step ends.
    `promotion`: chunks that are being brought up for it while it waits, asked for since `waiting_since`.
    """

    request: Request
    root: bytes
    chain: KeyChain
    options: RequestOptions
    stored: int = 0
    offered: int = 0
    computed: int = 0
    lease: Lease | None = None
    promotion: Promotion | None = None
    waiting_since: float | None = None
    streamed: bool = False
    streams: int = 0
    stream: Stream | None = None
    sources: dict[str, int] = field(factory=dict)
    """Tokens to load, by the tier that had them."""
    logged: tuple[int, int] | None = None
    hit_tokens: int = 0
    load_bytes: int = 0
    load_seconds: float = 0.0
    bypass: bool = False
    """A load of this request failed: it computes the rest by itself and is not offered anything again."""

    def keys(self, count: int) -> list[ChunkKey]:
        """The first `count` keys, hashing what has become known since the last call."""
        if count > len(self.chain.keys):
            self.chain.extend(self.request.all_token_ids)
        return self.chain.keys[:count]

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def drop_promotion(self) -> None:
        if self.promotion is not None:
            self.promotion.release()
            self.promotion = None


@define(eq=False)
class _LoadJob:
    tracked: _Tracked | None
    lease: Lease
    first_chunk: int
    stream: Stream | None = None


@define(eq=False)
class _StoreJob:
    tracked: _Tracked
    reservation: Reservation
    first_chunk: int
    upto: int
    suspect: bool = False
    """Ordered before it was known that a load had failed: it may hold what was computed on top of that."""


class Scheduler:
    """`namespace` roots every key; `geometry` says how block tables map to chunks; `ranks` workers answer.

    `loads` and `stores` switch the directions off (a pure producer loads nothing, a pure consumer stores
    nothing). `promotion_deadline`: seconds that a request waits for chunks of lower tiers. All calls come
    from the one thread that schedules.
    """

    def __init__(
        self,
        store: TieredStore,
        namespace: Namespace,
        geometry: Geometry,
        *,
        ranks: int = 1,
        loads: bool = True,
        stores: bool = True,
        save_decode: bool = True,
        min_retrieve_tokens: int = 0,
        promotion_deadline: float = 1.0,
        load_cost: LoadCost | None = None,
        pin_ttl: float = 300.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._geometry = geometry
        self._chunk_size = geometry.chunk_size
        self._ranks = ranks
        self._loads = loads
        self._stores = stores
        self._save_decode = save_decode
        self._min_retrieve_tokens = min_retrieve_tokens
        self._promotion_deadline = promotion_deadline
        self._cost = load_cost or LoadCost()
        self._pin_ttl = pin_ttl
        self._clock = clock
        # Half of the tier at most for one stream: the other half serves everybody else meanwhile.
        self._window = max(1, store.slab.num_slots // 4)
        self._synchronous = max(1, store.slab.num_slots // 2)
        self._streams: dict[str, Stream] = {}
        self._step: tuple[int, float] | None = None
        self._requests: dict[str, _Tracked] = {}
        self._leased: set[str] = set()
        self._load_jobs: dict[int, _LoadJob] = {}
        self._store_jobs: dict[int, _StoreJob] = {}
        self._pending_reports: dict[int, JobReport] = {}
        self._next_job = 0
        self._plan = StepPlan()
        self._mapped = False

    # -- requests -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Track the request and hash its prompt, once, before it is ever scheduled."""
        tracked = self._track(request)
        keys = tracked.keys(request.num_tokens // self._chunk_size)
        for wanted in (keys if tracked.options.prefetch else (), self._other_keys(tracked)):
            if wanted:
                self._store.promote(wanted, priority=Priority.PREFETCH, ttl=self._pin_ttl)
        if self._loads and not tracked.options.skip_load:
            self._promote_early(tracked, keys)

    def _other_keys(self, tracked: _Tracked) -> list[ChunkKey]:
        """Keys of another prompt that this request asks to prefetch, in its own salt and adapter."""
        tokens = tracked.options.prefetch_tokens
        return chunk_keys(tokens, tracked.root, self._chunk_size) if tokens else []

    def _promote_early(self, tracked: _Tracked, keys: Sequence[ChunkKey]) -> None:
        """Have what lower tiers hold brought up while the request queues."""
        ready, found = self._store.match(keys)
        if ready < found <= self._synchronous and self._is_worth(keys, ready, found):
            tracked.promotion = self._store.promote(keys[:found], priority=Priority.PREFETCH)

    def _is_worth(self, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        tier = self._store.tier_of(keys[ready])
        chunks = found - ready
        return tier is None or self._cost.worth_loading(
            tier, chunks * self._chunk_size, chunks * self._store.slab.slot_bytes
        )

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            self._forget(request.request_id)
            options = RequestOptions.of(request)
            root = request_root(self._namespace, request, options)
            chain = KeyChain(root, self._chunk_size, content_extras(request, self._chunk_size))
            tracked = self._requests[request.request_id] = _Tracked(request, root, chain, options)
        return tracked

    def _forget(self, request_id: str) -> _Tracked | None:
        tracked = self._requests.pop(request_id, None)
        self._leased.discard(request_id)
        if tracked is not None:
            tracked.drop_lease()
            tracked.drop_promotion()
            if tracked.stream is not None:
                tracked.stream.stop()
        return tracked

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Forget the request; its keys are touched tail first. Returns its report, if it asked for one."""
        tracked = self._forget(request.request_id)
        if tracked is None:
            return None
        self._store.touch(tracked.chain.keys)
        if tracked.options.pin_seconds:
            self._store.pin(tracked.chain.keys, tracked.options.pin_seconds)
        if not tracked.options.report:
            return None
        report = {
            "hit_tokens": tracked.hit_tokens,
            "sources": dict(tracked.sources),
            "load_bytes": tracked.load_bytes,
            "load_seconds": tracked.load_seconds,
        }
        return {"lmkv": report}

    # -- loading ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """`(tokens, asynchronous)`: what can be loaded beyond `num_computed_tokens`; leases what it promises.

        None instead of tokens: chunks are on their way up from a lower tier, ask again in the next step.
        """
        tracked = self._track(request)
        tracked.drop_lease()
        tracked.offered, tracked.computed, tracked.streamed = 0, num_computed_tokens, False
        if not self._loads or tracked.bypass or tracked.options.skip_load:
            return 0, False
        # The last token is always computed: vLLM needs its logits.
        keys = tracked.keys((request.num_tokens - 1) // self._chunk_size)
        first = num_computed_tokens // self._chunk_size
        ready, found = self._store.match(keys)
        if found > max(ready, first):
            if self._must_wait(tracked, keys, ready, found):
                return None, False
            ready, found = self._store.match(keys)
        chunks, streamed = self._offer(tracked, keys, ready, found)
        hit = chunks * self._chunk_size
        need = max(0, hit - num_computed_tokens)
        self._log_lookup(tracked, hit, need)
        if not need or need < self._min_retrieve_tokens:
            tracked.drop_promotion()
            return 0, False
        below = keys[max(first, ready) : chunks]
        tracked.sources = self._sources(tracked, need, below)
        tracked.streamed = streamed
        if not streamed:
            tracked.lease = self._store.lease(keys[first:ready])
            tracked.drop_promotion()
        self._leased.add(request.request_id)
        tracked.offered = hit
        return need, streamed

    def _sources(self, tracked: _Tracked, need: int, below: Sequence[ChunkKey]) -> dict[str, int]:
        """Tokens to load by tier: what was just promoted counts for the tier that it came from."""
        host = self._store.primary_name
        chunks = tracked.promotion.sources if tracked.promotion is not None else {}
        lower = {name: count * self._chunk_size for name, count in chunks.items() if name != host}
        if below:
            lower[self._store.tier_of(below[0]) or host] = len(below) * self._chunk_size
        lower = {name: min(tokens, need) for name, tokens in lower.items()}
        return {host: max(0, need - sum(lower.values())), **lower}

    def hit_sources(self, request_id: str) -> dict[str, int]:
        """Of the tokens that were last promised to a request, how many come from which tier."""
        tracked = self._requests.get(request_id)
        return dict(tracked.sources) if tracked is not None else {}

    def _must_wait(self, tracked: _Tracked, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether chunks of lower tiers, that fit host memory, are still worth waiting for."""
        if found > self._synchronous:
            return False
        now = self._clock()
        if tracked.waiting_since is None:
            if tracked.promotion is None and not self._is_worth(keys, ready, found):
                return False
            tracked.waiting_since = now
        if now - tracked.waiting_since > self._promotion_deadline:
            tracked.drop_promotion()
            return False
        promotion = tracked.promotion
        if promotion is None or (promotion.done and len(promotion) < found):
            # Asked for anew with a demand's priority: a prefetch may have been cut short by its share.
            demanded = self._store.promote(keys[:found])
            tracked.drop_promotion()
            promotion = tracked.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    def _offer(
        self, tracked: _Tracked, keys: Sequence[ChunkKey], ready: int, found: int
    ) -> tuple[int, bool]:
        """`(chunks, streamed)`: how much to promise, and whether it is loaded between steps.

        Streamed is what is too long for host memory; and everything for models with several block tables,
        because vLLM cannot be told that a load within the step failed there.
        """
        single = len(self._geometry.groups) == 1
        if tracked.streams >= _MAX_STREAMS:
            # Preempted again and again. A loading request holds blocks that vLLM cannot take back: two of
            # them could take turns for ever, where computing ones make progress.
            return (ready, False) if single else (0, False)
        too_long = max(ready, self._synchronous) < found
        if too_long and tracked.waiting_since is None and self._is_worth(keys, ready, found):
            return found, True
        return ready, not single

    def _log_lookup(self, tracked: _Tracked, hit: int, need: int) -> None:
        # A request that waits is asked about in every step: only news is logged.
        if tracked.logged != (hit, need):
            tracked.logged = (hit, need)
            logger.info(
                "lmkv: request %s: total tokens %d, hit tokens %d, to load %d",
                tracked.request.request_id,
                tracked.request.num_tokens,
                hit,
                need,
            )

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Blocks are allocated: order the load that was promised, or let go of it."""
        tracked = self._track(request)
        lease, tracked.lease = tracked.lease, None
        self._leased.discard(request.request_id)
        if num_external_tokens <= 0:
            if lease is not None:
                lease.release()
            return
        start = tracked.computed
        end = start + num_external_tokens
        tracked.hit_tokens = num_external_tokens
        if tracked.streamed:
            self._begin_stream(tracked, block_ids, start, end)
        else:
            self._order_load(tracked, lease or self._store.lease(()), block_ids, start, end)

    def _order_load(
        self, tracked: _Tracked, lease: Lease, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> None:
        copies = self._geometry.load_copies(lease.slots, block_ids, start, end)
        covered = self._geometry.covers(copies, start, end)
        failed = [] if covered else self._geometry.blocks_between(block_ids, start, end)
        order = CopyOrder(self._new_job(), copies if covered else [], failed)
        self._load_jobs[order.job] = _LoadJob(tracked, lease, start // self._chunk_size)
        self._plan.loads.append(order)

    def _begin_stream(
        self, tracked: _Tracked, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> None:
        size = self._chunk_size
        tracked.streams += 1
        tracked.stream = self._streams[tracked.request.request_id] = Stream(
            self._store,
            self._geometry,
            tracked.request.request_id,
            tracked.keys(-(-end // size))[start // size :],
            [list(table) for table in block_ids],
            start,
            end,
            self._window,
        )
        self._advance_streams()

    def _advance_streams(self) -> None:
        for request_id, stream in list(self._streams.items()):
            piece = stream.advance()
            if piece is None:
                continue
            order = CopyOrder(
                self._new_job(), piece.copies, piece.failed_blocks, request_id if piece.last else None
            )
            tracked = self._requests.get(request_id)
            if piece.failed_blocks and tracked is not None:
                tracked.bypass = True
            self._load_jobs[order.job] = _LoadJob(tracked, piece.lease, stream.first_chunk, stream)
            self._plan.loads.append(order)
            if piece.last:
                del self._streams[request_id]

    def _new_job(self) -> int:
        self._next_job += 1
        return self._next_job

    # -- storing ------------------------------------------------------------------------------------------

    def build_plan(
        self,
        progress: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        scheduled_tokens: int = 0,
    ) -> StepPlan:
        """The orders of the step that was just scheduled.

        `progress`: for each request of the step, its tokens whose KV is valid after it, drafts excluded.
        `blocks_of(request_id)`: its block tables, one list a group, or None. `scheduled_tokens`: of the step.
        """
        self._time_step(scheduled_tokens)
        self._advance_streams()
        if self._stores:
            for request_id, computed in progress.items():
                tracked = self._requests.get(request_id)
                if tracked is not None and not tracked.options.skip_save:
                    self._store_completed(tracked, computed, blocks_of)
        for request_id in self._leased:
            # Promised, but not scheduled in this step: it will ask again.
            self._requests[request_id].drop_lease()
        self._leased.clear()
        plan, self._plan = self._plan, StepPlan()
        if not self._mapped and (plan.loads or plan.stores):
            plan = StepPlan(plan.loads, plan.stores, self._store.slab.ref)
        return plan

    def _time_step(self, tokens: int) -> None:
        """Steps follow each other without a pause while there is work: their distance is their duration."""
        now = self._clock()
        if self._step is not None:
            self._cost.observe_step(self._step[0], now - self._step[1])
        self._step = (tokens, now)

    def _store_completed(
        self, tracked: _Tracked, computed: int, blocks_of: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> None:
        # With asynchronous scheduling the last sampled tokens are computed before they are known here.
        known = min(computed, tracked.request.num_tokens)
        if not self._save_decode:
            known = min(known, getattr(tracked.request, "num_prompt_tokens", known))
        complete = known // self._chunk_size
        if complete <= tracked.stored:
            return
        block_ids = blocks_of(tracked.request.request_id)
        if block_ids is None:
            return
        keys = tracked.keys(complete)
        first = self._skip_present(tracked, keys)
        if first >= complete:
            return
        self._order_store(tracked, keys, first, complete, block_ids)

    def _skip_present(self, tracked: _Tracked, keys: Sequence[ChunkKey]) -> int:
        present, _ = self._store.match(keys[tracked.stored :])
        tracked.stored += present
        return tracked.stored

    def _order_store(
        self,
        tracked: _Tracked,
        keys: Sequence[ChunkKey],
        first: int,
        complete: int,
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        size = self._chunk_size
        reservation = self._store.reserve(
            keys[first:complete],
            parent=tracked.chain.parent(first),
            tokens=token_bytes(tracked.request.all_token_ids[first * size : complete * size]),
            protect=keys,
        )
        slots = reservation.slots
        copies: list[ChunkCopy] = []
        unusable: list[ChunkKey] = []
        for index in range(first, first + reservation.handled):
            slot = slots.get(keys[index])
            if slot is None:
                continue
            copy = self._geometry.store_copy(slot, block_ids, index)
            if copy is None:
                unusable.append(keys[index])
            else:
                copies.append(copy)
        reservation.abort(unusable)
        tracked.stored = first + reservation.handled
        if copies:
            order = CopyOrder(self._new_job(), copies)
            self._store_jobs[order.job] = _StoreJob(tracked, reservation, first, tracked.stored)
            self._plan.stores.append(order)

    # -- answers ------------------------------------------------------------------------------------------

    def on_report(self, report: WorkerReport) -> None:
        """Merge the workers' answers; a job ends when every rank has answered."""
        self._mapped = True
        # Failed loads first, also when other ranks have yet to answer: they cast doubt on the same step's stores.
        if any(not part.ok and job in self._load_jobs for job, part in report.jobs.items()):
            self._suspect_stores()
        for job, merged in self._merge(report):
            if job in self._load_jobs:
                self._end_load(self._load_jobs.pop(job), merged)
            elif job in self._store_jobs:
                self._end_store(self._store_jobs.pop(job), merged)

    def _merge(self, report: WorkerReport) -> Iterator[tuple[int, JobReport]]:
        for job, part in report.jobs.items():
            known = self._pending_reports.pop(job, None)
            merged = part if known is None else known.merge(part)
            if merged.ranks < self._ranks:
                self._pending_reports[job] = merged
            else:
                yield job, merged

    def _suspect_stores(self) -> None:
        """Not only of the request itself: others may share its blocks through vLLM's prefix cache."""
        for job in self._store_jobs.values():
            job.suspect = True

    def _end_load(self, job: _LoadJob, report: JobReport) -> None:
        keys = job.lease.keys
        job.lease.release()
        tracked = job.tracked
        if job.stream is not None:
            job.stream.copied() if report.ok else job.stream.stop()
        if tracked is None:
            return
        if report.ok:
            tracked.load_bytes += report.nbytes
            tracked.load_seconds += report.seconds
            return
        logger.warning("lmkv: a load for request %s failed; it is recomputed", tracked.request.request_id)
        self._store.drop(keys)
        tracked.bypass = True
        tracked.hit_tokens = 0
        tracked.stored = min(tracked.stored, job.first_chunk)

    def _end_store(self, job: _StoreJob, report: JobReport) -> None:
        count = len(job.reservation)
        if job.suspect or not report.ok:
            job.reservation.abort()
            job.tracked.stored = min(job.tracked.stored, job.first_chunk)
            # What cannot be copied now will not be in the next step: no use in trying again and again.
            job.tracked.options.skip_save |= not report.ok
            return
        job.reservation.commit()
        logger.info(
            "lmkv: request %s: stored %d of %d tokens",
            job.tracked.request.request_id,
            count * self._chunk_size,
            job.upto * self._chunk_size,
        )

    @property
    def busy(self) -> bool:
        """Whether copies are under way whose end has not been reported."""
        return bool(self._load_jobs or self._store_jobs)

    def reset(self) -> None:
        """Nothing that was cached until now is served any more."""
        self._store.clear()
        for tracked in self._requests.values():
            tracked.drop_lease()
            # What is running was computed before the reset, perhaps with other weights.
            tracked.options.skip_save = True
        self._leased.clear()

    def close(self) -> None:
        started = time.monotonic()
        for request_id in list(self._requests):
            self._forget(request_id)
        self._store.close()
        logger.debug("lmkv: closed in %.3f s", time.monotonic() - started)
