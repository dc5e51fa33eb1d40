"""The messages between the scheduler side and the workers: copy orders and reports. No vLLM types."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from lmkv.memory.comparison import Difference
from lmkv.memory.copier import ChunkCopy
from lmkv.memory.slab import SlabRef


@frozen
class CopyOrder:
    """Copies that succeed or fail together. `stores`: from blocks into slots; else the other way.

    `failed_blocks`: blocks that nothing will fill, to be reported as failed. `between_steps`: no computation
    of this step reads the blocks. `finishes`: id of the request whose asynchronous load ends with this order.
    `compares`: slots to compare with those that the copies have filled, one for each. `audited`: a load whose blocks
    are read back, and compared with the slots.
    """

    job: int
    copies: list[ChunkCopy]
    stores: bool = False
    failed_blocks: list[int] = field(factory=list)
    between_steps: bool = False
    finishes: str | None = None
    compares: list[int] = field(factory=list)
    audited: bool = False


@frozen
class ReadOrder:
    """Read the blocks of copies that the audited order `load` has made, and compare them with what was read then."""

    job: int
    load: int
    copies: list[ChunkCopy]


@frozen
class StepPlan:
    """The orders of one step. `reads` come before all that the step writes.

    `slab`: set until every worker is known to have mapped it. `timed`: number of a step whose end is to be reported; 0:
    this one's is not.
    """

    loads: list[CopyOrder] = field(factory=list)
    stores: list[CopyOrder] = field(factory=list)
    slab: SlabRef | None = None
    timed: int = 0
    reads: list[ReadOrder] = field(factory=list)


@define
class JobReport:
    """How a job ended on the `ranks` that have answered. `seconds`: those of the slowest rank.

    `differences`: of an order that compares, or is audited.
    """

    ranks: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(factory=list)

    def merge(self, other: JobReport) -> JobReport:
        return JobReport(
            self.ranks + other.ranks,
            self.ok and other.ok,
            self.nbytes + other.nbytes,
            max(self.seconds, other.seconds),
            self.differences + other.differences,
        )


@define
class WorkerReport:
    """The jobs, and the timed steps, that have ended since the last report.

    `mapped`: ranks that have the slab. `refusal`: why a rank fails every order from now on, "" if none does.
    `adapters`: number and digest of each adapter that was loaded.
    """

    jobs: dict[int, JobReport] = field(factory=dict)
    steps: set[int] = field(factory=set)
    mapped: set[int] = field(factory=set)
    refusal: str = ""
    adapters: set[tuple[int, str]] = field(factory=set)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Both reports in one; the order does not matter, because ranks answer in any order."""
        merged = dict(self.jobs)
        for job, report in other.jobs.items():
            merged[job] = merged[job].merge(report) if job in merged else report
        refusal = max(self.refusal, other.refusal)
        adapters = self.adapters | other.adapters
        return WorkerReport(merged, self.steps | other.steps, self.mapped | other.mapped, refusal, adapters)


class StepPlanBuilder:
    """Numbers copy orders and collects them until the step's plan is taken."""

    def __init__(self) -> None:
        self._last_job = 0
        self._reads: list[ReadOrder] = []
        self._loads: list[CopyOrder] = []
        self._stores: list[CopyOrder] = []
        self.timed = 0

    def read(self, load: int, copies: list[ChunkCopy]) -> ReadOrder:
        """Add to the plan that the blocks of an audited load are read again."""
        order = ReadOrder(self._new_job(), load, copies)
        self._reads.append(order)
        return order

    def load(
        self,
        copies: list[ChunkCopy],
        failed_blocks: list[int],
        *,
        between_steps: bool = False,
        finishes: str | None = None,
        audited: bool = False,
    ) -> CopyOrder:
        """Add a load to the plan."""
        made = self._new_job(), copies, False, failed_blocks, between_steps, finishes
        order = CopyOrder(*made, audited=audited)
        self._loads.append(order)
        return order

    def store(self, copies: list[ChunkCopy], compares: Sequence[int] = ()) -> CopyOrder:
        """Add a store to the plan, and a comparison of what it has copied."""
        order = CopyOrder(self._new_job(), copies, stores=True, compares=list(compares))
        self._stores.append(order)
        return order

    def _new_job(self) -> int:
        self._last_job += 1
        return self._last_job

    def take(self, slab: SlabRef | None) -> StepPlan:
        """The plan so far; a new one is begun. `slab`: for the workers to map, if there are orders."""
        made = self._loads, self._stores, slab if self._loads or self._stores else None, self.timed, self._reads
        self._reads, self._loads, self._stores, self.timed = [], [], [], 0
        return StepPlan(*made)
