"""The messages between the scheduler side and the workers: copy tasks, which tell workers what to copy, and reports.

Both sides of the connector import this package, which uses no types of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from lmkv.memory.comparison import Difference
from lmkv.memory.copier import ChunkCopy
from lmkv.memory.slab import SlabRef


@frozen
class CopyTask:
    """A command to the workers to copy chunks between vLLM's blocks and lmkv's slots. All `copies` of a task succeed or
    fail together. `job`: the task's number.

    `stores`: True to copy from blocks into slots (a store), False to copy from slots into blocks (a load).
    `failed_blocks`: blocks that a load cannot fill, because chunks were lost; workers report them as failed.
    `between_steps`: whether the load is asynchronous. Then this step's computation does not use the load's blocks.

    `finishes`: if the task ends a request's asynchronous load, the request's id. `compares`: for an audit, one slot for
    each copy, to compare with the slot that the copy fills. `audited`: whether to read back the blocks of a load, and
    compare them with the slots.
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
class ReadTask:
    """A command to the workers to read the blocks of an audited load a second time, and compare them with the first
    read. `load`: the job number of that load.
    """

    job: int
    load: int
    copies: list[ChunkCopy]


@define
class StepPlan:
    """The copy tasks of one step. The workers execute `reads` before everything else in the step.

    `slab`: the slab (lmkv's host memory) to map; None once every worker has mapped the slab. `timed`: the number of the
    step if the workers must report the step's end, else 0.
    """

    loads: list[CopyTask] = field(factory=list)
    stores: list[CopyTask] = field(factory=list)
    slab: SlabRef | None = None
    timed: int = 0
    reads: list[ReadTask] = field(factory=list)


@define
class JobReport:
    """The result of a job, which is one copy task or read task. `ranks`: number of ranks that have reported a result.
    `seconds`: the time of the slowest rank.

    `ok`: whether the job has succeeded on all these ranks. `nbytes`: number of bytes that all these ranks have copied.
    `differences`: the chunks or blocks that an audit has found to differ.
    """

    ranks: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(factory=list)

    def merge(self, other: JobReport) -> JobReport:
        sums = self.ranks + other.ranks, self.ok and other.ok, self.nbytes + other.nbytes
        return JobReport(*sums, max(self.seconds, other.seconds), self.differences + other.differences)


@define
class WorkerReport:
    """A worker's report to the scheduler side: the jobs and timed steps that have ended since its last report.

    `jobs`: results by job number. `steps`: numbers of the timed steps. `mapped`: the ranks that have mapped the slab.
    `refusal`: why a rank fails every task from now on; "" if no rank does so. `adapters`: (number, digest) of each
    loaded adapter.
    """

    jobs: dict[int, JobReport] = field(factory=dict)
    steps: set[int] = field(factory=set)
    mapped: set[int] = field(factory=set)
    refusal: str = ""
    adapters: set[tuple[int, str]] = field(factory=set)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Return a report with the content of both reports. `a.merge(b)` equals `b.merge(a)`, because ranks report in
        any order.
        """
        merged = dict(self.jobs)
        for job, report in other.jobs.items():
            merged[job] = merged[job].merge(report) if job in merged else report
        refusal = max(self.refusal, other.refusal)
        adapters = self.adapters | other.adapters
        return WorkerReport(merged, self.steps | other.steps, self.mapped | other.mapped, refusal, adapters)


class StepPlanBuilder:
    """Numbers copy tasks and collects them, until `take` returns them as the step's plan."""

    def __init__(self) -> None:
        self._last_job = 0
        self._plan = StepPlan()

    def time(self, step: int) -> None:
        """Make the workers report the end of step number `step`."""
        self._plan.timed = step

    def read(self, load: int, copies: list[ChunkCopy]) -> ReadTask:
        """Make the workers read an audited load's blocks again, to compare them with the first read. `load`: the load's
        job number.
        """
        self._plan.reads.append(ReadTask(self._new_job(), load, copies))
        return self._plan.reads[-1]

    def load(
        self,
        copies: list[ChunkCopy],
        failed_blocks: list[int],
        *,
        between_steps: bool = False,
        finishes: str | None = None,
        audited: bool = False,
    ) -> CopyTask:
        """Add a load to the plan. The arguments are the fields of `CopyTask` with the same names."""
        made = self._new_job(), copies, False, failed_blocks, between_steps, finishes
        self._plan.loads.append(CopyTask(*made, audited=audited))
        return self._plan.loads[-1]

    def store(self, copies: list[ChunkCopy], compares: Sequence[int] = ()) -> CopyTask:
        """Add a store to the plan. `compares`: see `CopyTask`."""
        self._plan.stores.append(CopyTask(self._new_job(), copies, stores=True, compares=list(compares)))
        return self._plan.stores[-1]

    def _new_job(self) -> int:
        self._last_job += 1
        return self._last_job

    def take(self, slab: SlabRef | None) -> StepPlan:
        """Return the plan, and begin a new plan. `slab`: the slab to map, if the plan has loads or stores."""
        plan, self._plan = self._plan, StepPlan()
        plan.slab = slab if plan.loads or plan.stores else None
        return plan
