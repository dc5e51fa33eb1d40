"""Decides by measured times whether to load or to compute, how long to wait, and whether to load within a step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from attrs import define, field

from lmkv.protocols import ChunkKey, Presence
from lmkv.store.promotion import Promotion
from lmkv.vllm.scheduler.context import PlanContext, Planner

logger = logging.getLogger("lmkv.vllm")

_SMOOTHING = 0.3
_DECAY = 0.98
MIN_STEP_TOKENS = 64
"""Smallest number of tokens of a step from which the model's speed is measured."""
_PROBE_EVERY = 16
"""One of this many skipped loads of a tier is run anyway, while its request computes, to measure the tier again."""
_USUAL = 4.0
"""A load is abandoned if it takes longer than this multiple of its expected time."""
_STAKE = 0.25
"""If loading is expected to be faster than computing, a request may wait for at least this share of the computing
time.
"""


@define
class LoadTime:
    """Estimates how long a tier takes for a load: a delay, plus a time per byte.

    Delay and time are fitted to recent loads by least squares; older loads count less. If all loads have the same size,
    the delay is 0.
    """

    nbytes: float = 0.0
    seconds: float = 0.0
    """The means of the loads' bytes (`nbytes`) and seconds (`seconds`)."""
    _variance: float = 0.0
    _covariance: float = 0.0

    def note_load(self, nbytes: int, seconds: float) -> None:
        """Record that a load of `nbytes` bytes took `seconds` seconds."""
        share = _SMOOTHING if self.seconds else 1.0
        more, longer = nbytes - self.nbytes, seconds - self.seconds
        self.nbytes += share * more
        self.seconds += share * longer
        self._variance = (1 - share) * (self._variance + share * more * more)
        self._covariance = (1 - share) * (self._covariance + share * more * longer)

    def of(self, nbytes: int) -> float:
        """Return the expected seconds of a load of `nbytes` bytes."""
        most = self.seconds / self.nbytes
        per_byte = self._covariance / self._variance if self._variance else most
        # Neither faster with more bytes, nor in less than no time.
        return self.seconds + min(max(per_byte, 0.0), most) * (nbytes - self.nbytes)


@define
class LoadCost:
    """Measures how fast prefill and the lower tiers are, and decides whether loading is worth its time.

    The fastest recent step determines the prefill speed, because the time of a step may include waits of the engine.
    `prefill_speed`: tokens per second. `loads`: measured times of loads, by tier. `skipped`: number of loads that were
    not worth their time, by tier.
    """

    enabled: bool = True
    prefill_speed: float = 0.0
    skipped: Counter[str] = field(factory=Counter)
    loads: dict[str, LoadTime] = field(factory=dict)

    def note_step(self, tokens: int, seconds: float) -> None:
        """Record that a step computed `tokens` tokens in `seconds` seconds."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.prefill_speed = max(self.prefill_speed * _DECAY, tokens / seconds)

    def note_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Record that a tier took `seconds` seconds for `nbytes` bytes, including the wait in its queue."""
        if nbytes and seconds > 0:
            self.loads.setdefault(tier, LoadTime()).note_load(nbytes, seconds)

    def worth_loading(self, tier: str, tokens: int, nbytes: int) -> bool:
        """Return whether loading `nbytes` bytes is probably faster than computing `tokens` tokens. True without
        measurements.
        """
        known = self.loads.get(tier)
        if not self.enabled or known is None or not self.prefill_speed:
            return True
        load, compute = known.of(nbytes), tokens / self.prefill_speed
        if load <= compute:
            return True
        self.skipped[tier] += 1
        logger.debug(
            "lmkv: %d tokens from %s are not loaded: loading takes %.3f s, computing %.3f s",
            tokens,
            tier,
            load,
            compute,
        )
        return False

    def wants_probe(self, tier: str) -> bool:
        """Return whether to measure the tier with the load that was just rejected as too slow. If so, the load runs
        only as a measurement, while the model computes the request.
        """
        return self.skipped[tier] % _PROBE_EVERY == 0

    def patience(self, tier: str | None, tokens: int, nbytes: int) -> float | None:
        """Return how many seconds to wait for a load of `tokens` tokens before computing them instead: at most the time
        to compute them.

        Return infinity if `load_or_recompute` is off, and None until a prefill was measured. `tier`: the tier to load
        from; None if unknown.
        """
        if not self.enabled:
            return math.inf
        if not self.prefill_speed:
            return None
        compute = tokens / self.prefill_speed
        known = self.loads.get(tier) if tier is not None else None
        return compute if known is None else min(compute, max(_USUAL * known.of(nbytes), _STAKE * compute))


MAX_STALL = 0.005
"""Seconds by which a synchronous load may delay the other requests of the batch."""


