"""`History`: samples of the counters over the last hour."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from lmkv.errors import LmkvError

_OF_TIER = ("name", "used_bytes", "chunks", "hits", "evictions")


class History:
    """Samples of `stats`, one each `interval` seconds, the last `size` of them."""

    def __init__(self, stats: Callable[[], Awaitable[dict[str, Any]]], interval: float = 10.0, size: int = 361) -> None:
        self._stats = stats
        self._interval = interval
        self._samples: deque[dict[str, Any]] = deque(maxlen=size)

    async def run(self) -> None:
        while True:
            # No engine answers, not even this one, because it is about to end.
            with suppress(LmkvError):
                stats = await self._stats()
                # A total that lacks an engine would look like a drop.
                if not any("unavailable" in engine for engine in stats.get("engines", ())):
                    self._samples.append(_sample(stats))
            await asyncio.sleep(self._interval)

    def snapshot(self) -> dict[str, Any]:
        return {"interval": self._interval, "samples": list(self._samples)}


def _sample(stats: dict[str, Any]) -> dict[str, Any]:
    tiers = [{name: tier[name] for name in _OF_TIER} for tier in stats["tiers"]]
    return {**{name: stats[name] for name in ("time", "lookup_tokens", "hit_tokens")}, "tiers": tiers}
