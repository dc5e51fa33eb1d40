"""Chooses the copier for the device that paged memory is on."""

from __future__ import annotations

import torch

from lmkv.chunks.layout import KVLayout
from lmkv.errors import UsageError
from lmkv.memory.copier import Copier
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.device import STAGING_BYTES, Staging
from lmkv.memory.device_copier import DeviceCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap


def check_device(kind: str) -> None:
    """Raise UsageError unless there is a copier for such devices. ROCm's are called "cuda", too."""
    if kind not in ("cpu", "cuda") or (kind == "cuda" and torch.version.hip):
        what = "an AMD GPU" if kind == "cuda" else f"a device of type {kind!r}"
        raise UsageError(f"lmkv copies to and from CPUs and NVIDIA GPUs; this is {what}")


def make_staging(memory: PagedMemory, nbytes: int = STAGING_BYTES) -> Staging | None:
    """The streams and memory that a copier needs on its device, which needs no slab yet; None for a CPU.

    Raises UsageError for a device without copier, and the exceptions of torch for the device.
    """
    check_device(memory.device.type)
    if memory.device.type == "cpu":
        return None
    from lmkv.memory.cuda import cuda_staging

    return cuda_staging(memory, nbytes)


def make_copier(
    memory: PagedMemory,
    layout: KVLayout,
    slab: SlabMap,
    rank: int = 0,
    staging: Staging | None = None,
    share: tuple[int, int] = (0, 1),
) -> Copier:
    """A copier for the memory's device. Populates the rank's part of the slab, in the background.

    `share`: (index, count) of this rank among those that have that part. Raises UsageError when memory, layout and
    slab do not fit, and the exceptions of torch for the device.
    """
    staging = staging or make_staging(memory)
    if staging is not None:
        return DeviceCopier(staging, memory, layout, slab, rank, share)
    copier = CPUCopier(memory, layout, slab, rank)
    slab.populate(layout.segment(rank), share)
    return copier
