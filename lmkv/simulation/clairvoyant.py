"""The optimum that no policy beats: Belady's rule under the prefix rule."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from lmkv.protocols import ChunkKey
from lmkv.simulation.trace import Trace

_NEVER = 1 << 60


def clairvoyant(trace: Trace, capacity: int) -> tuple[int, int]:
    """`(hit tokens, hit chunks)` of a cache of `capacity` chunks that knows the future.

    After each request it keeps those chunks, of the request and of before, whose next use comes first; of those with
    the same next use the ones nearer to the head. So the kept chunks are closed under prefixes, and no choice of
    victims finds more chunks.
    """
    after = _next_uses(trace)
    next_use: dict[ChunkKey, int] = {}
    heap: list[tuple[int, int, ChunkKey]] = []
    hit_tokens = hit_chunks = 0
    size = trace.chunk_tokens
    for request, uses in zip(trace.requests, after, strict=True):
        keys = request.keys
        hit = 0
        for key in keys:
            if key not in next_use:
                break
            hit += 1
        hit_chunks += hit
        hit_tokens += min(hit * size, request.tokens)
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            if use == _NEVER:
                next_use.pop(key, None)
            else:
                next_use[key] = use
                heappush(heap, (-use, -depth, key))
        if len(heap) > 2 * len(next_use) + len(keys):
            # Without the uses that are over, which would take more memory than all else.
            heap = [each for each in heap if next_use.get(each[2]) == -each[0]]
            heapify(heap)
        while len(next_use) > capacity:
            use, _, key = heappop(heap)
            if next_use.get(key) == -use:
                del next_use[key]
    return hit_tokens, hit_chunks


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each chunk of each request, the number of the next request that uses it."""
    coming: dict[ChunkKey, int] = {}
    found = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].keys
        found.append([coming.get(key, _NEVER) for key in keys])
        coming.update(dict.fromkeys(keys, number))
    found.reverse()
    return found
