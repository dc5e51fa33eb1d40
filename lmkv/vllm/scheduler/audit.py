"""Audits a sample of hits: `HitAudits` compares stored chunks with computed KV, and `LoadAudits` reads loaded blocks
back.

Checksums prove only that loaded bytes are the bytes that were written, not that they are the right KV. For `HitAudits`,
workers copy freshly computed pages into free slots, and compare these slots with the stored chunks.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from attrs import define
from cachetools import LRUCache

from lmkv.chunks.hashing import StateKey, TailKey, state_keys
from lmkv.memory.comparison import Difference
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease, Reservation
from lmkv.vllm.plan import JobReport
from lmkv.vllm.plan.request import Audit, BlockTables, Request
from lmkv.vllm.scheduler.context import Job, PlanContext, Planner

logger = logging.getLogger("lmkv.vllm")

_REMEMBERED = 100_000
"""Number of chunks to remember in each cache of audits."""
_NAMED = 3
"""Largest number of layers or blocks that a log line names."""


CopiesOf = Sequence[Callable[[int], ChunkCopy | None]]
"""For each key, a function that takes a slot and returns the copy of the key's chunk into this slot, or None if blocks
are missing.
"""


def named(names: Sequence[str]) -> str:
    """Join names to one text for a log line: at most three, followed by "..." if there are more."""
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])


@define
class Sampler:
    """Chooses a random share `rate` of hits. Choosing every n-th hit could miss errors that follow a pattern."""

    rate: float
    draw: Callable[[], float] = random.random

    def __call__(self) -> bool:
        return self.rate > 0 and self.draw() < self.rate


@define(eq=False)
class _Comparison(Job):
    audit: Audit
    lease: Lease
    reservation: Reservation
    keys: Sequence[ChunkKey]
    chunks: list[int]
    """The index of each compared chunk in its prompt; for a state, the index of the chunk before it."""

    @property
    def states(self) -> bool:
        return isinstance(self.keys[0], StateKey)


class WrongChunks:
    """Deletes wrong chunks and all chunks after them in a prompt, and remembers which chunks were wrong.

    Other requests may have computed and stored KV after a wrong chunk. Therefore call `purge` with the chunks of every
    request before the request loads.
    """

    def __init__(self, delete: Callable[[Sequence[ChunkKey]], object], states: int) -> None:
        self._delete = delete
        self._states = states
        self._keys: dict[ChunkKey, str] = {}
        """For the key of each wrong chunk, the result of its audit as text for the log."""
        self._deleted: LRUCache[ChunkKey, bool] = LRUCache(_REMEMBERED)

    def add(self, keys: Sequence[ChunkKey], found: str) -> None:
        """Delete the wrong chunk `keys[0]`, and the chunks after it, which depend on it (the other keys). `found`: the
        audit's result as text.
        """
        for key in keys[:1]:
            self._keys.setdefault(key, found)
        for key in keys:
            self._deleted.pop(key, None)
        self.purge(keys)

    def is_in(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether an audit has found that one of these chunks is wrong."""
        return self.first_of(keys) is not None

    def first_of(self, keys: Sequence[ChunkKey]) -> str | None:
        """Return the audit's result for the first wrong chunk among `keys`. Return None if no wrong chunk is among
        them.
        """
        return next((self._keys[key] for key in keys if key in self._keys), None) if self._keys else None

    def purge(self, keys: Sequence[ChunkKey]) -> None:
        """Delete the chunks of a prompt from the first known wrong chunk on. Chunks that were deleted before are
        skipped, because they may have been stored anew.
        """
        if not self._keys:
            return
        first = next((number for number, key in enumerate(keys) if key in self._keys), len(keys))
        stale = [key for key in keys[first:] if key not in self._deleted]
        if stale:
            self._delete([*stale, *(behind for key in stale for behind in state_keys(key, self._states))])
            self._deleted.update(dict.fromkeys(stale, True))


