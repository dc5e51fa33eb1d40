"""`Auditor`: has some hits computed all the same, and compares what is computed with what is stored.

Checksums prove that bytes are those that were written; only this proves that they are the right KV. The workers copy
the fresh pages into slots of their own, as a store does, and compare them with the stored chunks as numbers.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import define
from cachetools import LRUCache

from lmkv.chunks.hashing import TailKey, state_keys
from lmkv.memory.comparison import Difference
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease, Reservation
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.requests.audit import Audit
from lmkv.vllm.requests.request import BlockTables, RequestState
from lmkv.vllm.scheduler.context import PlanContext

logger = logging.getLogger("lmkv.vllm")

_REMEMBERED = 100_000
"""Chunks whose last audit, deletion or origin is known."""
_NAMED = 3
"""Layers, or blocks, that a log line names."""


def named(names: Sequence[str]) -> str:
    """The first of these names, for a log line."""
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])


@define
class Sampler:
    """Draws one of `1 / rate` hits, at random: what comes back in a pattern is found, too."""

    rate: float
    draw: Callable[[], float] = random.random

    def __call__(self) -> bool:
        return self.rate > 0 and self.draw() < self.rate


@define(eq=False)
class _Job:
    state: RequestState
    audit: Audit
    lease: Lease
    reservation: Reservation
    keys: Sequence[ChunkKey]
    chunks: list[int]
    """Number of each compared chunk in its prompt; of a state the chunk before it."""
    states: bool
    tainted: bool = False


class Wrong:
    """The chunks that were found to be wrong, and which chunks behind them have been deleted since.

    KV that was computed from a wrong chunk is wrong, too. Who has it is not known; but nothing is loaded for a request
    before its chunks have passed `purge`.
    """

    def __init__(self, delete: Callable[[Sequence[ChunkKey]], object], states: int) -> None:
        self._delete = delete
        self._states = states
        self._keys: dict[ChunkKey, str] = {}
        """The finding for each wrong chunk, for the log."""
        self._deleted: LRUCache[ChunkKey, bool] = LRUCache(_REMEMBERED)

    def add(self, keys: Sequence[ChunkKey], found: str) -> None:
        """Delete a wrong chunk, the first of `keys` if there is any, and those that are known to follow it."""
        for key in keys[:1]:
            self._keys.setdefault(key, found)
        for key in keys:
            self._deleted.pop(key, None)
        self.purge(keys)

    def is_in(self, keys: Sequence[ChunkKey]) -> bool:
        """Whether one of these chunks was once wrong."""
        return self.first_of(keys) is not None

    def first_of(self, keys: Sequence[ChunkKey]) -> str | None:
        """The finding for the first of these chunks that was once wrong."""
        return next((self._keys[key] for key in keys if key in self._keys), None) if self._keys else None

    def purge(self, keys: Sequence[ChunkKey]) -> None:
        """Delete those chunks of a prompt that were stored behind a wrong one before it was found."""
        if not self._keys:
            return
        first = next((number for number, key in enumerate(keys) if key in self._keys), len(keys))
        stale = [key for key in keys[first:] if key not in self._deleted]
        if stale:
            self._delete([*stale, *(state for key in stale for state in state_keys(key, self._states))])
            self._deleted.update(dict.fromkeys(stale, True))


class Auditor:
    """Decides which hits are audited, and what follows. Called on the scheduling thread only; never waits.

    `on_wrong(state, chunk, honest)`: called with a request whose chunk with this number was wrong, once it is deleted.
    `honest`: the request's own KV is right.
    """

    def __init__(self, context: PlanContext) -> None:
        options = context.options
        self._store = context.store
        self._block_map = context.block_map
        self._chunk_size = context.chunk_size
        self._builder = context.builder
        self._states = context.boundaries.states
        self._telemetry = context.observer.telemetry
        self._disables = options.audit_action == "disable"
        self.on = options.audit_rate > 0 and options.audits_computed
        self.sampler = Sampler(options.audit_rate)
        self.wrong = Wrong(self._store.delete, self._states)
        self.on_wrong: Callable[[RequestState, int, bool], None] = lambda state, chunk, honest: None
        self._jobs: dict[int, _Job] = {}
        self._computed: LRUCache[tuple[ChunkKey, str], bool] = LRUCache(_REMEMBERED)
        """Last chunks of hits that were audited by computing them, and the tiers that had them."""
        self._behind: LRUCache[ChunkKey, str] = LRUCache(_REMEMBERED)
        """Chunks that were computed behind a load, for the log."""

    @property
    def loads_off(self) -> bool:
        """Whether nothing is loaded any more, because of a wrong chunk and `audit_action`."""
        return self._telemetry.loads_off

    def __repr__(self) -> str:
        return f"<Auditor: {self.sampler.rate:g} of hits, {len(self._jobs)} comparisons under way>"

    def takes(self, state: RequestState, keys: Sequence[ChunkKey], tokens: int, seconds: float) -> bool:
        """Whether the request is to compute its hit `keys`: drawn once. It would then compute `tokens` in `seconds`."""
        if state.audit is None and not state.drawn:
            state.drawn = True
            # Not the chunk that only begins like the rest of the prompt.
            own = state.keys(len(keys))
            end = next((n for n, pair in enumerate(zip(keys, own, strict=False)) if pair[0] != pair[1]), len(own))
            first, tail = state.computed // self._chunk_size, self._tail(state, keys[end:])
            if (end > first or tail is not None) and self.sampler():
                tiers = [tier for tier, count in state.source_chunks.items() for _ in range(count)]
                # The next time that it is drawn it is loaded, so that copies are audited at any rate.
                last = tail or own[end - 1], tiers[-1]
                if self._computed.pop(last, False):
                    state.audits_load = True
                    return False
                self._computed[last] = True
                state.audit = Audit(first, end, tiers, state.computed, tail)
                self._telemetry.audited(tokens, seconds)
        return state.audit is not None

    def _tail(self, state: RequestState, keys: Sequence[ChunkKey]) -> TailKey | None:
        """The prompt's tail, if it comes next in the hit and has whole pages; not with windows, which may lack some."""
        tail = state.tail if keys and keys[0] == state.tail and not self._block_map.windowed else None
        begins = len(state.chain.keys) * self._chunk_size if tail is not None else 0
        return tail if tail is not None and state.computed <= begins and self._whole(tail) else None

    def _whole(self, tail: TailKey) -> int:
        """Tokens of a tail in pages that are full: what else is in its last page is not known."""
        size = max(group.block_size for group in self._block_map.groups)
        return tail.tokens // size * size

    def takes_load(self, state: RequestState) -> bool:
        """Whether a load of this request is to be read back."""
        drawn, state.audits_load = state.audits_load, False
        return drawn or self.sampler()

    def stored(self, state: RequestState, keys: Sequence[ChunkKey]) -> None:
        """Note which load these chunks were computed behind: it may be to blame for what is in them."""
        if self.on and state.hit_tokens:
            text = f"computed by request {state.name} behind {state.hit_tokens} tokens that it had loaded"
            self._behind.update(dict.fromkeys(keys, text))

    # -- orders -------------------------------------------------------------------------------------------

    def compare(self, state: RequestState, computed: int, tables: BlockTables) -> None:
        """Order the comparison of the chunks that are complete after `computed` tokens."""
        audit = state.audit
        if audit is None:
            return
        chunks = range(audit.next, min(computed // self._chunk_size, audit.end))
        if chunks:
            audit.next = chunks.stop
            keys = state.keys(chunks.stop)
            copies = [lambda slot, chunk=chunk: self._block_map.compared_copy(slot, tables, chunk) for chunk in chunks]
            self._order(state, audit, keys[chunks.start :], copies, list(chunks), states=False)
        tail, end = audit.tail, audit.end
        if tail is not None and computed >= end * self._chunk_size + tail.tokens:
            copy_of = partial(self._block_map.store_copy, block_ids=tables, chunk=end, tokens=self._whole(tail))
            self._order(state, audit, [tail], [copy_of], [end], states=False)
        elif tail is not None:
            return
        if audit.next >= end:
            self.end(state)

    def compare_states(self, state: RequestState, chunks: int, blocks: Mapping[int, int]) -> None:
        """Order the comparison of the states behind `chunks` chunks, where the hit would have ended."""
        audit = state.audit
        if audit is None or chunks != audit.end:
            return
        keys = state.state_keys(chunks)
        copies = [lambda slot, number=key.number: self._block_map.state_copy(slot, number, blocks) for key in keys]
        self._order(state, audit, keys, copies, [chunks - 1] * len(keys), states=True)

    @staticmethod
    def end(state: RequestState) -> None:
        """Compare no more of what this request computes."""
        state.audit = None
        state.drop_promotion()

    def _order(
        self,
        state: RequestState,
        audit: Audit,
        keys: Sequence[ChunkKey],
        copies_of: Sequence[Callable[[int], ChunkCopy | None]],
        chunks: list[int],
        *,
        states: bool,
    ) -> None:
        """Compare the leading ones of `keys` that are in host memory, as far as there are slots for the fresh ones."""
        lease = self._store.lease(keys)
        fresh = [secrets.token_bytes(32) for _ in lease.keys]
        reservation = self._store.reserve(fresh, protect=state.keys(audit.end))
        slots = zip(reservation.slots.values(), lease.slots, copies_of, chunks, strict=False)
        made = [(copy_of(slot), stored, chunk) for slot, stored, copy_of, chunk in slots]
        copies = [(copy, stored, chunk) for copy, stored, chunk in made if copy is not None]
        if not copies:
            reservation.abort()
            lease.release()
            return
        order = self._builder.store([copy for copy, _, _ in copies], [stored for _, stored, _ in copies])
        numbers = [chunk for _, _, chunk in copies]
        self._jobs[order.job] = _Job(state, audit, lease, reservation, keys, numbers, states)

    # -- ends ---------------------------------------------------------------------------------------------

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    @property
    def busy(self) -> bool:
        """Whether the end of a comparison has not been reported yet."""
        return bool(self._jobs)

    def taint_all(self) -> None:
        """A load failed, or everything was reset: what was computed may be wrong, or what is stored is no more."""
        for job in self._jobs.values():
            job.tainted = True

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have compared their parts: drop what is wrong."""
        job = self._jobs.pop(number)
        job.reservation.abort()
        job.lease.release()
        if not report.ok or job.tainted:
            return
        wrong = sorted({job.chunks[each.copy] for each in report.differences})
        tiers = [job.audit.tier(chunk) for chunk in job.chunks]
        self._telemetry.compared(tiers, [job.audit.tier(chunk) for chunk in wrong], states=job.states)
        if wrong:
            found = self._log(job, report.differences, wrong[0])
            # vLLM's own hit is not compared. If there was one, it may be wrong, and the cause of what was found.
            first = 0 if job.audit.computed else wrong[0]
            keys = job.state.keys_with_tail(len(job.state.chain.keys))[first:]
            tail = [key for key in job.keys if isinstance(key, TailKey) and key not in keys]
            self.wrong.add([*tail, *keys], found)
            self._telemetry.loads_off |= self._disables
            self.on_wrong(job.state, first, not job.audit.computed)

    def _log(self, job: _Job, differences: Sequence[Difference], chunk: int) -> str:
        """Log what was found, and return it."""
        found = [each for each in differences if job.chunks[each.copy] == chunk]
        layers = [layer for each in found for layer in each.layers]
        at = chunk * self._chunk_size
        key = job.keys[0] if isinstance(job.keys[0], TailKey) else job.state.keys(chunk + 1)[chunk]
        cause, behind = self.wrong.first_of(job.state.keys(chunk)), self._behind.get(key)
        what = "state" if job.states else "KV"
        text = (
            f"wrong {what} in {job.audit.tier(chunk)}: request {job.state.name}, "
            f"tokens {at + min(each.first for each in found)} to {at + max(each.end for each in found) - 1}, "
            f"{len(layers)} layers ({named(layers)}) on ranks {sorted({each.rank for each in found})}, "
            f"deviation {max(each.deviation for each in found):.3g}"
        )
        logger.error(
            "lmkv: audit: %s%s; it and all that depends on it is deleted%s",
            text,
            f"; it follows from {cause}" if cause else f"; it was {behind}" if behind else "",
            ", and nothing is loaded any more" if self._disables else "",
        )
        return text
