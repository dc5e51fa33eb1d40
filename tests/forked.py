"""Processes that begin with the imports done: all are forked from one server, which pays for them once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

LIMIT = 400.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.backends.disk.disk_writer", "tests.store.shared_store"])

Tell = Callable[[Any], None]

barrier = _context.Barrier
"""A barrier at which so many children wait for each other."""


class Child:
    """A process that does `work(tell, *args)`; `heard` returns what it tells. The end of a `with` kills it."""

    def __init__(self, work: Callable[..., None], *args: object) -> None:
        self._ear, mouth = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(work, mouth.send, *args))
        self._process.start()
        mouth.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def heard(self) -> Any:
        assert self._ear.poll(LIMIT), "it says nothing"
        return self._ear.recv()

    def ended(self) -> int | None:
        """Wait for its exit code; None if it does not end."""
        self._process.join(LIMIT)
        self._ear.close()
        return self._process.exitcode

    def kill(self) -> int | None:
        """Kill it by SIGKILL, unless it has ended before; returns the exit code."""
        self._process.kill()
        return self.ended()


def _run(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    work(*args)


def _end_with_the_parent() -> None:
    """End with the tests: a child that works until it is killed must not outlive them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def python(folder: Path, *arguments: str) -> str:
    """The output of `python *arguments` in `folder`; the arguments are a script's, or `-m` and a module's."""
    with tempfile.NamedTemporaryFile() as printed:
        with Child(_python, str(folder), arguments, printed.name) as child:
            code = child.ended()
        text = Path(printed.name).read_text()
    assert code == 0, text
    return text


def _python(_: Tell, folder: str, arguments: tuple[str, ...], printed: str) -> None:
    output = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ["PATH"] = "/usr/bin:/bin"
    sys.path.insert(0, folder)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def files_open_in(pid: int, folder: Path) -> list[str]:
    """The files of `folder` that a process has open, deleted ones included."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return [path for path in found if path.startswith(str(folder))]
