"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (default), quick, ci, nightly; and which tests run when."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import skipped_as_missing

pytest_plugins = ["tests.changed", "tests.durations"]

# Read when lmkv is imported: methods marked @locked check that their lock is held.
os.environ["LMKV_CHECK_LOCKS"] = "1"

# Wall-clock deadlines measure the machine's other load, not lmkv.
settings.register_profile(
    "dev", deadline=None, max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("dev"), max_examples=15, derandomize=True)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=60, stateful_step_count=50, derandomize=True)
settings.register_profile(
    "nightly", settings.get_profile("dev"), max_examples=3000, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


LONGEST = tuple((Path(__file__).parent / "longest.txt").read_text().split())
"""Files of tests, the longest first: `--dist loadfile` hands them out in the order of their collection."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="only the nightly tests of this part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked `nightly`, unless `-m` names the mark, and begin with the longest files."""
    part, chosen = config.getoption("part"), "nightly" in config.option.markexpr

    def runs(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("nightly")
        return mark is None or (chosen and part in (None, *mark.args))

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = filter(runs, items)
    rank = {config.rootpath / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end which programs were missing, and how many tests were skipped for that."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    lines = skipped_as_missing(skipped)
    if lines:
        terminalreporter.section("NOT TESTED, because it is missing here", red=True, bold=True)
        for line in lines:
            terminalreporter.line(line, red=True)


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """Have commands that run in this process leave its logging as it was."""
    logger = logging.getLogger("lmkv")
    level = logger.level
    yield
    logger.setLevel(level)


class _Guards(logging.Handler):
    """Exceptions that lmkv has kept from vLLM, and that no test has injected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        within = record.pathname.endswith(("vllm/connector.py", "scheduler/__init__.py"))
        if error is not None and within and not str(error).startswith("injected"):
            self.kept.append(f"{record.getMessage()}: {error!r}")


@pytest.fixture(autouse=True)
def _no_error_kept_from_vllm() -> Iterator[None]:
    """Fail where lmkv goes on after an error of its own: vLLM then misses a hit, and nothing else shows it."""
    guards, logger = _Guards(), logging.getLogger("lmkv.vllm")
    logger.addHandler(guards)
    yield
    logger.removeHandler(guards)
    assert guards.kept == []


@pytest.fixture(autouse=True)
def _memory_of_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slabs of other programs on this host, such as another run of the suite, take nothing from a test's small ones.

    The tests of tests/memory measure the host as it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "tests/memory" not in request.path.as_posix():
            patch.setattr("lmkv.memory.slab.promised_and_taken", lambda: (0, 0))
        yield


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: for thousands of files whose medium does not matter."""
    in_memory = Path("/dev/shm")
    parent = in_memory if os.access(in_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="lmkv-test-", dir=parent) as folder:
        yield Path(folder)
