"""The backends, which store the chunks of tiers. The module of each backend is imported at the first use of its
name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.backends.adapters import (
        AsyncAdapter as AsyncAdapter,
        AsyncBackend as AsyncBackend,
        AsyncFileBackend as AsyncFileBackend,
        NullBackend as NullBackend,
        WrapperBackend as WrapperBackend,
    )
    from lmkv.backends.cpu import CPUPinnedBackend as CPUPinnedBackend
    from lmkv.backends.disk import LocalDiskBackend as LocalDiskBackend
    from lmkv.backends.remote.base import RemoteBackend as RemoteBackend, RemoteOptions as RemoteOptions
    from lmkv.backends.remote.infinistore import InfiniStoreBackend as InfiniStoreBackend
    from lmkv.backends.remote.mooncake import MooncakeBackend as MooncakeBackend
    from lmkv.backends.remote.objects import ObjectStoreBackend as ObjectStoreBackend
    from lmkv.backends.remote.redis import RedisBackend as RedisBackend

_HOMES = {
    "AsyncAdapter": "adapters",
    "AsyncBackend": "adapters",
    "AsyncFileBackend": "adapters",
    "CPUPinnedBackend": "cpu",
    "InfiniStoreBackend": "remote.infinistore",
    "LocalDiskBackend": "disk",
    "MooncakeBackend": "remote.mooncake",
    "NullBackend": "adapters",
    "ObjectStoreBackend": "remote.objects",
    "RedisBackend": "remote.redis",
    "RemoteBackend": "remote.base",
    "RemoteOptions": "remote.base",
    "WrapperBackend": "adapters",
}

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
