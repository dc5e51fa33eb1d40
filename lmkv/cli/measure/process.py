"""A child process that answers questions: one JSON object per line, over its standard input and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ANSWER_TIMEOUT = 1800.0
END_TIMEOUT = 15.0
LOG = "vllm.log"
LOG_CHARACTERS = 4000


def same_code() -> dict[str, str]:
    """Variables with which a child imports the lmkv of this process, and not another one that is installed."""
    here, others = str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{here}{os.pathsep}{others}" if others else here}


class ChildFailedError(RuntimeError):
    """The child ended or did not answer in time. The message ends with its last log lines."""


class ChildProcess:
    """Runs `command`, a program that answers with `Questions`, in a process group of its own.

    Its output goes to `folder`/vllm.log. It imports the lmkv of this process. `env`: variables beside those of this
    process, whose place they take.
    """

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / LOG
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **same_code(), **(env or {})},
                start_new_session=True,
            )

    def ask(self, question: object, timeout: float = ANSWER_TIMEOUT) -> Any:
        """Send a question and wait for its answer. Raises ChildFailedError."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        # A child that has ended cannot take the question: then there is no answer to read, either.
        with suppress(BrokenPipeError):
            print(json.dumps(question), file=self._child.stdin, flush=True)
        # Before the timer's own start: a child that the timer has killed was late by this clock, too.
        started = time.monotonic()
        too_late = threading.Timer(timeout, self.kill)
        too_late.start()
        try:
            answer = self._child.stdout.readline()
        finally:
            too_late.cancel()
        if answer:
            return json.loads(answer)
        code, log = self._child.wait(), self._log.read_text(errors="replace")[-LOG_CHARACTERS:]
        late = time.monotonic() - started >= timeout
        what = f"did not answer within {timeout:.0f} s" if late else f"ended with {code}"
        raise ChildFailedError(f"process {self._child.args!r} {what}:\n{log}")

    def kill(self) -> None:
        """SIGKILL for the child and everything that it started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def leave(self) -> None:
        """Ask no more and let it end, which takes vLLM some seconds."""
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()

    def close(self) -> None:
        """Let it end and wait for that; kill it after END_TIMEOUT seconds. Idempotent."""
        self.leave()
        end(self._child, END_TIMEOUT)
        assert self._child.stdout is not None
        self._child.stdout.close()


def end(child: subprocess.Popen[str], timeout: float) -> None:
    """Wait until a child's process group has ended, at most `timeout` seconds, and kill the rest of it.

    Not only the child: the last process of the group removes vLLM's shared memory.
    """
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline and not _has_ended(child):
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _has_ended(child: subprocess.Popen[str]) -> bool:
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return True
    return False


class Questions:
    """The child's end: an iterator over the questions, each to be answered. Other output is logged.

    Ends when the parent closes the pipe, or has ended.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        question = sys.stdin.readline()
        if not question:
            raise StopIteration
        return json.loads(question)

    def answer(self, value: object) -> None:
        print(json.dumps(value), file=self._answers)
