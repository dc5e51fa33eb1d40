"""Chooses the copier for the device that paged memory is on."""

from __future__ import annotations

from lmkv.chunks.layout import KVLayout
from lmkv.memory.copier import Copier
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap


def make_copier(memory: PagedMemory, layout: KVLayout, slab: SlabMap, rank: int = 0) -> Copier:
    """Raises UsageError when memory, layout and slab do not fit, and what torch raises for the device."""
    if memory.device.type == "cpu":
        return CPUCopier(memory, layout, slab, rank)
    from lmkv.memory.cuda import make_cuda_copier

    return make_cuda_copier(memory, layout, slab, rank)
