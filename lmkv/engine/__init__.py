"""The library without vLLM: `Engine`, and the objects that its calls take and return."""

from lmkv.engine.engine import Engine, destroy, get, get_or_create
from lmkv.engine.request import EngineStats, Prefetch, Progress, Variant

__all__ = ["Engine", "EngineStats", "Prefetch", "Progress", "Variant", "destroy", "get", "get_or_create"]
