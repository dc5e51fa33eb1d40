"""The orders of the step that is being scheduled."""

from __future__ import annotations

from lmkv.copier import ChunkCopy
from lmkv.slab import SlabRef
from lmkv.vllm.metadata import CopyOrder, StepPlan


class Outbox:
    """Numbers jobs and collects their orders until the step's plan is taken."""

    def __init__(self) -> None:
        self._last_job = 0
        self._plan = StepPlan()

    def load(
        self,
        copies: list[ChunkCopy],
        failed_blocks: list[int],
        *,
        between_steps: bool = False,
        finishes: str | None = None,
    ) -> CopyOrder:
        order = CopyOrder(
            self._new_job(),
            copies,
            failed_blocks=failed_blocks,
            between_steps=between_steps,
            finishes=finishes,
        )
        self._plan.loads.append(order)
        return order

    def store(self, copies: list[ChunkCopy]) -> CopyOrder:
        order = CopyOrder(self._new_job(), copies, stores=True)
        self._plan.stores.append(order)
        return order

    def _new_job(self) -> int:
        self._last_job += 1
        return self._last_job

    def take(self, slab: SlabRef | None) -> StepPlan:
        """The plan, and an empty one begun. `slab`: to be mapped by the workers, if they have orders."""
        plan, self._plan = self._plan, StepPlan()
        return StepPlan(plan.loads, plan.stores, slab) if plan.loads or plan.stores else plan
