"""`CPUPinnedBackend`: stores chunks in host memory, as the first tier of a store or as a separate backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lmkv.chunks.layout import align_up
from lmkv.errors import BackendError, ClosedError, UsageError
from lmkv.memory import slab
from lmkv.memory.machine import clamp_capacity
from lmkv.memory.slab import Slab
from lmkv.protocols import HIT, MISS, PRESENT, STORED, Chunk, ChunkKey, Read, Written


class CPUPinnedBackend:
    """Host memory, divided into slots of equal size: the backend of a store's first tier.

    On a machine with a CUDA device, the engine pins the slots in the background. Without a device, the slots are
    ordinary memory.

    Parameters
    ----------
    capacity_bytes
        Bytes of host memory to use. If fewer bytes are available, lmkv uses fewer and logs a warning.
    slot_bytes
        Bytes for one chunk, rounded up to whole memory pages; pass `KVLayout.slot_bytes`.
    shared
        Whether other processes of this host will map the memory.
    populate
        Whether to map all memory pages in the background now, instead of mapping each page at its first use.
    engine
        Name by which other processes find the shared memory; see `lmkv.memory.slab.wait_for_slab`.
    engines
        Number of engines that start on this host and share the host's memory.

    Raises
    ------
    ConfigError
        There is not enough memory for a single slot.

    Notes
    -----
    Thread-safe: the methods of `Backend` copy while they hold a lock. A store with this backend as its first tier calls
    `take_slab`. From then on, the methods of `Backend` raise `UsageError`.

    Examples
    --------
    >>> from lmkv.protocols import Chunk
    >>> backend = CPUPinnedBackend(capacity_bytes=1 << 20, slot_bytes=4096)
    >>> backend
    <CPUPinnedBackend 'cpu': 256 of 256 slots of 4096 bytes are free>
    >>> backend.write(Chunk(bytes(32), memoryview(b"payload"))).status
    <WriteStatus.STORED: 'stored'>
    >>> into = memoryview(bytearray(7))
    >>> backend.read(bytes(32), into).status, bytes(into)
    (<ReadStatus.HIT: 'hit'>, b'payload')
    >>> backend.close()
    """

    name = "cpu"

    def __init__(
        self,
        capacity_bytes: int,
        slot_bytes: int,
        *,
        shared: bool = False,
        populate: bool = True,
        engine: str = "",
        engines: int = 1,
    ) -> None:
        slot_bytes = align_up(slot_bytes)
        with slab.one_at_a_time():
            capacity = clamp_capacity(capacity_bytes, slot_bytes, engines=engines)
            self._slab = Slab(slot_bytes, capacity, shared=shared, engine=engine)
        self._slots: dict[ChunkKey, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._closed = self._taken = False
        if populate:
            self._slab.populate()

    def __repr__(self) -> str:
        slots = f"{self._slab.free_slots} of {self._slab.num_slots} slots of {self._slab.slot_bytes} bytes"
        return f"<CPUPinnedBackend {self.name!r}: {slots} are free>"

    def take_slab(self) -> Slab:
        """Return the memory with all slots. From now on, only the caller, a store, uses the slots.

        Raises UsageError if another store has the slots already, or if any slot contains a chunk.
        """
        with self._lock:
            self._check_open()
            if self._slots:
                raise UsageError(f"backend {self.name!r} already has chunks: give the store an empty backend")
            self._taken = True
            return self._slab

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._check_open()
        return [key in self._slots for key in keys]

    def read(self, key: ChunkKey, into: memoryview) -> Read:
        with self._lock:
            self._check_open()
            found = self._slots.get(key)
            if found is None:
                return MISS
            slot, nbytes = found
            if nbytes != len(into):
                reason = f"the chunk has {nbytes} bytes, but the buffer has {len(into)}"
                return Read.failed(BackendError(self.name, "read", key.hex(), reason))
            into[:] = self._slab.view(slot, len(into))
            return HIT

    def write(self, chunk: Chunk) -> Written:
        with self._lock:
            self._check_open()
            if chunk.key in self._slots:
                return PRESENT
            nbytes = len(chunk.payload)
            if nbytes > self._slab.slot_bytes:
                return Written.rejected(f"the chunk does not fit a slot of {self._slab.slot_bytes} bytes", None)
            slot = self._slab.allocate()
            if slot is None:
                return Written.rejected("host memory has no free slot")
            self._slab.view(slot, nbytes)[:] = chunk.payload
            self._slots[chunk.key] = (slot, nbytes)
            return STORED

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._check_open()
            for key in keys:
                found = self._slots.pop(key, None)
                if found is not None:
                    self._slab.free(found[0])

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
            raise UsageError(f"backend {self.name!r} belongs to a store: use the store")
