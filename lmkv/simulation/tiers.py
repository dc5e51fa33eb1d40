"""Replays over several tiers and engines: host memory of each engine, and a disk that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from lmkv.errors import UsageError
from lmkv.policies import Shadow
from lmkv.protocols import Admission, ChunkKey, SeesPrompts
from lmkv.simulation.trace import Trace, TraceRequest

ROUTERS = ("prefix", "round-robin", "least-loaded")
_BUSY_SECONDS = 30.0
"""How long a request counts as load of its engine, for the least-loaded router."""


@frozen
class TierResult:
    """Leading chunks and tokens that were found in this tier and not above, and chunks that were written to it."""

    name: str
    hit_tokens: int
    hit_chunks: int
    written_chunks: int


@define(eq=False)
class Router:
    """Chooses the engine of each request: the one that served the longest prefix, the next, or the least busy one."""

    kind: str
    engines: int
    _last: dict[ChunkKey, int] = field(init=False, factory=dict)
    _turn: int = field(init=False, default=-1)
    _busy: list[list[float]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.kind not in ROUTERS:
            raise UsageError(f"unknown router {self.kind!r}; there are: {', '.join(ROUTERS)}")
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
        """The engine that has served the deepest chunk. The first chunk, which many prompts share, does not count."""
        served = [self._last[key] for key in request.keys[1:] if key in self._last]
        return served[-1] if served else None


def replay_tiers(
    trace: Trace,
    ram: Sequence[Shadow],
    disk: Shadow | None,
    chunk_bytes: int,
    *,
    router: str = "prefix",
    admission: Admission | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[TierResult]:
    """Replay over the RAM of one engine or more and a disk that all write through to, and read on a miss in RAM."""
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
        if progress is not None and not number % 256:
            progress(number)
    written = sum(shadow.written for shadow in ram) // chunk_bytes
    results = [TierResult("ram", found["ram"], found["ram chunks"], written)]
    if disk is not None:
        results.append(TierResult("disk", found["disk"], found["disk chunks"], disk.written // chunk_bytes))
    return results


def _admitted(keys: Sequence[ChunkKey], disk: Shadow, admission: Admission) -> Sequence[ChunkKey]:
    """The chain up to the first chunk that the disk lacks and does not take."""
    for count, key in enumerate(keys):
        if key not in disk and not admission.admit(key):
            return keys[:count]
    return keys
