"""What the scheduler tells the workers with each step, and what they answer. Plain data, no vLLM types."""

from __future__ import annotations

from attrs import define, field, frozen

from lmkv.memory.copier import ChunkCopy
from lmkv.memory.slab import SlabRef


@frozen
class CopyOrder:
    """Copies that succeed or fail together: loads, or with `stores` what is stored.

    `failed_blocks`: blocks that cannot be filled, to be reported with the order. `between_steps`: nothing
    that is computed in this step reads the blocks. `finishes`: the request whose load between steps is
    complete with this order.
    """

    job: int
    copies: list[ChunkCopy]
    stores: bool = False
    failed_blocks: list[int] = field(factory=list)
    between_steps: bool = False
    finishes: str | None = None


@frozen
class StepPlan:
    """The orders of one step. `slab` is set until the workers are known to have mapped it."""

    loads: list[CopyOrder] = field(factory=list)
    stores: list[CopyOrder] = field(factory=list)
    slab: SlabRef | None = None


@define
class JobReport:
    """One job, over the ranks that answered: how many, whether all succeeded, the slowest one's seconds."""

    ranks: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0

    def merge(self, other: JobReport) -> JobReport:
        return JobReport(
            self.ranks + other.ranks,
            self.ok and other.ok,
            self.nbytes + other.nbytes,
            max(self.seconds, other.seconds),
        )


@define
class WorkerReport:
    """What finished since the last report, by job."""

    jobs: dict[int, JobReport] = field(factory=dict)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Order of merging does not matter: ranks answer in any order."""
        merged = dict(self.jobs)
        for job, report in other.jobs.items():
            merged[job] = merged[job].merge(report) if job in merged else report
        return WorkerReport(merged)


class StepPlanBuilder:
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
