"""Plain reads of what a tier stores, without lmkv: the bound of a hit from there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from lmkv.backends.disk.fileio import Scratch
from lmkv.backends.disk.folder import SUFFIX
from lmkv.chunks.codec import DEFAULT_SEGMENT_BYTES, segment_checksums
from lmkv.cli.measure.timing import wait_until_settled

MARGIN = 1.1
"""A hit from a lower tier may take as long as one from host memory and this many times a plain read."""
PROMPTS = 2
"""Prompts of the same length that the measured engine has stored: see `ttft.first_time`."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of the C library's `mallopt`."""

T = TypeVar("T")


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _of_one_prompt(sizes: Mapping[T, int]) -> dict[T, int]:
    """As many whole chunks as one prompt has, with their sizes; the tails of prompts are smaller."""
    if not sizes:
        raise LookupError("the tier has no chunks")
    whole = max(sizes.values())
    found = [each for each, size in sizes.items() if size == whole]
    return dict.fromkeys(found[: -(-len(found) // PROMPTS)], whole)


def files_of_one_prompt(folder: Path) -> dict[Path, int]:
    """As many chunks' files of a tier as a prompt has, with their sizes. Raises LookupError without files."""
    return _of_one_prompt({path: path.stat().st_size for path in folder.joinpath("kv").rglob(f"*{SUFFIX}")})


def files_of(folder: Path, *, in_memory: bool) -> Callable[[], None]:
    """Reads as many chunks' files as a prompt has, by one thread: past the page cache, or from memory with checksums.

    It reads into huge pages where there are any, as the disk tier does. Raises LookupError without files.
    """
    sizes = files_of_one_prompt(folder)
    memory = Scratch().take("plain read", sum(sizes.values()))
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

    By default the kernel maps memory anew for each large value: it takes longer to map it than to receive the value.
    """
    with contextlib.suppress(AttributeError):  # not every C library has it
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
