"""lmkv keeps the KV cache of an LLM server outside the server's GPU.

Each public name is imported from its module when a program first uses the name. So `lmkv.policies` and `lmkv.testing`
work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.chunks.layout import KVLayout as KVLayout, LayerPages as LayerPages
    from lmkv.chunks.namespace import Namespace as Namespace
    from lmkv.config import Config as Config
    from lmkv.engine import (
        Engine as Engine,
        EngineStats as EngineStats,
        Prefetch as Prefetch,
        Variant as Variant,
        destroy as destroy,
        get as get,
        get_or_create as get_or_create,
    )
    from lmkv.errors import (
        BackendError as BackendError,
        BackendUnavailable as BackendUnavailable,
        ClosedError as ClosedError,
        ConfigError as ConfigError,
        CorruptChunkError as CorruptChunkError,
        LmkvError as LmkvError,
        NoSpaceError as NoSpaceError,
        UsageError as UsageError,
    )
    from lmkv.memory.paged import PagedMemory as PagedMemory
    from lmkv.protocols import Presence as Presence, Tier as Tier
    from lmkv.store.catalog import Catalog as Catalog
    from lmkv.store.guards import StoreObserver as StoreObserver
    from lmkv.store.health import StoreStats as StoreStats, TierStats as TierStats
    from lmkv.store.leases import Lease as Lease, Reservation as Reservation
    from lmkv.store.promotion import Promotion as Promotion, SharedLookup as SharedLookup
    from lmkv.store.tiered import TieredStore as TieredStore

__version__ = "0.1.0"

_HOMES = {
    "engine": ("Engine", "EngineStats", "Prefetch", "Variant", "destroy", "get", "get_or_create"),
    "config": ("Config",),
    "chunks.layout": ("KVLayout", "LayerPages"),
    "chunks.namespace": ("Namespace",),
    "errors": (
        *("BackendError", "BackendUnavailable", "ClosedError", "ConfigError", "CorruptChunkError"),
        *("LmkvError", "NoSpaceError", "UsageError"),
    ),
    "memory.paged": ("PagedMemory",),
    "protocols": ("Presence", "Tier"),
    "store.catalog": ("Catalog",),
    "store.guards": ("StoreObserver",),
    "store.health": ("StoreStats", "TierStats"),
    "store.leases": ("Lease", "Reservation"),
    "store.promotion": ("Promotion", "SharedLookup"),
    "store.tiered": ("TieredStore",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
