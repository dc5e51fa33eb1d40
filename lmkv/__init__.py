"""lmkv: the KV cache of an LLM server beyond its GPU."""

from lmkv.config import Config
from lmkv.engine import Engine, EngineStats, Variant
from lmkv.errors import (
    BackendError,
    BackendUnavailable,
    ClosedError,
    ConfigError,
    CorruptChunkError,
    LmkvError,
    NoSpaceError,
    TransferTimeout,
    UsageError,
)
from lmkv.keys import Namespace
from lmkv.layout import KVLayout, LayerPages
from lmkv.outcomes import Presence
from lmkv.pages import PagedMemory
from lmkv.prefetch import Prefetch
from lmkv.registry import destroy, get, get_or_create
from lmkv.tier import Tier
from lmkv.tiered import TieredStore

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "ClosedError",
    "Config",
    "ConfigError",
    "CorruptChunkError",
    "Engine",
    "EngineStats",
    "KVLayout",
    "LayerPages",
    "LmkvError",
    "Namespace",
    "NoSpaceError",
    "PagedMemory",
    "Prefetch",
    "Presence",
    "Tier",
    "TieredStore",
    "TransferTimeout",
    "UsageError",
    "Variant",
    "__version__",
    "destroy",
    "get",
    "get_or_create",
]
