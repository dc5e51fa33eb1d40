"""`AgentServer`: the thread that serves the agent API, with bounds on what callers cost."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from fastapi import FastAPI
from h11 import LocalProtocolError
from uvicorn import Config, Server

from lmkv.agent.address import UNIX, Address

# -- the pace of its threads ------------------------------------------------------------------------------


_SHARE = 0.1
"""Share of one core. Callers can slow the engine by a tenth at most."""
_SAVED = 0.5
"""Seconds of a core that a service may save up while it is idle."""
_MIN_PAUSE, _MAX_PAUSE = 0.001, 1.0
"""Shortest pause of a worker in seconds, and the longest of any thread, so that it can end."""
_WORKERS = 2
_LOOP, _WORK = 0, 1
P = ParamSpec("P")
T = TypeVar("T")


class Pace:
    """The loop has one half of the share and the workers the other, so that neither waits for the other one's work.

    What one of them leaves, the other may have. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [_SAVED / 2, _SAVED / 2]
        self._time = time.monotonic()
        self._ended = False

    def spend(self, part: int, computed: float = 0.0) -> float:
        """Note seconds that a thread of this part has computed; returns those for which it has to pause."""
        with self._lock:
            now, left = time.monotonic(), self._left
            earned, self._time = _SHARE * (now - self._time), now
            left[part] -= computed
            new = [each + earned / 2 for each in left]
            over = [max(0.0, each - _SAVED / 2) for each in new]
            left[:] = [min(each + more, _SAVED / 2) for each, more in zip(new, reversed(over), strict=True)]
            return 0.0 if self._ended else max(0.0, -left[part] / _SHARE)

    def work(self, call: Callable[[], T]) -> T:
        """Call it on a worker's thread once the workers have time left."""
        while pause := self.spend(_WORK):
            time.sleep(min(max(pause, _MIN_PAUSE), _MAX_PAUSE))
        begun = time.thread_time()
        try:
            return call()
        finally:
            self.spend(_WORK, time.thread_time() - begun)

    def end(self) -> None:
        """Nobody pauses any more."""
        self._ended = True


class _PacedSelector(selectors.DefaultSelector):
    """Pauses before it looks for events when its thread has computed for more than its share."""

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
            # Timers run, and whoever comes waits.
            return []
        # One at a time, or many callers together would compute for long until the next pause.
        ready = super().select(timeout)
        return [random.choice(ready)] if ready else ready


class _Workers(ThreadPoolExecutor):
    """A few threads, which the end of the process does not wait for: what they call may hang."""

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
        """Have the threads end after what was submitted and is still awaited. Does not wait for them."""
        for _ in range(_WORKERS):
            self._jobs.put(None)


def paced_loop(pace: Pace | None = None) -> asyncio.AbstractEventLoop:
    """Make the loop, whose executor has the same pace. Call it in the thread that runs the loop."""
    pace = pace or Pace()
    loop = asyncio.SelectorEventLoop(_PacedSelector(pace))
    loop.set_default_executor(_Workers(pace))
    return loop


# -- the server -------------------------------------------------------------------------------------------


logger = logging.getLogger("lmkv.agent")

_KEEP_SECONDS = 10
_HEADER_BYTES = _READ_BYTES = 16 << 10
_END_LIMIT = 5.0
_MAX_CONNECTIONS = 128
_SHARE_OF_FILES = 8
"""Connections may take this fraction of the files that the process may open."""


def max_connections() -> int:
    """Most connections at a time: a small part of the files that the engine may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files < 0 else min(_MAX_CONNECTIONS, files // _SHARE_OF_FILES)


class _Door(socket.socket):
    """A listening socket that closes what comes while there are `max_connections`: uvicorn counts requests alone."""

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
        """Remove the socket's file, unless the path is another server's by now. While it is open, its inode is ours."""
        with suppress(OSError):
            if self._file and self.fileno() >= 0 and os.path.samestat(self._file, os.stat(self.path)):
                os.unlink(self.path)
        self._file = None

    def give_back(self) -> None:
        """Remove the file and end listening. Idempotent."""
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
    """Serves an application at `url`, in a thread of its own, until `close`.

    `inside`: gives the address at which the other engines of the server come in, so that strangers at a port take
    them no connection. It may raise OSError, and the engine is then without the others.
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
                logger.warning("lmkv: the engines of one server cannot find each other: %s", error)
            for door in self._doors:
                # What comes with one read is parsed without a pause.
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
            """Not what a stranger's bytes caused, or anybody could fill the log."""
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
            logger.exception("lmkv: the agent API at %s has ended; the engine goes on without it", self.url)
        finally:
            uvicorn_logger.removeFilter(matters)
            # Or callers would wait where nobody answers.
            self._give_back()

    async def _serve(self) -> None:
        await asyncio.gather(*(server.serve([door]) for server, door in zip(self._servers, self._doors, strict=True)))

    def close(self) -> None:
        """End the server, within seconds. Idempotent."""
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
    """Log what failed on the loop, but not that uvicorn refused bytes after it had begun to answer."""
    if not isinstance(context.get("exception"), LocalProtocolError):
        loop.default_exception_handler(context)
