"""StorePlanner: each chunk is copied out in the step that completes it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from attrs import define

from lmkv.chunks.hashing import token_bytes
from lmkv.memory.copier import ChunkCopy
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Reservation
from lmkv.store.tiered import TieredStore
from lmkv.vllm.geometry import Geometry
from lmkv.vllm.metadata import JobReport, StepPlanBuilder
from lmkv.vllm.scheduler.request import BlockTables, RequestState

logger = logging.getLogger("lmkv.vllm")


@define(eq=False)
class _Job:
    state: RequestState
    reservation: Reservation
    first_chunk: int
    upto: int
    tainted: bool = False
    """Ordered before it was known that a load had failed: it may hold what was computed on top of that."""


class StorePlanner:
    """`save_decode`: whether generated tokens are stored too. Called on the scheduling thread only."""

    def __init__(
        self, store: TieredStore, geometry: Geometry, builder: StepPlanBuilder, *, save_decode: bool
    ) -> None:
        self._store = store
        self._geometry = geometry
        self._chunk_size = geometry.chunk_size
        self._builder = builder
        self._save_decode = save_decode
        self._jobs: dict[int, _Job] = {}

    def completes(self, state: RequestState, computed: int) -> int:
        """How many leading chunks are complete with `computed` valid tokens, 0 when none of them is new."""
        # With asynchronous scheduling the last sampled tokens are computed before they are known here.
        known = min(computed, state.request.num_tokens)
        if not self._save_decode:
            known = min(known, getattr(state.request, "num_prompt_tokens", known))
        complete = known // self._chunk_size
        return complete if complete > state.stored and not state.options.skip_save else 0

    def store(self, state: RequestState, complete: int, tables: BlockTables) -> None:
        """Order copies of the chunks up to number `complete` that are not here yet.

        Where the tier has no slot to give, the rest is tried again in the request's next step.
        """
        keys = state.keys(complete)
        state.stored += self._store.match(keys[state.stored :])[0]
        first = state.stored
        if first == complete:
            return
        size = self._chunk_size
        reservation = self._store.reserve(
            keys[first:],
            parent=state.chain.parent(first),
            tokens=token_bytes(state.request.all_token_ids[first * size : complete * size]),
            protect=keys,
        )
        state.stored = first + reservation.accepted
        copies = self._copies(reservation, keys, first, state.stored, tables)
        if copies:
            order = self._builder.store(copies)
            self._jobs[order.job] = _Job(state, reservation, first, state.stored)

    def _copies(
        self,
        reservation: Reservation,
        keys: Sequence[ChunkKey],
        first: int,
        end: int,
        tables: BlockTables,
    ) -> list[ChunkCopy]:
        """Copies into the reserved slots; chunks whose blocks are not all there are given back."""
        slots = reservation.slots
        copies, unusable = [], []
        for index in range(first, end):
            slot = slots.get(keys[index])
            copy = None if slot is None else self._geometry.store_copy(slot, tables, index)
            if copy is not None:
                copies.append(copy)
            elif slot is not None:
                unusable.append(keys[index])
        reservation.abort(unusable)
        return copies

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    def taint_all(self) -> None:
        """A load failed: what was ordered until now may be built on it, in the request itself and in others

        that share its blocks through vLLM's prefix cache.
        """
        for job in self._jobs.values():
            job.tainted = True

    def ended(self, number: int, report: JobReport) -> None:
        """All ranks have answered: publish the chunks, or forget them."""
        job = self._jobs.pop(number)
        state, count = job.state, len(job.reservation)
        if job.tainted or not report.ok:
            job.reservation.abort()
            state.stored = min(state.stored, job.first_chunk)
            # What cannot be copied now will not be in the next step: no use in trying again and again.
            state.options.skip_save |= not report.ok
            return
        job.reservation.commit()
        stored, total = count * self._chunk_size, job.upto * self._chunk_size
        logger.info("lmkv: request %s: stored %d of %d tokens", state.request_id, stored, total)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)
