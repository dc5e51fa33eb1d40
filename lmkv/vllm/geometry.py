"""How block tables map to chunks: which pages of which blocks a copy moves."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from lmkv.memory.copier import ChunkCopy, Run

NULL_BLOCK = 0
"""vLLM's placeholder in tables with a sliding window: never read, never written."""


@frozen
class Group:
    """One block table: tokens a block and, with a sliding window, how many tokens a query looks back on."""

    block_size: int
    window: int | None = None


@frozen
class Geometry:
    """Chunks of `chunk_size` tokens over the block tables of `groups`."""

    chunk_size: int
    groups: tuple[Group, ...]

    def store_copy(self, slot: int, block_ids: Sequence[Sequence[int]], chunk: int) -> ChunkCopy | None:
        """The copy that fills `slot` with chunk number `chunk`, or None when its blocks are not all there.

        Of a table with a window only the pages that a match ending with this chunk reads must exist.
        """
        runs = []
        for group, table in zip(self.groups, block_ids, strict=True):
            per_chunk = self.chunk_size // group.block_size
            blocks = list(table[chunk * per_chunk : (chunk + 1) * per_chunk])
            first = _first_real(blocks)
            if len(blocks) < per_chunk or first > self._first_needed(group):
                return None
            runs.append(Run(first, blocks[first:]))
        return ChunkCopy(slot, tuple(runs))

    def _first_needed(self, group: Group) -> int:
        if group.window is None:
            return 0
        return max(0, self.chunk_size - (group.window - 1)) // group.block_size

    def load_copies(
        self, slots: Sequence[int], block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> list[ChunkCopy]:
        """Copies that fill the blocks of tokens [start, end), `slots` being those of the chunks from start's.

        Starts exactly at `start`: blocks before it hold valid KV that others may be reading.
        """
        if start >= end:
            return []
        size = self.chunk_size
        low = start // size * size
        spans = [
            (max(start, at), min(end, at + size))
            for at in range(low, min(end, low + len(slots) * size), size)
        ]
        columns = [
            self._load_runs(group, list(table), spans)
            for group, table in zip(self.groups, block_ids, strict=True)
        ]
        # Only as many as spans: there may be slots beyond the end.
        return [ChunkCopy(slot, runs) for slot, runs in zip(slots, zip(*columns, strict=True), strict=False)]

    def _load_runs(self, group: Group, table: list[int], spans: Sequence[tuple[int, int]]) -> list[Run]:
        """One run for each span of tokens, which lies in one chunk."""
        size, per_chunk = group.block_size, self.chunk_size // group.block_size
        runs = []
        for low, high in spans:
            first = low // size
            blocks = table[first : -(-high // size)]
            if group.window is not None:
                skipped = _first_real(blocks)
                first, blocks = first + skipped, blocks[skipped:]
            runs.append(Run(first - low // self.chunk_size * per_chunk, blocks))
        return runs

    def most_blocks(self, tokens: int) -> int:
        """At most so many blocks hold a request of `tokens` tokens and what the next step adds to it."""
        return sum(tokens // group.block_size + 2 for group in self.groups)

    def covers(self, copies: Sequence[ChunkCopy], start: int, end: int) -> bool:
        """Whether the copies reach from `start` to `end`, in chunks."""
        return len(copies) == -(-end // self.chunk_size) - start // self.chunk_size

    def blocks_between(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> list[int]:
        """The first table's blocks for tokens [start, end): what a failed load has to name."""
        size = self.groups[0].block_size
        return [block for block in block_ids[0][start // size : -(-end // size)] if block != NULL_BLOCK]


def _first_real(blocks: Sequence[int]) -> int:
    """Index of the first block that is not the null block; null blocks only ever lead."""
    for index, block in enumerate(blocks):
        if block != NULL_BLOCK:
            return index
    return len(blocks)
