"""Mooncake and InfiniStore in a network of their own: they listen on every address, whatever they are told."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from attrs import frozen

from tests.servers import START_LIMIT, missing, stop

_CLONE_NEWNET = 0x40000000

MOONCAKE, MOONCAKE_MEMORY, INFINISTORE = 21151, 21152, 22345
"""Ports: of Mooncake's master, of the process that has its memory, of InfiniStore. They are below the range that Linux
gives to connections (32768 on): a connection from the port of a server that starts keeps it from listening."""

UVLOOP = os.environ.get("INFINISTORE_UVLOOP", "")
"""InfiniStore was built for uvloop 0.21: a folder that has it, where the environment's is another one."""

_INFINISTORE = """if True:
    import infinistore.server
    infinistore.server.prevent_oom = lambda: None  # not in every container
    infinistore.server.main()
"""


@contextmanager
def own_network(needed_by: str) -> Iterator[None]:
    """Give this thread, and all that it starts, a loopback device of its own, and nothing else."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

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


@frozen
class Mooncake:
    master: Server
    memory: Server


@contextmanager
def mooncake_servers(folder: Path) -> Iterator[Mooncake]:
    try:
        store = importlib.import_module("mooncake.store")
    except ImportError as error:
        missing("mooncake", f"pip install -r requirements/mooncake.txt, and see there ({error})")
    programs = Path(str(store.__file__)).parent
    with (
        own_network("mooncake"),
        Server(
            folder / "master.log",
            MOONCAKE,
            *(str(programs / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={MOONCAKE}"),
            *("--metrics_host=127.0.0.1", "--metrics_port=9103", "--default_kv_lease_ttl=5000"),
        ) as master,
        Server(
            folder / "memory.log",
            MOONCAKE_MEMORY,
            *(str(programs / "mooncake_client"), "--host=127.0.0.1", f"--port={MOONCAKE_MEMORY}"),
            *("--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{MOONCAKE}"),
            "--global_segment_size=512 MB",
        ) as memory,
    ):
        yield Mooncake(master, memory)


@contextmanager
def infinistore_server(folder: Path) -> Iterator[Server]:
    if importlib.util.find_spec("infinistore") is None:
        missing("infinistore", "pip install --no-deps infinistore")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([UVLOOP, os.environ.get("PYTHONPATH", "")])}
    uvloop = subprocess.run(
        [sys.executable, "-c", "import uvloop; print(uvloop.__version__)"],
        check=False,
        capture_output=True,
        text=True,
        env=env,
    )
    if not uvloop.stdout.startswith("0.21."):
        missing("infinistore", "needs uvloop 0.21: pip install --target DIR uvloop==0.21.0, INFINISTORE_UVLOOP=DIR")
    with (
        own_network("infinistore"),
        Server(
            folder / "server.log",
            INFINISTORE,
            *(sys.executable, "-c", _INFINISTORE, "--service-port", str(INFINISTORE), "--manage-port", "18080"),
            *("--host", "127.0.0.1", "--prealloc-size", "1", "--log-level", "error"),
            env={**env, "LD_PRELOAD": str(_device_in(folder))},
        ) as server,
    ):
        yield server


def _device_in(folder: Path) -> Path:
    """InfiniStore does not start without an RDMA device, not even for TCP: a library that says there is one."""
    library = folder / "rdma_device.so"
    source = Path(__file__).with_name("rdma_device.c")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        missing("infinistore", f"apt install gcc libibverbs-dev ({error})")
    return library
