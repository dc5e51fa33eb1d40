"""Host memory as a backend: the hot tier, and by itself a complete in-memory store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmkv.chunks.layout import align_up
from lmkv.errors import BackendError, ClosedError, UsageError
from lmkv.memory.slab import Slab, clamp_capacity
from lmkv.outcomes import HIT, MISS, PRESENT, STORED, Read, Written
from lmkv.protocols import Chunk, ChunkKey


class CPUPinnedBackend:
    """Chunks in the slots of a slab; pinned by whoever maps the slab next to a device.

    `capacity_bytes`: at most this much host memory, clamped to what the machine has. `slot_bytes`: room for
    one chunk, rounded up to whole pages. `shared`: other processes will map the slab. `pinned`: a device's
    driver will be asked to pin it, so RLIMIT_MEMLOCK limits it too.

    The verbs of `Backend` copy and take the backend's lock. A store that uses this backend as its primary
    tier moves no bytes through them: it takes the slots over with `take_slab`, and the verbs refuse.
    """

    name = "cpu"

    def __init__(
        self,
        capacity_bytes: int,
        slot_bytes: int,
        *,
        shared: bool = False,
        populate: bool = True,
        pinned: bool = False,
    ) -> None:
        slot_bytes = align_up(slot_bytes)
        capacity = clamp_capacity(capacity_bytes, slot_bytes, pinned=pinned)
        self._slab = Slab(slot_bytes, capacity, shared=shared)
        self._slots: dict[ChunkKey, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._closed = self._taken = False
        if populate:
            self._slab.populate()

    def take_slab(self) -> Slab:
        """Hand the slots over to a store, which fills, names and frees them from now on.

        Raises UsageError when somebody else has them, or chunks are in them.
        """
        with self._lock:
            self._check_open()
            if self._slots:
                raise UsageError(f"{self.name!r} holds chunks: it cannot become a primary tier")
            self._taken = True
            return self._slab

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._check_open()
        return [key in self._slots for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, memoryview]]) -> list[Read]:
        with self._lock:
            self._check_open()
            return [self._read(key, into) for key, into in items]

    def _read(self, key: ChunkKey, into: memoryview) -> Read:
        found = self._slots.get(key)
        if found is None:
            return MISS
        slot, nbytes = found
        if nbytes != len(into):
            reason = f"it has {nbytes} bytes, the buffer {len(into)}"
            return Read.failed(BackendError(self.name, "read", key.hex(), reason))
        into[:] = self._slab.view(slot, len(into))
        return HIT

    def write(self, chunks: Sequence[Chunk]) -> list[Written]:
        with self._lock:
            self._check_open()
            return [self._write(chunk) for chunk in chunks]

    def _write(self, chunk: Chunk) -> Written:
        if chunk.key in self._slots:
            return PRESENT
        nbytes = len(chunk.payload)
        if nbytes > self._slab.slot_bytes:
            return Written.rejected(f"{nbytes} bytes do not fit a slot of {self._slab.slot_bytes}")
        slot = self._slab.acquire()
        if slot is None:
            return Written.rejected("full")
        self._slab.view(slot, nbytes)[:] = chunk.payload
        self._slots[chunk.key] = (slot, nbytes)
        return STORED

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._check_open()
            for key in keys:
                found = self._slots.pop(key, None)
                if found is not None:
                    self._slab.release(found[0])

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._slots.clear()
                self._slab.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"backend {self.name!r} is closed")
        if self._taken:
            raise UsageError(f"the slots of {self.name!r} belong to a store")
