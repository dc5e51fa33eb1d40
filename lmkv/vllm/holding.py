"""Requests that hold KV blocks without computing: their loads run between steps."""

from __future__ import annotations

from collections.abc import Callable

from lmkv.vllm.geometry import Geometry
from lmkv.vllm.tracked import Tracked


class Holding:
    """Who holds blocks that are being filled, or have been, and does not compute yet.

    vLLM cannot take such blocks back. Before it lets another such request in, it sets aside what the others
    still need; but vLLM 0.32 sets too little aside for layers with a window, and two requests that hold can
    wait for each other for ever. Of such models another one is let in only when the free blocks suffice for
    all of them. `free_blocks`: how many vLLM has.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._unreserved = any(group.window is not None for group in geometry.groups)
        self._requests: dict[str, Tracked] = {}
        self.free_blocks: Callable[[], int] = lambda: 0

    def admits(self, tracked: Tracked) -> bool:
        """Whether the request may become one of them now."""
        others = [other for other in self._requests.values() if other is not tracked]
        if not others or not self._unreserved:
            return True
        lengths = [other.request.num_tokens for other in (*others, tracked)]
        return sum(map(self._geometry.most_blocks, lengths)) <= self.free_blocks()

    def begin(self, tracked: Tracked) -> None:
        self._requests[tracked.request_id] = tracked

    def end(self, tracked: Tracked) -> None:
        """It computes, or has lost its blocks, or is gone."""
        self._requests.pop(tracked.request_id, None)