@define
class LoadMode:
    """Decides whether a load is synchronous (within a step) or asynchronous (between steps).

    `concurrent`: whether the device can copy while it computes, as GPUs can. Otherwise asynchronous loads gain nothing.
    `computing`: number of requests in the last step, which a synchronous load in the next step would delay.
    """

    mode: Literal["auto", "sync", "async"] = "auto"
    concurrent: bool = False
    computing: int = 0
    _speed: float = 0.0
    """Bytes per second of copies from host memory to the device, on all ranks together."""

    def note_load(self, nbytes: int, seconds: float) -> None:
        """Record that a load of `nbytes` bytes took `seconds` seconds."""
        if nbytes and seconds > 0:
            speed = nbytes / seconds
            self._speed += (speed - self._speed) * (_SMOOTHING if self._speed else 1)

    def between_steps(self, nbytes: int) -> bool:
        """Return whether to load `nbytes` bytes asynchronously. With "auto", return False until a speed was
        measured.
        """
        if self.mode != "auto":
            return self.mode == "async"
        stalls = bool(self._speed) and nbytes / self._speed > MAX_STALL
        return self.concurrent and self.computing > 0 and stalls


class Timing(Planner):
    """Decides about loads by the measured times of loads and steps.

    `cost`: the speeds of the model and of each tier. `mode`: decides whether a load is synchronous.
    """

    def __init__(self, context: PlanContext) -> None:
        super().__init__(context)
        self.cost = LoadCost(enabled=context.options.load_or_recompute)
        self.mode = LoadMode(context.options.load_mode, concurrent=context.options.concurrent_copies)
        self.max_promoted = max(1, context.store.slab.num_slots // 2)
        """Largest number of chunks of one request that may be promoted at the same time."""

    def worth_loading(self, keys: Sequence[ChunkKey], ready: int, found: int, computed: int) -> float:
        """Return how many of the first chunks are worth loading: those before the first chunk in a tier that is too
        slow.

        Return infinity if no tier is too slow. `ready`: number of chunks from `keys[0]` on in host memory. `found`:
        number of chunks from `keys[0]` on in any tier. `computed`: number of chunks of vLLM's own hit.
        """
        for tier, (count, nbytes) in self._store.catalog.by_tier(keys[ready:found]).items():
            tokens = self._tokens(count, found, computed)
            if tier is not None and not self.cost.worth_loading(tier, tokens, nbytes):
                worth = next(n for n in range(ready, found) if self._store.catalog.tier_of(keys[n]) == tier)
                if self.cost.wants_probe(tier):
                    self._probe(keys[: min(found, self.max_promoted)])
                return worth
        return math.inf

    def _tokens(self, count: int, found: int, computed: int) -> int:
        """Return how many tokens vLLM need not compute after a load of `count` of the `found` entries. vLLM already has
        the first `computed` chunks.

        With recurrent layers, all tokens of the hit count, because chunks and states are useless without each other.
        """
        chunks = self._boundaries.without_states(found) - computed if self._boundaries.states else count
        return chunks * self._chunk_size

    def _probe(self, keys: Sequence[ChunkKey]) -> None:
        """Measure a slow tier again: load `keys` from it while the request computes."""
        probe = self.promote(keys, prefetch=True, ttl=self._options.prefetch_deadline)
        probe.add_done_callback(probe.release)

    def promote(
        self,
        keys: Sequence[ChunkKey],
        *,
        prefetch: bool = False,
        limit: int | None = None,
        ttl: float | None = None,
        owner: bytes = b"",
    ) -> Promotion:
        """Promote chunks, and measure how long their tiers take, including waits in queues.

        The arguments and the result are those of `TieredStore.promote`.
        """
        started = self._clock()
        promotion = self._store.promote(keys, prefetch=prefetch, limit=limit, ttl=ttl, owner=owner)

        def measure() -> None:
            for tier, (nbytes, at) in promotion.delivered.items():
                if tier != self._store.primary_name:
                    self.cost.note_load(tier, nbytes, at - started)
                    self._telemetry.promoted(tier, at - started)

        promotion.add_done_callback(measure)
        return promotion

    def late(self, keys: Sequence[ChunkKey], seconds: float) -> None:
        """Record that a wait of `seconds` seconds for these chunks was too short. For each tier with chunks that have
        not arrived, this counts as a load that took twice as long.
        """
        presences = self._store.catalog.lookup(keys)
        missing = [key for key, presence in zip(keys, presences, strict=True) if presence is not Presence.READY]
        for tier, (_, nbytes) in self._store.catalog.by_tier(missing).items():
            if tier is not None:
                self.cost.note_load(tier, nbytes, 2 * seconds)

    def limit(self, keys: Sequence[ChunkKey], ready: int, found: int, computed: int = 0) -> float | None:
        """Return how many seconds a request may wait until its first `found` chunks are in host memory. Return None if
        no speed is known.

        `ready`: number of chunks from `keys[0]` on that are in host memory already. `computed`: number of chunks of
        vLLM's own hit.
        """
        tokens = self._tokens(found - ready, found, computed)
        tiers = self._store.catalog.by_tier(keys[ready:found])
        limits = [self.cost.patience(tier, tokens, nbytes) for tier, (_, nbytes) in tiers.items()]
        return max((limit for limit in limits if limit is not None), default=None)

    def compute_seconds(self, tokens: int) -> float:
        """Return the estimated seconds to compute `tokens` tokens, or infinity if no speed is known."""
        seconds = self.cost.patience(None, tokens, 0)
        return math.inf if seconds is None else seconds
