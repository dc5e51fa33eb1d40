"""Seconds of each test, as a pytest plugin: the slowest at the end of a run, all of them in a file, and a budget.

Processor time is that of the process and of its children that have ended: unlike seconds on the clock, it hardly
depends on what else the machine does. So the budget is in processor time.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BUDGET = 5.0
"""Seconds of processor time of a test that needs no vLLM, unless it is marked `slow` and says why.

A slow machine takes nearly twice as long: a run fails only beyond twice the budget, and names each test beyond it.
"""
_SHOWN, _LEAST = 12, 1.0
_PHASES = ("setup", "call", "teardown")


class Took(NamedTuple):
    """Seconds on the clock, and of processors."""

    clock: float = 0.0
    processor: float = 0.0

    def __add__(self, other: object) -> Took:
        assert isinstance(other, Took)
        return Took(self.clock + other.clock, self.processor + other.processor)

    def __str__(self) -> str:
        return f"{self.clock:7.1f} s {self.processor:7.1f} s"


def now() -> Took:
    used = os.times()
    return Took(time.monotonic(), used.user + used.system + used.children_user + used.children_system)


def since(before: Took) -> Took:
    after = now()
    return Took(after.clock - before.clock, after.processor - before.processor)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="write the seconds of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker(config), "durations-of-a-worker")
    else:
        config.pluginmanager.register(Durations(config), "durations")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = now()
    return (yield)


_BEFORE = pytest.StashKey[Took]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report: Any = yield
    # Attributes of a report cross from a worker to the process that has started it.
    report.processor = since(item.stash[_BEFORE]).processor
    report.needs_vllm = item.get_closest_marker("vllm") is not None
    report.has_budget = not any(map(item.get_closest_marker, ("vllm", "gpu", "nightly", "slow")))
    item.stash[_BEFORE] = now()
    return report


class _Worker:
    """Tells how long this process took to collect the tests."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._before = now()

    def pytest_collection_finish(self) -> None:
        self._config.workeroutput["collection"] = tuple(since(self._before))


class Durations:
    """Gathers the seconds of all tests of a run."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._before = now()
        self.collections: list[Took] = []
        self.tests: dict[str, dict[str, Took]] = defaultdict(dict)
        self.over: dict[str, float] = {}
        self._with_budget: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.collections.append(since(self._before))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        found = getattr(node, "workeroutput", {}).get("collection")
        if found:
            self.collections.append(Took(*found))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in _PHASES and hasattr(report, "processor"):
            self.tests[report.nodeid][report.when] = Took(report.duration, report.processor)
            if report.has_budget:
                self._with_budget.add(report.nodeid)

    def total(self, name: str) -> Took:
        return sum(self.tests[name].values(), Took())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        took = {name: self.total(name).processor for name in self._with_budget}
        # More examples take longer.
        nightly = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
        self.over = {name: seconds for name, seconds in took.items() if seconds > BUDGET and not nightly}
        if session.exitstatus == pytest.ExitCode.OK and any(seconds > 2 * BUDGET for seconds in self.over.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (file := self._config.getoption("durations_to")) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"collection": self.collections, "tests": self.tests}, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.over:
            terminalreporter.section("OVER BUDGET", red=True, bold=True)
            for name, seconds in self.over.items():
                terminalreporter.line(f"{seconds:.1f} s of processor time, at most {BUDGET:.0f}: {name}", red=True)
        setups = {f"{name} (setup)": phases.get("setup", Took()) for name, phases in self.tests.items()}
        calls = {name: self.total(name) for name in self.tests}
        for title, found in (("tests", calls), ("setups", setups)):
            slowest = sorted(found.items(), key=lambda each: -max(each[1]))[:_SHOWN]
            shown = [f"{took} {name}" for name, took in slowest if max(took) >= _LEAST]
            if shown:
                terminalreporter.section(f"slowest {title}: on the clock, of processors")
                for line in shown:
                    terminalreporter.line(line)


def main() -> None:
    """Write the names of the longest files of the last complete run, for conftest: python -m tests.durations."""
    root = Path(__file__).parents[1]
    took: dict[str, float] = defaultdict(float)
    for part in ("unit", "vllm", "v2"):
        for name, phases in json.loads((root / "build" / "durations" / f"{part}.json").read_text())["tests"].items():
            took[name.partition("::")[0]] += sum(clock for clock, _ in phases.values())
    longest = sorted((name for name, seconds in took.items() if seconds > 10), key=lambda name: -took[name])
    (root / "tests" / "longest.txt").write_text("\n".join([*longest, ""]))


if __name__ == "__main__":
    main()
