"""A CUDA device, or a simulated one, for the tools that are meant for a GPU and must run before there is one."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lmkv.memory.copier import Event
from lmkv.memory.device import Addresses, Device, Stream, Transfers
from lmkv.memory.slab import SlabMap
from tests.simulated_device import SimulatedDevice


class Accelerator:
    """The device that is measured. `simulate`: figures mean nothing, but every line of a tool runs."""

    def __init__(self, *, simulate: bool = False) -> None:
        self.simulated = SimulatedDevice() if simulate else None
        self.torch = torch.device("cpu" if simulate else "cuda:0")
        if simulate:
            self.name = "a simulated device"
        else:
            torch.cuda.set_device(self.torch)
            self.name = torch.cuda.get_device_name()

    def open(self) -> Device:
        if self.simulated is not None:
            return self.simulated
        from lmkv.memory.cuda import CUDADevice

        return CUDADevice(self.torch)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor there."""
        copy = tensor.to(self.torch, copy=True)
        if self.simulated is not None:
            self.simulated.adopt([copy])
        return copy

    def launch(self, work: Callable[[], object]) -> None:
        """Queue computation with the device's tensors, which runs in the order of the calls, after this returns."""
        if self.simulated is not None:
            self.simulated.launch(work)
        else:
            work()


def host_memory(nbytes: int, *, populate: bool = True) -> SlabMap:
    """Memory like a slab's, which nobody has registered yet."""
    memory = SlabMap(-1, nbytes, mmap.PAGESIZE)
    if populate:
        memory.prefault(0, nbytes)
    return memory


def copy(
    device: Device, stream: Stream, sources: Sequence[int], targets: Sequence[int], nbytes: int, *, pinned: bool
) -> Event:
    """One call for copies of `nbytes` each between host and device; returns the event of their end."""
    sizes: Addresses = np.full(len(sources), nbytes, np.int64)
    arrays = np.array(sources, np.int64), np.array(targets, np.int64)
    device.transfer(Transfers(*arrays, sizes, pinned, stable=False), stream)
    return stream.mark()
