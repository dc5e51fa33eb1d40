"""One chunk in host memory: its slot, its state, and how many refer to it."""

from __future__ import annotations

from enum import Enum

from attrs import define, field

from lmkv.protocols import ChunkKey


class State(Enum):
    """State of an entry. An absent chunk has no entry."""

    WRITING = "writing"
    LOADING = "loading"
    READY = "ready"


@define(eq=False)
class Entry:
    """A chunk in host memory. Changed only under the store's lock.

    `refs`: leases, reservations, running I/O, promotions and pins that refer to the slot. `removed`: out of
    the index for good; the slot is freed with the last reference. `flushing`: evicted, and being copied to
    lower tiers first. `in_policy`: known to the policy. `origin`: see `KeyChain.origin`; empty for a chunk that
    is found by its key only. `prefetched`: brought by a prefetch, and not leased since.
    """

    key: ChunkKey = field(repr=bytes.hex)
    slot: int
    state: State
    parent: ChunkKey = field(default=b"", repr=bytes.hex)
    tokens: bytes = field(default=b"", repr=False)
    origin: bytes = field(default=b"", repr=False)
    refs: int = 1
    removed: bool = False
    flushing: bool = False
    in_policy: bool = False
    prefetched: bool = False

    @property
    def ready(self) -> bool:
        return self.state is State.READY and not self.removed
