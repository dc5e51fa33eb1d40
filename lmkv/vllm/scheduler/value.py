"""`MemoryValue`: estimates how many hits larger or smaller tiers would give, by replaying a sample of requests."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attrs import define, field
from cachetools import LRUCache

from lmkv.errors import safe_repr
from lmkv.policies import Shadow, like
from lmkv.policies.base import BRANCHES, DEPTH
from lmkv.protocols import ChunkKey, Clock
from lmkv.store.guards import attempt
from lmkv.store.tiered import TieredStore

logger = logging.getLogger("lmkv.vllm")

SIZES: Final = (0.5, 1.0, 2.0, 4.0)
"""The sizes to estimate for each tier, as multiples of the tier's present size."""
_NOW: Final = SIZES.index(1.0)
_SAMPLED_CHUNKS: Final = 4096
_MAX_SHARE: Final = 0.001
"""Largest share of time to spend on estimates. If estimates take more time, fewer requests are sampled."""
_FEWEST_CHUNKS: Final = 512
"""Smallest number of chunks in a shadow (a simulated tier) that gives a useful estimate."""
_BACKLOG: Final = 8
"""For this many waiting requests, a step replays one more request."""
_SETTLE_SECONDS: Final = 5.0
KEPT: Final = 0.999
"""Factor that reduces the weight of all earlier requests with each sampled request."""
_DAY: Final = 86_400


@define(eq=False)
class _Tier:
    name: str
    nbytes: int
    shadows: list[Shadow]
    found: list[float] = field(factory=lambda: [0.0] * len(SIZES))
    """Number of tokens that each size of this tier would have found, with all other tiers unchanged."""
    without: float = 0.0
    """Number of tokens that the other tiers would have found without this tier."""


class MemoryValue:
    """Replays finished requests in shadows (simulated tiers), and reports the estimated hits. Never waits.

    Only the scheduling thread calls the methods, except `report`. In each step, one shadow replays one finished
    request, or a few if many wait, so that no call takes long. A sample of requests is replayed. Conversations with a
    common beginning are in the sample together or not at all, because they share hits.
    """

    def __init__(self, store: TieredStore, chunk_tokens: int, clock: Clock = time.perf_counter) -> None:
        self._store = store
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._children: LRUCache[ChunkKey, int] = LRUCache(1 << 16)
        self._known: LRUCache[ChunkKey, None] = LRUCache(1 << 16)
        self._replays = deque[Iterator[None]]()
        self._started = clock()
        self._spent = self._tokens = 0.0
        self._begin(min(1.0, _SAMPLED_CHUNKS / max(1, store.slab.num_slots)))

    def _begin(self, rate: float) -> None:
        self._rate, self._sampled_tokens, self._sampled = rate, 0.0, 0
        self._replays.clear()
        self._tiers = [
            _Tier(name, nbytes, [Shadow(like(policy), rate * nbytes * size) for size in SIZES])
            for name, nbytes, policy in self._store.catalog.sizes()
        ]

    def finished(self, keys: Sequence[ChunkKey], tokens: int) -> None:
        """Note that a request with a prompt of `tokens` tokens has ended. `keys`: keys of the whole chunks that it
        used, in order.
        """
        if not keys:
            return
        started = self._clock()
        self._tokens += tokens
        own = self._part(keys)
        if int.from_bytes(keys[own][:4]) < self._rate * (1 << 32):
            self._replays.append(self._replay(keys, own, tokens))
        self._spend(started)

    def step(self) -> bool:
        """Replay one request in one shadow, or a few if many wait. Return whether there is more to replay. If a policy
        raises, drop the replayed request.
        """
        if self._replays:
            started = self._clock()
            with self._lock:
                for _ in range(1 + len(self._replays) // _BACKLOG):
                    if not attempt(lambda: next(self._replays[0], self) is None, self._failed):
                        self._replays.popleft()
            self._spend(started)
        return bool(self._replays)

    def _failed(self, error: Exception) -> bool:
        logger.warning("lmkv: the estimate of hits with more memory leaves out a request: %s", safe_repr(error))
        return False

    def _spend(self, started: float) -> None:
        """Count the time since `started` as spent on estimates. If the share of such time is too large, sample fewer
        requests.
        """
        now = self._clock()
        self._spent += now - started
        too_long = now - self._started > _SETTLE_SECONDS and self._spent > _MAX_SHARE * (now - self._started)
        if too_long and self._rate * self._store.slab.num_slots > _FEWEST_CHUNKS:
            with self._lock:
                self._begin(self._rate / 2)
            self._spent, self._started, self._tokens = 0.0, now, 0.0

    def _part(self, keys: Sequence[ChunkKey]) -> int:
        """Return the index of the first chunk that few conversations share."""
        parent = None
        for key in keys[:DEPTH]:
            if key not in self._known:
                self._known[key] = None
                if parent is not None:
                    self._children[parent] = self._children.get(parent, 0) + 1
            parent = key
        shared = range(min(len(keys) - 1, DEPTH), 0, -1)
        return next((own for own in shared if self._children.get(keys[own - 1], 0) >= BRANCHES), 0)

    def _replay(self, keys: Sequence[ChunkKey], own: int, tokens: int) -> Iterator[None]:
        """Replay a request in one shadow at each `next`, and then count the request's hits."""
        # Chunks that many share are in every tier of any size, and would fill a sampled one.
        sampled = keys[own:] if self._rate < 1 else keys
        shared = len(keys) - len(sampled)
        size = self._store.slab.slot_bytes
        hits: list[list[int]] = [[] for _ in self._tiers]
        for found, tier in zip(hits, self._tiers, strict=True):
            for shadow in tier.shadows:
                found.append(shadow.request(sampled, size))
                yield
        self._sampled_tokens = self._sampled_tokens * KEPT + tokens
        self._sampled += 1
        for place, tier in enumerate(self._tiers):
            others = [each[_NOW] + shared for number, each in enumerate(hits) if number != place]
            beside = max(others, default=0)
            tier.without = tier.without * KEPT + min(beside * self._chunk_tokens, tokens)
            for number, hit in enumerate(hits[place]):
                counted = min(max(shared + hit, beside) * self._chunk_tokens, tokens)
                tier.found[number] = tier.found[number] * KEPT + counted

    def report(self, prefill_speed: float = 0.0) -> dict[str, Any]:
        """Return the estimates for each size of each tier. `prefill_speed`: tokens per second; 0 if unknown.

        In the result, `saved_seconds` is the prefill time per day that a size saves, compared with the present size.
        """
        with self._lock:
            a_day = self._tokens / max(self._clock() - self._started, 1e-9) * _DAY
            whole = self._sampled_tokens

            def point(size: float, tier: _Tier, found: float) -> dict[str, Any]:
                ratio, more = (tokens / whole if whole else 0.0 for tokens in (found, found - tier.found[_NOW]))
                seconds = round(more * a_day / prefill_speed, 1) if prefill_speed else None
                return {"bytes": int(size * tier.nbytes), "hit_ratio": round(ratio, 5), "saved_seconds": seconds}

            tiers = [
                {
                    "name": tier.name,
                    "bytes": tier.nbytes,
                    "points": [point(size, tier, found) for size, found in zip(SIZES, tier.found, strict=True)],
                    "without": point(0, tier, tier.without),
                }
                for tier in self._tiers
            ]
            return {"sampled_requests": self._sampled, "sampled_share": self._rate, "tiers": tiers}
