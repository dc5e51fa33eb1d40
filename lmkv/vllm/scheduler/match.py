"""`Matcher`: decides how many tokens lmkv promises to load when vLLM looks up a request, and how to load them.

Chunks in host memory are loaded synchronously (within a step) if vLLM can recompute a failed synchronous load. Chunks
in lower tiers are promoted while the request waits in vLLM's queue, so that the batch does not wait. A hit that does
not fit into host memory is loaded asynchronously, part by part, between steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from attrs import define, field, frozen

from lmkv.chunks.hashing import TailKey, token_bytes
from lmkv.protocols import ChunkKey
from lmkv.store.promotion import Promotion
from lmkv.vllm.plan.request import BlockTables, Miss, Request, VLLMRequest, WaitLimit
from lmkv.vllm.scheduler.audit import HitAudits
from lmkv.vllm.scheduler.context import PlanContext, Planner
from lmkv.vllm.scheduler.loads import Loads
from lmkv.vllm.scheduler.timing import Timing

logger = logging.getLogger("lmkv.vllm")

_MAX_ASYNC_LOADS = 3
_YIELD, _YIELD_EVERY = 5e-5, 0.01
"""Seconds of the pauses in which the scheduling thread lets I/O threads run, and shortest seconds from pause to
pause.
"""
_LOOK_EVERY = 0.01, 0.1, 1.0
"""Time between two lookups for `wait_for`: shortest (seconds), share of the time since the first lookup, longest
(seconds).
"""
_LOOK_CHUNKS = 256
"""Largest number of chunks for `wait_for` to look up at a time."""
_SHARED = "?"
"""The name under which the response time of all shared tiers together is measured."""


@frozen
class Wait:
    """A lookup's result: vLLM must ask again in the next step."""


@frozen
class Hit:
    """A lookup's result: `tokens` tokens after the computed tokens will be loaded. This promise holds until the step
    ends.

    `between_steps`: whether the load is asynchronous.
    """

    tokens: int
    between_steps: bool


Match: TypeAlias = Wait | Hit | Miss
"""A lookup's result. A `Miss` of 0 tokens means that nothing is missing."""
WAIT = Wait()


@define(eq=False)
class _Lookup:
    """The state of one lookup. `wanted`: keys of the chunks that may be loaded. `computed`: how many of the first
    chunks vLLM already has.

    `keys`: the keys of the longest hit, including states. `ready`: how many of the first keys are in host memory.
    `found`: how many of the first keys are worth loading.
    """

    request: Request
    computed: int
    wanted: list[ChunkKey]
    keys: list[ChunkKey] = field(factory=list)
    ready: int = 0
    found: int = 0


