"""Engines and servers that lmkv is compared with: plain reads of a tier's data, Redis, LMCache's server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from attrs import define, evolve, field

from benchmarks.rounds import ROOT
from lmkv.backends.disk.fileio import Scratch
from lmkv.backends.disk.folder import SUFFIX
from lmkv.chunks.codec import DEFAULT_SEGMENT_BYTES, segment_checksums
from lmkv.cli.engines import END_TIMEOUT, EngineSpec, end, wait_until_settled

PROMPTS = 2
"""Prompts of the same length that a measured engine has stored."""
ROUTES = {"LMCache": "auto", "LMCache, shared memory": "lmcache_driven"}
"""Who moves the bytes, by engine: `auto` is vLLM's worker, which pickles them, where there is no GPU."""
START_TIMEOUT = 120.0
ENVIRONMENT = {
    # In place of a path that belongs to another environment.
    "PYTHONPATH": str(ROOT),
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of the C library's `mallopt`."""


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


# -- plain reads ------------------------------------------------------------------------------------------


def _of_one_prompt(sizes: Mapping[Any, int]) -> dict[Any, int]:
    """As many whole chunks as one prompt has, with their sizes; the tails of prompts are smaller."""
    if not sizes:
        raise LookupError("the tier has no chunks")
    whole = max(sizes.values())
    found = [each for each, size in sizes.items() if size == whole]
    return dict.fromkeys(found[: -(-len(found) // PROMPTS)], whole)


def files_of(folder: Path, *, in_memory: bool) -> Callable[[], None]:
    """Reads as many chunks' files as a prompt has, by one thread: past the page cache, or from memory with checksums.

    It reads into huge pages where there are any, as the disk tier does. Raises LookupError without files.
    """
    sizes = _of_one_prompt({path: path.stat().st_size for path in folder.joinpath("kv").rglob(f"*{SUFFIX}")})
    memory = Scratch().borrow("plain read", sum(sizes.values()))
    flags = os.O_RDONLY | (0 if in_memory else _direct_flag(next(iter(sizes))))

    def read() -> None:
        for number, (path, size) in enumerate(sizes.items()):
            part = memory[number * size : (number + 1) * size]
            fd = os.open(path, flags)
            try:
                if os.preadv(fd, [part], 0) != size:
                    raise RuntimeError(f"{path} was not read at once")
            finally:
                os.close(fd)
            if in_memory:
                segment_checksums(part, DEFAULT_SEGMENT_BYTES)

    read()
    return read


def _direct_flag(path: Path) -> int:
    """The flag of `open` for reads past the page cache; 0 where the file system has none."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


@contextlib.contextmanager
def whole_database(url: str | None) -> Iterator[None]:
    """A Redis database that is empty before and after; nothing without a URL. Raises RuntimeError if it has keys."""
    if url is None:
        yield
        return
    from redis import Redis

    with contextlib.closing(Redis.from_url(url)) as client:
        if count := client.dbsize():
            raise RuntimeError(f"the Redis database has {count:,} keys; give the URL of an empty one")
        try:
            yield
        finally:
            client.flushdb()


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, from now on.

    The kernel's default maps new memory for each large value, which takes longer than to receive the value.
    """
    with suppress(AttributeError):  # not every C library has it
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def values_of(url: str) -> Callable[[], None]:
    """Gets as many chunks' values as a prompt has, by the client of a Redis whose database has nothing else.

    Waits until an engine has written all of them. Raises LookupError without values. From now on this process keeps
    the memory that it frees.
    """
    from redis import Redis

    keep_freed_memory()
    client = Redis.from_url(url)
    wait_until_settled(client.dbsize)
    names = _of_one_prompt({name: client.strlen(name) for name in client.scan_iter(count=1000)})

    def read() -> None:
        for name in names:
            if not client.get(name):
                raise RuntimeError(f"Redis has lost {name!r}")

    read()
    return read


# -- servers ----------------------------------------------------------------------------------------------


@define
class RedisServer:
    """Redis on loopback, in memory only, to be killed, stopped and started."""

    program: str
    port: int = field(factory=lambda: free_ports(1)[0])
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)

    def start(self) -> None:
        command = [self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.01)
        raise SystemExit(f"{self.program} does not answer at port {self.port}")

    def signal(self, number: int) -> None:
        """SIGSTOP leaves its connections open."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class LMCacheServer:
    """`lmcache server` on loopback, in a process group of its own, with so many GiB for all engines' chunks."""

    def __init__(self, python: str, gib: float, log: Path) -> None:
        self.port, http = free_ports(2)
        at = ["--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(http)]
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
            "lmcache.mp.port": self.port,
            "lmcache.mp.mp_transfer_mode": ROUTES[name],
        }
        return evolve(plain, connector="LMCacheMPConnector", settings=settings)

    def close(self) -> None:
        self._child.terminate()
        end(self._child, END_TIMEOUT)
