"""The scheduler side of the connector: tells vLLM how many tokens can be loaded, and plans the copies of each step.

This package uses no types of vLLM, and reads only a few attributes of requests and scheduler outputs, so that tests can
simulate any schedule. No call waits for I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import evolve

from lmkv.chunks.hashing import hash_prompt
from lmkv.chunks.namespace import Namespace
from lmkv.protocols import ChunkKey
from lmkv.store.catalog import HitFinder
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import StepPlan, StepPlanBuilder, WorkerReport
from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.plan.identity import Adapter, Adapters, Media, tagged_root
from lmkv.vllm.plan.request import BlockTables, KeyMaker, Miss, Request, VLLMRequest
from lmkv.vllm.scheduler.audit import HitAudits, LoadAudits
from lmkv.vllm.scheduler.changes import WeightChanges
from lmkv.vllm.scheduler.context import Jobs, PlanContext, SchedulerOptions
from lmkv.vllm.scheduler.events import Event, EventRecorder
from lmkv.vllm.scheduler.loads import Loads
from lmkv.vllm.scheduler.match import WAIT, Hit, Match, Matcher, Wait
from lmkv.vllm.scheduler.observer import SchedulerObserver
from lmkv.vllm.scheduler.stores import ChunkStores, FinishedRequests, RetainedState, StateStores
from lmkv.vllm.scheduler.telemetry import Values
from lmkv.vllm.scheduler.timing import Timing

logger = logging.getLogger("lmkv.vllm")


class Scheduler:
    """The scheduler side: follows all requests, tells vLLM how many tokens can be loaded, and plans loads, stores and
    audits.

    `Matcher` and `Loads` decide about loads, `ChunkStores` and `StateStores` about stores, `HitAudits` and `LoadAudits`
    about audits. `WeightChanges` keeps KV of different weights apart. `FinishedRequests` applies the pins and
    priorities of ended requests.

    All calls come from vLLM's scheduling thread, in the order of its steps: lookup and allocation of each request,
    `plan_step`, `take_plan`, and later `on_report` with the workers' results.

    `block_map`: decides which blocks belong to which chunk. `events`: records KV events; None if vLLM publishes none.
    `identify()`: a function that returns the identity of the workers' model. If the result is None, nothing is cached.
    This function is called at the start and when the weights may have changed. `load_adapter(lora)`: a function that
    returns an adapter as the workers have loaded it.
    """

    def __init__(
        self,
        store: TieredStore,
        namespace: Namespace,
        block_map: BlockMap,
        options: SchedulerOptions | None = None,
        events: EventRecorder | None = None,
        identify: Callable[[], str | None] | None = None,
        load_adapter: Callable[[Any], Adapter | None] = lambda lora: None,
    ) -> None:
        self._store = store
        self._block_map, self._chunk_size = block_map, block_map.chunk_size
        options = options or SchedulerOptions()
        self._options = evolve(
            options,
            # vLLM recomputes scratch blocks from the end of a hit on, which must be the end of a block.
            save_unfull_chunk=options.save_unfull_chunk and not block_map.scratch,
            # The KV of draft layers depends on tokens behind a chunk, which differ between prompts.
            audits_computed=options.audits_computed and not options.lookahead,
            # With states a hit ends at one, though the KV of draft layers there depends on the next token: this costs
            # one accepted draft at most.
            lookahead=0 if block_map.states else options.lookahead,
        )
        self._builder = StepPlanBuilder()
        self._clock = self._options.clock
        self._observer = SchedulerObserver(store, block_map.chunk_size, self._clock, events)
        self.boundaries = HitFinder(store.catalog, block_map.states)
        self._jobs = Jobs(self._options.ranks)
        parts = store, self.boundaries, block_map, self._builder, self._jobs, self._options, self._observer
        context = PlanContext(*parts)
        self.audit = HitAudits(context)
        self.audit.on_wrong = self._on_wrong
        self.load_audits = LoadAudits(context, self.audit)
        self.timing = Timing(context)
        self.loads = Loads(context, self.timing, self.load_audits)
        self.matcher = Matcher(context, self.timing, self.loads, self.audit)
        self._chunks, self._states = ChunkStores(context), StateStores(context, self.audit)
        self._requests: dict[str, Request] = {}
        self._mapped: set[int] = set()
        self._refused = False
        names = Media(self._options.media_by_name), Adapters(load_adapter), self._options.save_unfull_chunk
        self._naming = KeyMaker(namespace, self._chunk_size, *names, block_map.states, self._options.longest)
        audits = self.audit, self.load_audits
        self.changes = WeightChanges(context, self._naming, self._requests, self.loads, audits, identify)
        self._endings = FinishedRequests(context, self._chunks)

    def __repr__(self) -> str:
        return f"<Scheduler: {len(self._requests)} requests{', copying' if self.busy else ''}>"

    @property
    def observer(self) -> SchedulerObserver:
        """The object that makes metrics, reasons of misses, reports on recent requests, and KV events."""
        return self._observer

    @property
    def store(self) -> TieredStore:
        return self._store

    @property
    def requests(self) -> Mapping[str, Request]:
        """The requests that have arrived and have not ended, by id."""
        return MappingProxyType(self._requests)

    def keys_of(self, tokens: Sequence[int], cache_salt: str | None, tags: Mapping[str, str]) -> list[ChunkKey]:
        """Return the chunk keys of a prompt without images and adapters. Return no keys if the workers' weights are
        unknown. Thread-safe.

        The keys are for the weights at the last lookup, even if the weights have changed since then.
        """
        root = self.root_of(cache_salt, tags)
        return [] if root is None else self._keys(root, tokens)

    def root_of(self, cache_salt: str | None, tags: Mapping[str, str]) -> bytes | None:
        """Return the root of the chunk keys of prompts with this salt and these tags. Return None if the workers'
        weights are unknown. Thread-safe.

        The root is for the weights at the last lookup, even if the weights have changed since then.
        """
        identity = self.changes.identity
        return None if identity is None else tagged_root(self._naming.namespace, tags.items(), identity, cache_salt)

    def watch_blocks(self, free: Callable[[], int], evict: Callable[[set[int]], None], count: int = 0) -> None:
        """Set two functions of vLLM: `free()` returns the number of free blocks, and `evict(blocks)` removes blocks
        from vLLM's prefix cache.

        `count`: the number of all of vLLM's blocks, free or not.
        """
        self.loads.admission.free_blocks = free
        self.loads.evict_blocks = evict
        self.changes.evict = lambda: evict(set(range(count)))

    # -- requests -----------------------------------------------------------------------------------------

    def on_new_request(self, vllm_request: VLLMRequest) -> None:
        """Hash the prompt of a new request, and begin to promote its chunks before vLLM schedules the request.

        If the weights may have changed, lmkv asks the workers before it hashes the prompt. A sleeping engine cannot ask
        its workers, so in this case the prompt is hashed only at the request's first lookup.
        """
        if self.changes.puts_off(vllm_request.request_id):
            return
        request = self._request_of(vllm_request)
        keys = request.keys_with_tail(vllm_request.num_tokens // self._chunk_size)
        self._store.hints.label(keys, request.tenants)
        self._store.hints.prompt(keys, vllm_request.num_tokens)
        self.audit.wrong.purge(keys)
        other = self._keys(request.root, request.options.prefetch_tokens) if request.options.prefetch_tokens else []
        self._store.hints.label(other, request.tenants)
        for chain in (keys if request.options.prefetch else [], other):
            if wanted := self.boundaries.keys_to_promote(chain):
                self._store.promote(wanted, prefetch=True, ttl=self._options.pin_ttl, owner=request.root)
        if self._may_load(request):
            self.matcher.arrived(request, keys)

    def _keys(self, root: bytes, tokens: Sequence[int]) -> list[ChunkKey]:
        """Return the chunk keys of a prompt, including the key of its tail. `root`: the root of these keys."""
        chain, tail = hash_prompt(tokens, root, self._chunk_size, tail=self._options.save_unfull_chunk)
        return chain.keys if tail is None else [*chain.keys, tail]

    def _request_of(self, vllm_request: VLLMRequest) -> Request:
        request = self._requests.get(vllm_request.request_id)
        # Clients choose ids, and may reuse the id of an aborted request.
        if request is None or request.vllm is not vllm_request:
            self._forget(vllm_request.request_id)
            self.changes.identify()
            request = Request.of(vllm_request, self._naming, self.changes.identity, self.matcher.new_patience())
            self._requests[vllm_request.request_id] = request
            self.changes.follow_adapter(request)
        request.follow()
        return request

    def _may_load(self, request: Request) -> bool:
        switched_on = self._options.loads and not self._refused and not self.audit.loads_off
        return switched_on and not request.loading.failed and not request.options.skip_load

    def _forget(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.matcher.forget(request)
            self.loads.forget(request)
            self.load_audits.give_up(request)
            self._end_deferral(request)
        self.changes.forget(request_id)
        return request

    def request_finished(self, vllm_request: VLLMRequest) -> dict[str, Any] | None:
        """Forget an ended request. Return the `kv_transfer_params` of its response, or None if there are none.

        After the request's last store, its chunks count as recently used, and its pins and priorities begin.
        """
        request = self._forget(vllm_request.request_id)
        return None if request is None else self._endings.finished(request)

    # -- one step -----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, vllm_request: VLLMRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return `(tokens, asynchronous)`: how many tokens can be loaded after the computed tokens, and whether the
        load is asynchronous.

        If `tokens` is None, vLLM must ask again in the next step.
        """
        started, evictions = self._clock(), self.changes.evictions
        self.changes.identify()
        if vllm_request.request_id in self.changes.put_off:
            self.on_new_request(vllm_request)
        request = self._request_of(vllm_request)
        changed = self.changes.evictions > evictions or self.changes.loads_across(request.request_id)
        if changed and num_computed_tokens:
            # vLLM asks again, by then without its own hit. That also rules out blocks of a load from before the
            # change, which vLLM shares from the step on in which their request continues.
            return None, False
        answer = self.match(request, num_computed_tokens)
        self._observer.telemetry.lookup_took(self._clock() - started)
        if isinstance(answer, Wait):
            if request.waiting.deferred_since is None:
                request.waiting.deferred_since = started
            return None, False
        self._end_deferral(request)
        return (answer.tokens, answer.between_steps) if isinstance(answer, Hit) else (0, False)

    def _end_deferral(self, request: Request) -> None:
        """Record that a request's lookup has ended, so that vLLM does not ask again."""
        since, request.waiting.deferred_since = request.waiting.deferred_since, None
        if since is not None:
            self._observer.telemetry.lookup_was_deferred(self._clock() - since)

    def match(self, request: Request, num_computed_tokens: int) -> Match:
        """Return how many tokens lmkv promises to load for a request, or the reason why lmkv promises nothing."""
        request.waiting.release_lease()
        if request.auditing.audit is not None:
            request.auditing.audit.computed = max(request.auditing.audit.computed, num_computed_tokens)
        # Also for a request that loads nothing: vLLM's own hit may include another request's unfilled blocks.
        if self.loads.is_unconfirmed(request, num_computed_tokens):
            return WAIT
        if not self._options.loads:
            return Miss("skip_load", 0)
        if not self._may_load(request):
            return self.matcher.refuse(request, num_computed_tokens, self._why_not(request))
        return self.matcher.match(request, num_computed_tokens)

    def _why_not(self, request: Request) -> str:
        if request.loading.failed:
            return "failed"
        return "unidentified" if request.unidentified else "switched_off" if self.audit.loads_off else "skip_load"

    def update_state_after_alloc(
        self, vllm_request: VLLMRequest, block_ids: BlockTables, num_external_tokens: int
    ) -> None:
        """Plan the promised load of `num_external_tokens` tokens into the blocks that vLLM has allocated. If the number
        is 0, release the promised chunks.
        """
        request = self._request_of(vllm_request)
        self.matcher.allocated(request, self._block_map.select(block_ids), num_external_tokens)
        self._observer.recent.scheduled(request)

    def hit_sources(self, request_id: str) -> dict[str, int]:
        """Return the number of tokens that the last lookup has promised for a request, by tier."""
        request = self._requests.get(request_id)
        return dict(request.report.sources) if request is not None else {}

    def fail_load(self, request_id: str, block_ids: BlockTables, num_external_tokens: int) -> None:
        """Report the blocks of a promised load as failed. Call this if `update_state_after_alloc` raises."""
        request, tables = self._requests.get(request_id), self._block_map.select(block_ids)
        if request is None:
            self.loads.fail_unknown(tables)
        else:
            self.loads.fail(request, tables, request.waiting.computed + num_external_tokens)

    def plan_step(
        self,
        progress: Mapping[str, int],
        blocks_of: Callable[[str], BlockTables | None],
        scheduled_tokens: int = 0,
        offers: Mapping[str, Sequence[RetainedState]] = MappingProxyType({}),
        preempted: Iterable[str] = (),
        overwritten: Collection[int] = (),
    ) -> None:
        """Plan the copies for the step that vLLM has just scheduled.

        `progress`: for each request of the step, how many tokens have valid KV after the step, without drafts.
        `blocks_of(request_id)`: a function that returns a request's block tables, or None. `scheduled_tokens`: number
        of tokens of the step. `offers`: the states of recurrent layers that vLLM retains for lmkv, by request.
        `preempted`: ids of requests that have lost their blocks. `overwritten`: blocks that may have new content before
        the workers get the plan.
        """
        for request_id in preempted:
            if request_id in self._requests:
                self.load_audits.give_up(self._requests[request_id])
        self.load_audits.plan(overwritten)
        self.loads.end_step(scheduled_tokens, len(progress))
        self.matcher.end_step()
        self.changes.keep_apart(progress, blocks_of)
        if (self._options.stores or self.audit.on) and not self._refused:
            for request_id, computed in progress.items():
                self._store_completed(request_id, computed, blocks_of, offers.get(request_id, ()))
        self._observer.value.step()

    def take_plan(self) -> StepPlan:
        """Return the plan of the step for all workers: all copy tasks since the last call."""
        # Sent with each plan until all workers have mapped it: some may not have run yet.
        return self._builder.take(None if len(self._mapped) == self._options.ranks else self._store.slab.ref)

    def _store_completed(
        self,
        request_id: str,
        computed: int,
        blocks_of: Callable[[str], BlockTables | None],
        offers: Sequence[RetainedState],
    ) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.follow()
        stores = self._options.stores
        complete = self._chunks.completes(request, computed) if stores else 0
        tail = stores and self._chunks.completes_tail(request, computed)
        states = self.boundaries.states > 0 and (stores or request.auditing.audit is not None)
        found = blocks_of(request_id) if complete or tail or states or request.auditing.audit is not None else None
        if found is None:
            return
        tables = self._block_map.select(found)
        if complete:
            before = request.storing.stored
            self._chunks.store(request, complete, tables)
            self.audit.stored(request, request.keys(request.storing.stored)[before:])
        if tail:
            self._chunks.store_tail(request, tables)
        if states:
            self._states.take(request, computed, tables, offers)
        self.audit.compare(request, computed, tables)

    # -- answers ------------------------------------------------------------------------------------------

    def on_report(self, report: WorkerReport) -> None:
        """Process a report, which may be from only some workers. A job ends when every rank has reported its result."""
        ends = report.jobs
        try:
            self._note(report)
        except Exception:
            logger.exception("lmkv: a report of the workers is unreadable; lmkv counts the reported copies as failed")
            self._jobs.distrust()
            ends = {job: evolve(part, ok=False) for job, part in report.jobs.items()}
        for job, merged in self._jobs.answered(ends):
            try:
                self._jobs.end(job, merged)
            except Exception:
                # The other jobs must end: a load without an end keeps its request waiting forever.
                logger.exception("lmkv: an error occurred after a copy; lmkv continues; please report the error")

    def _note(self, report: WorkerReport) -> None:
        """Process a report except the results of its jobs. After a failed load, discard the results of running
        stores.
        """
        self._mapped |= report.mapped
        if report.refusal and not self._refused:
            self._refused = True
            logger.error("lmkv: nothing is cached from now on: %s", report.refusal)
        for step in report.steps:
            self.loads.step_ended(step)
        for number, digest in report.adapters:
            self.changes.adapter_loaded(number, digest)
        # Before any store is published, and without the other ranks' answers: a store reported together with a
        # failed load may contain KV computed from unfilled blocks.
        if any(not part.ok and self.loads.may_have_been_read(job) for job, part in report.jobs.items()):
            self._jobs.distrust()

    def _on_wrong(self, request: Request, chunk: int, own_kv_is_right: bool) -> None:
        """React to a wrong chunk with index `chunk` of a request: discard running stores, which may depend on this
        chunk, and empty vLLM's prefix cache.
        """
        self._jobs.distrust()
        self.changes.evict_all()
        keys = request.chain.keys[: chunk + 1][-1:]
        for other in self._requests.values():
            if other is request or not set(keys).isdisjoint(other.chain.keys):
                if other is not request or not own_kv_is_right:
                    # End its audit, which would accuse the chunks that others store anew.
                    other.options.skip_save = True
                    self.audit.end(other)
                other.storing.begin_again(chunk)

    def take_events(self) -> list[Event]:
        """Return the chunks that tiers have gained and lost since the last call, as KV events."""
        return [] if self._observer.events is None else self._observer.events.take()

    def republish(self) -> None:
        """Publish all chunks again. Call this when vLLM is about to publish that all its blocks are removed: routers
        then forget lmkv's chunks, until lmkv's events follow.
        """
        if self._observer.events is not None:
            self._observer.events.republish()

    @property
    def busy(self) -> bool:
        """Whether any planned copy is still missing the report of a worker."""
        return len(self._jobs) > 0 or bool(self.loads.between_steps)

    def reset(self) -> None:
        """Empty host memory. Lower tiers keep their chunks, which requests find again if the weights are still the
        same.
        """
        self.changes.suspect()
        # Running copies may belong to ended requests.
        self._jobs.distrust()
        self._store.clear(lower=False)
        self._observer.reset()

    def take_samples(self) -> Values:
        """Return the metrics' values since the last call."""
        return self._observer.telemetry.take()

    def close(self) -> None:
        """Forget every request and close the store, which finishes its I/O within a limited time."""
        for request_id in list(self._requests):
            self._forget(request_id)
        self._store.close()
