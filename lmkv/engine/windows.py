"""Windows of a prompt: as many of its next chunks as are, or can be, in host memory at once."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.engine.validation import seconds
from lmkv.protocols import ChunkKey
from lmkv.store.leases import Lease
from lmkv.store.tiered import TieredStore

_MARGIN = 60.0
"""Seconds from the end of a wait to the lease that follows it, at most."""


def look_up_shared(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> None:
    """Ask shared tiers for chunks that the indexes do not know, for at most `timeout` seconds."""
    limit, lookup = seconds(timeout, "timeout"), store.look_up_shared(keys)
    if lookup is not None:
        lookup.wait(limit)


def lease_window(store: TieredStore, keys: Sequence[ChunkKey], timeout: float) -> Lease:
    """A lease on the leading chunks in host memory; if the first is not there, on the chunks that can be promoted."""
    lease = store.lease(keys)
    if lease:
        return lease
    limit = seconds(timeout, "timeout")
    # At most half of host memory: the rest serves everybody else meanwhile. It ends by itself should an exception come
    # before it is known here.
    promotion = store.promote(keys, limit=max(1, store.slab.num_slots // 2), ttl=max(limit, 0.0) + _MARGIN)
    try:
        promotion.wait(limit)
        return store.lease(promotion.keys)
    finally:
        promotion.release()
