"""`Jobs`: every order that the workers have not answered yet, whoever has given it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

from attrs import define, field

from lmkv.vllm.plan.metadata import JobReport
from lmkv.vllm.plan.request import Request


class TakesEnds(Protocol):
    """A planner, which is told once how each of its jobs has ended. `number`: as in the order."""

    def ended(self, number: int, job: Job, report: JobReport) -> None: ...


@define(eq=False, kw_only=True)
class Job:
    """An order to the workers for a request. Each planner has a kind of its own.

    `distrusted`: ordered before a load was known to have failed, or before a reset: what it copies may have been
    computed from blocks that nothing has filled.
    """

    planner: TakesEnds = field(repr=False)
    request: Request
    distrusted: bool = False


J = TypeVar("J", bound=Job)


class Jobs:
    """The jobs that have not ended. Called on the scheduling thread only. `ranks`: workers that answer each order."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job] = {}
        self._reports: dict[int, JobReport] = {}
        """Answers of some ranks."""

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, number: int, job: Job) -> None:
        """Follow an order that is in the step's plan."""
        self._jobs[number] = job

    def get(self, number: int) -> Job | None:
        return self._jobs.get(number)

    def of(self, kind: type[J]) -> Iterator[J]:
        """The jobs of a kind, the oldest first."""
        return (job for job in self._jobs.values() if isinstance(job, kind))

    def distrust(self) -> None:
        """Throw away what was ordered before now, where it may be wrong.

        After a failed load KV may depend on the unfilled blocks, which other requests share through vLLM's prefix
        cache. After a reset nobody looks for it.
        """
        for job in self._jobs.values():
            job.distrusted = True

    def answered(self, reports: Mapping[int, JobReport]) -> Iterator[tuple[int, JobReport]]:
        """Merge the answers of some ranks; the jobs that all ranks have answered."""
        for number, part in reports.items():
            known = self._reports.pop(number, None)
            merged = part if known is None else known.merge(part)
            if merged.ranks < self._ranks:
                self._reports[number] = merged
            else:
                yield number, merged

    def end(self, number: int, report: JobReport) -> None:
        """A job has ended on all ranks. Jobs that nobody follows are ignored."""
        job = self._jobs.pop(number, None)
        if job is not None:
            job.planner.ended(number, job, report)
