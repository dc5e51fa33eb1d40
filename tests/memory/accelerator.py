"""A CUDA device, or a simulated one, for tests that are meant for a GPU and must run before there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lmkv.memory.device import Device
from tests.simulated_device import SimulatedDevice


class Accelerator:
    """The device that is tested. `simulate`: in its place a simulated one."""

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
