"""A stand-in for Triton's CPU backend, with which vLLM's build for CPUs runs its Model Runner V2.

vLLM chooses its V2 runner wherever Triton works, so on every GPU. Its build for CPUs has that runner too, and needs
only a Triton with a backend for CPUs, which no package has. Triton's own interpreter runs the kernels instead, on
numpy: right, and slow. There are no streams, no CUDA graphs and no races of a device here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


def is_wanted() -> bool:
    """Whether this process is to run vLLM's V2 runner: its own variable says so."""
    return os.environ.get(SWITCH) == "1"


def install() -> None:
    """Give Triton a CPU backend. To be called before vLLM or a module with kernels is imported, in every process."""
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM was imported before Triton had its CPU backend")
    # Read when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends
    from triton.runtime.driver import driver

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    driver.set_active(Driver())


class Driver:
    """The methods of a Triton driver that vLLM and the interpreter call."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the interpreter measures nothing")


def is_there() -> bool:
    """Whether the installed packages are enough."""
    return importlib.util.find_spec("triton") is not None
