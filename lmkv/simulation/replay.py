"""Replays a trace over one tier: the policy that is shipped decides what is kept."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from lmkv.policies import Shadow
from lmkv.protocols import Policy
from lmkv.simulation.trace import Trace


@frozen
class Replayed:
    """The result of a replay. `tokens`: those of all prompts."""

    tokens: int
    hit_tokens: int
    hit_chunks: int
    written_chunks: int = 0

    @property
    def hit_ratio(self) -> float:
        """Tokens that were found, of all tokens of prompts."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    chunk_bytes: int = 1,
    progress: Callable[[int], None] | None = None,
    ended: Callable[[int], None] | None = None,
) -> Replayed:
    """Replay over a cache of `capacity` bytes.

    `progress`: called with the number of requests, now and then. `ended`: called with the number of each request when
    it has ended: the moment to give the policy hints.
    """
    tier = Shadow(policy, capacity)
    request_tier, size = tier.request, trace.chunk_tokens
    hit_tokens = hit_chunks = 0
    for number, request in enumerate(trace.requests):
        hit = request_tier(request.keys, chunk_bytes)
        hit_chunks += hit
        hit_tokens += min(hit * size, request.tokens)
        if ended is not None:
            ended(number)
        if progress is not None and not number % 256:
            progress(number)
    return Replayed(trace.tokens, hit_tokens, hit_chunks, tier.written // chunk_bytes)
