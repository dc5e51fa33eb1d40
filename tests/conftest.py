"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE: dev (default), ci, nightly; and when long tests run."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import skipped_as_missing

# Read when lmkv is imported: methods marked @locked check that their lock is held.
os.environ["LMKV_CHECK_LOCKS"] = "1"

# Wall-clock deadlines measure the machine's other load, not lmkv.
settings.register_profile(
    "dev", deadline=None, max_examples=50, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=100, stateful_step_count=50, derandomize=True)
settings.register_profile(
    "nightly", settings.get_profile("dev"), max_examples=3000, stateful_step_count=100, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked `nightly`, unless NIGHTLY=1 or `-m` names the mark."""
    if os.environ.get("NIGHTLY") == "1" or "nightly" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("nightly")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


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


@pytest.fixture(autouse=True)
def _memory_of_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slabs of other programs on this host, such as another run of the suite, take nothing from a test's small ones.

    The tests of tests/memory measure the host as it is.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "tests/memory" not in request.path.as_posix():
            patch.setattr("lmkv.memory.slab_files.promised_and_taken", lambda: (0, 0))
        yield


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: for thousands of files whose medium does not matter."""
    in_memory = Path("/dev/shm")
    parent = in_memory if os.access(in_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="lmkv-test-", dir=parent) as folder:
        yield Path(folder)
