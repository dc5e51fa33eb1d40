"""`LoadAudits`: has the blocks of some loads read back, and compares them with the chunks that were loaded.

A stored chunk that is right can still be copied wrongly. Workers read the blocks as soon as the load has ended, before
vLLM is told so where that is possible, and once more when their request gives them up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from attrs import define

from lmkv.memory.comparison import Difference
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.requests.request import RequestState
from lmkv.vllm.scheduler.auditor import Auditor, named
from lmkv.vllm.scheduler.context import PlanContext

logger = logging.getLogger("lmkv.vllm")


@define(eq=False)
class AuditedLoad:
    """A load whose blocks are read back.

    `copies`: of the chunks from number `first` on, and of states. `tenure`: of its request (see `RequestState`) when it
    was ordered.
    """

    state: RequestState
    copies: list[ChunkCopy]
    first: int
    end: int
    kind: str
    tenure: int


class LoadAudits:
    """Decides which loads are audited, and what follows. Called on the scheduling thread only; never waits.

    `on_wrong(state, chunk)`: called with a request whose blocks of this chunk do not hold what is stored.
    """

    def __init__(self, context: PlanContext, audit: Auditor) -> None:
        self._audit = audit
        self._block_map = context.block_map
        self._builder = context.builder
        self._telemetry = context.observer.telemetry
        self._disables = context.options.audit_action == "disable"
        self._layerwise = context.options.whole_blocks
        self.on_wrong: Callable[[RequestState, int], None] = lambda state, chunk: None
        self._held: dict[int, AuditedLoad] = {}
        """Loads whose request still has their blocks, by job."""
        self._given_up: dict[int, AuditedLoad] = {}
        """Loads whose request has given the blocks up since the last plan: nothing has written into these yet."""
        self._left: set[RequestState] = set()
        self._jobs: dict[int, AuditedLoad | None] = {}

    def take(
        self, state: RequestState, copies: list[ChunkCopy], first: int, end: int, *, between_steps: bool
    ) -> AuditedLoad | None:
        """The load of a request, if it is to be audited. `end`: the token that it ends before."""
        if not copies or not self._audit.takes_load(state):
            return None
        kind = "between steps" if between_steps else "layer by layer" if self._layerwise else "within a step"
        return AuditedLoad(state, copies, first, end, kind, state.tenure)

    def ended(self, job: int, load: AuditedLoad, report: JobReport) -> None:
        """All ranks have compared what they have loaded."""
        self._telemetry.audited_load(wrong=bool(report.differences))
        state = load.state
        if report.differences:
            # Where it is computed again, nothing was computed from it.
            self._wrong(load, report.differences, "load", spread=report.ok)
        elif report.ok and state.tenure == load.tenure:
            self._held[job] = load
        elif report.ok and state in self._left and state.tenure == load.tenure + 1:
            self._given_up[job] = load

    def _wrong(self, load: AuditedLoad, differences: Sequence[Difference], what: str, *, spread: bool) -> None:
        chunk, text = load.first + differences[0].copy, self._described(load, differences)
        logger.error(
            "lmkv: audit: wrong %s: %s; %s%s",
            what,
            text,
            "it goes on" if spread else "it is computed instead",
            ", and nothing is loaded any more" if self._disables else "",
        )
        self._telemetry.loads_off |= self._disables
        if spread:
            state, after = load.state, load.end // self._block_map.chunk_size
            behind = [key for key in state.keys_with_tail(len(state.chain.keys))[after:] if key not in state.promised]
            self._audit.wrong.add(behind, f"a wrong {what}, {text}")
            self.on_wrong(state, chunk)

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
            f"request {load.state.name}, tokens {first} to {min(end, load.end) - 1}, blocks {named(blocks)}, "
            f"{len(layers)} layers ({named(layers)}) on ranks {sorted({each.rank for each in differences})}, "
            f"copied {load.kind}, {len(load.copies)} chunks and states from {_tiers(load.state)}"
        )

    # -- once more ----------------------------------------------------------------------------------------

    def give_up(self, state: RequestState) -> None:
        """The request has ended, or was preempted."""
        state.tenure += 1
        self._left.add(state)
        for job in [job for job, load in self._held.items() if load.state is state]:
            self._given_up[job] = self._held.pop(job)

    def order(self, overwritten: Collection[int]) -> None:
        """Order that what was given up is read again, before this step writes into it.

        `overwritten`: blocks that vLLM writes into before it hands the plan over.
        """
        for job, load in self._given_up.items():
            copies = self._settled(load, overwritten)
            if any(run.blocks for copy in copies for run in copy.runs):
                self._jobs[self._builder.read(job, copies).job] = load
        self._given_up.clear()
        self._left.clear()

    def _settled(self, load: AuditedLoad, overwritten: Collection[int]) -> list[ChunkCopy]:
        """Whole pages before the load's end, of tables that keep all blocks: nothing was to write into them."""
        size, copies = self._block_map.chunk_size, []
        for number, copy in enumerate(load.copies, load.first):
            runs = []
            for group, run in zip(self._block_map.groups, copy.runs, strict=True):
                # States come behind the chunks, and so behind the end.
                whole = max(0, (load.end - number * size) // group.block_size - run.first)
                count = whole if group.window is None else 0
                blocks = run.blocks[:count]
                gone = next((n for n, block in enumerate(blocks) if block in overwritten), len(blocks))
                runs.append(Run(run.first, blocks[:gone]))
            copies.append(ChunkCopy(copy.slot, tuple(runs)))
        return copies

    def forget(self, state: RequestState | None = None) -> None:
        """The blocks of a request, or all, are computed again, or lost."""
        if state is None:
            self._held.clear()
            self._given_up.clear()
            self._jobs = dict.fromkeys(self._jobs)
        else:
            self._held = {job: load for job, load in self._held.items() if load.state is not state}

    def __contains__(self, job: int) -> bool:
        return job in self._jobs

    @property
    def busy(self) -> bool:
        """Whether blocks are being read again."""
        return bool(self._jobs)

    def read_again(self, number: int, report: JobReport) -> None:
        """All ranks have read the blocks again."""
        load = self._jobs.pop(number)
        if report.ok and report.differences and load is not None:
            self._telemetry.audited_load(wrong=True, again=True)
            self._wrong(load, report.differences, "block after a load that was right", spread=True)


def _tiers(state: RequestState) -> str:
    return ", ".join(tier for tier, count in state.source_chunks.items() if count) or "vLLM's own cache"
