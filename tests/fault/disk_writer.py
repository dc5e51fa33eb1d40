"""Child processes for the disk tests: `python disk_writer.py FOLDER DIRECT`, then commands on standard input.

`write SEED` and `churn SEED SECONDS` fork a child and print its process id once it works; `wait PID` prints
how it ended. The imports are paid for once, so that a test can have a thousand children. Not a test itself.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from lmkv.backends import _blob
from lmkv.backends.disk import LocalDiskBackend
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk

NAMESPACE = bytes(range(32))
KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(24)]


def payload_of(key: bytes) -> bytes:
    """The only right bytes for a key: 64 to 640 KiB, no two pages alike, not always whole pages."""
    nbytes = 65536 + int.from_bytes(key[:4], "little") % 589824
    blocks = (
        hashlib.sha256(key + number.to_bytes(4, "little")).digest() for number in range(nbytes // 4096 + 1)
    )
    return b"".join(block * 128 for block in blocks)[:nbytes]


PAYLOADS = {key: payload_of(key) for key in KEYS}


def write_until_killed(ready: Callable[[], None], folder: str, direct: Any, seed: int) -> None:
    """Writes and deletes; the store it makes is right at every moment, so it may be killed at any."""
    backend = LocalDiskBackend(folder, NAMESPACE, direct=direct)
    chooser = random.Random(seed)
    chunks = [Chunk(key, memoryview(payload), KEYS[0], bytes(64)) for key, payload in PAYLOADS.items()]
    ready()
    while True:
        chunk = chooser.choice(chunks)
        if chooser.random() < 0.4:
            backend.delete([chunk.key])
        else:
            (written,) = backend.write([chunk])
            assert written.status in (WriteStatus.STORED, WriteStatus.PRESENT), written


def churn(ready: Callable[[], None], folder: str, direct: Any, seed: int, seconds: float) -> None:
    """Everything at once beside other processes that do the same; any wrong byte ends it with an error."""
    backend = LocalDiskBackend(folder, NAMESPACE, direct=direct)
    chooser = random.Random(seed)
    ready()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        key = chooser.choice(KEYS)
        payload = PAYLOADS[key]
        action = chooser.random()
        if action < 0.4:
            (written,) = backend.write([Chunk(key, memoryview(payload))])
            assert written.status in (WriteStatus.STORED, WriteStatus.PRESENT), written
        elif action < 0.6:
            backend.delete([key])
        elif action < 0.65:
            for batch in backend.list_keys():
                assert all(item.nbytes == backend.stored_bytes(len(PAYLOADS[item.key])) for item in batch)
        else:
            buffer = memoryview(bytearray(len(payload)))
            (read,) = backend.read([(key, buffer)])
            assert read.status is ReadStatus.MISS or (read.status is ReadStatus.HIT and buffer == payload), (
                read
            )


def forked(work: Callable[..., None], *args: object) -> int:
    """The process id of a child that does the work, from the moment on that it says it is ready."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        return pid
    code = 1
    try:
        work(lambda: os.write(writer, b"!"), *args)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def main(folder: str, direct: str) -> None:
    # Some of the chunks are thus written as large ones are: in pieces, the header last.
    _blob.PIECE, _blob.SMALL = 64 << 10, 256 << 10
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "write":
            print(forked(write_until_killed, folder, direct, int(numbers[0])), flush=True)
        elif command == "churn":
            print(forked(churn, folder, direct, int(numbers[0]), float(numbers[1])), flush=True)
        else:
            _, status = os.waitpid(int(numbers[0]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
