"""Where a hit may end: with recurrent layers, only where all states and all chunks before them are stored."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from lmkv.chunks.hashing import state_keys
from lmkv.protocols import ChunkKey
from lmkv.store.tiered import TieredStore


@frozen
class Boundaries:
    """Finds the ends of hits in the store's indexes. `states`: entries of each boundary; if 0, any chunk may end a hit.

    A chain is the keys of a prompt's chunks. `first`: boundaries after this many chunks or fewer do not count.
    Thread-safe.
    """

    _store: TieredStore
    states: int

    def entries(self, chain: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys of all that a hit of these chunks needs: the chunks, and the states behind the last one."""
        return [*chain, *(state_keys(chain[-1], self.states) if chain and self.states else ())]

    def chunks(self, entries: int) -> int:
        """How many chunks are among the first of `entries`."""
        return max(0, entries - self.states)

    def last(self, chain: Sequence[ChunkKey], first: int = 0, *, ready: bool = False) -> int:
        """Most leading chunks behind which all states are stored, in host memory if `ready`; 0 if none are."""
        for end in range(len(chain), first, -1):
            counts = self._store.count_prefix(state_keys(chain[end - 1], self.states))
            if counts[0 if ready else 1] == self.states:
                return end
        return 0

    def found(self, chain: Sequence[ChunkKey], first: int = 0) -> list[ChunkKey]:
        """The entries of the longest hit that some tiers have; of leading chunks where nothing is recurrent."""
        stored = chain[: self._store.count_prefix(chain)[1]]
        return self.entries(stored[: self.last(stored, first)] if self.states else stored)

    def ready(self, chain: Sequence[ChunkKey], first: int = 0) -> list[ChunkKey]:
        """The entries of the longest hit that host memory has."""
        here = chain[: self._store.count_prefix(chain)[0]]
        return self.entries(here[: self.last(here, first, ready=True)] if self.states else here)

    def wanted(self, chain: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The entries to promote for a prompt: its longest hit, or all its chunks if nothing is recurrent."""
        return self.found(chain) if self.states else list(chain)
