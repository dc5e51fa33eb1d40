"""From a `Config` to the store it describes."""

from __future__ import annotations

from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Namespace
from lmkv.config import Config
from lmkv.policies import make_admission, make_policy
from lmkv.protocols import Tier
from lmkv.store.tiered import TieredStore


def build_store(
    config: Config, namespace: Namespace, layout: KVLayout, *, shared: bool = True, engine: str = "", engines: int = 1
) -> TieredStore:
    """The store of a configuration. Raises ConfigError when host memory cannot hold one chunk.

    `shared`: other processes map the slots, which they find by the name of the `engine`. `engines`: how many
    share this host.
    """
    # Whoever copies has the pages mapped: each rank those of its own part.
    host = CPUPinnedBackend(
        config.max_local_cpu_bytes, layout.slot_bytes, shared=shared, populate=False, engine=engine, engines=engines
    )
    return TieredStore(
        Tier(host, make_policy(config.cache_policy)),
        [_disk_tier(config, config.local_disk, namespace)] if config.local_disk else [],
        io_threads=config.disk_io_threads,
        prefetch_share=config.prefetch_share,
        # Without a CPU tier the slots are mere staging.
        retain=config.local_cpu,
        spans=layout.spans,
    )


def _disk_tier(config: Config, folder: str, namespace: Namespace) -> Tier:
    backend = LocalDiskBackend(
        folder,
        namespace.digest,
        sync=config.disk_sync,
        direct=config.disk_direct,
        min_free=config.disk_min_free_bytes,
        chunk_tokens=namespace.chunk_size,
        # Another process may begin to use the folder at any time.
        shared=True,
    )
    return Tier(
        backend,
        make_policy(config.cache_policy),
        capacity_bytes=config.max_local_disk_bytes,
        admission=make_admission(config.disk_admission),
        write=config.disk_write,
    )
