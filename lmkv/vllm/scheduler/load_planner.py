"""`LoadPlanner`: how many tokens a lookup promises vLLM, and how they are loaded.

Chunks in host memory are loaded within the step that needs them, where vLLM can be told that such a load
failed. Chunks of lower tiers are promoted while the request waits in vLLM's queue, so that the batch does not
wait for them. Hits that are too long for host memory are loaded through it between steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from lmkv.chunks.hashing import TailKey, token_bytes
from lmkv.protocols import ChunkKey
from lmkv.vllm.requests.miss import Miss
from lmkv.vllm.requests.request import BlockTables, Request, RequestState
from lmkv.vllm.scheduler.auditor import Auditor
from lmkv.vllm.scheduler.context import PlanContext
from lmkv.vllm.scheduler.load_jobs import LoadJobs
from lmkv.vllm.scheduler.tier_wait import TierWait

logger = logging.getLogger("lmkv.vllm")

_MAX_ASYNC_LOADS = 3


class LoadPlanner:
    """Promises chunks and orders their loads. Called on the scheduling thread only; never waits.

    `audit`: decides which hits are computed. `wait`: decides about lower tiers. `jobs`: the loads that were ordered.
    `stop_at(request, tokens)`: has vLLM end a step of the request there, and hand over its states.
    """

    def __init__(self, context: PlanContext, audit: Auditor) -> None:
        self._audit = audit
        self._store = context.store
        self._observer = context.observer
        self._block_map = context.block_map
        self._chunk_size = context.chunk_size
        self._options = context.options
        self._clock = context.options.clock
        self._may_load_within_step = context.loads_within_step
        self._promised: dict[str, RequestState] = {}
        self._boundaries = context.boundaries
        self.stop_at: Callable[[Request, int], None] = lambda request, tokens: None
        self.wait = TierWait(context)
        self.jobs = LoadJobs(context, self.wait, audit)

    # -- lookup -------------------------------------------------------------------------------------------

    def match(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        """`(tokens, between_steps)`: the tokens that can be loaded beyond the computed ones, and how.

        None instead of tokens: ask again in the next step, because shared tiers have not answered yet,
        chunks are still being promoted, or no further asynchronous load is admitted. A promise ends with the
        step that is being scheduled.
        """
        self.jobs.admission.end(state)
        state.computed, state.between_steps = num_computed_tokens, False
        if self.wait.rests(state):
            return None, False
        wanted = self._keys(state)
        self._audit.wrong.purge(wanted)
        first = num_computed_tokens // self._chunk_size
        if self.wait.is_asking(state, wanted) or (state.options.wait_for and self.wait.is_being_stored(state, wanted)):
            return None, False
        keys, ready, found = self._found(state, wanted)
        if found > max(ready, first):
            if self.wait.is_promoting(state, keys, ready, found):
                return None, False
            # The promotion has ended, now or before: its chunks are in host memory.
            keys, ready, found = self._found(state, wanted)
            if self._boundaries.states and ready < found <= self.wait.max_promoted:
                keys = self._boundaries.ready(wanted, first)
                ready = found = len(keys)
        state.patience.end(self._clock())
        keys, last = self._extended(state, keys[:found])
        if ready == found:
            ready = len(keys)
        chunks, between_steps = self._offer(state, keys, ready, len(keys))
        if between_steps and not self.jobs.admission.admits(state):
            if state.patience.lasts(self._clock(), lambda: math.inf, 0):
                return None, False
            chunks = 0
        last = last if chunks == len(keys) else self._chunk_size
        hit = self._hit_tokens(state, self._boundaries.chunks(chunks), last)
        need = max(0, hit - num_computed_tokens)
        self._stop_where_prompts_part(state, wanted, max(hit, num_computed_tokens))
        few = 0 < need < self._options.min_retrieve_tokens
        end = num_computed_tokens + (0 if few else need)
        covered = end + self._options.lookahead if hit else end
        state.miss = self._observer.explainer.explain(state, wanted, end, covered, few=few, late=state.patience.late)
        self._log(state, hit, need)
        if few or not need:
            state.drop_promotion()
            return 0, False
        if self._options.lookahead:
            chunks = -(-hit // self._chunk_size)
        if self._audit.on and self._is_audited(state, keys[:chunks], first, ready, need):
            return 0, False
        if not self._promise(state, keys[:chunks], first, need, between_steps):
            # An I/O thread has evicted some of them just now.
            return None, False
        return need, between_steps

    def _is_audited(self, state: RequestState, keys: list[ChunkKey], first: int, ready: int, need: int) -> bool:
        """Whether the request computes this hit, too. It keeps its promotion, so that its chunks stay until then."""
        chunks = self._boundaries.chunks(len(keys)) - first
        state.source_chunks = self._sources(state, chunks, keys[max(first, ready) :])
        speed = self.wait.cost.prefill_speed
        if not self._audit.takes(state, keys, need, need / speed if speed else 0.0):
            return False
        state.miss = Miss("audited", max(0, state.last_token - state.computed))
        if self._boundaries.states and state.audit is not None:
            self.stop_at(state.request, state.audit.end * self._chunk_size)
        return True

    def _found(self, state: RequestState, chain: list[ChunkKey]) -> tuple[list[ChunkKey], int, int]:
        """`(keys, ready, found)`: see `TierWait.match`; with recurrent layers `keys` are a hit's chunks and states."""
        keys = chain
        while self._boundaries.states:
            if len(chain) > state.resumable:
                chain = chain[: int(state.resumable)]
            keys = self._boundaries.found(chain, state.computed // self._chunk_size)
            ready, found = self.wait.match(state, keys)
            if found == len(keys):
                return keys, ready, found
            # Some of them are slower to load than to compute: perhaps those of a shorter hit are not.
            state.resumable, state.pays = min(found, self._boundaries.chunks(len(keys)) - 1), None
        return keys, *self.wait.match(state, keys)

    def _stop_where_prompts_part(self, state: RequestState, chain: Sequence[ChunkKey], hit: int) -> None:
        """If another prompt had the same chunks, but no state is kept behind them, have it kept this time."""
        if self._boundaries.states:
            shared = self._store.count_prefix(chain)[1] * self._chunk_size
            # Not within the answer of a preempted request, whose steps end where drafts are accepted.
            if hit < shared <= state.prompt_tokens:
                self.stop_at(state.request, shared)

    def _hit_tokens(self, state: RequestState, chunks: int, last: int) -> int:
        """Tokens of a hit of `chunks` chunks, `last` of them in the last one, that may be loaded."""
        lookahead = self._options.lookahead
        whole = self._block_map.scratch or (lookahead > 1 and self._block_map.windowed)
        if chunks and lookahead and whole:
            # Such a hit must end with a chunk: elsewhere the pages of the window before it were not stored.
            chunks, last, lookahead = chunks - 1, self._chunk_size, 0
        found = (chunks - 1) * self._chunk_size + last if chunks else 0
        hit = max(0, min(found - lookahead, state.last_token))
        return hit - hit % self._block_map.groups[0].block_size if self._options.whole_blocks else hit

    def _keys(self, state: RequestState) -> list[ChunkKey]:
        """The keys of the chunks that a load may end with."""
        total, size = state.request.num_tokens, self._chunk_size
        if state.loadable < state.last_token:
            return state.keys(state.loadable // size)
        if self._options.save_unfull_chunk:
            return state.keys_with_tail(total // size)
        return state.keys((total - 1) // size)

    def _extended(self, state: RequestState, keys: list[ChunkKey]) -> tuple[list[ChunkKey], int]:
        """`(keys, tokens)`: with one more chunk in host memory whose first tokens continue the prompt, if any.

        `tokens`: those of the last chunk that are the prompt's.
        """
        size, at = self._chunk_size, len(keys) * self._chunk_size
        if keys and isinstance(keys[-1], TailKey):
            shorter, last = self._extended(state, keys[:-1])
            return (shorter, last) if len(shorter) == len(keys) and last > keys[-1].tokens else (keys, keys[-1].tokens)
        limited = state.loadable < state.last_token or self._audit.wrong.is_in(keys)
        if not self._options.save_unfull_chunk or self._block_map.windowed or limited or at >= state.last_token:
            return keys, size
        tokens = token_bytes(state.tokens(at, size))
        key, count = self._store.catalog.longest_prefix(state.chain.origin(len(keys)), tokens)
        left = state.last_token - at
        usable = min(count, left)
        # A few tokens with which many prompts begin alike are sooner computed than loaded.
        few = usable < min(left, self._block_map.groups[0].block_size)
        return (keys, size) if few else ([*keys, key], count)

    def _offer(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> tuple[int, bool]:
        """`(chunks, between_steps)`: how many chunks to promise, and whether they are loaded between steps.

        Between steps: hits that are too long for host memory, and all where a load within a step may not
        fail.
        """
        if state.async_loads >= _MAX_ASYNC_LOADS:
            # Preempted again and again. vLLM cannot preempt a request that is loading: two of them could
            # preempt each other in turns for ever, where requests that compute make progress.
            return (ready, False) if self._may_load_within_step else (0, False)
        if max(ready, self.wait.max_promoted) < found:
            return found, True
        first = state.computed // self._chunk_size
        nbytes = max(0, ready - first) * self._store.slab.slot_bytes
        return ready, nbytes > 0 and (not self._may_load_within_step or self.jobs.mode.between_steps(nbytes))

    def _promise(self, state: RequestState, keys: list[ChunkKey], first: int, need: int, between_steps: bool) -> bool:
        """Lease what is loaded within the step; False if some of it has just gone."""
        total = self._boundaries.chunks(len(keys)) - first
        if between_steps:
            below = keys[max(first, self._store.count_prefix(keys)[0]) :]
        else:
            # Leased before the promotion is released: in between the chunks could be evicted.
            state.lease, below = self._store.lease(keys[first:]), []
            if len(state.lease) < len(keys) - first:
                state.drop_lease()
                return False
        state.source_chunks = self._sources(state, total, below)
        state.sources = self._in_tokens(state.source_chunks, need)
        state.promised, state.between_steps = keys, between_steps
        self._observer.track(state, keys)
        if not between_steps:
            state.drop_promotion()
        self._promised[state.request_id] = state
        return True

    def _sources(self, state: RequestState, total: int, below: Sequence[ChunkKey]) -> dict[str, int]:
        """The `total` chunks to load by tier. A chunk that was just promoted counts for the tier that it came from."""
        host = self._store.primary_name
        state.note_promoted()
        lower = {name: count for name, count in state.promoted.items() if name != host}
        if below:
            name = self._store.catalog.tier_of(below[0]) or host
            lower[name] = lower.get(name, 0) + len(below)
        lower = {name: min(count, total) for name, count in lower.items()}
        return {host: max(0, total - sum(lower.values())), **lower}

    def _in_tokens(self, chunks: dict[str, int], need: int) -> dict[str, int]:
        """The `need` tokens to load by tier: the first tier, host memory, has those that the others have not."""
        host, *lower = chunks
        tokens = {name: min(chunks[name] * self._chunk_size, need) for name in lower}
        return {host: max(0, need - sum(tokens.values())), **tokens}

    def _log(self, state: RequestState, hit: int, need: int) -> None:
        # vLLM asks about a waiting request in every step: only changes are logged.
        if state.logged != (hit, need):
            state.logged = (hit, need)
            missed = "" if state.miss is None else f" ({state.miss})"
            message = "lmkv: request %s: total tokens %d, hit tokens %d, to load %d%s"
            logger.info(message, state.name, state.request.num_tokens, hit, need, missed)

    def refuse(self, state: RequestState, num_computed_tokens: int, reason: str) -> None:
        """Have the request load nothing."""
        state.computed = num_computed_tokens
        state.miss = Miss(reason, max(0, state.last_token - num_computed_tokens))

    # -- allocation ---------------------------------------------------------------------------------------

    def allocated(self, state: RequestState, tables: BlockTables, tokens: int) -> None:
        """Blocks are allocated: order the promised load of `tokens` tokens, or release its lease for 0."""
        promised = self._promised.pop(state.request_id, None)
        if tokens <= 0:
            state.drop_lease()
        if not state.counted:
            if promised is not None and tokens <= 0:
                state.miss = Miss("not_taken", max(0, state.last_token - state.computed))
            self._observer.scheduled(state, found=tokens > 0)
        if tokens <= 0:
            self.jobs.admission.end(state)
            return
        state.hit_tokens = tokens
        end = state.computed + tokens
        if state.between_steps:
            self.jobs.begin(state, state.promised[state.computed // self._chunk_size :], tables, end)
        else:
            self.jobs.order(state, state.lease or self._store.lease(()), tables, end)
            state.lease = None

    def end_step(self, scheduled_tokens: int, requests: int) -> None:
        """A step was scheduled: order the windows that are ready, and withdraw the promises not taken up."""
        self.jobs.end_step(scheduled_tokens, requests)
        # A lease that waited with its request would keep its chunks from eviction.
        for state in self._promised.values():
            state.drop_lease()
        self._promised.clear()

    def forget(self, state: RequestState) -> None:
        """The request has ended: release its chunks."""
        self._promised.pop(state.request_id, None)
        state.release()
        self.jobs.forget(state)
