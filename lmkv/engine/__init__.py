"""The library without vLLM: `Engine`, and the objects that its calls take and return."""

from lmkv.engine.engine import Engine as Engine
from lmkv.engine.prefetch import Prefetch as Prefetch, Progress as Progress
from lmkv.engine.stats import EngineStats as EngineStats
from lmkv.engine.variant import Variant as Variant
