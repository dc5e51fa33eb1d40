"""`InPlace`: chunks in memory that a node shares are leased to be read there, without a slot of host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from attrs import define, frozen

from lmkv.errors import BackendError, CorruptChunkError
from lmkv.outcomes import HIT, MISS, Read
from lmkv.protocols import ChunkKey, Place
from lmkv.store.leases import Lease
from lmkv.store.tiers.entry import Entry
from lmkv.store.tiers.iopool import IOPool
from lmkv.store.tiers.jobs import AfterLock, deletion
from lmkv.store.tiers.locking import locked
from lmkv.store.tiers.lower import LowerTier
from lmkv.store.tiers.primary import PrimaryTier


@frozen
class FilesRead:
    """How chunks were read in place: `count` of them, `nbytes` in `seconds`, and why the one after them was not.

    `failed`: the key of that chunk, b"" if all were read. `error`: the message, "" for a chunk that is gone. `damaged`:
    whether its bytes are wrong. `blind`: why the worker can read no chunk in place, "" if it can.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failed: ChunkKey = b""
    error: str = ""
    damaged: bool = False
    blind: str = ""

    def outcome(self, tier: str) -> Read:
        """The outcome of reading `failed`, for the counters of its tier."""
        if not self.error:
            return MISS
        kind = CorruptChunkError if self.damaged else BackendError
        return Read.failed(kind(tier, "read", self.failed.hex(), self.error))


@define(eq=False, repr=False)
class InPlace:
    """Leases chunks of host memory and of the first lower tier, if its chunks can be read in place. Thread-safe.

    `lock`, `tiers`, `pool`: the store's. Another process may evict a chunk before it is read: `ended` is told so.
    """

    _lock: threading.Lock
    _primary: PrimaryTier
    _tiers: Sequence[LowerTier]
    _pool: IOPool

    @property
    def place(self) -> Place | None:
        """Where the chunks are that can be read in place; None if none can."""
        return next((tier.in_memory.place for tier in self._tiers[:1] if tier.in_memory is not None), None)

    @property
    def name(self) -> str:
        """The name of their tier."""
        return self._tiers[0].name

    def count(self, keys: Sequence[ChunkKey], *, look: bool = True) -> int:
        """How many leading chunks can be leased, as far as is known.

        `look`: look for the file of each one that is not in host memory, which takes microseconds, and forget those
        that are gone.
        """
        with self._lock:
            chunks = self._leading(keys)
            files = [chunk for chunk in chunks if look and not isinstance(chunk, Entry)]
            scan = self._tiers[0].index.begin_scan() if files else None
        if scan is None:
            return len(chunks)
        tier = self._tiers[0]
        there = tier.contains(files)
        with self._lock:
            tier.index.end_scan(scan)
            gone = [number for number, found in enumerate(there) if not found and files[number] not in scan.changed]
            for number in gone:
                tier.judge(files[number], MISS)
        first = min([*gone, len(there)])
        return len(chunks) if first == len(files) else chunks.index(files[first])

    def lease(self, keys: Sequence[ChunkKey]) -> Lease:
        """Refer to the leading chunks that are in host memory or can be read in place, as many as there are."""
        with self._lock:
            chunks = self._leading(keys)
            self._primary.use([chunk for chunk in chunks if isinstance(chunk, Entry)])
            index = self._tiers[0].index if self._tiers else None
            for chunk in chunks:
                if index is not None and not isinstance(chunk, Entry):
                    index.begin_read(chunk)
        return Lease(chunks, self._lock, self._primary, index)

    @locked
    def _leading(self, keys: Sequence[ChunkKey]) -> list[Entry | ChunkKey]:
        """The leading chunks that can be leased: entries of host memory, and keys of those in place."""
        found: list[Entry | ChunkKey] = []
        index = self._tiers[0].index if self.place and self._tiers[0].usable else ()
        for key in keys:
            entry = self._primary.entries.get(key)
            if entry is not None and entry.ready:
                found.append(entry)
            elif key in index:
                found.append(key)
            else:
                break
        return found

    def ended(self, files: FilesRead) -> str:
        """Count what was read in place, and forget or delete what was not.

        Returns why nothing can be read in place, "" if other chunks can.
        """
        tier, after, damaged = self._tiers[0], AfterLock(), False
        # A file that is here and not there: the reader sees another folder.
        elsewhere = bool(files.failed) and not files.error and any(tier.contains([files.failed]))
        with self._lock:
            for _ in range(files.count):
                tier.count_read(HIT, files.nbytes // files.count, files.seconds / files.count)
            if files.failed and not elsewhere and not files.blind:
                outcome = files.outcome(tier.name)
                tier.count_read(outcome, 0, 0.0)
                damaged = tier.judge(files.failed, outcome)
        if damaged:
            after.jobs.append(deletion(tier.reclaim))
            after.run(self._pool.submit)
        return "the worker sees another folder" if elsewhere else files.blind