class Matcher(Planner):
    """Decides the results of vLLM's lookups. Leases the chunks of a promised synchronous load, so that they stay in
    host memory.

    `stop_at(request, tokens)`: a function that makes vLLM end a step after `tokens` tokens of the request, and retain
    the states of recurrent layers there.
    """

    def __init__(self, context: PlanContext, timing: Timing, loads: Loads, audit: HitAudits) -> None:
        super().__init__(context)
        self._timing, self._loads, self._audit = timing, loads, audit
        # A step may load what it reads if vLLM can go on without it.
        self._may_load_within_step = self._block_map.one_full_table and self._options.load_mode != "async"
        self._promised: dict[str, Request] = {}
        self._yielded = -math.inf
        self.stop_at: Callable[[VLLMRequest, int], None] = lambda request, tokens: None

    def new_patience(self) -> WaitLimit:
        """Return the limits on the waits of a new request."""
        return WaitLimit(self._options.prefetch_deadline)

    # -- arrival ------------------------------------------------------------------------------------------

    def arrived(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Begin to look up a new request's chunks in shared tiers, and to promote chunks, while the request waits in
        vLLM's queue.
        """
        if request.options.max_load_tokens == 0:
            return
        request.waiting.shared_lookup = self._store.look_up_shared(keys, self._boundaries.states)
        keys = self._boundaries.keys_to_promote(keys)
        ready, found = self._worth_loading(request, keys)
        if ready < found <= self._timing.max_promoted:
            promotion = self._timing.promote(keys[:found], prefetch=True, owner=request.root)
            request.waiting.promotion = promotion
            self._yield(promotion)

    def _yield(self, promotion: Promotion) -> None:
        """Pause for a moment, so that the I/O threads begin now, not when the scheduling thread next waits, some 4 ms
        later.
        """
        reads = any(origin != self._store.primary_name for origin in promotion.origins)
        if reads and not 0 <= self._clock() - self._yielded < _YIELD_EVERY:
            self._yielded = self._clock()
            time.sleep(_YIELD)

    # -- lookup -------------------------------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> Match:
        """Return how many tokens to load after the `num_computed_tokens` tokens of vLLM's own hit, the reason to load
        nothing, or `Wait`.
        """
        self._loads.admission.end(request)
        waiting = request.waiting
        waiting.computed, waiting.between_steps = num_computed_tokens, False
        if 0.0 < waiting.look_at > self._clock():
            # It has looked lately for another server's chunks.
            return WAIT
        lookup = _Lookup(request, num_computed_tokens // self._chunk_size, self._keys(request))
        self._audit.wrong.purge(lookup.wanted)
        for is_unfinished in (self._asks_shared_tiers, self._awaits_another_server, self._promotes):
            if is_unfinished(lookup):
                return WAIT
        waiting.patience.end(self._clock())
        return self._answer(lookup)

    def _answer(self, lookup: _Lookup) -> Match:
        """Return the promise for the chunks that were found, after all waits."""
        request, computed = lookup.request, lookup.request.waiting.computed
        keys, last = self._extended(request, lookup.keys[: lookup.found])
        ready = len(keys) if lookup.ready == lookup.found else lookup.ready
        chunks, between_steps = self._offer(request, ready, len(keys))
        if between_steps and not self._loads.admission.admits(request):
            if request.waiting.patience.lasts(self._clock(), lambda: math.inf, 0):
                return WAIT
            chunks = 0
        last = last if chunks == len(keys) else self._chunk_size
        hit = self._hit_tokens(request, self._boundaries.without_states(chunks), last)
        need = max(0, hit - computed)
        self._stop_where_prompts_part(request, lookup.wanted, max(hit, computed))
        few = 0 < need < self._options.min_retrieve_tokens
        end, late = computed + (0 if few else need), request.waiting.patience.late
        covered = end + self._options.lookahead if hit else end
        miss = self._observer.explainer.explain(request, lookup.wanted, end, covered, few=few, late=late)
        self._observer.looked_up(request, miss, hit, need)
        if few or not need:
            request.waiting.cancel()
            return miss or Miss("too_short", 0)
        if self._options.lookahead:
            chunks = -(-hit // self._chunk_size)
        if self._audit.on and self._is_audited(request, keys[:chunks], lookup.computed, ready, need):
            return Miss("audited", max(0, request.last_token - computed))
        if not self._promise(request, keys[:chunks], lookup.computed, need, between_steps):
            # An I/O thread has evicted some of them just now.
            return WAIT
        return Hit(need, between_steps)

    def refuse(self, request: Request, num_computed_tokens: int, reason: str) -> Miss:
        """Load nothing for a request: return a miss of all tokens after the first `num_computed_tokens`, because of
        `reason`.
        """
        request.waiting.computed = num_computed_tokens
        miss = Miss(reason, max(0, request.last_token - num_computed_tokens))
        self._observer.missed(request, miss)
        return miss

    # -- waits, in their order ----------------------------------------------------------------------------

    def _asks_shared_tiers(self, lookup: _Lookup) -> bool:
        """Return whether the request still waits for shared tiers to say which chunks they have."""
        waiting, wanted = lookup.request.waiting, lookup.request.options.wait_for
        asked, now = waiting.shared_lookup, self._clock()
        if asked is None:
            return False
        if not asked.done:
            # All waits for another server's chunks count as one, over any number of lookups.
            tokens = len(lookup.wanted) * self._chunk_size
            limit = partial(self._timing.cost.patience, _SHARED, tokens, 1)
            return waiting.patience.lasts(now, partial(self._timing.compute_seconds, wanted) if wanted else limit, 0)
        self._timing.cost.note_load(_SHARED, 1, asked.seconds)
        # The chunks found now may be worth loading.
        waiting.shared_lookup = waiting.worth_loading = None
        if not wanted:
            waiting.patience.end(now)
        return False

    def _awaits_another_server(self, lookup: _Lookup) -> bool:
        """Return whether the request must still wait for the tokens of `wait_for`, which another server is storing.

        If so, begin another lookup for these tokens. Later waits have new limits.
        """
        request, waiting, now = lookup.request, lookup.request.waiting, self._clock()
        wanted = request.options.wait_for
        if not wanted:
            return False
        # Many requests may wait for long prompts: each continues after the chunks it has found, ever less often.
        keys = self._boundaries.with_states(lookup.wanted[: -(-wanted // self._chunk_size)])
        found = waiting.stored_elsewhere
        found += self._store.catalog.count_prefix(keys[found:])[1]
        missing = found < len(keys) and waiting.computed < wanted
        waits = missing and waiting.patience.lasts(now, lambda: self._timing.compute_seconds(wanted), found)
        asked = self._store.look_up_shared(keys[found : found + _LOOK_CHUNKS]) if waits else None
        if asked is not None:
            least, part, most = _LOOK_EVERY
            more = found > waiting.stored_elsewhere
            pause = 0.0 if more else min(max(least, part * waiting.patience.waited(now)), most)
            waiting.shared_lookup, waiting.stored_elsewhere, waiting.look_at = asked, found, now + pause
            return True
        if missing:
            text = "lmkv: request %s waited %.1f s for %d tokens of another server, got %d, and computes the rest"
            logger.warning(text, request.name, waiting.patience.spent, wanted, found * self._chunk_size)
        request.options.wait_for, waiting.patience = 0, self.new_patience()
        waiting.stored_elsewhere, waiting.look_at = 0, 0.0
        return False

    def _promotes(self, lookup: _Lookup) -> bool:
        """Find the longest hit. Return whether the request waits until the hit's chunks are in host memory."""
        self._find(lookup)
        if lookup.found <= max(lookup.ready, lookup.computed):
            return False
        if self._is_promoting(lookup):
            return True
        # The promotion has ended, now or before: its chunks are in host memory.
        self._find(lookup)
        if self._boundaries.states and lookup.ready < lookup.found <= self._timing.max_promoted:
            lookup.keys = self._boundaries.ready_hit(lookup.wanted, lookup.computed)
            lookup.ready = lookup.found = len(lookup.keys)
        return False

    def _is_promoting(self, lookup: _Lookup) -> bool:
        """Return whether the request waits for chunks `ready` to `found - 1`: they must fit into host memory and arrive
        in time.
        """
        if lookup.found > self._timing.max_promoted:
            return False
        waiting, keys, ready, found = lookup.request.waiting, lookup.keys, lookup.ready, lookup.found
        promotion = waiting.promotion
        limit = partial(self._timing.limit, keys, ready, found, lookup.computed)
        if not waiting.patience.lasts(self._clock(), limit, ready):
            if promotion is not None:
                self._timing.late(keys[ready:found], waiting.patience.spent)
            waiting.cancel()
            return False
        if promotion is None or promotion.released or (promotion.done and len(promotion) < found):
            # Promoted again, now as a load: a prefetch may have been cut short by its share of the slots.
            # The old promotion is released afterwards, so that its chunks stay referenced.
            demanded = self._timing.promote(keys[:found])
            waiting.cancel()
            promotion = waiting.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    # -- what was found -----------------------------------------------------------------------------------

    def _keys(self, request: Request) -> list[ChunkKey]:
        """Return the keys of the chunks that the request may load."""
        total, size = request.num_tokens, self._chunk_size
        if request.loadable < request.last_token:
            return request.keys(request.loadable // size)
        if self._options.save_unfull_chunk:
            return request.keys_with_tail(total // size)
        return request.keys((total - 1) // size)

    def _worth_loading(self, request: Request, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """Return `(ready, found)`: how many of the first chunks are in host memory, and how many are worth loading.

        The second number is decided once per request, and again after a lookup in shared tiers.
        """
        ready, found = self._store.catalog.count_prefix(keys)
        waiting = request.waiting
        computed = waiting.computed // self._chunk_size
        if found > max(ready, computed):
            if waiting.worth_loading is None:
                waiting.worth_loading = self._timing.worth_loading(keys, ready, found, computed)
            found = max(ready, int(min(found, waiting.worth_loading)))
        return ready, found

    def _find(self, lookup: _Lookup) -> None:
        """Find the longest hit. With recurrent layers, a hit ends where states are stored that are worth loading."""
        request, chain, waiting = lookup.request, lookup.wanted, lookup.request.waiting
        lookup.keys = chain
        while self._boundaries.states:
            if len(chain) > waiting.longest_hit:
                chain = chain[: int(waiting.longest_hit)]
            lookup.keys = self._boundaries.stored_hit(chain, lookup.computed)
            lookup.ready, lookup.found = self._worth_loading(request, lookup.keys)
            if lookup.found == len(lookup.keys):
                return
            # Some load more slowly than they compute. A shorter hit's may not.
            waiting.longest_hit = min(lookup.found, self._boundaries.without_states(len(lookup.keys)) - 1)
            waiting.worth_loading = None
        lookup.ready, lookup.found = self._worth_loading(request, lookup.keys)

    def _extended(self, request: Request, keys: list[ChunkKey]) -> tuple[list[ChunkKey], int]:
        """Add to `keys` one more chunk in host memory, if its first tokens continue the prompt. Return `(keys,
        tokens)`.

        `tokens`: how many tokens of the last chunk match the prompt.
        """
        size, at = self._chunk_size, len(keys) * self._chunk_size
        if keys and isinstance(keys[-1], TailKey):
            shorter, last = self._extended(request, keys[:-1])
            return (shorter, last) if len(shorter) == len(keys) and last > keys[-1].tokens else (keys, keys[-1].tokens)
        limited = request.loadable < request.last_token or self._audit.wrong.is_in(keys)
        if not self._options.save_unfull_chunk or self._block_map.windowed or limited or at >= request.last_token:
            return keys, size
        tokens = token_bytes(request.tokens(at, size))
        key, count = self._store.catalog.longest_prefix(request.chain.origin(len(keys)), tokens)
        left = request.last_token - at
        usable = min(count, left)
        # A few tokens that many prompts share compute faster than they load.
        few = usable < min(left, self._block_map.groups[0].block_size)
        return (keys, size) if few else ([*keys, key], count)

    def _offer(self, request: Request, ready: int, found: int) -> tuple[int, bool]:
        """Return `(chunks, between_steps)`: how many chunks to promise, and whether to load them asynchronously.

        A hit that does not fit into host memory is loaded asynchronously. So is every hit if vLLM cannot recompute a
        failed synchronous load.
        """
        if request.loading.begun >= _MAX_ASYNC_LOADS:
            # Preempted again and again. vLLM cannot preempt a loading request: two of them could preempt each other
            # in turns forever, while computing requests make progress.
            return (ready, False) if self._may_load_within_step else (0, False)
        if max(ready, self._timing.max_promoted) < found:
            return found, True
        first = request.waiting.computed // self._chunk_size
        nbytes = max(0, ready - first) * self._store.slab.slot_bytes
        return ready, nbytes > 0 and (not self._may_load_within_step or self._timing.mode.between_steps(nbytes))

    def _hit_tokens(self, request: Request, chunks: int, last: int) -> int:
        """Return how many tokens of a hit of `chunks` chunks may be loaded. `last`: how many tokens of the last chunk
        match.
        """
        lookahead = self._options.lookahead
        whole = self._block_map.scratch or (lookahead > 1 and self._block_map.windowed)
        if chunks and lookahead and whole:
            # Such a hit must end with a chunk: elsewhere the window's pages were not stored.
            chunks, last, lookahead = chunks - 1, self._chunk_size, 0
        found = (chunks - 1) * self._chunk_size + last if chunks else 0
        hit = max(0, min(found - lookahead, request.last_token))
        return hit - hit % self._block_map.groups[0].block_size if self._options.whole_blocks else hit

    def _stop_where_prompts_part(self, request: Request, chain: Sequence[ChunkKey], hit: int) -> None:
        """If this prompt diverges from an earlier prompt after the hit, make vLLM retain a state there, so that lmkv
        can store it.
        """
        if self._boundaries.states:
            shared = self._store.catalog.count_prefix(chain)[1] * self._chunk_size
            # Not within the answer of a preempted request, whose steps end where drafts are accepted.
            if hit < shared <= request.hashed_tokens:
                self.stop_at(request.vllm, shared)

    # -- promises -----------------------------------------------------------------------------------------

    def _is_audited(self, request: Request, keys: list[ChunkKey], first: int, ready: int, need: int) -> bool:
        """Return whether vLLM computes this hit for an audit instead of loading it."""
        chunks = self._boundaries.without_states(len(keys)) - first
        sources = self._sources(request, chunks, keys[max(first, ready) :])
        speed = self._timing.cost.prefill_speed
        if not self._audit.takes(request, keys, sources, need, need / speed if speed else 0.0):
            return False
        self._observer.missed(request, Miss("audited", max(0, request.last_token - request.waiting.computed)))
        audit = request.auditing.audit
        if self._boundaries.states and audit is not None:
            self.stop_at(request.vllm, audit.end * self._chunk_size)
        return True

    def _promise(self, request: Request, keys: list[ChunkKey], first: int, need: int, between_steps: bool) -> bool:
        """Promise a load, and lease the chunks of a synchronous load. Return False if some of these chunks have just
        been evicted.
        """
        waiting = request.waiting
        if between_steps:
            below = keys[max(first, self._store.catalog.count_prefix(keys)[0]) :]
        else:
            # Leased before the promotion is released: in between the chunks could be evicted.
            waiting.lease, below = self._store.lease(keys[first:]), []
            if len(waiting.lease) < len(keys) - first:
                waiting.release_lease()
                return False
        chunks = self._sources(request, self._boundaries.without_states(len(keys)) - first, below)
        # Host memory, the first tier, has the remaining tokens.
        host, *lower = chunks
        tokens = {name: min(chunks[name] * self._chunk_size, need) for name in lower}
        self._observer.promised(request, keys, chunks, {host: max(0, need - sum(tokens.values())), **tokens})
        waiting.between_steps = between_steps
        if not between_steps:
            waiting.cancel()
        self._promised[request.request_id] = request
        return True

    def _sources(self, request: Request, total: int, below: Sequence[ChunkKey]) -> dict[str, int]:
        """Return the number of chunks to load from each tier, `total` in all. Promoted chunks count for the tier they
        came from.
        """
        host = self._store.primary_name
        request.waiting.note_promoted()
        lower = {name: count for name, count in request.waiting.promoted.items() if name != host}
        if below:
            name = self._store.catalog.tier_of(below[0]) or host
            lower[name] = lower.get(name, 0) + len(below)
        lower = {name: min(count, total) for name, count in lower.items()}
        return {host: max(0, total - sum(lower.values())), **lower}

    # -- allocation ---------------------------------------------------------------------------------------

    def allocated(self, request: Request, tables: BlockTables, tokens: int) -> None:
        """Plan the promised load of `tokens` tokens into the allocated blocks. If `tokens` is 0, release the promised
        chunks.
        """
        waiting = request.waiting
        promised = self._promised.pop(request.request_id, None) is not None
        self._observer.scheduled(request, tokens, refused=promised and tokens <= 0)
        if tokens <= 0:
            waiting.release_lease()
            self._loads.admission.end(request)
            return
        end = waiting.computed + tokens
        if waiting.between_steps:
            keys = request.report.promised[waiting.computed // self._chunk_size :]
            self._loads.begin(request, keys, tables, end)
        else:
            self._loads.plan(request, waiting.lease or self._store.lease(()), tables, end)
            waiting.lease = None

    def end_step(self) -> None:
        """Release the promised chunks that vLLM has not used in the step that it has just scheduled."""
        # A lease kept by a waiting request would keep its chunks from eviction.
        for request in self._promised.values():
            request.waiting.release_lease()
        self._promised.clear()

    def forget(self, request: Request) -> None:
        """Release the lease of an ended request's promised chunks, and cancel its promotion."""
        self._promised.pop(request.request_id, None)
        request.waiting.release()
