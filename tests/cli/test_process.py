"""Child processes that answer questions: what they print, how they fail, and that nothing of them is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmkv.cli.engines import ChildFailedError, ChildProcess
from tests.kit import eventually, raised

PROGRAM = """
import os, subprocess, sys, time
from lmkv.cli.engines import Questions
questions = Questions()
print("printed")
for question in questions:
    if question == "end":
        sys.exit(3)
    if question == "hang":
        time.sleep(1000)
    if question == "start another":
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        questions.answer(other.pid)
    else:
        questions.answer([question, os.environ.get("MARK")])
"""


@contextmanager
def child(folder: Path, **env: str) -> Iterator[ChildProcess]:
    process = ChildProcess([sys.executable, "-c", PROGRAM], folder, env)
    try:
        yield process
    finally:
        process.kill()
        process.close()


def has_ended(pid: int) -> bool:
    """Also where nobody has reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_questions_are_answered_and_what_is_printed_is_logged(tmp_path: Path) -> None:
    with child(tmp_path / "new", MARK="x") as process:
        assert process.ask({"a": [1, None]}) == [{"a": [1, None]}, "x"]
        assert process.ask("again") == ["again", "x"]
        process.close()
        assert process._child.returncode == 0
    assert (tmp_path / "new" / "vllm.log").read_text() == "printed\n"


def test_a_child_that_ends_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        for question in ("end", "anything more"):
            raised(ChildFailedError, r"ended with exit code 3:\nprinted", process.ask, question)
        process.close()


def test_a_child_that_does_not_answer_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        other: int = process.ask("start another")
        assert not has_ended(other)
        raised(ChildFailedError, "did not answer within 1 s", process.ask, "hang", timeout=1)
        assert process._child.returncode == -9
        eventually(lambda: has_ended(other))
