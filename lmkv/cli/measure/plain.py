"""Plain reads of what a tier stores, without lmkv: the bound of a hit from there."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lmkv.backends.disk.folder import SUFFIX
from lmkv.chunks.codec import DEFAULT_SEGMENT_BYTES, segment_checksums

SHARE = 1.1
"""A hit from a lower tier may take as long as one from host memory and this share of a plain read."""
CHUNK = 256

T = TypeVar("T")


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _largest(sizes: Mapping[T, int], count: int) -> list[T]:
    """Chunks that are filled; the tails of prompts are smaller."""
    if len(sizes) < count:
        raise RuntimeError(f"{len(sizes)} chunks were stored instead of {count}")
    return sorted(sizes, key=lambda each: -sizes[each])[:count]


def _direct_flag(path: Path) -> int:
    """The flag of `open` for reads past the page cache; 0 where the file system has none."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


def files_of(folder: Path, tokens: int, *, in_memory: bool) -> Callable[[], None]:
    """Reads the files of a prompt's chunks by one thread: past the page cache, or from memory with their checksums."""
    sizes = {path: path.stat().st_size for path in folder.joinpath("kv").rglob(f"*{SUFFIX}")}
    paths = _largest(sizes, tokens // CHUNK)
    memory = memoryview(mmap.mmap(-1, sizes[paths[0]]))
    flags = os.O_RDONLY | (0 if in_memory else _direct_flag(paths[0]))

    def read() -> None:
        for path in paths:
            fd = os.open(path, flags)
            if os.preadv(fd, [memory], 0) != sizes[path]:
                raise RuntimeError(f"{path} was not read at once")
            os.close(fd)
            if in_memory:
                segment_checksums(memory[: sizes[path]], DEFAULT_SEGMENT_BYTES)

    read()
    return read


def values_of(url: str, tokens: int) -> Callable[[], None]:
    """Gets the values of a prompt's chunks from a Redis by its client."""
    from redis import Redis

    client = Redis.from_url(url)
    names = _largest({name: client.strlen(name) for name in client.scan_iter(count=1000)}, tokens // CHUNK)

    def read() -> None:
        for name in names:
            if not client.get(name):
                raise RuntimeError(f"Redis has lost {name!r}")

    read()
    return read
