"""Load or recompute: whether a tier is faster than the model, measured on both as they are."""

from __future__ import annotations

import logging
from typing import Literal

from attrs import define, field

logger = logging.getLogger("lmkv.vllm")

_SMOOTHING = 0.3
_DECAY = 0.98
_MIN_STEP_TOKENS = 64
_RETRY_EVERY = 16
"""Of the loads that look too slow, one in so many is done all the same, to see whether that still holds."""


@define
class LoadCost:
    """Speeds of prefill and of each lower tier, and the decisions that follow.

    A step's duration includes whatever the engine waited for, so single samples only understate the model:
    the fastest of the recent ones counts. `skipped`: loads that were not worth it.
    """

    enabled: bool = True
    prefill_speed: float = 0.0
    """Tokens a second."""
    skipped: int = 0
    _bandwidths: dict[str, float] = field(factory=dict)

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A step of the model computed so many tokens in so much time."""
        if tokens >= _MIN_STEP_TOKENS and seconds > 0:
            self.prefill_speed = max(self.prefill_speed * _DECAY, tokens / seconds)

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """A tier delivered so many bytes, queueing included."""
        if nbytes and seconds > 0:
            speed = nbytes / seconds
            known = self._bandwidths.get(tier, speed)
            self._bandwidths[tier] = known + _SMOOTHING * (speed - known)

    def bandwidth(self, tier: str) -> float | None:
        """Bytes a second that the tier delivers, None before it ever did."""
        return self._bandwidths.get(tier)

    def worth_loading(self, tier: str, tokens: int, nbytes: int) -> bool:
        """Whether loading is expected to be faster than computing; unmeasured tiers get their chance."""
        bandwidth = self._bandwidths.get(tier)
        if not self.enabled or bandwidth is None or not self.prefill_speed:
            return True
        load, compute = nbytes / bandwidth, tokens / self.prefill_speed
        if load <= compute:
            return True
        self.skipped += 1
        logger.debug(
            "lmkv: %d tokens from %s would take %.3f s, computing them %.3f s: not loaded",
            tokens,
            tier,
            load,
            compute,
        )
        return self.skipped % _RETRY_EVERY == 0


MAX_STALL = 0.005
"""Seconds: a load within a step delays everybody in the batch by as much as it takes."""


@define
class LoadMode:
    """`concurrent`: the device can copy while it computes; a CPU cannot, and gains nothing between steps.

    `computing`: requests of the last step, which a load within the next one would delay.
    """

    mode: Literal["auto", "sync", "async"] = "auto"
    concurrent: bool = False
    computing: int = 0
    _speed: float = 0.0
    """Bytes a second from host memory, over all ranks."""

    def observe(self, nbytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        if nbytes and seconds > 0:
            speed = nbytes / seconds
            self._speed += (speed - self._speed) * (_SMOOTHING if self._speed else 1)

    def between_steps(self, nbytes: int) -> bool:
        """Whether to load so many bytes between steps; within one until speeds are known."""
        if self.mode != "auto":
            return self.mode == "async"
        stalls = bool(self._speed) and nbytes / self._speed > MAX_STALL
        return self.concurrent and self.computing > 0 and stalls
