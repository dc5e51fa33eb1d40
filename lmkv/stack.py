"""From a `Config` to the store it describes."""

from __future__ import annotations

from lmkv.backends.memory import CPUPinnedBackend
from lmkv.config import Config
from lmkv.keys import Namespace
from lmkv.layout import KVLayout
from lmkv.policies import make_policy
from lmkv.tier import Tier
from lmkv.tiered import TieredStore

GB = 2**30


def build_store(
    config: Config, namespace: Namespace, layout: KVLayout, *, shared: bool = True
) -> TieredStore:
    """`shared`: other processes will map the CPU tier; they also populate its pages."""
    capacity = int(config.max_local_cpu_size * GB)
    host = CPUPinnedBackend(capacity, layout.slot_bytes, shared=shared, populate=not shared)
    return TieredStore(Tier(host, make_policy(config.cache_policy)))
