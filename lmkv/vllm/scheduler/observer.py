"""`SchedulerObserver`: is notified of all events of the scheduler side, and makes metrics, reports and KV events."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from typing import Any

from cachetools import LRUCache

from lmkv.chunks.hashing import KEY_BYTES, token_bytes
from lmkv.protocols import ChunkKey, Clock, Presence
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import JobReport
from lmkv.vllm.plan.request import Miss, Request
from lmkv.vllm.scheduler.events import EventRecorder
from lmkv.vllm.scheduler.telemetry import Telemetry
from lmkv.vllm.scheduler.value import MemoryValue

logger = logging.getLogger("lmkv.vllm")

_WHOLE = 4096
"""Largest number of characters of a request id that is kept unchanged."""


_REMEMBERED = 100_000
"""Number of evicted chunks per tier, and of first chunks of prompts, to remember."""

_LAST_BOUNDARIES = 8
"""At how many chunk ends to explain missing states. The number is small, because every lookup explains its miss."""

_SHORT = 16
"""Number of bytes of a chunk key to remember."""


_PRESENT = {Presence.READY: "too_short", Presence.PENDING: "not_ready", Presence.LOWER: "not_promoted"}


class EvictionLog:
    """Remembers the last `size` chunks that each tier has removed, with the time of removal. Observes the store's
    tiers.
    """

    def __init__(self, clock: Clock, size: int = _REMEMBERED) -> None:
        self._clock = clock
        self._size = size
        # Plain floats, because the garbage collector would visit as many tuples again and again.
        self._removed: dict[str, OrderedDict[bytes, float]] = {}

    def stored(self, tier: str, key: ChunkKey) -> None:
        for removed in list(self._removed.values()):
            removed.pop(key[:_SHORT], None)

    def removed(self, tier: str, key: ChunkKey) -> None:
        if len(key) > KEY_BYTES:
            return
        removed = self._removed.get(tier)
        if removed is None:
            removed = self._removed[tier] = OrderedDict()
        short = key[:_SHORT]
        # In two steps that another thread's `forget` may come between.
        removed.pop(short, None)
        removed[short] = self._clock()
        if len(removed) > self._size:
            removed.popitem(last=False)

    def find(self, key: ChunkKey) -> tuple[str, float] | None:
        """Return `(tier, seconds)`: the tier that last removed the chunk, and the seconds since then. Return None if
        unknown.
        """
        times = [(removed.get(key[:_SHORT]), tier) for tier, removed in list(self._removed.items())]
        found = max(((when, tier) for when, tier in times if when is not None), default=None)
        return None if found is None else (found[1], self._clock() - found[0])

    def forget(self, keys: Sequence[ChunkKey] | None = None) -> None:
        """Forget the removals of `keys`, or all removals if `keys` is None. Call this for chunks that were deleted on
        request, not evicted. Thread-safe.
        """
        if keys is None:
            self._removed = {}
        for removed in list(self._removed.values()):
            for key in keys or ():
                removed.pop(key[:_SHORT], None)


class Explainer:
    """Finds the reasons for misses. Only the scheduling thread calls its methods."""

    def __init__(self, store: TieredStore, chunk_size: int, clock: Clock) -> None:
        self._store = store
        self._chunk_size = chunk_size
        self.evictions = EvictionLog(clock)
        store.catalog.add_observer(self.evictions)
        self._roots: LRUCache[int, int] = LRUCache(_REMEMBERED)
        """For the hash of a prompt's first chunk of tokens, the hash of the root (model, salt, tags) under which it was
        stored last.
        """

    def clear(self) -> None:
        """Forget all evictions and stored prompts, because every chunk was deleted."""
        self.evictions.forget()
        self._roots.clear()

    def _first_chunk(self, request: Request) -> int:
        return hash(token_bytes(request.tokens(0, self._chunk_size)))

    def first_stored(self, request: Request) -> None:
        """Note that a prompt's first chunk was stored, and with which salt and tags."""
        self._roots[self._first_chunk(request)] = hash(request.root)

    def explain(
        self, request: Request, keys: Sequence[ChunkKey], end: int, covered: int, *, few: bool, late: bool
    ) -> Miss | None:
        """Return the miss of the tokens from index `end` on, with its reason. Return None if there are no such tokens.

        `keys`: the keys of all chunks that may be loaded. `covered`: number of tokens in the found chunks. `few`:
        whether the hit is smaller than `min_retrieve_tokens`. `late`: whether a wait has reached its limit.
        """
        missing = request.last_token - end
        if missing <= 0:
            return None
        index = covered // self._chunk_size
        if few or index >= len(keys):
            return Miss("limited" if request.loadable < request.last_token and not few else "too_short", missing)
        found = self._store.catalog.count_prefix(keys)[1]
        if request.naming.states and index < found:
            return self._without_states(request, index, found, missing, late=late)
        presence = self._store.catalog.lookup([keys[index]])[0]
        if presence is Presence.MISS:
            return self._absent(request, keys[index], index, missing)
        worth = request.waiting.worth_loading
        slower = presence is Presence.LOWER and worth is not None and index >= worth
        reason = "slower" if slower else "deadline" if late else _PRESENT[presence]
        return Miss(reason, missing, self._store.catalog.tier_of(keys[index]))

    def _without_states(self, request: Request, index: int, found: int, missing: int, *, late: bool) -> Miss:
        """Return the miss if chunks from index `index` on are stored, but no hit can end there, because states are
        missing.
        """
        index = max(index, found - _LAST_BOUNDARIES)
        states = [key for end in range(index + 1, found + 1) for key in request.state_keys(end)]
        present = [key for key in states if self._store.catalog.lookup([key])[0] is not Presence.MISS]
        tier = next(filter(None, map(self._store.catalog.tier_of, present)), None)
        if any(set(request.state_keys(end)) <= set(present) for end in range(index + 1, found + 1)):
            reason = "deadline" if late else "slower" if request.waiting.longest_hit < found else "not_promoted"
            return Miss(reason, missing, tier)
        evicted = [gone for key in states if (gone := self.evictions.find(key)) is not None]
        if evicted:
            return Miss("evicted", missing, *min(evicted, key=lambda gone: gone[1]))
        return Miss("no_state", missing)

    def _absent(self, request: Request, key: ChunkKey, index: int, missing: int) -> Miss:
        tier = self._store.catalog.unavailable_in(key)
        if tier is not None:
            return Miss("tier_unavailable", missing, tier)
        evicted = self.evictions.find(key)
        if evicted is not None:
            return Miss("evicted", missing, *evicted)
        if request.waiting.shared_lookup is not None and not request.waiting.shared_lookup.done:
            return Miss("deadline", missing)
        root = self._roots.get(self._first_chunk(request)) if index == 0 else None
        return Miss("not_stored" if root in (None, hash(request.root)) else "other_salt", missing)


