"""Engines and servers with which lmkv is compared: plain reads of a tier's data, Redis, and LMCache's server."""

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
"""Number of prompts of the same length that a measured engine has stored."""
ROUTES = {"LMCache": "auto", "LMCache, shared memory": "lmcache_driven"}
"""For each engine, the route of the bytes. With `auto`, vLLM's worker moves them, and pickles them on CPUs."""
START_TIMEOUT = 120.0
ENVIRONMENT = {
    # In place of a path that belongs to another environment.
    "PYTHONPATH": str(ROOT),
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of the C library's function `mallopt`."""


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
    """Return the whole chunks of one prompt, with their sizes. Tails of prompts are smaller, and are left out."""
    if not sizes:
        raise LookupError("the tier has no chunks")
    whole = max(sizes.values())
    found = [each for each, size in sizes.items() if size == whole]
    return dict.fromkeys(found[: -(-len(found) // PROMPTS)], whole)


def files_of(folder: Path, *, in_memory: bool) -> Callable[[], None]:
    """Return a function that reads the files of one prompt's chunks with one thread, past the page cache or,
    `in_memory`, with checksums.

    The function reads into huge pages, if there are any, as the disk tier does. Raises LookupError without files.
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
    """Return the flag of `open` for reads past the page cache, or 0 if the file system has no such flag."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


@contextlib.contextmanager
def whole_database(url: str | None) -> Iterator[None]:
    """Provide a Redis database that is empty before and after, or nothing without a URL. Raises RuntimeError if the
    database has keys.
    """
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
    """Make this process keep the memory that it frees, from now on.

    By default, the kernel maps new memory for each large value. Mapping takes longer than receiving the value.
    """
    with suppress(AttributeError):  # not every C library has it
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def values_of(url: str) -> Callable[[], None]:
    """Return a function that gets the values of one prompt's chunks with the client of Redis. The database must have no
    other values.

    Waits until an engine has written all values. Raises LookupError without values. From now on, this process keeps the
    memory that it frees.
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
    """A Redis server on loopback, only in memory, which a benchmark kills, stops and starts."""

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
        """Send a signal to the server. SIGSTOP stops the server, but leaves its connections open."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class LMCacheServer:
    """`lmcache server` on loopback, in a separate process group. `gib`: GiB of memory for the chunks of all engines."""

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
        """Return the engine `plain` with LMCache's connector, which asks this server."""
        settings = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.mp_transfer_mode": ROUTES[name],
        }
        return evolve(plain, connector="LMCacheMPConnector", settings=settings)

    def close(self) -> None:
        self._child.terminate()
        end(self._child, END_TIMEOUT)
