"""Work for the I/O threads: planned under the store's lock, started after its release."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from attrs import define, field

_TRIES = 10
"""How often Ctrl-C may come into one thing that has to be done."""


class Priority(IntEnum):
    """Order of service. A store waits for every load; a prefetch waits for every demanded load."""

    LOAD = 0
    PREFETCH = 1
    DELETION = 2
    STORE = 3


@define(eq=False)
class Job:
    """`work` runs on an I/O thread and handles its own errors; `refused` runs if the pool does not take it.

    Both get an `AfterLock` for further plans, which is run after them. `lane`: the tier whose threads do it.
    """

    work: Callable[[AfterLock], None]
    priority: Priority
    refused: Callable[[AfterLock], None]
    lane: str = ""


@define(eq=False)
class AfterLock:
    """Plans made under a lock, to be run after its release. `calls` come after `jobs` and must not raise."""

    jobs: list[Job] = field(factory=list)
    calls: deque[Callable[[AfterLock], None]] = field(factory=deque)

    def run(self, submit: Callable[[Sequence[Job]], list[Job]]) -> None:
        """Do everything, including plans that jobs and calls add meanwhile. No lock may be held.

        `submit`: `IOPool.submit`, which queues jobs and returns the refused ones. An exception of one, or Ctrl-C, keeps
        no other from being done, and is raised at the end. What it has cut short is done again: that does no harm.
        """
        raised: BaseException | None = None
        tries = _TRIES
        while self.jobs or self.calls:
            try:
                self._run(submit)
            except BaseException as error:
                raised, tries = error, tries - 1
                if isinstance(error, Exception) or not tries:
                    tries = _TRIES
                    self._give_up()
        if raised is not None:
            raise raised

    def _run(self, submit: Callable[[Sequence[Job]], list[Job]]) -> None:
        if self.jobs:
            # A chain is unreferenced tail first: its head is evicted last.
            self.calls.extendleft(job.refused for job in submit(self.jobs))
            self.jobs = []
        while self.calls and not self.jobs:
            self.calls[0](self)
            self.calls.popleft()

    def _give_up(self) -> None:
        """Leave out what has just failed."""
        if self.jobs:
            self.calls.extendleft(job.refused for job in self.jobs)
            self.jobs = []
        else:
            self.calls.popleft()


def deletion(work: Callable[[], None], lane: str) -> Job:
    """A job that a pool may refuse: the store serves nothing that it would delete."""
    return Job(lambda after: work(), Priority.DELETION, lambda after: None, lane)
