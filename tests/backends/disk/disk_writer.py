"""What the child processes of the disk tests do. Not a test itself."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

from lmkv.backends.disk import chunkfile
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk
from tests.forked import Tell

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


def open_disk(folder: str, direct: Any) -> LocalDiskBackend:
    # Some of the chunks are thus written as large ones are: in pieces, the header last.
    chunkfile.PIECE, chunkfile.SMALL = 64 << 10, 256 << 10
    return LocalDiskBackend(folder, NAMESPACE, direct=direct)


def write_until_killed(tell: Tell, folder: str, direct: Any, seed: int) -> None:
    """Writes and deletes; the store it makes is right at every moment, so it may be killed at any."""
    backend = open_disk(folder, direct)
    chooser = random.Random(seed)
    chunks = [Chunk(key, memoryview(payload), KEYS[0], bytes(64)) for key, payload in PAYLOADS.items()]
    tell("ready")
    while True:
        chunk = chooser.choice(chunks)
        if chooser.random() < 0.4:
            backend.delete([chunk.key])
        else:
            (written,) = backend.write([chunk])
            assert written.status in (WriteStatus.STORED, WriteStatus.PRESENT), written


def churn(tell: Tell, folder: str, direct: Any, seed: int, seconds: float) -> None:
    """Everything at once beside other processes that do the same; any wrong byte ends it with an error."""
    backend = open_disk(folder, direct)
    chooser = random.Random(seed)
    tell("ready")
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
