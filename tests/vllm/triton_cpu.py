"""A stand-in for Triton's CPU backend, with which vLLM's build for CPUs runs its Model Runner V2.

vLLM chooses its V2 runner wherever Triton works, so on every GPU. Its build for CPUs has that runner too, and needs
only a Triton with a backend for CPUs, which no package has. Triton's own interpreter runs the kernels instead, on
numpy: right, and slow. There are no streams, no CUDA graphs and no races of a device here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
HERE = Path(__file__).parent


def is_wanted() -> bool:
    """Whether this process is to run vLLM's V2 runner: its own variable says so."""
    return os.environ.get(SWITCH) == "1"


def child_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment whose processes run the V2 runner, too."""
    paths = [str(HERE / "v2_processes"), str(HERE.parents[1]), given.get("PYTHONPATH", "")]
    return {SWITCH: "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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
    _make_masks_bool()
    _save_time()


def _make_masks_bool() -> None:
    """The interpreter keeps the `&` of a scalar and a vector of booleans as integers, and then refuses it as a mask."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask: TensorHandle) -> TensorHandle:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, pointers, as_bool(mask), *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, value, as_bool(mask), *rest)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = masked_load, masked_store


def _save_time() -> None:
    """Save half of the time: the interpreter patches Triton's language at each launch, and looks for overflows."""
    from triton.runtime import interpreter

    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: set[frozenset[int]] = set()

    def patch_once(function: Any) -> Any:
        seen = frozenset(map(id, function.__globals__.values())) & language
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return nothing_to_restore

    language = {id(interpreter.tl), id(interpreter.tl.core)}
    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
