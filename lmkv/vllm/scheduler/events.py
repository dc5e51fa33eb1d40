"""Makes KV events for routers: which of vLLM's blocks have entered or left a tier of the store.

Only chunks that this engine has stored or found have events, because the block hashes of other chunks are unknown. The
store's threads record changes, and the scheduling thread makes events from these changes.

Several tiers may have the same place (medium and locality), and several chunks may have the same block, for example
with different tags. A block leaves a place when no tier there has a chunk with this block.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from attrs import define, evolve, field, frozen

from lmkv.chunks.hashing import StateKey
from lmkv.protocols import ChunkKey
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.plan.request import Request, VLLMRequest

logger = logging.getLogger("lmkv.vllm")

BlockHash = int | bytes
"""The hash of a block in vLLM's own events."""

_BATCH_CHANGES = 1024
"""Largest number of changes that one step turns into events. Later steps process the other changes."""


class Place(NamedTuple):
    """The place of a tier in vLLM's KV events: its storage medium, and whether it is on this machine."""

    medium: str
    locality: str


_PLACES = {"cpu": Place("CPU", "LOCAL"), "shared_memory": Place("CPU", "LOCAL"), "disk": Place("STORAGE", "LOCAL")}


def place_of(tier: str) -> Place:
    return _PLACES.get(tier, Place("STORAGE", "REMOTE"))


@frozen(kw_only=True)
class Blocks:
    """Consecutive blocks of one KV cache group, with the fields of vLLM's events. `tokens`: the token ids in all
    blocks.
    """

    group: int
    block_size: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: array[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] = ()

    def part(self, first: int, end: int) -> Blocks:
        """Return the blocks with index `first` to `end - 1`."""
        hashes, parent = self.hashes[first:end], self.hashes[first - 1] if first else self.parent
        tokens, extra_keys = self.tokens[first * self.block_size : end * self.block_size], self.extra_keys[first:end]
        return evolve(self, hashes=hashes, parent=parent, tokens=tokens, extra_keys=extra_keys)


@frozen
class BlocksStored:
    place: Place
    blocks: Blocks


@frozen
class BlocksRemoved:
    place: Place
    group: int
    hashes: Sequence[BlockHash]


Event = BlocksStored | BlocksRemoved
Describe = Callable[[VLLMRequest, int, int, int], Blocks | None]
"""`describe(request, group, start, end)`: a function that returns the blocks of tokens `start` to `end - 1`, which fill
whole blocks. Returns None if the hashes are not known.
"""


@define(eq=False)
class _Chunk:
    """A chunk or state, its blocks in each KV cache group without a window, and the tiers that have it."""

    blocks: list[Blocks]
    tiers: set[str] = field(factory=set)


