"""A connector's storage for one trial: a folder and a Redis database, faults in both, and the server that a connector
may need.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

FAULTS = ("delete", "truncate", "flip", "empty")


@frozen
class Storage:
    """The storage of a connector. `folder`: the folder of all the connector's files. `redis`: the URL of a Redis
    database that only this connector uses, or "".
    """

    folder: Path
    redis: str = ""

    def strike(self, kind: str, pick: float) -> bool:
        """Break the stored item at the place `pick`, from 0 (first) to 1 (last), by a fault of `kind`. Returns whether
        an item was broken.
        """
        return self._strike_files(kind, pick) or (bool(self.redis) and self._strike_redis(kind, pick))

    def empty_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def empty_redis(self) -> None:
        if self.redis:
            self._client().flushdb()

    def _strike_files(self, kind: str, pick: float) -> bool:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        if not files:
            return False
        path = _picked(files, pick)
        try:
            if kind == "empty":
                for child in self.folder.iterdir():
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            elif kind == "delete":
                path.unlink()
            else:
                path.write_bytes(_broken(path.read_bytes(), kind, pick))
        except OSError:  # The connector has deleted it meanwhile.
            return False
        return True

    def _strike_redis(self, kind: str, pick: float) -> bool:
        client = self._client()
        names = sorted(name for name in client.scan_iter() if client.type(name) == b"string")
        if not names:
            return False
        name = _picked(names, pick)
        if kind == "empty":
            client.flushdb()
        elif kind == "delete":
            client.delete(name)
        else:
            client.set(name, _broken(client.get(name) or b"", kind, pick), keepttl=True)
        return True

    def _client(self) -> Any:
        from redis import Redis

        connect: Callable[[str], Any] = Redis.from_url
        return connect(self.redis)


def _picked(stored: Sequence[_T], pick: float) -> _T:
    # Schedules have rounded places: 1.0 as well.
    return stored[min(int(pick * len(stored)), len(stored) - 1)]


def _broken(content: bytes, kind: str, pick: float) -> bytes:
    # Somewhere in the file, and not where the file is among all of them.
    place = int(pick * 7919) % max(1, len(content))
    if kind == "truncate":
        return content[:place]
    flipped = bytearray(content)
    if flipped:
        flipped[place] ^= 1 << int(pick * 1000) % 8
    return bytes(flipped)


_START_LIMIT = 120.0
_T = TypeVar("_T")


def fill_in(value: _T, places: Mapping[str, str]) -> _T:
    """Return a JSON value with `{name}` replaced by `places["name"]` in all strings."""
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
    """Run the server `command` during a `with` block, and wait until it listens on `port`. With "", there is no
    server.
    """
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
