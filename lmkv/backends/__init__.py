"""Where chunks are kept. Each backend is imported when it is first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.backends.aio import AsyncAdapter, AsyncBackend
    from lmkv.backends.disk import LocalDiskBackend
    from lmkv.backends.memory import CPUPinnedBackend
    from lmkv.backends.null import NullBackend
    from lmkv.backends.wrapper import WrapperBackend

_HOMES = {
    "AsyncAdapter": "aio",
    "AsyncBackend": "aio",
    "CPUPinnedBackend": "memory",
    "LocalDiskBackend": "disk",
    "NullBackend": "null",
    "WrapperBackend": "wrapper",
}

__all__ = [
    "AsyncAdapter",
    "AsyncBackend",
    "CPUPinnedBackend",
    "LocalDiskBackend",
    "NullBackend",
    "WrapperBackend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
