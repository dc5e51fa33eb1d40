"""`History`: samples of the counters over the last hour."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from lmkv.errors import LmkvError, safe_repr

logger = logging.getLogger("lmkv.agent")

_OF_TIER = ("name", "used_bytes", "chunks", "hits", "evictions")


class History:
    """Samples of `stats`, one each `interval` seconds, the last `size` of them."""

    def __init__(self, stats: Callable[[], Awaitable[dict[str, Any]]], interval: float = 10.0, size: int = 361) -> None:
        self._stats = stats
        self._interval = interval
        self._samples: deque[dict[str, Any]] = deque(maxlen=size)
        self._failed = False

    async def run(self) -> None:
        while True:
            try:
                stats = await self._stats()
                # A total that lacks an engine would look like a drop.
                if not any("unavailable" in engine for engine in stats.get("engines", ())):
                    self._samples.append(_sample(stats))
            except LmkvError:
                # No engine answers, not even this one, because it is about to end.
                pass
            except Exception as error:
                if not self._failed:
                    logger.warning("lmkv: the history of the agent API lacks samples: %s", safe_repr(error))
                self._failed = True
            await asyncio.sleep(self._interval)

    def snapshot(self) -> dict[str, Any]:
        return {"interval": self._interval, "samples": list(self._samples)}


def _sample(stats: dict[str, Any]) -> dict[str, Any]:
    tiers = [{name: tier[name] for name in _OF_TIER} for tier in stats["tiers"]]
    return {**{name: stats[name] for name in ("time", "lookup_tokens", "hit_tokens")}, "tiers": tiers}
