"""Counts of a run so far, and the verdict on them."""

from __future__ import annotations

import attrs
from attrs import define, field

MUST_HAPPEN = ("requests", "faults", "preemptions", "evictions", "external_hit_tokens", "aborted", "audited_loads")
MUST_NOT_HAPPEN = ("differences", "leaks", "hangs", "alarms")


@define
class Counts:
    """`problems` says in words what `differences`, `leaks`, `hangs` and `alarms` count.

    `aborted_loads`: of those that were `aborted`, while a load between steps filled their blocks. `drafting`: an
    engine with drafts was among them.
    """

    requests: int = 0
    differences: int = 0
    leaks: int = 0
    hangs: int = 0
    alarms: int = 0
    """Of audits; none of the faults is one that they are to find."""
    audited_hits: int = 0
    audited_loads: int = 0
    faults: int = 0
    preemptions: int = 0
    evictions: int = 0
    external_hit_tokens: int = 0
    aborted: int = 0
    aborted_loads: int = 0
    resets: int = 0
    engines: int = 0
    steps: int = 0
    accepted_drafts: int = 0
    drafting: bool = False
    problems: list[str] = field(factory=list)

    def differ(self, what: str) -> None:
        self.differences += 1
        self.problems.append(f"difference: {what}")

    def leak(self, what: str) -> None:
        self.leaks += 1
        self.problems.append(f"leak: {what}")

    def hang(self, what: str) -> None:
        self.hangs += 1
        self.problems.append(f"hang: {what}")

    def alarm(self, what: str) -> None:
        self.alarms += 1
        self.problems.append(f"alarm: {what}")

    def as_dict(self) -> dict[str, int]:
        return attrs.asdict(self, filter=attrs.filters.exclude("problems", "drafting"))

    def verdict(self) -> list[str]:
        """Why the run failed; empty when it did not. A run that tested nothing has failed, too."""
        counted = self.as_dict()
        wrong = [f"{counted[name]} {name}" for name in MUST_NOT_HAPPEN if counted[name]]
        must_happen = (*MUST_HAPPEN, "accepted_drafts") if self.drafting else MUST_HAPPEN
        return wrong + [f"no {name}: nothing was tested" for name in must_happen if not counted[name]]
