"""The slab: one region of host memory cut into equal slots, one chunk a slot.

The slab is the CPU tier and the staging buffer of every other tier, so that nothing is copied twice in host
memory. Shared, it is an anonymous memory file: other processes map it through its owner's file descriptor,
its size is not bound by /dev/shm, and the kernel frees it with its last user, however that one dies.
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
_RAM_SHARE = 0.8
"""Of the memory that is available now: the rest is for whoever else lives here."""


@frozen
class SlabRef:
    """What another process on this host needs to map a shared slab."""

    path: str
    nbytes: int
    slot_bytes: int


def available_ram(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be taken: MemAvailable, or less where a control group says so."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, KeyError):
        free = 1024 * _numbers(meminfo)["MemAvailable:"]
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        # The group's page cache counts as used, but goes when memory is wanted.
        cache = _numbers(cgroup / "memory.stat")
        free = min(free, limit - used + cache["inactive_file"] + cache["active_file"])
    return max(free, 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}


def clamp_capacity(wanted: int, slot_bytes: int, *, pinned: bool = False) -> int:
    """`wanted` bytes cut down to what this machine can give, in whole slots, with one log line if cut.

    `pinned`: the slab will be registered with a device, so RLIMIT_MEMLOCK counts too.
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
        logger.warning(
            "lmkv: CPU tier cut from %.2f GiB to %.2f GiB by %s", wanted / 2**30, capacity / 2**30, reason
        )
    return capacity


class SlabMap:
    """A mapping of a slab: bytes by slot, without bookkeeping. Not thread-safe to close while in use.

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

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """The writable bytes of a slot, or its first `nbytes`."""
        return self.array[slot, :nbytes].data

    def populate(self) -> None:
        """Have the pages mapped in the background, so that no copy pays for first touches."""
        if self._populator is None:
            self._populator = threading.Thread(target=self._populate, name="lmkv-populate", daemon=True)
            self._populator.start()

    def _populate(self) -> None:
        with contextlib.suppress(OSError):
            # Whoever computes goes first: the thread's own niceness, on Linux.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        # ctypes, because mmap.madvise would hold the interpreter lock for the seconds that this takes.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for offset in range(0, self.nbytes, _PIECE):
            started = time.monotonic()
            length = min(_PIECE, self.nbytes - offset)
            if self._stop.is_set() or madvise(self.address + offset, length, _MADV_POPULATE_WRITE):
                return
            # Half of one core at most: the server's own start-up is going on beside it.
            self._stop.wait(time.monotonic() - started)

    def close(self) -> None:
        """Unmap. Views that are still alive keep the memory until they go. Idempotent."""
        self._stop.set()
        if self._populator is not None:
            self._populator.join()
        self.array = np.empty((0, self.slot_bytes), np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def attach(ref: SlabRef) -> SlabMap:
    """Map a slab that another process of this host owns. Raises OSError when it is gone or out of reach."""
    fd = os.open(ref.path, os.O_RDWR)
    try:
        return SlabMap(fd, ref.nbytes, ref.slot_bytes)
    finally:
        os.close(fd)


class Slab(SlabMap):
    """The owner's side: `acquire` and `release` of slots, O(1), never blocking.

    No lock inside: whoever owns the slab calls these under its own.
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

    @property
    def ref(self) -> SlabRef:
        """How other processes of this host map it, as long as this one lives. Shared slabs only."""
        if self._fd < 0:
            raise UsageError("only a shared slab can be mapped by other processes")
        return SlabRef(f"/proc/{os.getpid()}/fd/{self._fd}", self.nbytes, self.slot_bytes)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """A slot nobody uses, or None."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._used[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back. Raises UsageError for one that is not in use: somebody's bytes are at stake."""
        if not (0 <= slot < len(self._used) and self._used[slot]):
            raise UsageError(f"slot {slot} is not in use")
        self._used[slot] = 0
        self._free.append(slot)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