class EventRecorder:
    """Observes the store's tiers, and records an event when a tier gains or loses a chunk. After an error, the recorder
    publishes nothing more.

    The store calls `stored` and `removed` on any thread; only the scheduling thread calls the other methods. When no
    tier has a chunk any more, the recorder forgets the chunk.
    """

    def __init__(self, store: TieredStore, block_map: BlockMap, describe: Describe) -> None:
        self._store = store
        self._chunk_size = block_map.chunk_size
        self._block_sizes = {
            number: group.block_size
            for number, group in enumerate(block_map.groups)
            if group.window is None and not group.state
        }
        self._state_groups = [(number, group) for number, group in enumerate(block_map.groups) if group.state]
        self._describe = describe
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._changes: deque[tuple[str, ChunkKey, bool]] = deque()
        self._counts: dict[tuple[Place, int], dict[BlockHash, int]] = {}
        """For each place and group, how many chunks contain each published block. A chunk counts once for each tier
        that has it.
        """
        self._events: list[Event] = []
        self._failed = False
        store.catalog.add_observer(self)

    def __repr__(self) -> str:
        return f"<EventRecorder: {len(self._chunks)} chunks known, {len(self._changes)} changes to publish>"

    # -- the store's threads, under its lock --------------------------------------------------------------

    def stored(self, tier: str, key: ChunkKey) -> None:
        if key in self._chunks:
            self._changes.append((tier, key, True))

    def removed(self, tier: str, key: ChunkKey) -> None:
        if key in self._chunks:
            self._changes.append((tier, key, False))

    # -- the scheduling thread ----------------------------------------------------------------------------

    def track(self, request: Request, keys: Sequence[ChunkKey]) -> None:
        """Publish from now on which tiers have these chunks and states. Those that are tracked already are skipped.

        `keys`: keys of a request's first chunks, followed by keys of states, if any.
        """
        try:
            self._track({key: _Chunk(blocks) for key, blocks in self._unknown(request, keys) if blocks})
        except Exception:
            logger.exception("lmkv: a request's blocks could not be described; lmkv publishes no KV events from now on")
            self.reset()
            self._failed = True

    def _unknown(self, request: Request, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, list[Blocks]]]:
        own = request.chain.keys
        for index, key in enumerate(() if self._failed else keys):
            if key in self._chunks:
                continue
            start = index * self._chunk_size
            if index < len(own) and own[index] == key:
                yield key, self._blocks(request.vllm, start, self._chunk_size)
            elif request.tail is not None and key == request.tail:
                yield key, self._blocks(request.vllm, start, request.tail.tokens)
            elif isinstance(key, StateKey):
                chunks = index - key.number + 1
                yield key, self._state_blocks(request.vllm, chunks * self._chunk_size, key.number)

    def _blocks(self, request: VLLMRequest, start: int, tokens: int) -> list[Blocks]:
        whole = [(group, start + tokens // size * size) for group, size in self._block_sizes.items() if tokens >= size]
        described = (self._describe(request, group, start, end) for group, end in whole)
        return [blocks for blocks in described if blocks is not None]

    def _state_blocks(self, request: VLLMRequest, end: int, number: int) -> list[Blocks]:
        """Return the blocks with the states after `end` tokens of the layers in state entry `number`."""
        groups = [(index, group.block_size) for index, group in self._state_groups if group.state == number]
        described = (self._describe(request, index, end - size, end) for index, size in groups)
        return [blocks for blocks in described if blocks is not None]

    def _track(self, chunks: dict[ChunkKey, _Chunk]) -> None:
        if not chunks:
            return
        # Before the store answers, so that later changes are noted.
        self._chunks |= chunks
        for key, found in zip(chunks, self._store.catalog.replay_to(self, list(chunks)), strict=True):
            if not found:
                del self._chunks[key]

    def take(self) -> list[Event]:
        """Return the events of recorded changes: at most 1,024 changes per call. Later calls return the events of the
        other changes.
        """
        events, self._events = self._events, []
        touched = set()
        for _ in range(min(len(self._changes), _BATCH_CHANGES)):
            tier, key, is_stored = self._changes.popleft()
            chunk = self._chunks.get(key)
            if chunk is not None and is_stored != (tier in chunk.tiers):
                chunk.tiers ^= {tier}
                touched.add(key)
                make = self._stored if is_stored else self._removed
                for blocks in chunk.blocks:
                    events += make(place_of(tier), blocks)
        for key in touched:
            if not self._chunks[key].tiers:
                del self._chunks[key]
        return events

    def _stored(self, place: Place, blocks: Blocks) -> Iterator[Event]:
        """Yield an event for each run of consecutive blocks that are new in this place."""
        counts = self._counts.setdefault((place, blocks.group), {})
        for block in blocks.hashes:
            counts[block] = counts.get(block, 0) + 1
        for is_new, run in groupby(range(len(blocks.hashes)), lambda index: counts[blocks.hashes[index]] == 1):
            if is_new:
                first, *rest = run
                yield BlocksStored(place, blocks.part(first, first + len(rest) + 1))

    def _removed(self, place: Place, blocks: Blocks) -> Iterator[Event]:
        counts = self._counts[place, blocks.group]
        gone = []
        for block in blocks.hashes:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                gone.append(block)
        if gone:
            yield BlocksRemoved(place, blocks.group, gone)

    def republish(self) -> None:
        """Publish all known chunks again, with the tiers that have them now."""
        again = [(tier, key, True) for key, chunk in self._chunks.items() for tier in sorted(chunk.tiers)]
        for chunk in self._chunks.values():
            chunk.tiers.clear()
        self._events.clear()
        self._counts.clear()
        # Before the waiting changes.
        self._changes.extendleft(reversed(again))

    def reset(self) -> None:
        """Publish that all known blocks are removed, and forget all chunks."""
        self._chunks.clear()
        self._changes.clear()
        self._events += [
            BlocksRemoved(place, group, list(counts)) for (place, group), counts in self._counts.items() if counts
        ]
        self._counts.clear()
