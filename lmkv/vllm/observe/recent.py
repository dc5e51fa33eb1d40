"""`RecentRequests`: the hits and misses of the last requests, for the agent API."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

from lmkv.protocols import Clock
from lmkv.vllm.requests.request import RequestState

_WHOLE = 4096
"""Characters of an id that is kept as it is."""


class RecentRequests:
    """Reports of the last `size` requests, without tokens, and the tokens that all of them looked up and found.

    Noted on the scheduling thread, read on any. A report is replaced, never changed: readers may keep it.
    """

    def __init__(self, size: int = 200, clock: Clock = time.time) -> None:
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, dict[str, Any]] = {}
        self._lookup_tokens = self._hit_tokens = 0

    def scheduled(self, state: RequestState) -> None:
        """Report a request whose blocks are allocated, so that its hit is known; called again after a preemption."""
        key = _key(state.request_id)
        report = {
            "request": state.name,
            "time": self._clock(),
            "running": True,
            "tokens": state.request.num_tokens,
            "vllm_tokens": state.computed,
            **_report(state),
        }
        with self._lock:
            known = self._reports.get(key)
            self._reports[key] = report if known is None else report | {"time": known["time"]}
            if known is None:
                self._hit_tokens += state.hit_tokens
                self._lookup_tokens += state.hit_tokens + (0 if state.miss is None else state.miss.looked_up)
            if len(self._reports) > self._size:
                del self._reports[next(iter(self._reports))]

    def finished(self, state: RequestState) -> None:
        """Complete the report of a request that has ended: now it is known how its loads went."""
        key = _key(state.request_id)
        with self._lock:
            known = self._reports.get(key)
            if known is not None:
                self._reports[key] = known | _report(state) | {"running": False}

    def snapshot(self) -> dict[str, Any]:
        """`requests`, newest first, their `ids`, and the tokens of all since the start: `lookup_tokens` and so on."""
        with self._lock:
            newest, ids = list(reversed(self._reports.values())), list(reversed(self._reports))
            totals = {"lookup_tokens": self._lookup_tokens, "hit_tokens": self._hit_tokens}
        return {**totals, "requests": newest, "ids": ids}


def _key(request_id: str) -> str:
    """The whole id, of which reports have what people can read; one of any length as its beginning and a digest."""
    if len(request_id) <= _WHOLE:
        return request_id
    return request_id[:_WHOLE] + hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()


def _report(state: RequestState) -> dict[str, Any]:
    """The request's own report, with only those tiers that something was loaded from."""
    sources = state.sources if state.hit_tokens else {}
    return state.report() | {"sources": {tier: tokens for tier, tokens in sources.items() if tokens}}
