"""`TierWait`: which chunks of lower tiers are worth loading, and how long a request waits for them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from lmkv.outcomes import Presence
from lmkv.protocols import ChunkKey
from lmkv.store.promotion import Promotion
from lmkv.store.shared_lookup import SharedLookup
from lmkv.vllm.requests.patience import Patience
from lmkv.vllm.requests.request import RequestState
from lmkv.vllm.scheduler.context import PlanContext
from lmkv.vllm.scheduler.load_policy import LoadCost

logger = logging.getLogger("lmkv.vllm")

_YIELD, _YIELD_EVERY = 5e-5, 0.01
"""Seconds for which the scheduling thread lets I/O threads have the interpreter, and least seconds between two."""
_LOOK_EVERY = 0.01, 0.1, 1.0
"""Least seconds between two looks for what another server stores, part of the time waited so far, and most seconds."""
_LOOK_CHUNKS = 256
"""Chunks that one look is for."""
_SHARED = "?"
"""Stands for all shared tiers where their answers to lookups are timed."""


class TierWait:
    """Asks shared tiers, promotes chunks, and decides whether a request waits for either. Never waits for them itself.

    `cost`: the measured speeds of the model and of each tier.
    """

    def __init__(self, context: PlanContext) -> None:
        self._store = context.store
        self._options = context.options
        self._boundaries = context.boundaries
        self._clock = context.options.clock
        self._telemetry = context.observer.telemetry
        self._chunk_size = context.chunk_size
        self.cost = LoadCost(enabled=context.options.load_or_recompute)
        self._yielded = -math.inf
        self.max_promoted = max(1, context.store.slab.num_slots // 2)
        """Chunks of one request that may be promoted at once."""

    def new_patience(self) -> Patience:
        """The patience of a request that has not waited yet."""
        return Patience(self._options.prefetch_deadline)

    def match(self, state: RequestState, keys: Sequence[ChunkKey]) -> tuple[int, int]:
        """`(ready, found)`: leading chunks that can be leased, and leading chunks anywhere that are worth loading."""
        ready, found = self._store.count_prefix(keys)
        if found > max(ready, state.computed // self._chunk_size):
            found = max(ready, min(found, self._paying(state, keys, ready, found)))
        return ready, found

    def _paying(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> int:
        """The number of leading chunks before the first tier from which loading takes longer than computing.

        Decided once per request, and again once shared tiers have answered.
        """
        if state.pays is None:
            state.pays = math.inf
            first = state.computed // self._chunk_size
            for tier, (count, nbytes) in self._store.catalog.by_tier(keys[ready:found]).items():
                tokens = self._tokens(count, found, first)
                if tier is not None and not self.cost.worth_loading(tier, tokens, nbytes):
                    state.pays = next(n for n in range(ready, found) if self._store.catalog.tier_of(keys[n]) == tier)
                    if self.cost.wants_probe(tier):
                        self._probe(keys[: min(found, self.max_promoted)])
                    break
        return found if state.pays == math.inf else int(state.pays)

    def _tokens(self, count: int, found: int, first: int) -> int:
        """Tokens that need not be computed if `count` of `found` entries are loaded, the first `first` of which are.

        With recurrent layers all that a hit has: its chunks are of no use without its states, nor these without them.
        """
        return (self._boundaries.chunks(found) - first if self._boundaries.states else count) * self._chunk_size

    # -- promotions ---------------------------------------------------------------------------------------

    def arrived(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """Begin to look up and promote a new request's chunks while it waits in vLLM's queue."""
        if state.options.max_load_tokens == 0:
            return
        state.shared_lookup = self._store.look_up_shared(keys, self._boundaries.states)
        keys = self._boundaries.wanted(keys)
        ready, found = self.match(state, keys)
        if ready < found <= self.max_promoted:
            state.promotion = self.promote(keys[:found], prefetch=True, owner=state.root)
            self._yield(state.promotion)

    def _yield(self, promotion: Promotion) -> None:
        """Let the I/O threads begin. Without this they start when this thread next waits, 4 ms later."""
        reads = any(origin != self._store.primary_name for origin in promotion.origins)
        if reads and not 0 <= self._clock() - self._yielded < _YIELD_EVERY:
            self._yielded = self._clock()
            time.sleep(_YIELD)

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        prefetch: bool = False,
        limit: int | None = None,
        ttl: float | None = None,
        owner: bytes = b"",
    ) -> Promotion:
        """Promote chunks, and measure how fast their tiers deliver them, the time in queues included."""
        started = self._clock()
        promotion = self._store.promote(keys, prefetch=prefetch, limit=limit, ttl=ttl, owner=owner)

        def measure() -> None:
            for tier, (nbytes, at) in promotion.delivered.items():
                if tier != self._store.primary_name:
                    self.cost.observe_load(tier, nbytes, at - started)
                    self._telemetry.promoted(tier, at - started)

        promotion.add_done_callback(measure)
        return promotion

    def _probe(self, keys: Sequence[ChunkKey]) -> None:
        """Measure a slow tier again while the request computes."""
        probe = self.promote(keys, prefetch=True, ttl=self._options.prefetch_deadline)
        probe.add_done_callback(probe.release)

    # -- waits --------------------------------------------------------------------------------------------

    def is_asking(self, state: RequestState, keys: Sequence[ChunkKey]) -> bool:
        """Whether shared tiers have not answered yet, and the request may wait for their answer."""
        shared_lookup = state.shared_lookup
        if shared_lookup is None:
            return False
        now, wanted = self._clock(), state.options.wait_for
        if not shared_lookup.done:
            # All waits for chunks that another server stores count as one, however many lookups they take.
            lookup = partial(self.cost.patience, _SHARED, len(keys) * self._chunk_size, 1)
            return state.patience.lasts(now, partial(self._compute_seconds, wanted) if wanted else lookup, 0)
        self._answered(state, shared_lookup)
        if not wanted:
            state.patience.end(now)
        return False

    def _answered(self, state: RequestState, shared_lookup: SharedLookup) -> None:
        self.cost.observe_load(_SHARED, 1, shared_lookup.seconds)
        # The chunks that were found now may be worth loading.
        state.shared_lookup, state.pays = None, None

    def rests(self, state: RequestState) -> bool:
        """Whether it has looked lately for what another server stores."""
        return state.look_at > 0.0 and self._clock() < state.look_at

    def is_being_stored(self, state: RequestState, keys: Sequence[ChunkKey]) -> bool:
        """Whether another server has still to store the tokens of `wait_for`; if so, asks for them again.

        Later waits have a deadline of their own.
        """
        wanted, now = state.options.wait_for, self._clock()
        # Many requests may wait, for long prompts: each goes on from what it has found, and looks less and less often.
        keys = self._boundaries.entries(keys[: -(-wanted // self._chunk_size)])
        found = state.arrived
        found += self._store.count_prefix(keys[found:])[1]
        missing = found < len(keys) and state.computed < wanted
        waits = missing and state.patience.lasts(now, lambda: self._compute_seconds(wanted), found)
        asked = self._store.look_up_shared(keys[found : found + _LOOK_CHUNKS]) if waits else None
        if asked is not None:
            least, part, most = _LOOK_EVERY
            pause = 0.0 if found > state.arrived else min(max(least, part * state.patience.waited(now)), most)
            state.shared_lookup, state.arrived, state.look_at = asked, found, now + pause
            return True
        if missing:
            message = "lmkv: request %s: of %d tokens that another server stores %d were found within %.1f s"
            logger.warning(message, state.name, wanted, found * self._chunk_size, state.patience.spent)
        state.options.wait_for, state.patience = 0, self.new_patience()
        state.arrived, state.look_at = 0, 0.0
        return False

    def is_promoting(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> bool:
        """Whether chunks `ready` to `found` fit into host memory, and the request may wait on for them."""
        if found > self.max_promoted:
            return False
        promotion = state.promotion
        first = state.computed // self._chunk_size
        if not state.patience.lasts(self._clock(), lambda: self.limit(keys, ready, found, first), ready):
            self._give_up(state, keys, ready, found)
            return False
        if promotion is None or promotion.released or (promotion.done and len(promotion) < found):
            # Promoted again, now as a load: a prefetch may have been cut short by its share of the slots.
            # The old promotion is released afterwards, so that its chunks stay referenced.
            demanded = self.promote(keys[:found])
            state.drop_promotion()
            promotion = state.promotion = demanded
            if demanded.done and demanded.ready <= ready:
                return False
        return not promotion.done

    def _give_up(self, state: RequestState, keys: Sequence[ChunkKey], ready: int, found: int) -> None:
        """Chunks `ready` to `found` have not all come in time: their tiers count as twice as slow as was seen."""
        missing = [
            key
            for key, presence in zip(keys[ready:found], self._store.lookup(keys[ready:found]), strict=True)
            if presence is not Presence.READY
        ]
        for tier, (_, nbytes) in self._store.catalog.by_tier(missing).items() if state.promotion is not None else ():
            if tier is not None:
                self.cost.observe_load(tier, nbytes, 2 * state.patience.spent)
        state.drop_promotion()

    def limit(self, keys: Sequence[ChunkKey], ready: int, found: int, first: int = 0) -> float | None:
        """Seconds that a request may wait for chunks `ready` to `found`; None while no speed is known.

        `first`: how many chunks it has computed.
        """
        tokens = self._tokens(found - ready, found, first)
        tiers = self._store.catalog.by_tier(keys[ready:found])
        limits = [self.cost.patience(tier, tokens, nbytes) for tier, (_, nbytes) in tiers.items()]
        known = [limit for limit in limits if limit is not None]
        return max(known) if known else None

    def _compute_seconds(self, tokens: int) -> float:
        """Seconds that `tokens` take to compute; infinite while no speed is known."""
        seconds = self.cost.patience(None, tokens, 0)
        return math.inf if seconds is None else seconds
