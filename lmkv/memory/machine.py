"""Computes how much memory on this machine a slab, or an in-memory folder that engines share, may take."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from lmkv.errors import ConfigError
from lmkv.memory import slab

logger = logging.getLogger(__name__)

RAM_SHARE = 0.8
"""Largest share of the available memory for all slabs of this host together."""
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Number of bytes. In control groups of version 1, a larger limit means that there is no limit."""
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FILE_SYSTEM_SHARE = 0.9
"""Largest share of an in-memory file system's free space for chunks, because vLLM also has queues in /dev/shm."""


@frozen
class ControlGroup:
    """The folder of a control group (cgroup). `names`: the names of the file with the limit, of the file with the
    used memory, and of the two entries of `memory.stat` that count the page cache.

    `V1`, `V2`: the `names` in cgroup version 1 and in version 2.
    """

    folder: Path
    names: tuple[str, str, str, str]

    V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
    V2 = ("memory.max", "memory.current", "inactive_file", "active_file")

    def limit_bytes(self) -> int:
        """Return the limit in bytes. Raises ValueError if there is no limit, and OSError if the control group does not
        exist.
        """
        return int((self.folder / self.names[0]).read_text())

    def free_bytes(self) -> int:
        """Return how many more bytes the group may take. The group's page cache counts as free, because the kernel can
        drop it.
        """
        used, stat = int((self.folder / self.names[1]).read_text()), _numbers(self.folder / "memory.stat")
        return self.limit_bytes() - used + sum(stat[name] for name in self.names[2:])


def control_groups(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[ControlGroup]:
    """Yield the control groups that may limit this process: the group in the file `own`, and its parents, up to `root`.

    In a container, `root` is usually the process's group, and the folders of the other groups do not exist.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if number == "0" or "memory" in controllers.split(","):
            names, top = (ControlGroup.V2, root) if number == "0" else (ControlGroup.V1, root / "memory")
            folder = top / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_relative_to(top):
                    yield ControlGroup(group, names)


def memory_limit(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the smallest limit of this process's control groups in bytes, or None if there is no limit."""
    limits = []
    for group in control_groups(root, own):
        with contextlib.suppress(OSError, ValueError):
            limits.append(group.limit_bytes())
    least = min(limits, default=_NO_LIMIT)
    return least if least < _NO_LIMIT else None


def available_ram(
    meminfo: Path = Path("/proc/meminfo"), root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the bytes of available memory: MemAvailable of /proc/meminfo, or less if a control group allows less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, KeyError):
        free = 1024 * _numbers(meminfo)["MemAvailable:"]
    for group in control_groups(root, own):
        with contextlib.suppress(OSError, ValueError, KeyError):
            free = min(free, group.free_bytes())
    return max(free, 0)


_SMALL_SHARE = 256
"""A slab of less than 1/256 of the memory belongs to a test or a tool, and limits no other engine."""


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file that has a name and a number in each line. Return the numbers by name."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}


def clamp_capacity(wanted: int, slot_bytes: int, *, engines: int = 1) -> int:
    """Return a capacity for a slab: `wanted` bytes, rounded down to whole slots. If this machine has too little memory,
    return fewer bytes and log a warning.

    `engines`: the number of engines that start on this host; each of them gets at most an equal share of the available
    memory. The full size of this user's other slabs counts as used, unless `wanted` is small, as in a test. Raises
    ConfigError if not even one slot fits.
    """
    promised, taken = slab.promised_and_taken()
    room = int((available_ram() + taken) * RAM_SHARE)
    limits = {
        "available memory": room,
        f"available memory, shared by {engines} engines": room // engines,
        "available memory, less what other engines on this host may take": room - promised,
    }
    if wanted < room // _SMALL_SHARE:
        limits = {"available memory": room}
    return _limited("max_local_cpu_size", wanted, limits, slot_bytes)


def _limited(setting: str, wanted: int, limits: Mapping[str, int], unit: int = 1) -> int:
    """Return `wanted` bytes or the smallest of `limits` (bytes by reason), rounded down to multiples of `unit`. Log a
    warning if a limit is smaller.

    Raises ConfigError if not even one unit of several bytes fits.
    """
    reason, limit = min(limits.items(), key=lambda item: item[1])
    capacity = max(min(wanted, limit), 0) // unit * unit
    if not capacity and unit > 1:
        todo = f"raise {setting}" if wanted < unit else f"lower {setting} of all engines on this host, free memory,"
        raise ConfigError(
            f"{setting}: {wanted} bytes, limited to {max(limit, 0)} bytes by {reason}, cannot hold one chunk of "
            f"{unit} bytes: {todo} or lower chunk_size"
        )
    if wanted > limit:
        sizes = wanted / 2**30, capacity / 2**30
        logger.warning("lmkv: %s is cut from %.2f GiB to %.2f GiB, limited by %s", setting, *sizes, reason)
    return capacity


def file_system_of(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system of a folder, or "" if the file `mounts` does not list it."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


def check_in_memory(folder: str) -> None:
    """Log a warning if the folder is not on an in-memory file system. Raises ConfigError for hugetlbfs, where lmkv
    cannot write.
    """
    kind = file_system_of(folder)
    if kind == "hugetlbfs":
        raise ConfigError(
            f"shared_memory: lmkv cannot write to files on hugetlbfs, as in {folder}: for huge pages mount a tmpfs "
            "with the option huge=within_size"
        )
    if kind not in IN_MEMORY:
        logger.warning(
            "lmkv: shared_memory: %s is on %s, not in memory; name a folder in /dev/shm or another tmpfs, or "
            "set local_disk instead",
            folder,
            kind or "an unknown file system",
        )


def clamp_shared_memory(folder: str, wanted: int, used: int) -> int:
    """Return a capacity for an in-memory folder: `wanted` bytes. If the folder or this machine has too little memory,
    return fewer bytes and log a warning.

    `used`: the bytes of chunks that are already in the folder. The full size of this user's slabs counts as used.
    """
    promised, taken = slab.promised_and_taken()
    limits = {"available memory": int((available_ram() + taken + used) * RAM_SHARE) - promised}
    status = os.statvfs(folder)
    # A tmpfs without a limit reports zero blocks.
    if status.f_blocks:
        free = status.f_bavail * status.f_frsize
        limits[f"the size of its file system (df {folder}; Docker: --shm-size)"] = int(
            (free + used) * _FILE_SYSTEM_SHARE
        )
    return _limited("max_shared_memory_size", wanted, limits)
