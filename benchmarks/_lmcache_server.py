"""LMCache's multi-process mode as a peer: `lmcache server`, and arms of vLLM with LMCacheMPConnector."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.request import urlopen

from lmkv.cli.measure.engines import end

ROUTES = {"LMCache": "auto", "LMCache, shared memory": "lmcache_driven"}
"""By arm, who moves the bytes: `auto` is vLLM's worker, which pickles them, where there is no GPU."""
LIMIT = 120.0
GOODBYE = 15.0


def environment() -> dict[str, str]:
    """Ours without the path that would mix two environments; and nothing is told to anyone."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


class Server:
    """The server on loopback, in a process group of its own, with so many GB for the chunks of all arms."""

    def __init__(self, python: str, gb: float, log: Path) -> None:
        self._python = python
        self._port, http = free_ports(2)
        at = ["--host", "127.0.0.1", "--port", str(self._port), "--http-port", str(http)]
        size = ["--l1-size-gb", str(gb), "--eviction-policy", "LRU"]
        how = ["--supported-transfer-mode", "auto", "--disable-metrics"]
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                [python, "-P", "-m", "lmcache.cli.main", "server", *at, *size, *how],
                stdout=output,
                stderr=output,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        try:
            self._wait(f"http://127.0.0.1:{http}/healthcheck", log)
        except BaseException:
            self.close()
            raise

    def _wait(self, url: str, log: Path) -> None:
        limit = time.monotonic() + LIMIT
        while self._child.poll() is None and time.monotonic() < limit:
            with suppress(OSError), urlopen(url, timeout=5):
                return
            time.sleep(0.2)
        raise RuntimeError(f"LMCache's server did not start:\n{log.read_text()[-2000:]}")

    def arm(self, name: str, script: Sequence[str]) -> list[str]:
        """The command of an arm that asks this server, in LMCache's environment."""
        settings = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._port,
            "lmcache.mp.mp_transfer_mode": ROUTES[name],
        }
        other = {"connector": "LMCacheMPConnector", "settings": settings}
        return [self._python, *script, "--arm", name, "--other", json.dumps(other)]

    def close(self) -> None:
        self._child.terminate()
        end(self._child, GOODBYE)
