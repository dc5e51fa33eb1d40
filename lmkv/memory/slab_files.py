"""The memory files of shared slabs: how another process of this host finds the one that it is to map.

A name is that of the engine and a random part, so that a number of a file descriptor that means another file
in another container, or once its owner has ended, is never taken for the slab.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
from collections.abc import Iterator

_PREFIX = "lmkv-slab-"
_MEMFD = re.compile(rf"/memfd:({_PREFIX}.*?)( \(deleted\))?")


def create(engine: str, nbytes: int) -> int:
    """The descriptor of a new memory file for the slab of an engine."""
    fd = os.memfd_create(_prefix(engine) + secrets.token_hex(8), os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _prefix(engine: str) -> str:
    return f"{_PREFIX}{re.sub('[^a-zA-Z0-9-]', '-', engine)[:100]}."


def name_of(path: str) -> str:
    """The name of the slab's memory file that a path in /proc refers to; "" when it refers to none."""
    try:
        found = _MEMFD.fullmatch(os.readlink(path))
    except OSError:
        return ""
    return found[1] if found else ""


def slab_files() -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name and state of each slab on this host whose owner lets this process look."""
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
    """Path, name and bytes of the slab of an engine; None while there is none that has its size, or more than one."""
    found = [(path, name, stat.st_size) for path, name, stat in slab_files() if name.startswith(_prefix(engine))]
    return found[0] if len(found) == 1 and found[0][2] else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Processes of this host that size and make their slabs one after the other, to see each other's."""
    fd = os.open("/dev/shm" if os.path.isdir("/dev/shm") else "/", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def promised_and_taken() -> tuple[int, int]:
    """Bytes that the slabs of this host may come to take, and the bytes that they have taken until now."""
    found = [stat for _, _, stat in slab_files()]
    return sum(stat.st_size for stat in found), sum(stat.st_blocks * 512 for stat in found)
