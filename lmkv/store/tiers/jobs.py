"""Work for the I/O threads: planned under the store's lock, started after its release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from attrs import define, field


class Priority(IntEnum):
    """Order of service. A store waits for every load; a prefetch waits for every demanded load."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2


@define(eq=False)
class Job:
    """`work` runs on an I/O thread and handles its own errors; `refused` runs if the pool does not take it.

    Both get an `AfterLock` for further plans, which is run after them.
    """

    work: Callable[[AfterLock], None]
    priority: Priority
    refused: Callable[[AfterLock], None]


@define(eq=False)
class AfterLock:
    """Plans made under a lock, to be run after its release. `calls` come after `jobs` and must not raise."""

    jobs: list[Job] = field(factory=list)
    calls: list[Callable[[AfterLock], None]] = field(factory=list)

    def run(self, submit: Callable[[Sequence[Job]], list[Job]]) -> None:
        """Do everything, including plans that jobs and calls add meanwhile. No lock may be held.

        `submit`: `IOPool.submit`, which queues jobs and returns the refused ones.
        """
        while self.jobs or self.calls:
            jobs, calls, self.jobs, self.calls = self.jobs, self.calls, [], []
            # A chain is unreferenced tail first: its head is evicted last.
            for job in reversed(submit(jobs) if jobs else []):
                job.refused(self)
            for call in calls:
                call(self)


def deletion(work: Callable[[], None]) -> Job:
    """A job that a closed pool may refuse: then the store serves nothing that it would delete."""
    return Job(lambda after: work(), Priority.LOAD, lambda after: None)
