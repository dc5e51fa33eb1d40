"""The memory files of shared slabs: how other processes of this host find the right one.

A name has the engine's name and a random part. So a path is never mistaken for the slab if its descriptor means another
file, in another container or after its owner has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_PREFIX = "lmkv-slab-"
_MEMFD = re.compile(rf"/memfd:({_PREFIX}.*?)( \(deleted\))?")

_PATIENCE = 10.0
"""Seconds to wait for other processes that make their slabs."""
_PAUSE = 0.01
"""Seconds between two attempts."""

_in_this_process = threading.Lock()
os.register_at_fork(after_in_child=_in_this_process._at_fork_reinit)  # type: ignore[attr-defined]


def create(engine: str, nbytes: int) -> int:
    """The descriptor of a new memory file for the slab of an engine."""
    fd = os.memfd_create(_prefix(engine) + secrets.token_hex(8), os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _prefix(engine: str) -> str:
    return f"{_PREFIX}{re.sub('[^a-zA-Z0-9-]', '-', engine)[:100]}."


def name_of(path: str) -> str:
    """The name of this user's slab file at a path in /proc; "" for any other file."""
    try:
        found = _MEMFD.fullmatch(os.readlink(path))
        return found[1] if found and os.stat(path).st_uid == os.geteuid() else ""
    except OSError:
        return ""


def slab_files() -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name and state of each slab of this user's on this host."""
    names = set()
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        name = name_of(path)
        if name and name not in names:
            names.add(name)
            try:
                yield path, name, os.stat(path)
            except OSError:
                continue


def find(engine: str) -> tuple[str, str, int] | None:
    """Path, name and bytes of the slab of an engine; None unless exactly one has its final size."""
    found = [(path, name, stat.st_size) for path, name, stat in slab_files() if name.startswith(_prefix(engine))]
    return found[0] if len(found) == 1 and found[0][2] else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock of this user on this host while a slab is sized and made: each process sees the slabs before it.

    A process that gets no lock within `_PATIENCE` seconds goes on with a warning: two slabs may then be promised the
    same memory.
    """
    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        try:
            if not _in_this_process.acquire(timeout=_PATIENCE):
                raise TimeoutError("another thread is creating a slab")
            stack.callback(_in_this_process.release)
            fd = os.open(_lock_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            _lock(fd, deadline)
        except OSError as error:
            logger.warning("lmkv: slabs created at the same time may be promised the same memory: %s", error)
        yield


def _lock_file() -> str:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return f"{folder}/lmkv-{os.geteuid()}.lock"


def _lock(fd: int, deadline: float) -> None:
    """Lock a file for this process, without its children, until it is closed."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "it is not this user's file: remove it", _lock_file())
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process has it locked", _lock_file()) from None
            time.sleep(_PAUSE)


def promised_and_taken() -> tuple[int, int]:
    """Bytes that this user's slabs on this host may take, and bytes that they have taken."""
    found = [stat for _, _, stat in slab_files()]
    return sum(stat.st_size for stat in found), sum(stat.st_blocks * 512 for stat in found)