class HitAudits(Planner):
    """Decides which hits to audit: vLLM computes them, and workers compare the result with the stored chunks. Deletes
    wrong chunks.

    `on_wrong(request, chunk, own_kv_is_right)`: a function that is called after the deletion of a wrong chunk. `chunk`:
    the chunk's index in the prompt. `own_kv_is_right`: whether the KV in the request's blocks is right. True if vLLM
    has computed all of this KV, without a hit.
    """

    def __init__(self, context: PlanContext) -> None:
        super().__init__(context)
        options = context.options
        self._disables = options.audit_action == "disable"
        self.on = options.audit_rate > 0 and options.audits_computed
        self.sampler = Sampler(options.audit_rate)
        self.wrong = WrongChunks(self._store.delete, context.boundaries.states)
        self.on_wrong: Callable[[Request, int, bool], None] = lambda request, chunk, own_kv_is_right: None
        self._computed: LRUCache[tuple[ChunkKey, str], bool] = LRUCache(_REMEMBERED)
        """The last chunks of audited hits, each with the tier that had the chunk."""
        self._behind: LRUCache[ChunkKey, str] = LRUCache(_REMEMBERED)
        """Chunks that a request has computed after a load, each with a text about this load for the log."""

    @property
    def loads_off(self) -> bool:
        """Whether loads are off, because an audit found a wrong chunk and `audit_action` is "disable"."""
        return self._telemetry.loads_off

    def __repr__(self) -> str:
        return f"<HitAudits: {self.sampler.rate:g} of hits>"

    def takes(
        self, request: Request, keys: Sequence[ChunkKey], sources: Mapping[str, int], tokens: int, seconds: float
    ) -> bool:
        """Return whether to audit the hit of a request. If so, vLLM must compute the hit. The decision is random, and
        made only once for each request.

        `keys`: the keys of the hit. `sources`: number of chunks to load, by tier. `tokens`: number of tokens that vLLM
        must compute for the audit. `seconds`: estimated time to compute them.
        """
        if request.auditing.audit is None and not request.auditing.decided:
            request.auditing.decided = True
            # Without the chunk that only begins like the rest of the prompt.
            own = request.keys(len(keys))
            end = next((n for n, pair in enumerate(zip(keys, own, strict=False)) if pair[0] != pair[1]), len(own))
            first, tail = request.waiting.computed // self._chunk_size, self._tail(request, keys[end:])
            if (end > first or tail is not None) and self.sampler():
                tiers = [tier for tier, count in sources.items() for _ in range(count)]
                # When drawn again it is loaded, so that copies are audited at any rate.
                last = tail or own[end - 1], tiers[-1]
                if self._computed.pop(last, False):
                    request.auditing.reads_back = True
                    return False
                self._computed[last] = True
                request.auditing.audit = Audit(first, end, tiers, request.waiting.computed, tail)
                self._telemetry.audited(tokens, seconds)
        return request.auditing.audit is not None

    def _tail(self, request: Request, keys: Sequence[ChunkKey]) -> TailKey | None:
        """Return the prompt's tail if it is the first of `keys` and has whole pages, else None.

        With sliding windows, return None, because pages of a tail may be missing.
        """
        tail = request.tail if keys and keys[0] == request.tail and not self._block_map.windowed else None
        begins = len(request.chain.keys) * self._chunk_size if tail is not None else 0
        return tail if tail is not None and request.waiting.computed <= begins and self._whole(tail) else None

    def _whole(self, tail: TailKey) -> int:
        """Return the number of tokens in full pages of a tail. The rest of its last page is undefined."""
        size = max(group.block_size for group in self._block_map.groups)
        return tail.tokens // size * size

    def takes_load(self, request: Request) -> bool:
        """Return whether to read back the blocks of a load for this request. The decision is random."""
        drawn, request.auditing.reads_back = request.auditing.reads_back, False
        return drawn or self.sampler()

    def stored(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has computed these chunks after a load. If an audit finds one of them wrong, the log
        names this load as a possible cause.
        """
        if self.on and request.report.hit_tokens:
            text = f"computed by request {request.name} after {request.report.hit_tokens} loaded tokens"
            self._behind.update(dict.fromkeys(keys, text))

    # -- tasks --------------------------------------------------------------------------------------------

    def compare(self, request: Request, computed: int, tables: BlockTables) -> None:
        """Plan the comparison of the hit's chunks that are complete after `computed` tokens."""
        audit = request.auditing.audit
        if audit is None:
            return
        chunks = range(audit.next, min(computed // self._chunk_size, audit.end))
        if chunks:
            audit.next = chunks.stop
            keys = request.keys(chunks.stop)
            copies = [lambda slot, chunk=chunk: self._block_map.compared_copy(slot, tables, chunk) for chunk in chunks]
            self._order(request, audit, keys[chunks.start :], copies, list(chunks))
        tail, end = audit.tail, audit.end
        if tail is not None and computed >= end * self._chunk_size + tail.tokens:
            copy_of = partial(self._block_map.store_copy, block_ids=tables, chunk=end, tokens=self._whole(tail))
            self._order(request, audit, [tail], [copy_of], [end])
        elif tail is not None:
            return
        if audit.next >= end:
            self.end(request)

    def compare_states(self, request: Request, chunks: int, blocks: Mapping[int, int]) -> None:
        """Plan the comparison of the recurrent layers' states after `chunks` chunks, if the audited hit ends there.

        `blocks`: the blocks that have these states, as `BlockMap.state_blocks` returns them.
        """
        audit = request.auditing.audit
        if audit is None or chunks != audit.end:
            return
        keys = request.state_keys(chunks)
        copies = [lambda slot, number=key.number: self._block_map.state_copy(slot, number, blocks) for key in keys]
        self._order(request, audit, keys, copies, [chunks - 1] * len(keys))

    @staticmethod
    def end(request: Request) -> None:
        """End the audit of this request's hit."""
        request.auditing.audit = None
        request.waiting.cancel()

    def _order(
        self, request: Request, audit: Audit, keys: Sequence[ChunkKey], copies_of: CopiesOf, chunks: list[int]
    ) -> None:
        """Plan the comparison of the chunks of `keys` that are in host memory, as far as there are free slots for the
        computed pages.
        """
        lease = self._store.lease(keys)
        fresh = [secrets.token_bytes(32) for _ in lease.keys]
        reservation = self._store.reserve(fresh, protect=request.keys(audit.end))
        slots = zip(reservation.slots.values(), lease.slots, copies_of, chunks, strict=False)
        made = [(copy_of(slot), stored, chunk) for slot, stored, copy_of, chunk in slots]
        copies = [(copy, stored, chunk) for copy, stored, chunk in made if copy is not None]
        if not copies:
            reservation.abort()
            lease.release()
            return
        task = self._builder.store([copy for copy, _, _ in copies], [stored for _, stored, _ in copies])
        numbers = [chunk for _, _, chunk in copies]
        self._jobs.begin(task.job, _Comparison(self, request, audit, lease, reservation, keys, numbers))

    # -- ends ---------------------------------------------------------------------------------------------

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Process the result of a comparison, after all ranks have compared: delete the wrong chunks."""
        assert isinstance(job, _Comparison)
        job.reservation.abort()
        job.lease.release()
        if not report.ok or job.distrusted:
            return
        wrong = sorted({job.chunks[each.copy] for each in report.differences})
        tiers = [job.audit.tier(chunk) for chunk in job.chunks]
        self._telemetry.compared(tiers, [job.audit.tier(chunk) for chunk in wrong], states=job.states)
        if wrong:
            found = self._log(job, report.differences, wrong[0])
            # vLLM's own hit is not compared. If there was one, it may be wrong, and the cause of the finding.
            first = 0 if job.audit.computed else wrong[0]
            keys = job.request.keys_with_tail(len(job.request.chain.keys))[first:]
            tail = [key for key in job.keys if isinstance(key, TailKey) and key not in keys]
            self.wrong.add([*tail, *keys], found)
            self.on_wrong(job.request, first, not job.audit.computed)

    def accuse(self, text: str, *then: str) -> None:
        """Log a wrong chunk or load (`text`) and the consequences (`then`). If `audit_action` is "disable", switch
        loads off.
        """
        self._telemetry.loads_off |= self._disables
        off = "; lmkv loads nothing from now on" if self._disables else ""
        logger.error("lmkv: an audit found %s%s", "; ".join([text, *filter(None, then)]), off)

    def _log(self, job: _Comparison, differences: Sequence[Difference], chunk: int) -> str:
        """Log the result of a comparison, and return it as text."""
        found = [each for each in differences if job.chunks[each.copy] == chunk]
        layers = [layer for each in found for layer in each.layers]
        at = chunk * self._chunk_size
        key = job.keys[0] if isinstance(job.keys[0], TailKey) else job.request.keys(chunk + 1)[chunk]
        cause, behind = self.wrong.first_of(job.request.keys(chunk)), self._behind.get(key)
        what = "state" if job.states else "KV"
        text = (
            f"wrong {what} in {job.audit.tier(chunk)}: request {job.request.name}, "
            f"tokens {at + min(each.first for each in found)} to {at + max(each.end for each in found) - 1}, "
            f"{len(layers)} layers ({named(layers)}) on ranks {sorted({each.rank for each in found})}, "
            f"deviation {max(each.deviation for each in found):.3g}"
        )
        origin = f"the cause is {cause}" if cause else f"the chunk was {behind}" if behind else ""
        self.accuse(text, origin, "lmkv deletes the chunk and all that depend on it")
        return text


@define(eq=False)
class _ReadAgain(Job):
    load: AuditedLoad | None
    """The load, or None if the load's blocks were recomputed or lost."""


@define(eq=False)
class AuditedLoad:
    """A load whose blocks are read back, and compared with the stored chunks.

    `copies`: the load's copies, of the chunks from index `first` on and of states. `end`: number of the request's
    tokens up to the load's end. `tenure`: how many times the request had released its blocks when the load was planned.
    """

    request: Request
    copies: list[ChunkCopy]
    first: int
    end: int
    kind: str
    tenure: int


class LoadAudits(Planner):
    """Decides which loads to audit. Workers read the blocks of an audited load twice: after the load, and when the
    request releases the blocks.

    `audit`: logs wrong blocks and deletes the chunks that depend on them.
    """

    def __init__(self, context: PlanContext, audit: HitAudits) -> None:
        super().__init__(context)
        self._audit = audit
        self._layerwise = context.options.whole_blocks
        self._held: dict[int, AuditedLoad] = {}
        """Audited loads, by job number, of requests that still have the loaded blocks."""
        self._given_up: dict[int, AuditedLoad] = {}
        """Audited loads, by job number, of requests that have released the blocks since the last plan. Nothing has
        overwritten these blocks yet.
        """
        self._left: set[Request] = set()

    def take(
        self, request: Request, copies: list[ChunkCopy], first: int, end: int, *, between_steps: bool
    ) -> AuditedLoad | None:
        """Return an `AuditedLoad` if this load is chosen for an audit, else None. `first`: index of the load's first
        chunk. `end`: number of the request's tokens up to the load's end. `between_steps`: whether the load is
        asynchronous.
        """
        if not copies or not self._audit.takes_load(request):
            return None
        kind = "between steps" if between_steps else "layer by layer" if self._layerwise else "within a step"
        return AuditedLoad(request, copies, first, end, kind, request.auditing.tenure)

    def load_ended(self, job: int, load: AuditedLoad, report: JobReport) -> None:
        """Process the comparison of a load's blocks, after all ranks have compared."""
        self._telemetry.audited_load(wrong=bool(report.differences))
        request = load.request
        if report.differences:
            # If it is recomputed, nothing was computed from it.
            self._wrong(load, report.differences, "load", spread=report.ok)
        elif report.ok and request.auditing.tenure == load.tenure:
            self._held[job] = load
        elif report.ok and request in self._left and request.auditing.tenure == load.tenure + 1:
            self._given_up[job] = load

    def _wrong(self, load: AuditedLoad, differences: Sequence[Difference], what: str, *, spread: bool) -> None:
        chunk, text = load.first + differences[0].copy, self._described(load, differences)
        self._audit.accuse(f"a wrong {what}: {text}", "the request continues" if spread else "vLLM computes the tokens")
        if spread:
            request, after = load.request, load.end // self._block_map.chunk_size
            known = request.keys_with_tail(len(request.chain.keys))[after:]
            behind = [key for key in known if key not in request.report.promised]
            self._audit.wrong.add(behind, f"a wrong {what}, {text}")
            self._audit.on_wrong(request, chunk, False)

    def _described(self, load: AuditedLoad, differences: Sequence[Difference]) -> str:
        size = self._block_map.chunk_size
        # A state is read behind the last chunk.
        last = -(-load.end // size) - 1
        starts = [min(load.first + each.copy, last) * size for each in differences]
        first = min(start + each.first for start, each in zip(starts, differences, strict=True))
        end = max(start + each.end for start, each in zip(starts, differences, strict=True))
        layers = list(dict.fromkeys(layer for each in differences for layer in each.layers))
        blocks = list(dict.fromkeys(str(block) for each in differences for block in each.blocks))
        return (
            f"request {load.request.name}, tokens {first} to {min(end, load.end) - 1}, blocks {named(blocks)}, "
            f"{len(layers)} layers ({named(layers)}) on ranks {sorted({each.rank for each in differences})}, "
            f"copied {load.kind}, {len(load.copies)} chunks and states from {_tiers(load.request)}"
        )

    # -- once more ----------------------------------------------------------------------------------------

    def give_up(self, request: Request) -> None:
        """Note that a request has released its blocks, because it has ended or was preempted."""
        request.auditing.tenure += 1
        self._left.add(request)
        for job in [job for job, load in self._held.items() if load.request is request]:
            self._given_up[job] = self._held.pop(job)

    def plan(self, overwritten: Collection[int]) -> None:
        """Plan a second read of the blocks of audited loads that requests have just released. Workers make this read
        before the step overwrites the blocks.

        `overwritten`: blocks that cannot be read, because they may have new content before the workers get the plan.
        """
        for job, load in self._given_up.items():
            copies = self._settled(load, overwritten)
            if any(run.blocks for copy in copies for run in copy.runs):
                task = self._builder.read(job, copies)
                self._jobs.begin(task.job, _ReadAgain(self, load.request, load))
        self._given_up.clear()
        self._left.clear()

    def _settled(self, load: AuditedLoad, overwritten: Collection[int]) -> list[ChunkCopy]:
        """Return copies of the load's whole pages, which nothing should have changed since the load.

        Tables with sliding windows or states, and overwritten blocks, are left out.
        """
        size, copies = self._block_map.chunk_size, []
        for number, copy in enumerate(load.copies, load.first):
            runs = []
            for group, run in zip(self._block_map.groups, copy.runs, strict=True):
                # States come after the chunks, and so after the end.
                whole = max(0, (load.end - number * size) // group.block_size - run.first)
                count = whole if group.window is None else 0
                blocks = run.blocks[:count]
                gone = next((n for n, block in enumerate(blocks) if block in overwritten), len(blocks))
                runs.append(Run(run.first, blocks[:gone]))
            copies.append(ChunkCopy(copy.slot, tuple(runs)))
        return copies

    def forget(self, request: Request | None = None) -> None:
        """Forget the audited loads of a request, because its blocks are recomputed. If `request` is None, forget all
        audited loads.
        """
        if request is None:
            self._held.clear()
            self._given_up.clear()
            for job in self._jobs.of(_ReadAgain):
                job.load = None
        else:
            self._held = {job: load for job, load in self._held.items() if load.request is not request}

    def ended(self, number: int, job: Job, report: JobReport) -> None:
        """Process the result of a second read of a load's blocks, which was made after their request released them.

        If the blocks have changed since the first read, log an error and delete the chunks that may be wrong.
        """
        assert isinstance(job, _ReadAgain)
        if report.ok and report.differences and job.load is not None:
            self._telemetry.audited_load(wrong=True, again=True)
            self._wrong(job.load, report.differences, "block after a correct load", spread=True)


def _tiers(request: Request) -> str:
    return ", ".join(tier for tier, count in request.report.source_chunks.items() if count) or "vLLM's own cache"
