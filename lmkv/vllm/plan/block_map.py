"""Maps vLLM's block tables to chunks: decides which blocks, and which pages of a chunk, each copy covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen

from lmkv.memory.copier import ChunkCopy, Run

_NOTHING = Run(0, [])
"""The run of a block table that the copied entry does not cover."""

NULL_BLOCK = 0
"""vLLM's placeholder in block tables. The placeholder replaces blocks that a sliding window has passed, and states
that no longer exist.
"""


@frozen
class Group:
    """One block table. `block_size`: number of tokens in a block. `window`: number of tokens that a query sees with a
    sliding window, or None.

    `table`: the table's index among vLLM's tables; None if lmkv caches all tables. `state`: for recurrent layers the
    number of their state entry, from 1 on, else 0. A block of such a table holds a state, not the KV of tokens. Only
    vLLM knows after which token.
    """

    block_size: int
    window: int | None = None
    table: int | None = None
    state: int = 0


@frozen(slots=False)
class BlockMap:
    """Maps chunks of `chunk_size` tokens to the block tables of `groups`.

    `scratch`: whether vLLM has further tables, with blocks that hold no prefix. vLLM fills the blocks of these tables
    again for the tokens after a hit, so a hit must end at the end of a block.
    """

    chunk_size: int
    groups: tuple[Group, ...]
    scratch: bool = False

    def select(self, tables: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return the block tables that lmkv stores and loads, out of all block tables of vLLM."""
        return [tables[group.table or 0] for group in self.groups] if self.scratch else tables

    def index(self, table: int) -> int:
        """Return the index in `groups` of the block table that has the index `table` in vLLM."""
        return next((index for index, group in enumerate(self.groups) if group.table == table), table)

    @cached_property
    def windowed(self) -> bool:
        """Whether a stored chunk may lack pages. Then a hit must end at the end of a chunk."""
        return any(group.window is not None for group in self.groups)

    @cached_property
    def states(self) -> int:
        """Number of state entries after each chunk; 0 without recurrent layers."""
        return max((group.state for group in self.groups), default=0)

    @cached_property
    def one_full_table(self) -> bool:
        """Whether vLLM can continue a request at the first block that a load has not filled.

        With several block tables, block ids are ambiguous. With a window, the blocks before the unfilled block may be
        null. vLLM reads a state before the loads of the step begin.
        """
        return len(self.groups) == 1 and not (self.windowed or self.states or self.scratch)

    def store_copy(
        self, slot: int, block_ids: Sequence[list[int]], chunk: int, tokens: int | None = None
    ) -> ChunkCopy | None:
        """Return a copy of chunk number `chunk`, or of the chunk's first `tokens` tokens, into `slot`.

        Returns None if blocks are missing. With a sliding window, a copy needs only the pages that a hit reads. A hit
        ends with the last of these tokens, or one token earlier if the hit is a whole prompt.
        """
        runs, tokens = [], tokens or self.chunk_size
        for group, table in zip(self.groups, block_ids, strict=True):
            if group.state:
                runs.append(_NOTHING)
                continue
            start, pages = chunk * self.chunk_size // group.block_size, -(-tokens // group.block_size)
            blocks = table[start : start + pages]
            first = 0 if blocks and blocks[0] != NULL_BLOCK else _first_real(blocks)
            if len(blocks) < pages or first > self._needed(group, tokens):
                return None
            runs.append(Run(first, blocks[first:]))
        return ChunkCopy(slot, tuple(runs))

    def compared_copy(self, slot: int, block_ids: Sequence[list[int]], chunk: int) -> ChunkCopy | None:
        """Return a copy of a whole chunk as `store_copy` does, but without pages that the chunk of another request
        may lack.
        """
        copy = self.store_copy(slot, block_ids, chunk)
        if copy is None or not self.windowed:
            return copy
        runs = [
            Run(max(run.first, needed), run.blocks[max(0, needed - run.first) :])
            for run, needed in zip(copy.runs, map(self._needed, self.groups), strict=True)
        ]
        return ChunkCopy(slot, tuple(runs))

    def _needed(self, group: Group, tokens: int | None = None) -> int:
        """Return the index of the first page of a chunk that a hit reads.

        The hit ends with the chunk's first `tokens` tokens, or one token earlier. After a hit of `tokens` - 1 tokens,
        the next token sees itself and `window` - 1 tokens before it.
        """
        tokens = tokens or self.chunk_size
        return 0 if group.window is None else max(0, tokens - group.window) // group.block_size

    def load_copies(
        self, slots: Sequence[int], block_ids: Sequence[list[int]], start: int, end: int
    ) -> list[ChunkCopy]:
        """Return the copies that fill the blocks of tokens [start, end).

        `slots`: the slots of the chunks, beginning with the chunk that contains token `start`. No copy writes blocks
        before `start`: their KV is valid, and other requests may be reading these blocks.
        """
        if start >= end:
            return []
        size = self.chunk_size
        low = start // size * size
        spans = [(max(start, at), min(end, at + size)) for at in range(low, min(end, low + len(slots) * size), size)]
        columns = [self._load_runs(group, table, spans) for group, table in zip(self.groups, block_ids, strict=True)]
        # There may be more slots than spans.
        return [ChunkCopy(slot, runs) for slot, runs in zip(slots, zip(*columns, strict=True), strict=False)]

    def _load_runs(self, group: Group, table: list[int], spans: Sequence[tuple[int, int]]) -> list[Run]:
        """Return one run for each of `spans`, which are ranges of tokens within one chunk."""
        if group.state:
            return [_NOTHING] * len(spans)
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

    def state_copy(self, slot: int, number: int, blocks: Mapping[int, int]) -> ChunkCopy | None:
        """Return a copy between `slot` and the states of state entry `number`, or None if a block is missing.

        `blocks`: the block of each state, by the index of its group.
        """
        wanted = [index for index, group in enumerate(self.groups) if group.state == number]
        if any(blocks.get(index, NULL_BLOCK) == NULL_BLOCK for index in wanted):
            return None
        runs = (Run(0, [blocks[index]]) if index in wanted else _NOTHING for index in range(len(self.groups)))
        return ChunkCopy(slot, tuple(runs))

    def state_blocks(self, block_ids: Sequence[list[int]], tokens: int) -> dict[int, int]:
        """Return by group index the block of the state after `tokens` tokens, which vLLM has just allocated or filled.

        `tokens`: number of tokens at the end of a load, or at the end of a step without drafts.
        """
        return {
            index: table[tokens // group.block_size - 1]
            for index, (group, table) in enumerate(zip(self.groups, block_ids, strict=True))
            if group.state and len(table) * group.block_size >= tokens
        }

    def most_blocks(self, tokens: int) -> int:
        """Return an upper bound of the blocks that a request needs until the end of its next step. `tokens`: number
        of tokens of the request.
        """
        return sum((0 if group.state else tokens // group.block_size) + 2 for group in self.groups)

    def covers(self, copies: Sequence[ChunkCopy], start: int, end: int) -> bool:
        """Return whether `copies` has a copy for every chunk with some of the tokens [start, end)."""
        return len(copies) == -(-end // self.chunk_size) - start // self.chunk_size

    def blocks_between(self, block_ids: Sequence[list[int]], start: int, end: int) -> list[int]:
        """Return the blocks to report for a failed load of tokens [start, end): the blocks of the first table
        without states, and of states.
        """
        for group, table in zip(self.groups, block_ids, strict=True):
            if not group.state:
                blocks = table[start // group.block_size : -(-end // group.block_size)]
                break
        else:
            blocks = []
        states = self.state_blocks(block_ids, end).values() if self.states else ()
        return [block for block in (*blocks, *states) if block != NULL_BLOCK]


def _first_real(blocks: Sequence[int]) -> int:
    """Return the index of the first block that is not the null block. All null blocks are at the beginning of
    `blocks`.
    """
    for index, block in enumerate(blocks):
        if block != NULL_BLOCK:
            return index
    return len(blocks)
