"""What lmkv counts about itself."""

from __future__ import annotations

from typing import Literal

from attrs import define, frozen

BreakerState = Literal["closed", "open", "half-open"]


@define
class TierCounters:
    """Running totals of one tier; changed under the store's lock."""

    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    read_failures: int = 0
    lost: int = 0
    """Indexed chunks that turned out to be gone or corrupt."""
    writes: int = 0
    written_bytes: int = 0
    write_rejects: int = 0
    write_failures: int = 0
    evictions: int = 0
    dropped: int = 0
    """Stores refused because too many waited."""


@frozen
class TierStats:
    """A tier at one moment: chunks and bytes it holds, of how many, and its totals so far.

    `breaker`: "open" while the tier keeps failing and counts as empty, "half-open" when it is about to be
    tried again; `write_breaker`: the same for writes alone, while what is there is still served.
    """

    name: str
    chunks: int
    used_bytes: int
    capacity_bytes: int | None
    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    read_failures: int = 0
    lost: int = 0
    writes: int = 0
    written_bytes: int = 0
    write_rejects: int = 0
    write_failures: int = 0
    evictions: int = 0
    dropped: int = 0
    breaker: BreakerState = "closed"
    write_breaker: BreakerState = "closed"


@frozen
class StoreStats:
    """A `TieredStore` at one moment. `leased` counts held slots, whoever holds them, pins among them."""

    tiers: tuple[TierStats, ...]
    leased: int
    pinned: int
    writing: int
    loading: int
    pending_io: int

    @property
    def primary(self) -> TierStats:
        return self.tiers[0]
