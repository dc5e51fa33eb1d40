"""A network for one test module's servers alone: they listen on every address, whatever they are told."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.servers import START_LIMIT, missing, stop

_CLONE_NEWNET = 0x40000000


@contextmanager
def own_network(needed_by: str) -> Iterator[None]:
    """This thread, and all that it starts, has a loopback device of its own, and nothing else."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            missing(needed_by, f"no network of its own: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before, _CLONE_NEWNET) == 0
    finally:
        os.close(before)


class Server:
    """A program that listens on a port."""

    def __init__(self, log: Path, port: int, *command: str, env: dict[str, str] | None = None) -> None:
        self.port = port
        self._log, self._command, self._env = log, command, env
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._env)
        deadline = time.monotonic() + START_LIMIT
        while not self._listens():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.01)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It accepts connections, and answers nothing."""
        assert self._process is not None
        stop(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
