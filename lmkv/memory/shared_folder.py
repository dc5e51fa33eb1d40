"""How much a folder in memory may take, which the engines of a host share through its files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv.memory import slab_files
from lmkv.memory.slab import RAM_SHARE, available_ram

logger = logging.getLogger(__name__)

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_FILE_SYSTEM_SHARE = 0.9
"""Share of the file system that chunks may take of what others do not: vLLM has queues of its own in /dev/shm."""


def file_system_of(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that the folder is on, "" when the kernel does not tell."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0]
    return ""


def check_in_memory(folder: str) -> None:
    """Warn when the folder is not in memory. Raises ConfigError when files in it cannot be written."""
    kind = file_system_of(folder)
    if kind == "hugetlbfs":
        raise ConfigError(
            f"shared_memory: {folder} is on hugetlbfs, where files cannot be written; for huge pages mount a tmpfs "
            "with the option huge=within_size"
        )
    if kind not in _IN_MEMORY:
        logger.warning(
            "lmkv: shared_memory: %s is on %s, not in memory; name a folder in /dev/shm or another tmpfs, or use "
            "local_disk for it",
            folder,
            kind or "an unknown file system",
        )


def clamp_shared_memory(folder: str, wanted: int, used: int) -> int:
    """`wanted` bytes, cut to what the folder and this machine can give; a warning says so.

    `used`: bytes of the chunks that are there already. What slabs of this host have not taken yet is theirs.
    """
    promised, taken = slab_files.promised_and_taken()
    limits = {"available memory": int((available_ram() + taken + used) * RAM_SHARE) - promised}
    status = os.statvfs(folder)
    # Without a limit of its own a tmpfs says that it has no blocks.
    if status.f_blocks:
        free = status.f_bavail * status.f_frsize
        limits[f"the size of its file system (df {folder}; Docker: --shm-size)"] = int(
            (free + used) * _FILE_SYSTEM_SHARE
        )
    reason, limit = min(limits.items(), key=lambda item: item[1])
    capacity = max(min(wanted, limit), 0)
    if wanted > limit:
        sizes = wanted / 2**30, capacity / 2**30
        logger.warning("lmkv: max_shared_memory_size cut from %.2f GiB to %.2f GiB by %s", *sizes, reason)
    return capacity
