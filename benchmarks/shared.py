"""The least cost of a hit in shared memory: files are read, checked and mapped, beside a copy of as many bytes.

    python benchmarks/shared.py [--folder /dev/shm] [--rounds 15] [--quick] [--json]

31 chunks of 2 MiB, the KV of a prompt of `benchmarks/ttft.py`, in seconds of CPU time. The first row is lmkv's tier.
The others are what its parts cost alone, and what it would cost to map the files and check them there.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.chunks.codec import DEFAULT_SEGMENT_BYTES, segment_checksums
from lmkv.outcomes import ReadStatus, WriteStatus
from lmkv.protocols import Chunk

CHUNKS, NBYTES = 31, 2 << 20
COPY = "a copy within the process"


def main() -> int:
    parser = arguments_of(__doc__, quick="five rounds")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="on a tmpfs")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmkv-shared-", dir=options.folder) as folder:
        runs = {name: partial(for_each, part) for name, part in parts(Path(folder)).items()}
        seconds = interleaved(runs, 5 if options.quick else options.rounds)
    found = [
        Row(name, statistics.median(times), "s", COPY, median_ratio(seconds, name, COPY))
        for name, times in seconds.items()
    ]
    return finish(found, options.json)


def for_each(part: Callable[[int], object]) -> None:
    for index in range(CHUNKS):
        part(index)


def parts(folder: Path) -> dict[str, Callable[[int], object]]:
    """The measured actions on one chunk, by name."""
    backend = LocalDiskBackend(folder / "kv", bytes(32), direct="off")
    # Aligned to pages as slots are: elsewhere the kernel copies at half the speed.
    slots = np.frombuffer(mmap.mmap(-1, CHUNKS * NBYTES), np.uint8).reshape(CHUNKS, NBYTES)
    source = np.frombuffer(mmap.mmap(-1, CHUNKS * NBYTES), np.uint8).reshape(CHUNKS, NBYTES)
    source[:] = np.random.default_rng(0).integers(0, 256, source.shape, np.uint8)
    keys = [bytes(31) + bytes([index]) for index in range(CHUNKS)]
    for key, row in zip(keys, source, strict=True):
        assert backend.write(Chunk(key, row.data)).status is WriteStatus.STORED
    plain = [folder / str(index) for index in range(CHUNKS)]
    for path, row in zip(plain, source, strict=True):
        path.write_bytes(row.data)

    def tier(index: int) -> None:
        assert backend.read(keys[index], slots[index].data).status is ReadStatus.HIT

    def read(index: int) -> None:
        fd = os.open(plain[index], os.O_RDONLY)
        assert os.preadv(fd, [slots[index].data], 0) == NBYTES
        os.close(fd)

    def check(index: int) -> None:
        segment_checksums(slots[index].data, DEFAULT_SEGMENT_BYTES)

    def mapped(index: int, *, checked: bool) -> None:
        fd = os.open(plain[index], os.O_RDONLY)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(fd, NBYTES, flags=flags, prot=mmap.PROT_READ) as found, memoryview(found) as view:
            os.close(fd)
            if checked:
                segment_checksums(view, DEFAULT_SEGMENT_BYTES)

    def copy(index: int) -> None:
        slots[index] = source[index]

    return {
        "lmkv's tier: read and checked": tier,
        "read": read,
        "checksums of bytes in the process": check,
        "mapped": partial(mapped, checked=False),
        "mapped and checked": partial(mapped, checked=True),
        COPY: copy,
    }


if __name__ == "__main__":
    sys.exit(main())
