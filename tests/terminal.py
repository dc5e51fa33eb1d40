"""Commands on a terminal of 80 columns, as a user sees them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmkv.agent.client import Client
from tests.kit import LIMIT, eventually

ROWS, COLUMNS = 24, 80
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`lmkv` with some words, in a session that this terminal controls."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._main, self._side = pty.openpty()
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(self._main, False)
        self._before = termios.tcgetattr(self._side)
        self._written = b""
        others = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            # A job in the background of a shell ignores interrupts, and so would all that it starts.
            ["env", "--default-signal=INT", "setsid", "--ctty", Path(sys.executable).with_name("lmkv"), *words],
            stdin=self._side,
            stdout=self._side,
            stderr=self._side,
            env={**others, "TERM": "xterm-256color", **environment},
        )

    def written(self) -> str:
        with suppress(BlockingIOError):
            while data := os.read(self._main, 1 << 16):
                self._written += data
        return self._written.decode(errors="replace")

    def screen(self) -> list[str]:
        """The lines that were drawn last."""
        return ESCAPE.sub("", self.written().rpartition("\x1b[H")[2]).splitlines()

    def press(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def ended(self) -> int:
        """The exit code, once the screen, the cursor and the keyboard are as they were."""
        code = self.process.wait(LIMIT)
        written = self.written()
        for entered, left in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert -1 < written.rfind(entered) < written.rfind(left)
        assert termios.tcgetattr(self._side) == self._before
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)


@contextmanager
def terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(*words, **environment)
    try:
        yield made
    finally:
        made.close()


def assert_top_follows(url: str, token: str, change: Callable[[], object]) -> None:
    """`lmkv top` shows what the server's stats say, before and after a change, until Ctrl+C."""
    with (
        Client(url, token) as client,
        terminal("top", "--url", url, "--interval", "0.5", LMKV_AGENT_TOKEN=token) as top,
    ):
        eventually(lambda: shows(top.screen(), client.stats()), "what there is", seen=top.screen)
        before = client.stats()
        change()
        eventually(lambda: rows_of(client.stats()) != rows_of(before), "a change")
        eventually(lambda: shows(top.screen(), client.stats()), "what has changed", seen=top.screen)
        assert max(map(len, top.screen())) <= COLUMNS
        assert len(top.screen()) <= ROWS
        top.press(b"\x03")
        assert top.ended() == 0


def rows_of(stats: dict[str, Any]) -> dict[str, list[str]]:
    """Each tier's chunks, hits and evictions, as they are shown."""
    names = ("chunks", "hits", "evictions")
    return {tier["name"]: [f"{tier[name]:,}" for name in names] for tier in stats["tiers"]}


def shows(screen: list[str], stats: dict[str, Any]) -> bool:
    """Whether the first table has each tier's counts, and the first line the tokens."""
    tiers = screen[: len(stats["tiers"]) + 3]
    found = {line[0]: line[-3:] for line in map(str.split, tiers) if line and line[0] in rows_of(stats)}
    return found == rows_of(stats) and f"of {stats['lookup_tokens']:,} tokens" in screen[0]
