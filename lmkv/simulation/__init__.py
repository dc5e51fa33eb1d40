"""Replays a trace (recorded requests) over one tier, or over several tiers and engines. `clairvoyant` is the upper
bound.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile

from attrs import define, field, frozen

from lmkv.errors import UsageError
from lmkv.policies import Shadow
from lmkv.policies.base import BRANCHES
from lmkv.protocols import Admission, ChunkKey, Policy, SeesPrompts, TakesHints
from lmkv.simulation.trace import Trace, TraceRequest
from lmkv.store.hints import Hints

ROUTERS = ("prefix", "round-robin", "least-loaded")
_BUSY_SECONDS = 30.0
"""Seconds for which a request counts as load of its engine when the router looks for the least busy engine."""


@frozen
class TierResult:
    """The result of one tier: chunks and tokens found in this tier but not in a faster tier, and chunks written to the
    tier.

    `tokens`: the number of tokens of all prompts.
    """

    name: str
    tokens: int
    hit_tokens: int
    hit_chunks: int
    written_chunks: int

    @property
    def hit_ratio(self) -> float:
        """The fraction of prompt tokens that were found in the tier, 0 to 1."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@define(eq=False)
class Router:
    """Chooses the engine for each request, by `kind`.

    "round-robin": one engine after the other. "least-loaded": the engine with the fewest recent requests. "prefix": the
    engine that last served the longest prefix of the prompt; if no engine has served a prefix, the least loaded engine.
    """

    kind: str
    engines: int
    _last: dict[ChunkKey, int] = field(init=False, factory=dict)
    _turn: int = field(init=False, default=-1)
    _busy: list[list[float]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.kind not in ROUTERS:
            raise UsageError(f"unknown router {self.kind!r}; known are: {', '.join(ROUTERS)}")
        self._busy = [[] for _ in range(self.engines)]

    def choose(self, request: TraceRequest) -> int:
        if self.engines == 1:
            return 0
        chosen = self._by_prefix(request) if self.kind == "prefix" else None
        if chosen is None and self.kind == "round-robin":
            self._turn = chosen = (self._turn + 1) % self.engines
        if chosen is None:
            for number, ends in enumerate(self._busy):
                self._busy[number] = [end for end in ends if end > request.time]
            chosen = min(range(self.engines), key=lambda number: len(self._busy[number]))
        self._busy[chosen].append(request.time + _BUSY_SECONDS)
        if self.kind == "prefix":
            self._last.update(dict.fromkeys(request.keys, chosen))
        return chosen

    def _by_prefix(self, request: TraceRequest) -> int | None:
        """Return the engine that has served the longest prefix of the prompt, or None if no engine has.

        The first chunk does not count, because many prompts share it.
        """
        return next((self._last[key] for key in reversed(request.keys[1:]) if key in self._last), None)


def replay_tiers(
    trace: Trace,
    ram: Sequence[Shadow],
    disk: Shadow | None,
    chunk_bytes: int,
    *,
    router: str = "prefix",
    admission: Admission | None = None,
    progress: Callable[[int], None] | None = None,
    ended: Callable[[int], None] | None = None,
) -> list[TierResult]:
    """Replay a trace over the host memory of several engines and a disk that all engines share.

    Engines write all admitted chunks to the disk, and read the chunks that their memory lacks. `ram`: the memory of
    each engine. `router`: see `Router`. `progress`: a function that is called now and then with the number of replayed
    requests. `ended`: a function that is called after each request with the request's index, for example to give hints
    to the policy.
    """
    found: Counter[str] = Counter()
    choose = Router(router, len(ram)).choose
    size = trace.chunk_tokens
    for number, request in enumerate(trace.requests):
        keys = request.keys
        near = ram[choose(request)].request(keys, chunk_bytes)
        far = near
        if disk is not None:
            far = max(near, disk.leading(keys))
            if isinstance(admission, SeesPrompts):
                admission.prompt(keys, request.tokens)
            wanted = keys if admission is None else _admitted(keys, disk, admission)
            disk.request(wanted, chunk_bytes)
        near_tokens = min(near * size, request.tokens)
        found["ram chunks"] += near
        found["ram"] += near_tokens
        found["disk chunks"] += far - near
        found["disk"] += min(far * size, request.tokens) - near_tokens
        if ended is not None:
            ended(number)
        if progress is not None and not number % 256:
            progress(number)
    written = {"ram": sum(shadow.written for shadow in ram), **({"disk": disk.written} if disk is not None else {})}
    return [
        TierResult(name, trace.tokens, found[name], found[f"{name} chunks"], nbytes // chunk_bytes)
        for name, nbytes in written.items()
    ]


def _admitted(keys: Sequence[ChunkKey], disk: Shadow, admission: Admission) -> Sequence[ChunkKey]:
    """Return the chunks before the first chunk that is not on the disk and that the admission filter refuses."""
    for count, key in enumerate(keys):
        if key not in disk and not admission.admit(key):
            return keys[:count]
    return keys


def sessions_of(trace: Trace) -> list[bytes]:
    """Return the name of each request's session.

    If the trace has no sessions, requests with the same beginning form a session. The name is then the key of a chunk:
    the first chunk of the prompt with fewer than `BRANCHES` different successors in the trace.
    """
    branches: Counter[ChunkKey] = Counter()
    seen: set[ChunkKey] = set()
    for request in trace.requests:
        for parent, key in zip(request.keys, request.keys[1:], strict=False):
            if key not in seen:
                seen.add(key)
                branches[parent] += 1
    return [
        request.session.encode()
        or next((key for key in request.keys if branches[key] < BRANCHES), request.keys[-1] if request.keys else b"")
        for request in trace.requests
    ]


class EndHints:
    """Gives a policy hints about the sessions of requests, and about the ends of sessions.

    `share`: the fraction of sessions with hints, 0 to 1. Raises UsageError if the policy does not accept hints.
    """

    def __init__(self, trace: Trace, policy: Policy, share: float) -> None:
        if not isinstance(policy, TakesHints):
            raise UsageError(f"policy {policy!r} ignores the ends of sessions: leave out --told-ends")
        self._hints = Hints(threading.Lock(), {"": policy}, lambda: 0.0)
        self._requests = trace.requests
        self._sessions = sessions = sessions_of(trace)
        self._last = dict(zip(sessions, range(len(sessions)), strict=True))
        # The same sessions whatever the policy.
        names = list(self._last)
        self._telling = {name for number, name in enumerate(names) if int((number + 1) * share) > int(number * share)}

    def __call__(self, number: int) -> None:
        session = self._sessions[number]
        if session in self._telling:
            ended = self._last[session] == number
            self._hints.session(b"", session.hex(), self._requests[number].keys, ended=ended)


_NEVER = 1 << 60


def clairvoyant(trace: Trace, capacity: int) -> tuple[int, int]:
    """Return `(hit tokens, hit chunks)` of a cache of `capacity` chunks that knows the future.

    After each request, the cache keeps the chunks with the earliest next use. If the next use is the same, earlier
    chunks of the prompt have precedence. No other policy finds more chunks.
    """
    after = _next_uses(trace)
    next_use: dict[ChunkKey, int] = {}
    heap: list[tuple[int, int, ChunkKey]] = []
    hit_tokens = hit_chunks = 0
    size = trace.chunk_tokens
    for request, uses in zip(trace.requests, after, strict=True):
        keys = request.keys
        hit = len(list(takewhile(next_use.__contains__, keys)))
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
    """Return, for each chunk of each request, the index of the next request that uses the chunk, or `_NEVER`."""
    coming: dict[ChunkKey, int] = {}
    found = []
    for number in range(len(trace.requests) - 1, -1, -1):
        keys = trace.requests[number].keys
        found.append([coming.get(key, _NEVER) for key in keys])
        coming.update(dict.fromkeys(keys, number))
    found.reverse()
    return found


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    chunk_bytes: int = 1,
    progress: Callable[[int], None] | None = None,
    ended: Callable[[int], None] | None = None,
) -> TierResult:
    """Replay a trace over one cache of `capacity` bytes. `progress`, `ended`: see `replay_tiers`."""
    return replay_tiers(trace, [Shadow(policy, capacity)], None, chunk_bytes, progress=progress, ended=ended)[0]
