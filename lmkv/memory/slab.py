"""The slab: one region of host memory, divided into slots of equal size. A slot has space for one chunk.

The slab is the first tier: chunks are copied between the slab and lower tiers. A shared slab is an anonymous memory
file, which other processes map through the owner's file descriptor. The size of /dev/shm does not limit the slab. The
kernel frees the memory when the last process that maps the slab ends. lmkv recognizes the file by its name, which
contains the engine's name and a random part.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import mmap
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from lmkv.chunks.layout import ALIGNMENT, KVLayout, align_up
from lmkv.errors import UsageError

logger = logging.getLogger(__name__)

_PREFIX = "lmkv-slab-"
_MEMFD = re.compile(rf"/memfd:({_PREFIX}.*?)( \(deleted\))?")

_PATIENCE = 10.0
"""Seconds to wait for the lock while other processes make their slabs."""
_PAUSE = 0.01
"""Seconds between two attempts to lock the file."""

_MADV_POPULATE_WRITE = 23
_PIECE = 8 << 20
"""Number of bytes that one call maps."""
_SEARCH_PAUSE = 0.5
"""Seconds between two searches for a slab."""

_in_this_process = threading.Lock()
os.register_at_fork(after_in_child=_in_this_process._at_fork_reinit)  # type: ignore[attr-defined]


def create_file(engine: str, nbytes: int) -> int:
    """Create a memory file for the slab of an engine, and return its file descriptor."""
    fd = os.memfd_create(_prefix(engine) + secrets.token_hex(8), os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _prefix(engine: str) -> str:
    return f"{_PREFIX}{re.sub('[^a-zA-Z0-9-]', '-', engine)[:100]}."


def name_of(path: str) -> str:
    """Return the name of a slab's memory file. `path`: the path of a file descriptor in /proc. Return "" if the path
    leads to no slab of this user.
    """
    try:
        found = _MEMFD.fullmatch(os.readlink(path))
        return found[1] if found and os.stat(path).st_uid == os.geteuid() else ""
    except OSError:
        return ""


def slab_files() -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield `(path, name, status)` of the memory file of each slab of this user on this host."""
    names = set()
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        name = name_of(path)
        if name and name not in names:
            names.add(name)
            try:
                yield path, name, os.stat(path)
            except OSError:
                continue


