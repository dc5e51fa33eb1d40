"""The server of the agent API: `Address`, where the server listens, and `AgentServer`, which limits its own CPU use."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import queue
import random
import re
import resource
import selectors
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from attrs import field, frozen
from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn import Config, Server

from lmkv.errors import ConfigError, short_repr

logger = logging.getLogger("lmkv.agent")

UNIX = "unix:"
_LOCALHOST = re.compile(r"(?i)^localhost\.?:")
_NAME_DIGITS = 16
_PATIENCE, _PAUSE = 3.0, 0.02
"""Seconds to wait while another server binds a socket in the same folder, and seconds between two attempts."""


def _literal(text: str) -> str:
    """Return the address with `localhost` replaced by 127.0.0.1.

    `localhost` may also mean ::1, where another user may listen.
    """
    return _LOCALHOST.sub("127.0.0.1:", text)


@frozen
class Address:
    """The address of an agent API: a loopback address with a port, or the path of a unix socket."""

    text: str = field(converter=_literal)

    @property
    def url(self) -> str:
        """The address as a URL for clients."""
        return self.text if self.text.startswith(UNIX) else f"http://{self.text}"

    @property
    def is_known(self) -> bool:
        """Whether the address is known before it is bound. False for port 0, for which the system chooses a port."""
        return not self.text.endswith(":0")

    def of_engine(self, number: int) -> Address:
        """Return the address of engine `number`: this port plus `number`, or this unix socket's path plus `.number`.

        For engine 0, return this address unchanged.
        """
        if not number:
            return self
        host, _, port = self.text.rpartition(":")
        unix = self.text.startswith(UNIX) or not port.isdigit()
        return Address(f"{self.text}.{number}" if unix else f"{host}:{int(port) + number}")

    def private(self, number: int) -> Address:
        """Return the address of the unix socket at which other engines of the server reach engine `number`.

        Raises OSError if this user has no private folder.
        """
        # An address means something in one container alone, and folders may be common to several.
        container = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net")]
        name = hashlib.sha256(f"{container} {self.text}".encode(errors="surrogateescape")).hexdigest()[:_NAME_DIGITS]
        return Address(f"{UNIX}{_private_folder()}/{name}.{number}")

    def bind(self) -> tuple[socket.socket, str]:
        """Listen at the address, and return `(socket, URL)`. Raises OSError if the address cannot be bound.

        Raises ConfigError unless the address is a loopback port or a unix socket's path.
        """
        # An empty path would be an abstract socket, which every user may open.
        if self.text.startswith(f"{UNIX}/") and "\0" not in self.text:
            path = self.text.removeprefix(UNIX)
            with _one_at_a_time(os.path.dirname(path)):
                return _alone_bound(path), self.text
        host, _, port = self.text.rpartition(":")
        host = host.strip("[]")
        with suppress(ValueError):
            if ip_address(host).is_loopback and port.isdigit() and int(port) < 1 << 16:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                _check_free(family, (host, int(port)))
                bound = socket.create_server((host, int(port)), family=family)
                literal = f"[{host}]" if ":" in host else host
                return bound, f"http://{literal}:{bound.getsockname()[1]}"
        raise ConfigError(
            f"agent_listen = {short_repr(self.text)} must be unix:/path, or a loopback address such as 127.0.0.1:8377"
        )


def _check_free(family: socket.AddressFamily, place: tuple[str, int]) -> None:
    """Raise OSError if another socket is bound to the port, even if that socket does not listen yet.

    vLLM's server binds its port, but does not listen until its engine has started. SO_REUSEADDR, which lmkv sets for
    restarts, would let lmkv take the port in between.
    """
    with socket.socket(family) as probe:
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _has_ended_connections(place[1]):
                raise


def _has_ended_connections(port: int) -> bool:
    """Return whether the system still has ended connections of the port, and no socket listens on the port."""
    listening, states = "0A", set[str]()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
            states |= {row[3] for row in rows if int(row[1].rpartition(":")[2], 16) == port}
    return bool(states) and listening not in states


@contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """Hold the folder's lock for a `with` block, so that only one server at a time is between `bind` and `listen`.

    If another process holds the lock for too long, the block runs without the lock. Other users may hold the lock.
    """
    with ExitStack() as held:
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_PAUSE)
        yield


def _alone_bound(path: str) -> socket.socket:
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        # A server that is too busy to accept connections does not answer either.
        probe.settimeout(1)
        if stat.S_ISSOCK(os.stat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED:
            # The server of this socket has ended.
            os.unlink(path)
    bound = socket.socket(socket.AF_UNIX)
    with ExitStack() as taken:
        taken.callback(bound.close)
        bound.bind(path)
        taken.callback(os.unlink, path)
        # Nobody can connect before `listen`, so the mode is right in time. An umask would change it for all threads.
        os.chmod(path, 0o600)
        # Listen before the thread runs, so that early callers wait instead of being refused, as at a port.
        bound.listen()
        taken.pop_all()
    return bound


# -- a folder of this user's alone ---------------------------------------------------------------------------


def _bases() -> list[str]:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return [*([given] if given else []), tempfile.gettempdir(), "/tmp"]


def _private_folder() -> Path:
    """Return a folder for sockets that only this user can change. A missing folder is created.

    Raises OSError if there is no such folder.
    """
    refused: OSError | None = None
    for base in _bases():
        try:
            folder = Path(os.path.realpath(base, strict=True), f"lmkv-{os.geteuid()}")
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            _check_private(folder)
        except OSError as error:
            refused = refused or error
        else:
            return folder
    raise refused or FileNotFoundError("this user has no private folder for sockets: set XDG_RUNTIME_DIR to one")


def _check_private(folder: Path) -> None:
    """Raise PermissionError if other users may enter the folder, or could replace the folder or one of its parents."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EACCES, "lmkv needs a 0700 folder of this user here: remove this path", str(folder))
    # In a user namespace root of outside has another number.
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for above in folder.parents:
        status = above.stat()
        can_replace = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted or can_replace:
            raise PermissionError(errno.EACCES, "other users may replace files here: run chmod +t", str(above))