_MAX_REQUESTS = 10_000
_MAX_BYTES, _ANSWER_BYTES = 16 << 20, 1 << 20
"""Largest number of bytes of records to keep, and to return at once. At least one record is kept and returned."""
_BYTES = 200
"""Estimated number of bytes of a record in JSON, without its keys."""
_WANTED_SECONDS = 60.0
"""Seconds for which requests are recorded after a client has last read records."""
_NAME_BYTES = 8


class RecentRequests:
    """The reports of the last `size` requests, and the total numbers of tokens that were looked up and that were found.

    The scheduling thread writes reports; any thread may read them. A report is never changed, only replaced.
    """

    def __init__(self, size: int = 200, clock: Clock = time.time) -> None:
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, dict[str, Any]] = {}
        self._lookup_tokens = self._hit_tokens = 0

    def scheduled(self, request: Request) -> None:
        """Add the report of a request. Call this when vLLM has allocated the request's blocks, because the hit is known
        then.

        After a preemption, another call replaces the report.
        """
        key = _key(request.request_id)
        report = {
            "request": request.name,
            "time": self._clock(),
            "running": True,
            "tokens": request.num_tokens,
            "vllm_tokens": request.waiting.computed,
            **_report(request),
        }
        with self._lock:
            known = self._reports.get(key)
            self._reports[key] = report if known is None else report | {"time": known["time"]}
            if known is None:
                self._hit_tokens += request.report.hit_tokens
                missed = 0 if request.report.miss is None else request.report.miss.looked_up
                self._lookup_tokens += request.report.hit_tokens + missed
            if len(self._reports) > self._size:
                del self._reports[next(iter(self._reports))]

    def finished(self, request: Request) -> None:
        """Complete the report of an ended request with the results of its loads."""
        key = _key(request.request_id)
        with self._lock:
            known = self._reports.get(key)
            if known is not None:
                self._reports[key] = known | _report(request) | {"running": False}

    def snapshot(self) -> dict[str, Any]:
        """Return a mapping. `requests`: the last reports, newest first. `ids`: the id of each report's request.

        `lookup_tokens`, `hit_tokens`: total numbers of tokens that were looked up and that were found.
        """
        with self._lock:
            newest, ids = list(reversed(self._reports.values())), list(reversed(self._reports))
            totals = {"lookup_tokens": self._lookup_tokens, "hit_tokens": self._hit_tokens}
        return {**totals, "requests": newest, "ids": ids}


