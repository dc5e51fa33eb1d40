"""Counters of a store and its tiers, and all that they have at one moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from attrs import define, frozen

from lmkv.protocols import ChunkKey
from lmkv.store.entries import Entry

BreakerState = Literal["closed", "open", "half-open"]


@define
class TierCounters:
    """Totals of one tier since it was made. Changed under the store's lock."""

    hits: int = 0
    """Chunks served."""
    reads: int = 0
    read_bytes: int = 0
    read_failures: int = 0
    lost: int = 0
    """Indexed chunks that turned out to be missing or corrupt."""
    writes: int = 0
    written_bytes: int = 0
    write_rejects: int = 0
    write_failures: int = 0
    evictions: int = 0
    dropped: int = 0
    """Writes refused because too many waited, or because the tier hangs."""
    prefetched: int = 0
    """Chunks that a prefetch brought into host memory: `prefetch_hits` of them were leased later, `prefetch_expired`
    were removed without a lease."""
    prefetch_hits: int = 0
    prefetch_expired: int = 0


@frozen(kw_only=True)
class TierStats(TierCounters):
    """A tier at one moment: its content, its capacity, and its totals so far.

    `states`: of recurrent layers, in host memory; lower tiers count them as chunks. `breaker`: "open" while the tier
    keeps failing and counts as empty, "half-open" when it is about to be tried again. `write_breaker`: the same for
    writes alone, while stored chunks are still served. `hung_reads`, `hung_writes`: calls that have run for more than
    five seconds, deletions among the writes; each keeps a thread of the tier until it ends, a read or write also
    a slot of host memory.
    """

    name: str
    chunks: int
    used_bytes: int
    capacity_bytes: int | None
    states: int = 0
    breaker: BreakerState = "closed"
    write_breaker: BreakerState = "closed"
    hung_reads: int = 0
    hung_writes: int = 0


@frozen
class StoreStats:
    """A `TieredStore` at one moment.

    `leased`: slots with any reference, pins included. `pinned`: pinned chunks. `writing` and `loading`: slots that
    are being filled. `pending_io`: jobs that wait or run.
    """

    tiers: tuple[TierStats, ...]
    leased: int
    pinned: int
    writing: int
    loading: int
    pending_io: int

    @property
    def primary(self) -> TierStats:
        return self.tiers[0]


@frozen
class Stored:
    """What a lower tier's index knows. `sizes`: bytes of each stored chunk.

    `rewriting`: those of `writing` that are stored as well. `tombstones`: never served again, `reclaiming`: being
    deleted.
    """

    sizes: Mapping[ChunkKey, int]
    reclaiming_bytes: int
    writing: Collection[ChunkKey]
    rewriting: Collection[ChunkKey]
    tombstones: Collection[ChunkKey]
    reclaiming: Collection[ChunkKey]


@frozen
class Snapshot:
    """All that a `TieredStore` has at one moment. `held`: the chunks in host memory. `tiers`: the lower ones.

    `prefetched`: the key of each slot that prefetches refer to, of a removed chunk, too. `wished`: slots of pins and
    prefetches, by the type of the keys. `promotions`: those that are not released.
    """

    held: Mapping[ChunkKey, Entry]
    tiers: Sequence[Stored]
    pinned: Collection[ChunkKey]
    wished: Mapping[type, int]
    prefetched: Collection[ChunkKey]
    promotions: int
