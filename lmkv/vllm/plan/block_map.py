"""Maps vLLM's block tables to chunks: decides which blocks, and which pages of a chunk, each copy covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import frozen

from lmkv.memory.copier import ChunkCopy, Run

_NOTHING = Run(0, [])
"""The run of pages (`Run`) for a block table that a copy does not touch."""

NULL_BLOCK = 0
"""vLLM's placeholder in block tables, for blocks that a sliding window has passed and for states that no longer
exist.
"""


@frozen
class Group:
    """One block table. `block_size`: number of tokens in a block. `window`: number of tokens that a query attends to
    with a sliding window; None for full attention.

    `table`: the table's index among vLLM's tables; None if lmkv caches all tables. `state`: for recurrent layers,
    number (from 1 on) of the state entry that holds their states; 0 for other layers. A block of recurrent layers holds
    a state, not the KV of tokens.
    """

    block_size: int
    window: int | None = None
    table: int | None = None
    state: int = 0


@frozen(slots=False)
class BlockMap:
    """Maps chunks of `chunk_size` tokens to block tables. `groups`: the tables that lmkv caches.

    `scratch`: whether vLLM has further tables, which cannot be cached. vLLM fills their blocks anew after every hit, so
    hits must end at the end of a block.
    """

    chunk_size: int
    groups: tuple[Group, ...]
    scratch: bool = False

    def select(self, tables: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return the block tables that lmkv caches. `tables`: all block tables of a request."""
        return [tables[group.table or 0] for group in self.groups] if self.scratch else tables

    def index(self, table: int) -> int:
        """Return the index in `groups` of vLLM's block table number `table`."""
        return next((index for index, group in enumerate(self.groups) if group.table == table), table)

    @cached_property
    def windowed(self) -> bool:
        """Whether some layers have a sliding window. A hit must then end at the end of a chunk, because a stored chunk
        may have only its last pages.
        """
        return any(group.window is not None for group in self.groups)

    @cached_property
    def states(self) -> int:
        """Number of state entries (slots with states of recurrent layers) after each chunk; 0 if the model has no
        recurrent layers.
        """
        return max((group.state for group in self.groups), default=0)

    @cached_property
    def one_full_table(self) -> bool:
        """Whether vLLM has only one block table, with full attention, so that failed loads are reported by block ids.

        vLLM can then continue a request at the first block that a load has not filled. With several tables, windows or
        recurrent layers vLLM cannot do so, and failed asynchronous loads are reported by request ids.
        """
        return len(self.groups) == 1 and not (self.windowed or self.states or self.scratch)

    def store_copy(
        self, slot: int, block_ids: Sequence[list[int]], chunk: int, tokens: int | None = None
    ) -> ChunkCopy | None:
        """Return a `ChunkCopy` from the blocks of chunk number `chunk` into `slot`. Return None if blocks are missing.

        With a sliding window, blocks that no later hit reads may be missing. `tokens`: number of the chunk's first
        tokens to copy; None for all.
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
        """Return a `ChunkCopy` of a whole chunk as `store_copy` does, for a comparison with a stored chunk. With a
        sliding window, leave out pages that the stored chunk may lack.
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
        """Return the index of the first page of a chunk that a hit reads: 0 without a sliding window.

        The hit ends after the chunk's first `tokens` tokens, or one token earlier. In that case, the next token attends
        to itself and to `window` - 1 tokens before it.
        """
        tokens = tokens or self.chunk_size
        return 0 if group.window is None else max(0, tokens - group.window) // group.block_size

    def load_copies(
        self, slots: Sequence[int], block_ids: Sequence[list[int]], start: int, end: int
    ) -> list[ChunkCopy]:
        """Return the copies that fill the blocks of tokens `start` to `end - 1`. Earlier blocks are not written,
        because other requests may use them.

        `slots`: the slots of the chunks, beginning with the chunk that contains token `start`.
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
        """Return the run of pages for each of `spans`: ranges of tokens, each within one chunk."""
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
        """Return a `ChunkCopy` between `slot` and the blocks of recurrent layers with state number `number` (see
        `Group.state`). Return None if a block is missing.

        `blocks`: block ids by the index of their group in `groups`, as `state_blocks` returns them.
        """
        wanted = [index for index, group in enumerate(self.groups) if group.state == number]
        if any(blocks.get(index, NULL_BLOCK) == NULL_BLOCK for index in wanted):
            return None
        runs = (Run(0, [blocks[index]]) if index in wanted else _NOTHING for index in range(len(self.groups)))
        return ChunkCopy(slot, tuple(runs))

    def state_blocks(self, block_ids: Sequence[list[int]], tokens: int) -> dict[int, int]:
        """Return the block with the state of recurrent layers after `tokens` tokens, by index of the block table in
        `groups`.

        Call this only if vLLM keeps a state after `tokens` tokens, as at the end of a load or of a step.
        """
        return {
            index: table[tokens // group.block_size - 1]
            for index, (group, table) in enumerate(zip(self.groups, block_ids, strict=True))
            if group.state and len(table) * group.block_size >= tokens
        }

    def most_blocks(self, tokens: int) -> int:
        """Return an upper limit of the number of blocks that a request of `tokens` tokens has until the end of its next
        step.
        """
        return sum((0 if group.state else tokens // group.block_size) + 2 for group in self.groups)

    def covers(self, copies: Sequence[ChunkCopy], start: int, end: int) -> bool:
        """Return whether `copies` has one copy for each chunk that contains tokens from `start` to `end - 1`."""
        return len(copies) == -(-end // self.chunk_size) - start // self.chunk_size

    def blocks_between(self, block_ids: Sequence[list[int]], start: int, end: int) -> list[int]:
        """Return the blocks to report if a load of tokens `start` to `end - 1` fails. These are the blocks of the first
        table that has KV of tokens, and the blocks of recurrent layers' states.
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
    """Return the index of the first block that is not a null block. Null blocks are only at the beginning."""
    for index, block in enumerate(blocks):
        if block != NULL_BLOCK:
            return index
    return len(blocks)
