"""`SchedulerObserver`: receives each event of the scheduler side, for metrics, explanations and KV events."""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from typing import Any

from lmkv.protocols import ChunkKey, Clock
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan.metadata import JobReport
from lmkv.vllm.plan.request import Miss, Request
from lmkv.vllm.scheduler.events import Event, EventRecorder
from lmkv.vllm.scheduler.explain import Explainer
from lmkv.vllm.scheduler.telemetry import Telemetry
from lmkv.vllm.scheduler.value import MemoryValue

logger = logging.getLogger("lmkv.vllm")

_WHOLE = 4096
"""Characters of an id that is kept as it is."""


_MAX_REQUESTS = 10_000
_MAX_BYTES, _ANSWER_BYTES = 16 << 20, 1 << 20
"""Of all that is kept, and of one answer, which is made in one go; but one request at least."""
_BYTES = 200
"""Of a request besides the names of its chunks, as JSON."""
_WANTED_SECONDS = 60.0
"""How long requests are noted after somebody asked for them."""
_NAME_BYTES = 8


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

    def scheduled(self, request: Request) -> None:
        """Report a request whose blocks are allocated, so that its hit is known; called again after a preemption."""
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
        """Complete the report of a request that has ended: now it is known how its loads went."""
        key = _key(request.request_id)
        with self._lock:
            known = self._reports.get(key)
            if known is not None:
                self._reports[key] = known | _report(request) | {"running": False}

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


def _report(request: Request) -> dict[str, Any]:
    """The request's own report, with only those tiers that something was loaded from."""
    sources = request.report.sources if request.report.hit_tokens else {}
    return request.answer | {"sources": {tier: tokens for tier, tokens in sources.items() if tokens}}


class TraceRecorder:
    """Notes the last requests while somebody asks for them. Noted on the scheduling thread, read on any.

    A chunk is named by a keyed hash of its key: the same within a process, and meaningless elsewhere.
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
        """A request has ended that used these whole chunks, head first."""
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
        """Requests from this number on, as many as one answer has. Begins to note requests.

        `next`: the number to ask for next time; `left`: how many there are from that on already.
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
    """Passes each event of the scheduler side to those that want it. Called on the scheduling thread; never waits.

    `telemetry` counts for vLLM's `/metrics`, `explainer` finds the reasons of misses, `recent` keeps the reports
    of the last requests for the agent API, `recorder` their chunks for `lmkv record`, and `value` estimates the
    hits with more memory. `events` makes KV events; None if vLLM publishes none.
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

    # -- what a request is told -----------------------------------------------------------------------------

    def looked_up(self, request: Request, miss: Miss | None, hit: int, need: int) -> None:
        """A lookup found `hit` tokens, of which `need` are to be loaded, and missed the rest."""
        report = request.report
        report.miss = miss
        # vLLM asks about a waiting request in every step: only changes are logged.
        if report.last_log_line != (hit, need):
            report.last_log_line = (hit, need)
            message = "lmkv: request %s: total tokens %d, hit tokens %d, to load %d%s"
            missed = "" if miss is None else f" ({miss})"
            logger.info(message, request.name, request.num_tokens, hit, need, missed)

    def missed(self, request: Request, miss: Miss) -> None:
        """A request loads nothing."""
        request.report.miss = miss

    def promised(
        self, request: Request, keys: Sequence[ChunkKey], chunks: dict[str, int], tokens: dict[str, int]
    ) -> None:
        """A load was promised. `keys`: of its chunks, and of vLLM's own hit before them. The rest: by tier."""
        report = request.report
        report.promised, report.source_chunks, report.sources = keys, chunks, tokens
        self.track(request, keys)

    def scheduled(self, request: Request, tokens: int, *, refused: bool) -> None:
        """A request has its blocks, and loads `tokens` into them. `refused`: vLLM has not taken what was promised.

        Its hit and miss are counted once, whether or not it is preempted later.
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
        """A part of its load has ended; if it failed, nothing was loaded that counts."""
        if answer.ok:
            request.report.load_bytes += answer.nbytes
            request.report.load_seconds += answer.seconds

    def load_failed(self, request: Request) -> None:
        request.report.hit_tokens = 0

    # -- steps and ends -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Have the estimate of hits with more memory replay a little of what has finished."""
        self.value.step()

    def finished(self, request: Request, chain: Sequence[ChunkKey]) -> None:
        """Note that a request has ended: its chunks count as used. `chain`: their keys, with the tail's."""
        self.recent.finished(request)
        keys = request.chain.keys
        self.recorder.finished(request, keys)
        self.value.finished(keys, request.prompt_tokens)
        # A tier may have chunks of it that it has neither loaded nor stored, after a failed store for instance.
        # Before a reset it had another meaning.
        if not request.options.skip_load:
            self.track(request, chain)

    def track(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Publish KV events of these chunks, the leading ones of a request, from now on."""
        if self.events is not None:
            self.events.track(request, keys)

    def take_events(self) -> list[Event]:
        """The chunks that have come into a tier or left it since the last call."""
        return [] if self.events is None else self.events.take()

    def reannounce(self) -> None:
        """Publish the present places of all tracked chunks again, after vLLM has published that all blocks are gone."""
        if self.events is not None:
            self.events.reannounce()

    def reset(self) -> None:
        """Note that everything was deleted: publish that, and let earlier evictions explain nothing any more."""
        self.explainer.clear()
        if self.events is not None:
            self.events.reset()
