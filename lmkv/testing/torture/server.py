"""Fills in a trial's configuration, and runs the server that a connector may need."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

_START_LIMIT = 120.0
_T = TypeVar("_T")


def fill_in(value: _T, places: Mapping[str, str]) -> _T:
    """The same JSON with `{name}` replaced in all its strings."""
    text = json.dumps(value)
    for name, filling in places.items():
        text = text.replace(f"{{{name}}}", json.dumps(filling)[1:-1])
    filled: _T = json.loads(text)
    return filled


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


@contextlib.contextmanager
def serving(command: str, port: int, log: Path) -> Iterator[None]:
    """The server listens on this port in here. "" is no server."""
    if not command:
        yield
        return
    with log.open("wb") as output:
        process = subprocess.Popen(shlex.split(command), stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_LIMIT
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not listen on port {port}:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
