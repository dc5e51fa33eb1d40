"""vLLM engines that live at once, each in processes of its own, and are asked in turn."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmkv.cli.measure.engines import MARK, end

ROOT = Path(__file__).resolve().parents[1]
GOODBYE = 15.0
PAUSE = 0.5
"""Seconds: an engine's threads go on spinning for a while after a request, at the cost of the next one."""


class Live:
    """The engine of `command`, which reports once it is ready and then for each line that it reads."""

    def __init__(self, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self._child = subprocess.Popen(
                [*command, "--folder", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )

    def result(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line[len(MARK) :])
                return result
        raise RuntimeError(f"an engine ended with {self._child.wait()}:\n{self._errors.read_text()[-4000:]}")

    def ask(self, what: object = "") -> dict[str, Any]:
        assert self._child.stdin is not None
        print(what, file=self._child.stdin, flush=True)
        return self.result()

    def leave(self) -> None:
        """Let it end, which takes vLLM some seconds."""
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()

    def close(self) -> None:
        self.leave()
        end(self._child, GOODBYE)


def turns(engines: Collection[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Number of the round and engine to ask: all in each round, who is first being left to chance."""
    for number in range(rounds):
        for name in random.sample(list(engines), len(engines)):
            time.sleep(PAUSE)
            yield number, name
