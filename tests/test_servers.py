"""A test whose server is missing is skipped, and named at the run's end; where the server is needed, it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT

TESTS = """
import pytest
from tests.servers import needs_package

def test_one(): needs_package("not_here", "pip install it")
def test_another(): needs_package("not_here", "pip install it")
def test_by_pytest(): pytest.importorskip("not_here_either")
def test_that_has_other_reasons(): pytest.skip("not possible")
def test_that_passes(): needs_package("pytest", "pip install it")
"""


def run(folder: Path, *options: str, needed: str = "") -> tuple[int, str]:
    (folder / "test_needs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options, str(folder)]
    environment = {**os.environ, "NEEDED_SERVERS": needed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_the_end_of_a_run_names_what_was_missing(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "-n", "2")
    assert code == 0, printed
    summary = printed.partition("NOT TESTED")[2]
    assert "no not_here: pip install it [2 skipped]" in summary
    assert "could not import 'not_here_either'" in summary
    assert "not possible" not in summary


def test_what_is_needed_and_missing_fails(tmp_path: Path) -> None:
    code, printed = run(tmp_path, needed="other not_here")
    assert code == 1
    assert "2 failed, 1 passed, 2 skipped" in printed
    assert "not_here is needed here: pip install it" in printed
