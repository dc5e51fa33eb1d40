"""The slab: one region of host memory in equal slots, each of which has room for one chunk.

It is the CPU tier and the staging memory of all other tiers, so that no chunk is copied twice in host memory.
A shared slab is an anonymous memory file: other processes map it through its owner's file descriptor,
/dev/shm does not limit its size, and the kernel frees it with the last process that uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from lmkv.chunks.layout import ALIGNMENT
from lmkv.errors import ConfigError, UsageError

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
_PIECE = 8 << 20
"""Bytes populated per call."""
_RAM_SHARE = 0.8
"""Share of the available memory that a slab may take."""


@frozen
class SlabRef:
    """What another process on this host needs to `attach` a shared slab."""

    path: str
    nbytes: int
    slot_bytes: int


def available_ram(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that are available: MemAvailable, or less where a control group limits them."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, KeyError):
        free = 1024 * _numbers(meminfo)["MemAvailable:"]
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        # The group's page cache counts as used, but the kernel frees it when memory is needed.
        cache = _numbers(cgroup / "memory.stat")
        free = min(free, limit - used + cache["inactive_file"] + cache["active_file"])
    return max(free, 0)


def _numbers(path: Path) -> dict[str, int]:
    """From lines of a name and a number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}


def clamp_capacity(wanted: int, slot_bytes: int, *, pinned: bool = False) -> int:
    """`wanted` bytes in whole slots, cut to what this machine can give; a warning says so.

    `pinned`: the slab will be registered with a device's driver, so that RLIMIT_MEMLOCK is a limit, too.
    Raises ConfigError when not even one slot fits.
    """
    limits = {"available memory": int(available_ram() * _RAM_SHARE)}
    if pinned:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
            limits["RLIMIT_MEMLOCK (ulimit -l)"] = soft
    reason, limit = min(limits.items(), key=lambda item: item[1])
    capacity = min(wanted, limit) // slot_bytes * slot_bytes
    if not capacity:
        raise ConfigError(
            f"max_local_cpu_size: {wanted} bytes, limited to {limit} by {reason}, cannot hold one chunk of "
            f"{slot_bytes} bytes; raise it or lower chunk_size"
        )
    if wanted > limit:
        sizes = wanted / 2**30, capacity / 2**30
        logger.warning("lmkv: max_local_cpu_size cut from %.2f GiB to %.2f GiB by %s", *sizes, reason)
    return capacity


class SlabMap:
    """A mapping of a slab, without knowledge of which slots are used. Not to be closed while it is used.

    `array`: uint8 [num_slots, slot_bytes].
    """

    def __init__(self, fd: int, nbytes: int, slot_bytes: int) -> None:
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(fd, nbytes, flags=flags)
        self.slot_bytes = slot_bytes
        self.num_slots = nbytes // slot_bytes
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(-1, slot_bytes)
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<SlabMap: {self.num_slots} slots of {self.slot_bytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """The writable bytes of a slot, or the first `nbytes` of them."""
        return self.array[slot, :nbytes].data

    def populate(self) -> None:
        """Have the kernel map the pages in the background, so that no copy pays for page faults."""
        if self._populator is None:
            self._populator = threading.Thread(target=self._populate, name="lmkv-populate", daemon=True)
            self._populator.start()

    def _populate(self) -> None:
        with contextlib.suppress(OSError):
            # The computation has precedence. On Linux this is the niceness of this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        # Through ctypes, which releases the GIL; mmap.madvise would keep it for the seconds that this takes.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for offset in range(0, self.nbytes, _PIECE):
            started = time.monotonic()
            length = min(_PIECE, self.nbytes - offset)
            if self._stop.is_set() or madvise(self.address + offset, length, _MADV_POPULATE_WRITE):
                return
            # At most half of one core: the server starts up at the same time.
            self._stop.wait(time.monotonic() - started)

    def close(self) -> None:
        """Unmap, once no view is left that uses the memory. Idempotent."""
        self._stop.set()
        if self._populator is not None:
            # It works on the mapping's address, which may be another mapping's once this one is closed.
            self._populator.join()
        self.array = np.empty((0, self.slot_bytes), np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def attach(ref: SlabRef) -> SlabMap:
    """Map a slab of another process on this host. Raises OSError when it has ended or denies access."""
    fd = os.open(ref.path, os.O_RDWR)
    try:
        return SlabMap(fd, ref.nbytes, ref.slot_bytes)
    finally:
        os.close(fd)


class Slab(SlabMap):
    """A slab and the list of its free slots. `acquire` and `release` are O(1) and never block.

    Not thread-safe: its store, or its backend, calls them under a lock of its own.
    """

    def __init__(self, slot_bytes: int, capacity_bytes: int, *, shared: bool = False) -> None:
        if slot_bytes <= 0 or slot_bytes % ALIGNMENT:
            raise UsageError(f"slot_bytes {slot_bytes} is not a positive multiple of {ALIGNMENT}")
        num_slots = capacity_bytes // slot_bytes
        if num_slots < 1:
            raise UsageError(f"capacity of {capacity_bytes} bytes holds no slot of {slot_bytes} bytes")
        self._fd = -1
        if shared:
            self._fd = os.memfd_create("lmkv-slab", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, num_slots * slot_bytes)
        super().__init__(self._fd, num_slots * slot_bytes, slot_bytes)
        self._free = list(range(num_slots - 1, -1, -1))
        self._used = bytearray(num_slots)

    def __repr__(self) -> str:
        return f"<Slab: {self.free_slots} of {self.num_slots} slots of {self.slot_bytes} bytes are free>"

    @property
    def ref(self) -> SlabRef:
        """For `attach` in other processes of this host, while this process lives. Shared slabs only."""
        if self._fd < 0:
            raise UsageError("only a shared slab can be mapped by other processes")
        return SlabRef(f"/proc/{os.getpid()}/fd/{self._fd}", self.nbytes, self.slot_bytes)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """A free slot, in use from now on; None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Free a slot. Raises UsageError when it is not in use: it may be another chunk's already."""
        if not (0 <= slot < len(self._used) and self._used[slot]):
            raise UsageError(f"slot {slot} is not in use")
        self._used[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
