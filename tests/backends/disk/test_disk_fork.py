"""A process that is forked while its parent writes has no part in what the parent's threads were doing."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend, fileio
from lmkv.backends.disk.fileio import Scratch
from lmkv.backends.disk.folder import Usage
from lmkv.backends.disk.root import Root
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from lmkv.testing.backend_suite import chunk_of, listed, statuses
from tests.forked import Child, Tell, files_open_in

NAMESPACE = bytes(range(32))
LIMIT = 60.0


def fork() -> int:
    """A child that does nothing as long as it lives, a minute at most; its process id, once it runs."""
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(int(LIMIT))
        os.write(there, b"x")
        signal.pause()
    os.read(here, 1)
    os.close(here)
    os.close(there)
    return pid


class Stopped:
    """`os.<name>` in which every call but the first `passing` waits, once it has done its work, until `go_on`.

    `wait_until_reached` returns once for each call that waits.
    """

    def __init__(self, name: str, passing: int = 0) -> None:
        self._real = getattr(os, name)
        self._calls, self._passing = itertools.count(), passing
        self._reached, self._going_on = threading.Semaphore(0), threading.Event()
        setattr(os, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        done = self._real(*args, **named)
        if next(self._calls) >= self._passing:
            self._reached.release()
            assert self._going_on.wait(LIMIT)
        return done

    def wait_until_reached(self) -> None:
        assert self._reached.acquire(timeout=LIMIT)

    def go_on(self) -> None:
        self._going_on.set()


def fork_while_counting(tell: Tell, folder: str) -> None:
    """Fork while a thread has the count locked; go on living when it has let it go."""
    stopped = Stopped("pwrite", 1)  # the first notes what is pending
    counting = threading.Thread(target=Usage(Root(folder)).reserve_bytes, args=(100,))
    counting.start()
    stopped.wait_until_reached()
    tell(fork())
    stopped.go_on()
    counting.join(LIMIT)
    tell("counted")
    signal.pause()


def fork_while_writing(tell: Tell, folder: str, threads: int) -> None:
    """Fork while so many threads are in the middle of a temporary file, and wait to be killed."""
    backend = LocalDiskBackend(folder, NAMESPACE)
    stopped = Stopped("pwritev")
    for _ in range(threads):
        threading.Thread(target=backend.write, args=(chunk_of(100_000),), daemon=True).start()
    for _ in range(threads):
        stopped.wait_until_reached()
    tell(fork())
    signal.pause()


def fork_again_and_again(tell: Tell, folder: str, forks: int) -> None:
    """Fork at no particular moment while four threads write and delete."""
    backend = LocalDiskBackend(folder, NAMESPACE)

    def work() -> None:
        while True:
            chunk = chunk_of(100_000)
            backend.reserve_bytes(backend.stored_bytes(100_000))
            backend.write(chunk)
            backend.delete([chunk.key])

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(forks):
        tell(fork())
    signal.pause()


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


class Forked:
    """Process ids of what was forked; killed in the end."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def heard(self, child: Child) -> int:
        self.pids.append(child.heard())
        return self.pids[-1]


@pytest.fixture
def forked() -> Iterator[Forked]:
    made = Forked()
    yield made
    for pid in made.pids:
        os.kill(pid, signal.SIGKILL)


def test_the_count_is_nobodys_once_its_user_has_let_it_go(tmp_path: Path, forked: Forked) -> None:
    with Child(fork_while_counting, str(tmp_path)) as parent:
        forked.heard(parent)
        assert parent.heard() == "counted"
        assert Usage(Root(str(tmp_path))).reserve_bytes(10) == 110


def test_the_count_is_nobodys_when_its_user_was_killed(tmp_path: Path, forked: Forked) -> None:
    """While it had it locked: the child that it forked in that moment lives on."""
    with Child(fork_while_counting, str(tmp_path)) as parent:
        forked.heard(parent)
        parent.kill()
        assert Usage(Root(str(tmp_path))).reserve_bytes(10) == 110


def test_temporaries_of_a_dead_writer_are_swept_though_its_child_lives(tmp_path: Path, forked: Forked) -> None:
    reader = LocalDiskBackend(tmp_path, NAMESPACE)
    with Child(fork_while_writing, str(tmp_path), 3) as parent:
        pid = forked.heard(parent)
        assert listed(reader) == {}
        assert len(temporaries(tmp_path)) == 3, "their writer lives"
        parent.kill()
    assert listed(reader) == {}
    assert temporaries(tmp_path) == []
    assert files_open_in(pid, tmp_path) == []


def test_forked_children_have_nothing_open_and_others_go_on(tmp_path: Path, forked: Forked) -> None:
    with Child(fork_again_and_again, str(tmp_path), 30) as parent:
        for _ in range(30):
            assert files_open_in(forked.heard(parent), tmp_path) == []
        usage, beside = Usage(Root(str(tmp_path))), LocalDiskBackend(tmp_path, bytes(32))
        assert all(usage.reserve_bytes(1) >= count for count in range(1, 101))
        chunks = [chunk_of(100) for _ in range(100)]
        assert statuses(beside, chunks) == [WriteStatus.STORED] * 100


def scribble(tell: Tell) -> None:
    scratch = Scratch().borrow("header", 4096)
    scratch[:] = bytes([1]) * 4096
    if not (pid := os.fork()):
        scratch[:] = bytes([2]) * 4096
        os._exit(0)
    os.waitpid(pid, 0)
    tell(bytes(scratch[:1]))


def test_a_child_has_scratch_memory_of_its_own() -> None:
    with Child(scribble) as child:
        assert child.heard() == b"\1"


def write_after_fork(tell: Tell, folder: str) -> None:
    """A backend may be used on in a child that was forked while other threads wrote."""
    backend = LocalDiskBackend(folder, NAMESPACE)
    stopped = Stopped("pwritev")
    threading.Thread(target=backend.write, args=(chunk_of(100_000),), daemon=True).start()
    stopped.wait_until_reached()
    if not (pid := os.fork()):
        stopped.go_on()
        chunk = Chunk(bytes(32), memoryview(b"of the child"))
        stored = backend.write(chunk).status is WriteStatus.STORED
        os._exit(0 if stored and backend.contains([chunk.key]) == [True] else 1)
    tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_child_can_use_the_backend_itself(tmp_path: Path) -> None:
    with Child(write_after_fork, str(tmp_path)) as child:
        assert child.heard() == 0


def test_what_was_closed_is_nobodys_in_a_child(tmp_path: Path) -> None:
    """A child closes what its parent's threads have open by name, and what has such a name later is another's."""
    backend, chunk = LocalDiskBackend(tmp_path, NAMESPACE), chunk_of(5000)
    backend.reserve_bytes(backend.stored_bytes(len(chunk.payload)))
    assert backend.write(chunk).status is WriteStatus.STORED
    assert backend.contains([chunk.key]) == [True]
    assert backend.read(chunk.key, memoryview(bytearray(len(chunk.payload)))).status is ReadStatus.HIT
    backend.close()
    assert fileio._open == {}
