"""Mooncake and InfiniStore in a network of their own: they listen on every address, whatever they are told."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from attrs import frozen

import tests.servers
from tests.servers import missing

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


class Server(tests.servers.Server):
    """A program that listens on a port, until the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


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
    master_command = [
        *(programs / "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={MOONCAKE}"),
        *("--metrics_host=127.0.0.1", "--metrics_port=9103", "--default_kv_lease_ttl=5000"),
    ]
    memory_command = [
        *(programs / "mooncake_client", "--host=127.0.0.1", f"--port={MOONCAKE_MEMORY}"),
        *("--metadata_server=P2PHANDSHAKE", f"--master_server_address=127.0.0.1:{MOONCAKE}"),
        "--global_segment_size=512 MB",
    ]
    with (
        own_network("mooncake"),
        Server(folder, MOONCAKE, master_command) as master,
        Server(folder, MOONCAKE_MEMORY, memory_command) as memory,
    ):
        yield Mooncake(master, memory)


@contextmanager
def infinistore_server(folder: Path) -> Iterator[Server]:
    if importlib.util.find_spec("infinistore") is None:
        missing("infinistore", "pip install --no-deps infinistore")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([UVLOOP, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "import uvloop; print(uvloop.__version__)"]
    uvloop = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if not uvloop.stdout.startswith("0.21."):
        missing("infinistore", "needs uvloop 0.21: pip install --target DIR uvloop==0.21.0, INFINISTORE_UVLOOP=DIR")
    command = [
        *(sys.executable, "-c", _INFINISTORE, "--service-port", str(INFINISTORE), "--manage-port", "18080"),
        *("--host", "127.0.0.1", "--prealloc-size", "1", "--log-level", "error"),
    ]
    preloaded = {"PYTHONPATH": env["PYTHONPATH"], "LD_PRELOAD": str(_device_in(folder))}
    with own_network("infinistore"), Server(folder, INFINISTORE, command, **preloaded) as server:
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
