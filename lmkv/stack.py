"""From a `Config` to the store it describes."""

from __future__ import annotations

from urllib.parse import unquote, urlparse

from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.memory import CPUPinnedBackend
from lmkv.config import Config
from lmkv.keys import Namespace
from lmkv.layout import KVLayout
from lmkv.policies import AdmitNone, make_admission, make_policy
from lmkv.tier import Tier
from lmkv.tiered import TieredStore


def build_store(config: Config, namespace: Namespace, layout: KVLayout, *, shared: bool = True) -> TieredStore:
    """`shared`: other processes will map the CPU tier; they also populate its pages."""
    capacity = config.max_local_cpu_bytes
    host = CPUPinnedBackend(capacity, layout.slot_bytes, shared=shared, populate=not shared)
    # Without a CPU tier its slots are only what everything passes through.
    primary = Tier(host, make_policy(config.cache_policy), admission=None if config.local_cpu else AdmitNone())
    return TieredStore(
        primary,
        [_disk_tier(config, namespace)] if config.local_disk else [],
        io_threads=config.disk_io_threads,
        prefetch_share=config.prefetch_share,
    )


def _disk_tier(config: Config, namespace: Namespace) -> Tier:
    backend = LocalDiskBackend(
        disk_path(config.local_disk or ""),
        namespace.digest,
        sync=config.disk_sync,
        direct=config.disk_direct,
        min_free=config.disk_min_free_bytes,
        chunk_tokens=namespace.chunk_size,
    )
    return Tier(
        backend,
        make_policy(config.cache_policy),
        capacity_bytes=config.max_local_disk_bytes,
        admission=make_admission(config.disk_admission),
        write=config.disk_write,
    )


def disk_path(location: str) -> str:
    """`file:///path` or a plain path, as a path."""
    parsed = urlparse(location)
    return unquote(parsed.path) if parsed.scheme == "file" else location
