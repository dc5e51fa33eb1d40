"""The library without vLLM: `Engine`, and the objects that its calls take and return."""

from lmkv.engine.engine import Engine as Engine, destroy as destroy, get as get, get_or_create as get_or_create
from lmkv.engine.request import Variant as Variant
from lmkv.engine.results import EngineStats as EngineStats, Prefetch as Prefetch, Progress as Progress