# -- the pace of its threads ------------------------------------------------------------------------------


_SHARE = 0.1
"""Share of one core that the service may use. Callers can slow the engine by at most a tenth."""
_SAVED = 0.5
"""Computing time in seconds that an idle service may save up."""
_MIN_PAUSE, _MAX_PAUSE = 0.001, 1.0
"""Shortest pause of a worker, and longest pause of any thread, in seconds. The longest pause is short enough for a
quick end.
"""
_WORKERS = 2
_LOOP, _WORK = 0, 1
P = ParamSpec("P")
T = TypeVar("T")


class Pace:
    """Limits the CPU time of the service to a tenth of a core, half for the event loop and half for the worker threads.

    If the workers do not use their half, the event loop may use it, and vice versa. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [_SAVED / 2, _SAVED / 2]
        self._time = time.monotonic()
        self._ended = False

    def spend(self, part: int, computed: float = 0.0) -> float:
        """Note that a thread has used `computed` seconds of CPU time. Returns how many seconds the thread must pause.

        `part`: whether the thread belongs to the event loop (`_LOOP`) or to the workers (`_WORK`).
        """
        with self._lock:
            now, left = time.monotonic(), self._left
            earned, self._time = _SHARE * (now - self._time), now
            left[part] -= computed
            new = [each + earned / 2 for each in left]
            over = [max(0.0, each - _SAVED / 2) for each in new]
            left[:] = [min(each + more, _SAVED / 2) for each, more in zip(new, reversed(over), strict=True)]
            return 0.0 if self._ended else max(0.0, -left[part] / _SHARE)

    def work(self, call: Callable[[], T]) -> T:
        """Run `call` in this worker thread when the workers have CPU time left. Returns the result of `call`."""
        while pause := self.spend(_WORK):
            time.sleep(min(max(pause, _MIN_PAUSE), _MAX_PAUSE))
        begun = time.thread_time()
        try:
            return call()
        finally:
            self.spend(_WORK, time.thread_time() - begun)

    def end(self) -> None:
        """Stop limiting: later calls of `spend` return 0."""
        self._ended = True


class _PacedSelector(selectors.DefaultSelector):
    """A selector that pauses if the event loop's thread has used more than its share of CPU time."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self._computed = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        computed = time.thread_time()
        pause = self._pace.spend(_LOOP, computed - self._computed)
        self._computed = computed
        if pause:
            time.sleep(min(pause, _MAX_PAUSE))
        if pause > _MAX_PAUSE:
            # Timers run, and new callers wait.
            return []
        # One at a time, or many callers together would compute for long until the next pause.
        ready = super().select(timeout)
        return [random.choice(ready)] if ready else ready


class _Workers(ThreadPoolExecutor):
    """An executor with a few daemon threads. The process can end without waiting for them, because their calls may
    hang.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__(_WORKERS)
        self._pace = pace
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001
                    future.set_exception(error)

        self._jobs.put(job)
        if not self._begun:
            self._begun = True
            for _ in range(_WORKERS):
                threading.Thread(target=self._run, name="lmkv-agent-work", daemon=True).start()
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._pace.work(job)
            # A prompt may be large.
            del job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after all queued work. Returns immediately."""
        for _ in range(_WORKERS):
            self._jobs.put(None)


def paced_loop(pace: Pace | None = None) -> asyncio.AbstractEventLoop:
    """Return a new event loop, which shares a `Pace` with its executor. Call this in the thread that runs the loop."""
    pace = pace or Pace()
    loop = asyncio.SelectorEventLoop(_PacedSelector(pace))
    loop.set_default_executor(_Workers(pace))
    return loop


