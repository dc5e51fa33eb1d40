"""Programs of the child processes of the disk tests. Not a test itself."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import threading
from threading import Barrier
from typing import Any

import pytest

from lmkv.backends.disk import LocalDiskBackend, chunkfile
from lmkv.protocols import Chunk, ReadStatus, WriteStatus
from tests.forked import Tell
from tests.kit import LIMIT

NAMESPACE = bytes(range(32))
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(24)]


def payload_of(key: bytes) -> bytes:
    """The only right bytes for a key: 64 to 640 KiB, no two pages alike, not always whole pages."""
    nbytes = 65536 + int.from_bytes(key[:4], "little") % 589824
    blocks = (hashlib.sha256(key + number.to_bytes(4, "little")).digest() for number in range(nbytes // 4096 + 1))
    return b"".join(block * 128 for block in blocks)[:nbytes]


PAYLOADS = {key: payload_of(key) for key in KEYS}


def open_disk(folder: str, direct: Any) -> LocalDiskBackend:
    # Some of the chunks are thus written as large ones are: in pieces, the header last.
    chunkfile.PIECE, chunkfile.SMALL = 64 << 10, 256 << 10
    return LocalDiskBackend(folder, NAMESPACE, direct=direct)


def write_until_killed(tell: Tell, folder: str, direct: Any, seed: int, step: int | None = None) -> None:
    """Write and delete; the folder is right at every moment, so this may be killed at any.

    `step`: this system call of a write ends the process, when the half of it is done.
    """
    backend = open_disk(folder, direct)
    if step is not None:
        die_at(step)
    chooser = random.Random(seed)
    chunks = [Chunk(key, memoryview(payload), KEYS[0], bytes(64)) for key, payload in PAYLOADS.items()]
    tell("ready")
    while True:
        chunk = chooser.choice(chunks)
        if chooser.random() < 0.4:
            backend.delete([chunk.key])
        else:
            written = backend.write(chunk)
            assert written.status in (WriteStatus.STORED, WriteStatus.PRESENT), written


def die_at(step: int) -> None:
    pwritev, link, steps = os.pwritev, os.link, itertools.count(1)

    def write(fd: int, views: list[memoryview], at: int) -> int:
        if next(steps) == step:
            half = len(views[0]) // 8192 * 4096
            pwritev(fd, [views[0][:half]], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwritev(fd, views, at)

    def publish(source: str, path: str, **options: Any) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        link(source, path, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "pwritev", write)
    patch.setattr(os, "link", publish)


def stop_halfway(tell: Tell, folder: str, direct: Any) -> None:
    """Stop for ever before a complete file gets its name, and tell the name it has."""

    def stop(source: str, path: str, **options: Any) -> None:
        tell(source)
        threading.Event().wait()

    pytest.MonkeyPatch().setattr(os, "link", stop)
    open_disk(folder, direct).write(Chunk(KEYS[0], memoryview(PAYLOADS[KEYS[0]])))


def churn(_: Tell, folder: str, direct: Any, seed: int, rounds: int, start: Barrier) -> None:
    """Everything at once beside other processes that do the same; any wrong byte ends it with an error."""
    backend = open_disk(folder, direct)
    chooser = random.Random(seed)
    start.wait(LIMIT)
    for _ in range(rounds):
        key = chooser.choice(KEYS)
        payload = PAYLOADS[key]
        action = chooser.random()
        if action < 0.4:
            written = backend.write(Chunk(key, memoryview(payload)))
            assert written.status in (WriteStatus.STORED, WriteStatus.PRESENT), written
        elif action < 0.6:
            backend.delete([key])
        elif action < 0.65:
            for batch in backend.list_keys():
                assert all(item.nbytes == backend.stored_bytes(len(PAYLOADS[item.key])) for item in batch)
        else:
            buffer = memoryview(bytearray(len(payload)))
            read = backend.read(key, buffer)
            assert read.status is ReadStatus.MISS or (read.status is ReadStatus.HIT and buffer == payload), read
