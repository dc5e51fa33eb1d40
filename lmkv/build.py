"""Builds the `TieredStore` that a `Config` (lmkv's settings) describes."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from attrs import evolve

from lmkv import plugins
from lmkv.backends.cpu import CPUPinnedBackend
from lmkv.backends.disk import LocalDiskBackend
from lmkv.backends.disk.folder import describe
from lmkv.backends.remote.base import RemoteOptions
from lmkv.chunks.layout import KVLayout
from lmkv.chunks.namespace import Authenticator, Namespace
from lmkv.config import Config
from lmkv.config.options import DEFAULT
from lmkv.config.urls import RemoteURL
from lmkv.memory.machine import check_in_memory, clamp_shared_memory
from lmkv.policies import Quotas, make_admission, make_policy
from lmkv.protocols import Backend, Policy, Tier
from lmkv.store.guards import close_all
from lmkv.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_THREADS_A_CORE = {"shared_memory": 2, "disk": 4}
"""Largest useful number of I/O threads per core, by tier. More threads were slower. Other tiers have no limit."""


def build_store(
    config: Config, namespace: Namespace, layout: KVLayout, *, shared: bool = True, engine: str = "", engines: int = 1
) -> TieredStore:
    """Return the store of a configuration. Raises ConfigError if host memory cannot hold one chunk.

    `shared`: whether other processes map the slots of host memory, under the name `engine`. `engines`: number of
    engines that start on this host.
    """
    for level, remark in config.remarks:
        logger.log(level, "lmkv: %s", remark)
    # The client of a remote store may be a separate process, which maps the slots.
    shared = shared or bool(config.remotes)
    # Each rank maps the pages of its part before it copies.
    with ExitStack() as opened:
        host = CPUPinnedBackend(
            config.max_local_cpu_bytes, layout.slot_bytes, shared=shared, populate=False, engine=engine, engines=engines
        )
        opened.callback(host.close)
        primary = Tier(host, _policy(config))
        lower = list(_lower_tiers(config, namespace, config.authentication_bytes, opened))
        store = TieredStore(
            primary,
            lower,
            io_threads=io_threads(config, [tier.name for tier in lower]),
            prefetch_share=config.prefetch_share,
            pin_share=config.pin_share,
            # With `local_cpu: false` chunks only pass through the slots.
            retain=config.local_cpu,
            spans=layout.spans,
            sizes=layout.sizes,
        )
        # It owns them now. After an error before, nothing stays open: memory, above all, is promised to its owner.
        opened.pop_all()
    return store


def io_threads(config: Config, tiers: Sequence[str]) -> int:
    """Return how many I/O threads each tier gets: the setting, or by default the largest number that is useful for any
    of `tiers`.
    """
    if config.source("disk_io_threads") != DEFAULT:
        return config.disk_io_threads
    useful = max((_THREADS_A_CORE.get(name, math.inf) for name in tiers), default=math.inf)
    return int(min(config.disk_io_threads, useful * len(os.sched_getaffinity(0))))


def _policy(config: Config) -> Policy:
    if not config.quotas:
        return make_policy(config.cache_policy)
    shares = {share.tenant: share.percent / 100 for share in config.quotas}
    return Quotas(lambda: make_policy(config.cache_policy), shares)


def stored_namespace(namespace: Namespace, key: bytes | None) -> Namespace:
    """Return the namespace of lower tiers. With an authentication key, the namespace also depends on this key."""
    if key is None:
        return namespace
    return evolve(namespace, extra={**dict(namespace.extra), "authentication": Authenticator(key).identifier})


def _lower_tiers(config: Config, namespace: Namespace, key: bytes | None, opened: ExitStack) -> Iterator[Tier]:
    """Yield the lower tiers of a configuration, fastest first. `opened`: an exit stack that closes their backends."""
    namespace = stored_namespace(namespace, key)

    def backend_in(folder: str, **options: Any) -> LocalDiskBackend:
        # Shared, because another process may begin to use the folder at any time.
        found = LocalDiskBackend(
            folder, namespace.digest, shared=True, chunk_tokens=namespace.chunk_size, authentication_key=key, **options
        )
        opened.callback(found.close)
        describe(folder, namespace)
        return found

    if folder := config.shared_memory:
        # Files in memory need neither O_DIRECT nor syncs.
        memory = backend_in(folder, direct="off", name="shared_memory")
        check_in_memory(folder)
        capacity = clamp_shared_memory(folder, config.max_shared_memory_bytes, used=memory.reserve_bytes(0))
        yield Tier(memory, _policy(config), capacity_bytes=capacity)
    if folder := config.local_disk:
        options = {"sync": config.disk_sync, "direct": config.disk_direct, "min_free": config.disk_min_free_bytes}
        yield Tier(
            backend_in(folder, **options),
            _policy(config),
            capacity_bytes=config.max_local_disk_bytes,
            admission=make_admission(config.disk_admission),
            # Where chunks do not stay in host memory, none is evicted from it.
            write=config.disk_write if config.local_cpu else "through",
        )
    names: Counter[str] = Counter()
    for url in config.remotes:
        names[url.store_kind] += 1
        number = names[url.store_kind]
        name = url.store_kind if number == 1 else f"{url.store_kind}-{number}"
        backend = open_remote(config, url, namespace.digest, key, name=name, chunk_tokens=namespace.chunk_size)
        opened.callback(close_all, [(name, backend)])
        # No capacity: the remote store bounds and evicts by itself.
        yield Tier(backend, _policy(config))


def open_remote(
    config: Config, url: RemoteURL, namespace: bytes, key: bytes | None, *, name: str, chunk_tokens: int
) -> Backend:
    """Open the backend of a remote store. Raises ConfigError for invalid settings.

    `namespace`: the digest of the namespace. `key`: the authentication key. `name`: the name of the tier.
    `chunk_tokens`: number of tokens in a chunk.
    """
    options = RemoteOptions(
        username=config.remote_username,
        password=config.password,
        renew_password=config.renew_password,
        prefix=config.remote_prefix,
        ttl=config.remote_ttl or None,
        timeout=config.remote_timeout,
        chunk_tokens=chunk_tokens,
        name=name,
        authentication_key=key,
    )
    backend: Backend = plugins.make(url.place, f"remote_url {url}", Backend, url.text, namespace, options)
    return backend
