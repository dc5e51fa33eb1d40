"""When a load happens: within the step that reads it, or between steps while others compute."""

from __future__ import annotations

from typing import Literal

from attrs import define

MAX_STALL = 0.005
"""Seconds: a load within a step delays everybody in the batch by as much as it takes."""

_SMOOTHING = 0.3


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
