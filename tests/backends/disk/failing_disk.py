"""A store on a disk whose calls fail for a while. Not a test itself, but a program; `failing.c` is preloaded.

For each error and each kind of call: chunks are loaded, stored, listed, asked for and deleted while the calls fail, and
then all that was there before is loaded from disk again. It prints the results as JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmkv.backends.disk import chunkfile
from lmkv.store.guards import attempt
from lmkv.store.tiered import TieredStore
from lmkv.testing import ManualClock
from tests.kit import LIMIT
from tests.store.shared_store import CHUNK, KEYS, get, open_store, put

ERRORS = [
    *("EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "EAGAIN", "EBUSY", "ESTALE", "EACCES"),
    *("EREMOTEIO", "ENODEV", "EPERM"),
]
KINDS = ("open", "read", "write", "sync", "publish", "unlink", "stat", "list", "make")
CALLS = {**{kind: 1 << bit for bit, kind in enumerate(KINDS)}, "all": (1 << len(KINDS)) - 1}
CHUNKS = 8
CAPACITY = 100 * (CHUNK + 4096)


class Disk:
    """The control of `failing.c`."""

    def __init__(self) -> None:
        fd = os.open(os.environ["LMKV_FAIL_FILE"], os.O_RDWR)
        self._map = mmap.mmap(fd, 16)
        os.close(fd)

    @contextmanager
    def failing(self, code: int, calls: int, every: int) -> Iterator[None]:
        self._map[:] = struct.pack("4i", code, calls, every, 0)
        try:
            yield
        finally:
            self._map[:4] = bytes(4)

    @property
    def failed(self) -> int:
        """How many calls have failed since the last time that any did."""
        return int(struct.unpack("4i", self._map)[3])


def trouble(store: TieredStore, clock: ManualClock, keys: list[bytes], more: list[bytes]) -> set[str]:
    """Use the store for two seconds of its clock; the states of its breakers on the way."""
    states: set[str] = set()
    for _ in range(8):
        for key in keys:
            get(store, [key])
            store.drop([key])
            clock.advance(0.03)
            states |= {(tier := store.stats().tiers[1]).breaker, tier.write_breaker}
        put(store, more[:2])
        store.drop(keys)
        store.look_up_shared(keys)
        assert store.drain(LIMIT)
        attempt(store._scanners[0]._list, store._scanners[0]._failed)
        states |= {(tier := store.stats().tiers[1]).breaker, tier.write_breaker}
        store.delete(more[:1])
        assert store.drain(LIMIT)
        store.drop(more)
    return states


def outcome(disk: Disk, folder: Path, error: str, calls: str, every: int) -> dict[str, object]:
    clock = ManualClock()
    store = open_store(str(folder), 1, CAPACITY, clock)
    backend = store.backends[1]
    backend.sync = backend._files.sync = "full"  # type: ignore[attr-defined]
    keys, more = KEYS[:CHUNKS], [bytes([number]) * 32 for number in range(100, 104)]
    for key in keys:
        put(store, [key])
        assert store.drain(LIMIT)
    store.drop(keys)
    with disk.failing(getattr(errno, error), CALLS[calls], every):
        states = trouble(store, clock, keys, more)
    failed = disk.failed
    files = sum(folder.joinpath(b"\1".hex() * 32, key[:1].hex(), f"{key.hex()}.kv1").exists() for key in keys)
    clock.advance(100)
    found = store.look_up_shared(keys)
    assert found is None or found.wait(LIMIT)
    served = 0
    for key in keys:
        served += get(store, [key])
        store.drop([key])
    stats = store.stats().tiers[1]
    store.close()
    came_of_it = {"failed": failed, "files": files, "served": served, "states": sorted(states), "lost": stats.lost}
    return {"error": error, "calls": calls, "every": every, **came_of_it}


def main(folder: Path) -> None:
    logging.getLogger("lmkv").setLevel(logging.CRITICAL)
    # The last of several reads of a chunk may be the one that fails.
    chunkfile.PIECE, chunkfile.SMALL = 32 << 10, 0
    disk, number = Disk(), 0
    for error in ERRORS:
        for calls in CALLS:
            for every in (1, 3):
                number += 1
                print(json.dumps(outcome(disk, folder / str(number), error, calls, every)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
