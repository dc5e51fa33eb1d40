"""LMCache's multi-process mode as a peer: `lmcache server`, and vLLM engines with LMCacheMPConnector."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.request import urlopen

from attrs import evolve

from benchmarks._timing import REPOSITORY
from lmkv.cli.measure.process import END_TIMEOUT, end
from lmkv.cli.measure.vllm_engines import EngineSpec

ROUTES = {"LMCache": "auto", "LMCache, shared memory": "lmcache_driven"}
"""By engine, who moves the bytes: `auto` is vLLM's worker, which pickles them, where there is no GPU."""
START_TIMEOUT = 120.0
ENVIRONMENT = {
    # In place of a path that belongs to another environment.
    **REPOSITORY,
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


class Server:
    """The server on loopback, in a process group of its own, with so many GiB for all engines' chunks."""

    def __init__(self, python: str, gib: float, log: Path) -> None:
        self._port, http = free_ports(2)
        at = ["--host", "127.0.0.1", "--port", str(self._port), "--http-port", str(http)]
        size = ["--l1-size-gb", str(gib), "--eviction-policy", "LRU"]
        how = ["--supported-transfer-mode", "auto", "--disable-metrics"]
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                [python, "-P", "-m", "lmcache.cli.main", "server", *at, *size, *how],
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        try:
            self._wait(f"http://127.0.0.1:{http}/healthcheck", log)
        except BaseException:
            self.close()
            raise

    def _wait(self, url: str, log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while self._child.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urlopen(url, timeout=5):
                return
            time.sleep(0.2)
        raise RuntimeError(f"LMCache's server did not start:\n{log.read_text()[-2000:]}")

    def spec(self, name: str, plain: EngineSpec) -> EngineSpec:
        """The plain engine with LMCache's connector, which asks this server."""
        settings = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._port,
            "lmcache.mp.mp_transfer_mode": ROUTES[name],
        }
        return evolve(plain, connector="LMCacheMPConnector", settings=settings)

    def close(self) -> None:
        self._child.terminate()
        end(self._child, END_TIMEOUT)