# -- the server -------------------------------------------------------------------------------------------


_KEEP_SECONDS = 10
_HEADER_BYTES = _READ_BYTES = 16 << 10
_END_LIMIT = 5.0
_MAX_CONNECTIONS = 128
_SHARE_OF_FILES = 8
"""Number by which the files that the process may open are divided. Connections may take one part, an eighth."""


def max_connections() -> int:
    """Return how many connections the service may have: 128, or fewer if the process may open fewer than 1,024
    files.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // _SHARE_OF_FILES)


class _Door(socket.socket):
    """A listening socket that refuses connections beyond `max_connections`. uvicorn limits only requests, not
    connections.
    """

    def __init__(self, address: Address) -> None:
        bound, self.url = address.bind()
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._file = os.stat(self.path) if self.path else None
        self._most = max_connections()
        self._accepted: WeakSet[socket.socket] = WeakSet()

    @property
    def path(self) -> str:
        return self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if sum(each.fileno() >= 0 for each in self._accepted) >= self._most:
            connection.close()
            raise ConnectionAbortedError
        self._accepted.add(connection)
        return connection, address

    def remove(self) -> None:
        """Remove the unix socket's file, unless the file now belongs to another server."""
        with suppress(OSError):
            if self._file and self.fileno() >= 0 and os.path.samestat(self._file, os.stat(self.path)):
                os.unlink(self.path)
        self._file = None

    def give_back(self) -> None:
        """Remove the unix socket's file and stop listening. Idempotent."""
        self.remove()
        self.close()


def _config(app: FastAPI, *, first: bool) -> Config:
    return Config(
        app,
        # The other parser of uvicorn's bounds no header.
        http="h11",
        ws="none",
        lifespan="on" if first else "off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=max_connections(),
        limit_concurrency=max_connections(),
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_keep_alive=_KEEP_SECONDS,
        timeout_graceful_shutdown=1,
    )


class AgentServer:
    """Serves an application at `url`, in a separate thread, until `close` is called.

    `inside`: a function that returns a second address, for the other engines of the server. Each address has a
    separate limit of connections. If `inside` raises OSError, the API serves only this engine.
    """

    def __init__(
        self, make: Callable[[], FastAPI], address: Address, inside: Callable[[], Address] | None = None
    ) -> None:
        with ExitStack() as taken:
            self._doors = [_Door(address)]
            taken.callback(self._give_back)
            self.url = self._doors[0].url
            try:
                self._doors += [_Door(inside())] if inside else []
            except OSError as error:
                logger.warning(
                    "lmkv: the agent API serves this engine alone, because no other engine is found: %s", error
                )
            for door in self._doors:
                # The bytes of one read are parsed without a pause.
                door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)
            self._pace = Pace()
            app = make()
            self._servers = [Server(_config(app, first=not number)) for number, _ in enumerate(self._doors)]
            self._thread = threading.Thread(target=self._run, name="lmkv-agent", daemon=True)
            self._thread.start()
            taken.pop_all()

    def __repr__(self) -> str:
        return f"<AgentServer {self.url}>"

    def _run(self) -> None:
        thread = threading.get_ident()

        def matters(record: logging.LogRecord) -> bool:
            """Return whether to log a record of uvicorn. Drops records that clients cause with invalid bytes."""
            error = record.exc_info and record.exc_info[1]
            return record.thread != thread or (error is not None and not isinstance(error, LocalProtocolError))

        uvicorn_logger = logging.getLogger("uvicorn.error")
        uvicorn_logger.addFilter(matters)
        try:
            with asyncio.Runner(loop_factory=partial(paced_loop, self._pace)) as runner:
                runner.get_loop().set_exception_handler(_failed)
                runner.run(self._serve())
        except (Exception, SystemExit):
            # uvicorn means to end the process.
            logger.exception("lmkv: the agent API at %s has stopped; the engine continues without the API", self.url)
        finally:
            uvicorn_logger.removeFilter(matters)
            # Or callers would wait where nobody answers.
            self._give_back()

    async def _serve(self) -> None:
        await asyncio.gather(*(server.serve([door]) for server, door in zip(self._servers, self._doors, strict=True)))

    def close(self) -> None:
        """Stop the server within seconds. Idempotent."""
        for door in self._doors:
            door.remove()
        for server in self._servers:
            server.should_exit = True
        self._pace.end()
        self._thread.join(_END_LIMIT)
        self._give_back()

    def _give_back(self) -> None:
        for door in self._doors:
            door.give_back()


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, except the error after uvicorn has refused bytes in the middle of a response."""
    if not isinstance(context.get("exception"), LocalProtocolError):
        loop.default_exception_handler(context)
