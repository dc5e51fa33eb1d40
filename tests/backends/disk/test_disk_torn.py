"""A chunk's file in memory that another process overwrites, cuts off, deletes and puts back while it is read."""

from __future__ import annotations

import os
import random
from pathlib import Path

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.folder import SUFFIX
from lmkv.protocols import Chunk, ReadStatus
from tests.forked import Child, Tell

KEY = bytes(32)
PAYLOAD = random.Random(0).randbytes(4 << 20)
"""Two pieces of a read, and so long that a change comes in the middle of it."""
ENOUGH = 30


def tear(tell: Tell, path: str) -> None:
    """Change the file in place in every way, and put it back each time, until somebody ends it."""
    whole, other = Path(path).read_bytes(), path + ".whole"
    random_ = random.Random(1)
    tell("begun")
    while True:
        at = random_.randrange(len(whole))
        way = random_.randrange(4)
        try:
            if way == 0:
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(b"wrong" * 1000)
            elif way == 1:
                os.truncate(path, at)
            elif way == 2:
                os.unlink(path)
        except FileNotFoundError:
            pass  # the reader has set it aside
        Path(other).write_bytes(whole)
        os.rename(other, path)


def test_what_is_changed_while_it_is_read_is_served_whole_or_not_at_all(memory_path: Path) -> None:
    backend = LocalDiskBackend(memory_path, bytes(32), direct="off", shared=True)
    backend.write(Chunk(KEY, memoryview(PAYLOAD)))
    [path] = memory_path.rglob(f"*{SUFFIX}")
    found = dict.fromkeys(ReadStatus, 0)
    with Child(tear, str(path)) as other:
        assert other.heard() == "begun"
        while found[ReadStatus.HIT] < ENOUGH or found[ReadStatus.FAILED] < ENOUGH:
            into = bytearray(len(PAYLOAD))
            read = backend.read(KEY, memoryview(into))
            found[read.status] += 1
            assert read.status is not ReadStatus.HIT or into == PAYLOAD