def _key(request_id: str) -> str:
    """Return an id unchanged, or a long id's beginning and digest."""
    if len(request_id) <= _WHOLE:
        return request_id
    return request_id[:_WHOLE] + hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()


def _report(request: Request) -> dict[str, Any]:
    """Return the report of one request. `sources` has only the tiers from which tokens were loaded."""
    sources = request.report.sources if request.report.hit_tokens else {}
    return request.answer | {"sources": {tier: tokens for tier, tokens in sources.items() if tokens}}


class TraceRecorder:
    """Records which chunks requests use. Records only while clients read the records (until 60 seconds after the last
    read). Any thread may read.

    A record has a keyed hash instead of each chunk key. Equal keys have equal hashes only within one process.
    """

    def __init__(self, chunk_tokens: int, chunk_bytes: int, clock: Clock) -> None:
        self._chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._noted: deque[dict[str, Any]] = deque()
        self._count = self._bytes = 0
        self._wanted_until = float("-inf")

    def finished(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Record an ended request. `keys`: the keys of the whole chunks that it used, first to last."""
        now = self._clock()
        if now > self._wanted_until:
            return
        prompt = request.prompt_tokens
        noted = {
            "t": round(now, 3),
            "tokens": prompt,
            "output": request.num_tokens - prompt,
            "hit": min(prompt, request.waiting.computed + request.report.hit_tokens),
            "keys": " ".join(map(self._name, keys)),
        }
        if request.options.hint.session:
            noted["session"] = self._name(request.options.hint.session.encode("utf-8", "surrogatepass"))
        with self._lock:
            self._noted.append(noted)
            self._count += 1
            self._bytes += _size(noted)
            while len(self._noted) > 1 and (len(self._noted) > _MAX_REQUESTS or self._bytes > _MAX_BYTES):
                self._bytes -= _size(self._noted.popleft())

    def _name(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self._secret, digest_size=_NAME_BYTES).hexdigest()

    def since(self, number: int) -> dict[str, Any]:
        """Return the records from number `number` on, as many as fit into one response. Each call makes lmkv record for
        the next 60 seconds.

        In the result, `next` is the `number` for the next call, and `left` is the number of records that remain.
        """
        with self._lock:
            self._wanted_until = self._clock() + _WANTED_SECONDS
            count, first = self._count, self._count - len(self._noted)
            found = list(islice(self._noted, max(0, number - first), None))
        sums = accumulate(map(_size, found))
        most = sum(1 for _ in takewhile(lambda total: total <= _ANSWER_BYTES, sums))
        left = max(0, len(found) - max(1, most))
        return {
            "chunk_tokens": self._chunk_tokens,
            "chunk_bytes": self._chunk_bytes,
            "next": count - left,
            "left": left,
            "requests": found[: len(found) - left],
        }


def _size(noted: dict[str, Any]) -> int:
    return _BYTES + len(noted["keys"])


class SchedulerObserver:
    """Passes each event of the scheduler side to its parts. Only the scheduling thread calls the methods, which never
    wait.

    `telemetry` counts for vLLM's `/metrics`. `explainer` finds the reasons of misses. `recent` keeps the last reports
    for the agent API. `recorder` records used chunks for `lmkv record`. `value` estimates how many hits larger or
    smaller tiers would give. `events` makes KV events; None if vLLM publishes none.
    """

    def __init__(self, store: TieredStore, chunk_size: int, clock: Clock, events: EventRecorder | None) -> None:
        self.telemetry = Telemetry(store, clock)
        self.explainer = Explainer(store, chunk_size, clock)
        self.recent = RecentRequests()
        self.recorder = TraceRecorder(chunk_size, store.slab.slot_bytes, time.time)
        self.value = MemoryValue(store, chunk_size)
        self.telemetry.predicted = self.value.report
        self.events = events

    def __repr__(self) -> str:
        return f"<SchedulerObserver: {self.events or 'no KV events'}>"

    # -- a request's report -----------------------------------------------------------------------------------

    def looked_up(self, request: Request, miss: Miss | None, hit: int, need: int) -> None:
        """Note a lookup that found `hit` tokens, including vLLM's own hit. `need`: number of these tokens to load.
        `miss`: the tokens that will not be loaded, with the reason; None if there are none.
        """
        report = request.report
        report.miss = miss
        # vLLM asks about a waiting request in every step: only changes are logged.
        if report.last_log_line != (hit, need):
            report.last_log_line = (hit, need)
            message = "lmkv: request %s has %d tokens: lmkv found %d and loads %d%s"
            missed = "" if miss is None else f" ({miss})"
            logger.info(message, request.name, request.num_tokens, hit, need, missed)

    def missed(self, request: Request, miss: Miss) -> None:
        """Note that lmkv loads nothing for a request."""
        request.report.miss = miss

    def promised(
        self, request: Request, keys: Sequence[ChunkKey], chunks: dict[str, int], tokens: dict[str, int]
    ) -> None:
        """Note a promised load. `keys`: the keys of the chunks in vLLM's own hit, and then of the promised chunks.
        `chunks`, `tokens`: number of promised chunks and tokens, by tier.
        """
        report = request.report
        report.promised, report.source_chunks, report.sources = keys, chunks, tokens
        self.track(request, keys)

    def scheduled(self, request: Request, tokens: int, *, refused: bool) -> None:
        """Note that vLLM has allocated a request's blocks, and that lmkv loads `tokens` tokens into them.

        `refused`: whether lmkv had promised a load, but vLLM did not use it. The request's hit and miss are counted
        only the first time, not after preemptions.
        """
        report = request.report
        if not report.counted:
            if refused:
                report.miss = Miss("not_taken", max(0, request.last_token - request.waiting.computed))
            report.counted = True
            self.telemetry.looked_up(*((report.sources, report.source_chunks) if tokens > 0 else ({}, {})), report.miss)
        if tokens > 0:
            report.hit_tokens = tokens

    def loaded(self, request: Request, answer: JobReport) -> None:
        """Note the end of a synchronous load, or of one part of an asynchronous load. Failures do not count."""
        if answer.ok:
            request.report.load_bytes += answer.nbytes
            request.report.load_seconds += answer.seconds

    def load_failed(self, request: Request) -> None:
        request.report.hit_tokens = 0

    # -- steps and ends -------------------------------------------------------------------------------------

    def finished(self, request: Request, chain: Sequence[ChunkKey]) -> None:
        """Note that a request has ended. `chain`: the keys of the request's whole chunks, and of the tail (the
        prompt's remaining tokens) if the tail comes right after them.
        """
        self.recent.finished(request)
        keys = request.chain.keys
        self.recorder.finished(request, keys)
        self.value.finished(keys, request.prompt_tokens)
        # A tier may have chunks that the request has neither loaded nor stored, after a failed store for instance.
        # Not after a reset, which has changed the keys' meaning.
        if not request.options.skip_load:
            self.track(request, chain)

    def track(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Publish KV events about these chunks from now on. `keys`: the keys of a request's first chunks."""
        if self.events is not None:
            self.events.track(request, keys)

    def reset(self) -> None:
        """Publish that all chunks were deleted, and forget all evictions."""
        self.explainer.clear()
        if self.events is not None:
            self.events.reset()
