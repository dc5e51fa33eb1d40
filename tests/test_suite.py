"""The suite's own rules: a budget of seconds, nightly parts that can be found, tests of what was changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import changed
from tests.changed import changed_since, distances, is_test
from tests.conftest import LONGEST
from tests.pages import ROOT, loaded_module

NIGHTLY = re.compile(r'mark\.nightly\("([\w-]+)"\)')
MARKED = re.compile(r'^    "[\w-]+": marked\("([\w-]+)"', re.MULTILINE)
KIT = "packages/kv-connector-torture/kv_connector_torture"
TESTS = """
import time, pytest

def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_short(): pass
def test_waiting(): time.sleep(0.5)
def test_long(): busy(0.4)
def test_very_long(): busy(0.8)
@pytest.mark.slow("a reason")
def test_that_says_why(): busy(0.8)
@pytest.fixture
def made(): busy(0.4)
def test_with_a_long_setup(made): pass
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "test_them.py").write_text(TESTS)
    (folder / "conftest.py").write_text("import tests.durations\ntests.durations.BUDGET = 0.3\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.durations", "-p", "no:cacheprovider", *options, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow("each of two runs has processes of its own")
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=str)
def test_a_test_over_the_budget_fails_the_run_unless_it_says_why(tmp_path: Path, workers: tuple[str, ...]) -> None:
    code, printed = run(tmp_path, *workers, "--durations-to=durations.json")
    assert code == 1
    assert "6 passed" in printed
    over = re.findall(r"s of processor time, at most .*: test_them.py::(\w+)", printed)
    assert sorted(over) == ["test_long", "test_very_long", "test_with_a_long_setup"]
    assert run(tmp_path, *workers, "-k", "not very_long and not setup")[0] == 0, "a slow machine takes longer"
    found = json.loads((tmp_path / "durations.json").read_text())
    assert len(found["collection"]) == len(workers) or not workers
    clock, processor = found["tests"]["test_them.py::test_waiting"]["call"]
    assert clock >= 0.5
    assert processor < 0.3


def test_each_nightly_part_has_its_reason() -> None:
    dev = loaded_module(ROOT / "dev.py")
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == [*dev.NIGHTLY]
    sources = [path for path in changed.python_files() if path.is_relative_to(ROOT / "tests")]
    parts = {part for path in sources for part in NIGHTLY.findall(path.read_text())}
    assert parts == {*MARKED.findall((ROOT / "dev.py").read_text())}, "each is run by the part of its name"
    bare = re.compile(r"mark\.nightly\b(?!\(\")")
    assert [path.name for path in sources if bare.search(path.read_text())] == []


NEAREST = {
    "lmkv/store/health.py": ("tests/store/test_breaker.py", "tests/policies/test_policies.py"),
    "lmkv/backends/remote/redis.py": ("tests/backends/remote/test_redis.py", "tests/vllm/test_connector.py"),
    "lmkv/cli/top.py": ("tests/cli/test_server.py", "tests/vllm/test_families.py"),
    "lmkv/vllm/worker.py": ("tests/vllm/scheduler/test_worker.py", "tests/store/test_tiered.py"),
    "tests/vllm/drafts.py": ("tests/vllm/test_drafts.py", "tests/vllm/test_connector.py"),
    f"{KIT}/trial.py": ("tests/vllm/test_torture.py", "tests/test_engine.py"),
    "examples/standalone.py": ("tests/test_examples.py", "tests/store/test_tiered.py"),
    "docs/development/decisions.md": ("tests/test_docs.py", "tests/store/test_tiered.py"),
}


def test_a_change_concerns_the_tests_that_import_it() -> None:
    for file, (nearest, not_concerned) in NEAREST.items():
        found = distances([file])
        assert found is not None
        assert found[nearest] <= 2
        assert not_concerned not in found
        assert all((ROOT / name).exists() for name in found if is_test(name))


def test_a_change_of_what_all_depend_on_concerns_all() -> None:
    assert distances(["pyproject.toml"]) is None
    assert distances(["lmkv/store/tiered.py", "tests/conftest.py"]) is None
    concerned = distances(["lmkv/protocols.py"])
    assert concerned is not None
    assert {"tests/vllm/test_connector.py", "tests/test_engine.py"} <= set(concerned)
    assert distances(["lmkv/policies/gone.py"]) is None, "who imported it before is not known"
    program = next((ROOT / "docs" / "drawings").glob("*.py")).relative_to(ROOT).as_posix()
    assert distances([program]) is None, "no test imports or names it"


def test_a_file_that_is_reached_by_a_name_alone() -> None:
    for file, test in {
        "dev.py": "tests/test_suite.py",
        "lmkv/engine/__init__.py": "tests/test_engine.py",
        "lmkv/vllm/plugin.py": "tests/vllm/test_plugin.py",
        "tests/backends/disk/attacks/make_attacks.py": "tests/backends/disk/attacks/test_attacks.py",
        "lmkv/policies/queues.py": "tests/policies/test_policies.py",
    }.items():
        found = distances([file])
        assert found is not None, file
        assert test in found, file


def test_every_file_of_lmkv_has_a_test_or_concerns_all() -> None:
    read_all = {"tests/test_architecture.py", "tests/test_doctests.py", "tests/test_docs.py", "tests/test_suite.py"}
    for path in sorted((ROOT / "lmkv").rglob("*.py")):
        found = distances([path.relative_to(ROOT).as_posix()])
        assert found is None or {name for name in found if is_test(name)} - read_all, path


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


def test_what_was_changed_is_found_with_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "first").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "second").write_text("2")
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "third").write_text("3")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed_since("HEAD") == {"third"}
    assert changed_since("HEAD~1") == {"second", "third"}