def find_file(engine: str) -> tuple[str, str, int] | None:
    """Return `(path, name, size in bytes)` of an engine's slab. Returns None if the engine has no slab, several slabs,
    or a slab that has no size yet.
    """
    found = [(path, name, stat.st_size) for path, name, stat in slab_files() if name.startswith(_prefix(engine))]
    return found[0] if len(found) == 1 and found[0][2] else None


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock during a `with` block that makes a slab. All processes of this user on this host use the same lock,
    so that two slabs do not claim the same memory.

    A process that does not get the lock within `_PATIENCE` seconds continues with a warning.
    """
    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        try:
            if not _in_this_process.acquire(timeout=_PATIENCE):
                raise TimeoutError("another thread of this process holds the lock")
            stack.callback(_in_this_process.release)
            fd = os.open(_lock_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, fd)
            _lock(fd, deadline)
        except OSError as error:
            logger.warning("lmkv: the lock failed, so engines that start together may take too much memory: %s", error)
        yield


def _lock_file() -> str:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return f"{folder}/lmkv-{os.geteuid()}.lock"


def _lock(fd: int, deadline: float) -> None:
    """Lock a file until this process closes it. Wait for the lock until `deadline`, then raise TimeoutError. Forked
    children do not inherit the lock.
    """
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
        raise PermissionError(errno.EPERM, "the file belongs to another user: remove the file", _lock_file())
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process has locked the file", _lock_file()) from None
            time.sleep(_PAUSE)


def promised_and_taken() -> tuple[int, int]:
    """Return `(promised, taken)`: the total size of this user's slabs on this host, and the bytes that the slabs occupy
    so far.
    """
    found = [stat for _, _, stat in slab_files()]
    return sum(stat.st_size for stat in found), sum(stat.st_blocks * 512 for stat in found)


@frozen
class SlabRef:
    """A reference with which another process on this host can map a shared slab (see `attach`). `name`: the name of the
    slab's memory file.

    Equality ignores `path`, which contains the id of a process: a forked child has another path for the same file.
    """

    path: str = field(eq=False)
    nbytes: int
    slot_bytes: int
    name: str


class SlabMap:
    """A mapping of a slab into this process. The mapping does not know which slots are free. Close a mapping only after
    its last use.

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
        """Return the writable bytes of a slot, or only the first `nbytes` bytes."""
        return self.array[slot, :nbytes].data

    def populate(self, part: tuple[int, int] | None = None, turn: tuple[int, int] = (0, 1)) -> None:
        """Make the kernel map the slab's memory pages in the background, so that copies cause no page faults.

        `part`: offset and size in bytes of the part of each slot to map, if other processes map the other parts.
        `turn`: see `spans`.
        """
        if self._populator is None:
            populator = threading.Thread(
                target=self._populate, args=(part or (0, self.slot_bytes), turn), name="lmkv-populate", daemon=True
            )
            # Without a thread copies pay for the page faults.
            with contextlib.suppress(RuntimeError):
                populator.start()
                self._populator = populator

    def _populate(self, part: tuple[int, int], turn: tuple[int, int]) -> None:
        lower_priority()
        for offset, nbytes in self.spans(part, _PIECE, turn):
            started = time.monotonic()
            if self._stop.is_set() or not self.prefault(offset, nbytes):
                return
            # At most half of one core: the server starts up at the same time.
            self._stop.wait(time.monotonic() - started)

    def spans(self, part: tuple[int, int], piece: int, turn: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, int]]:
        """Yield `(offset, size)` in bytes of each piece of memory to map. A piece is `part` of one slot. If `part` is
        a whole slot, a piece is as many slots as fit into `piece` bytes, at least one.

        `part`: the offset and size in bytes of the part in each slot. `turn`: (index, count) of this process among the
        processes that map the part. Each process begins at another place, so that the processes share the work.
        """
        offset, nbytes = part
        together = max(1, piece // self.slot_bytes) if nbytes == self.slot_bytes else 1
        slots = range(0, self.num_slots, together)
        begin = len(slots) * turn[0] // turn[1]
        for slot in (*slots[begin:], *slots[:begin]):
            last = min(slot + together, self.num_slots) - 1
            yield slot * self.slot_bytes + offset, (last - slot) * self.slot_bytes + nbytes

    def prefault(self, offset: int, nbytes: int) -> bool:
        """Make the kernel map the pages of `nbytes` bytes from `offset` on. Returns False if the kernel does not map
        all these pages.
        """
        # Through ctypes, which releases the GIL; mmap.madvise would keep it for the seconds that this takes.
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        first = offset // ALIGNMENT * ALIGNMENT
        return not madvise(self.address + first, align_up(offset + nbytes - first), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap the memory as soon as no view of the memory exists any more. Idempotent."""
        self._stop.set()
        if self._populator is not None:
            # It uses the address, which another mapping may get once this one is closed.
            self._populator.join()
        self.array = np.empty((0, self.slot_bytes), np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


def lower_priority() -> None:
    """Lower the priority of the calling thread, so that computation comes first. On Linux, other threads keep their
    priority.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def attach(ref: SlabRef) -> SlabMap:
    """Map a slab of another process on this host.

    Raises OSError if the other process has ended or denies access, or if the path in `ref` now leads to another file.
    """
    fd = os.open(ref.path, os.O_RDWR)
    try:
        if name_of(f"/proc/self/fd/{fd}") != ref.name:
            raise FileNotFoundError(
                f"{ref.path} is not host memory {ref.name}: the engine has ended, or is in another container"
            )
        return SlabMap(fd, ref.nbytes, ref.slot_bytes)
    finally:
        os.close(fd)


def slab_name(engine: str, layout: KVLayout) -> str:
    """Return the name of an engine's slab. The name contains a digest of the layout, so only processes with the same
    layout find the slab.
    """
    return f"{layout.digest}-{engine}"


def wait_for_slab(engine: str, slot_bytes: int, stop: threading.Event) -> SlabRef | None:
    """Wait until a slab of the engine exists, and return a reference to it. Return None if `stop` is set first.

    `slot_bytes`: the size of the slab's slots, for the reference.
    """
    while not stop.is_set():
        found = find_file(engine)
        if found is not None:
            path, name, nbytes = found
            return SlabRef(path, nbytes, slot_bytes, name)
        stop.wait(_SEARCH_PAUSE)
    return None


class Slab(SlabMap):
    """A slab that knows which of its slots are free. `allocate` and `free` take constant time and never block.

    Not thread-safe: each caller holds the lock of the store or backend that owns the slab. `engine`: the name by which
    other processes find a shared slab. `descriptor`: the file descriptor of a shared slab's memory file, else -1.
    """

    def __init__(self, slot_bytes: int, capacity_bytes: int, *, shared: bool = False, engine: str = "") -> None:
        if slot_bytes <= 0 or slot_bytes % ALIGNMENT:
            raise UsageError(f"slot_bytes {slot_bytes} is not a positive multiple of {ALIGNMENT}")
        num_slots = capacity_bytes // slot_bytes
        if num_slots < 1:
            raise UsageError(f"a capacity of {capacity_bytes} bytes is less than one slot of {slot_bytes} bytes")
        self.descriptor = create_file(engine, num_slots * slot_bytes) if shared else -1
        try:
            super().__init__(self.descriptor, num_slots * slot_bytes, slot_bytes)
            self._free = list(range(num_slots - 1, -1, -1))
            self._used = bytearray(num_slots)
        except BaseException:
            self._close_file()
            raise

    def __repr__(self) -> str:
        return f"<Slab: {self.free_slots} of {self.num_slots} slots of {self.slot_bytes} bytes are free>"

    @property
    def ref(self) -> SlabRef:
        """A reference to a shared slab, with which other processes of this host can `attach` while this process
        runs.
        """
        if self.descriptor < 0:
            raise UsageError("only a shared slab can be mapped by other processes")
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return SlabRef(path, self.nbytes, self.slot_bytes, name_of(path))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Mark a free slot as used, and return it. Return None if all slots are in use."""
        return next(iter(self.claim(1)), None)

    def claim(self, count: int) -> list[int]:
        """Mark up to `count` free slots as used, and return them. If there are fewer, return all free slots."""
        first = max(0, len(self._free) - count)
        slots, self._free[first:] = self._free[first:], []
        for slot in slots:
            self._used[slot] = 1
        return slots

    def free(self, *slots: int) -> None:
        """Free slots. Raises UsageError if a slot is not in use, because it may already belong to another chunk."""
        used = self._used
        for slot in slots:
            if not (0 <= slot < len(used) and used[slot]):
                raise UsageError(f"slot {slot} is not in use")
            used[slot] = 0
            self._free.append(slot)

    def recount(self, used: Collection[int]) -> None:
        """Mark exactly the slots in `used` as used, and all other slots as free."""
        self._free, self._used = (
            [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used],
            bytearray(slot in used for slot in range(self.num_slots)),
        )

    def close(self) -> None:
        super().close()
        self._close_file()

    def _close_file(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
