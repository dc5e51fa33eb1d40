"""Replays a trace over one tier: the policy that is shipped decides what is kept."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from lmkv.protocols import Policy
from lmkv.simulation.trace import Trace


@frozen
class Replayed:
    """What a replay found. `tokens`: of all prompts."""

    tokens: int
    hit_tokens: int
    hit_chunks: int
    written_chunks: int = 0

    @property
    def hit_ratio(self) -> float:
        """Tokens that were found, of all tokens of prompts."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(
    trace: Trace, policy: Policy, capacity: int, chunk_bytes: int = 1, progress: Callable[[int], None] | None = None
) -> Replayed:
    """Replay over a cache of `capacity` bytes. `progress`: called with the number of requests, now and then."""
    used = hit_tokens = hit_chunks = written = 0
    resident: set[bytes] = set()
    size, insert, touch, evict = trace.chunk_tokens, policy.insert, policy.touch, policy.evict
    for number, request in enumerate(trace.requests):
        keys = request.keys
        hit = 0
        for key in keys:
            if key not in resident:
                break
            hit += 1
        hit_chunks += hit
        hit_tokens += min(hit * size, request.tokens)
        missing = [key for key in keys[hit:] if key not in resident]
        if missing:
            over = used + len(missing) * chunk_bytes - capacity
            if over > 0:
                chain = set(keys)
                victims = evict(over, chain)
                if victims is None:
                    # As many as fit beside those of the same chain that are here.
                    room = capacity // chunk_bytes - (len(keys) - len(missing))
                    missing = missing[: max(room, 0)]
                    over = used + len(missing) * chunk_bytes - capacity
                    victims = evict(over, chain) if over > 0 else []
                resident.difference_update(victims or ())
                used -= len(victims or ()) * chunk_bytes
            if missing:
                parents = dict(zip(keys[1:], keys, strict=False))
                for key in reversed(missing):
                    insert(key, chunk_bytes, parents.get(key, b""))
                resident.update(missing)
                used += len(missing) * chunk_bytes
                written += len(missing)
        touch(keys)
        if progress is not None and not number % 256:
            progress(number)
    return Replayed(trace.tokens, hit_tokens, hit_chunks, written)
