"""What a copier is told to move, and what every one of them checks and promises."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from attrs import frozen

from lmkv.errors import UsageError

if TYPE_CHECKING:
    from lmkv.chunks.layout import KVLayout
    from lmkv.memory.paged import PagedMemory
    from lmkv.memory.slab import SlabMap

_P = TypeVar("_P")


@frozen
class Run:
    """Consecutive pages of a chunk, from `first`, and the blocks that hold them."""

    first: int
    blocks: list[int]


@frozen
class ChunkCopy:
    """One chunk's share of a copy order: a slot, and for each block table the run of pages to move."""

    slot: int
    runs: tuple[Run, ...]


class Event(Protocol):
    """When a copy has been done. `query` never blocks."""

    def query(self) -> bool: ...

    def wait(self) -> None: ...


class Done:
    """The event of a copy that was finished when its call returned."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE = Done()


class Copier(Protocol):
    """Copies between one rank's paged memory and its segment of the slots. Not thread-safe.

    All calls come from the thread that launches the computation, and are ordered with it: stores come after
    what was launched before, loads before what is launched next.
    """

    @property
    def num_layers(self) -> int: ...

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        """Blocks into slots. The blocks may be used again as soon as the call returns."""
        ...

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False) -> Event:
        """Slots into blocks. With `overlap` beside the computation, which reads them after the event only."""
        ...

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """`store`, a layer with each `next`, which comes once the layer's computation was launched."""
        ...

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """`load`, a layer with each `next`; following layers may be on their way already."""
        ...

    def close(self) -> None: ...


def by_layer(planes: Sequence[_P], num_layers: int, layer_of: Callable[[_P], int]) -> list[list[_P]]:
    """The planes due with each layer: of several fused layers, the first to load and the last to store."""
    due: list[list[_P]] = [[] for _ in range(num_layers)]
    for plane in planes:
        due[layer_of(plane)].append(plane)
    return due


def block_ids(blocks: object) -> list[int]:
    """The ids in a sequence, a numpy array or a torch tensor of integers.

    Raises UsageError for anything else, such as floats and booleans, which an index would silently convert.
    """
    ids = blocks.tolist() if hasattr(blocks, "tolist") else blocks
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
        raise UsageError(f"block ids must be a sequence of integers, not {reprlib.repr(blocks)}")
    return list(ids) if {int}.issuperset(map(type, ids)) else list(map(_block_id, ids))


def _block_id(value: Any) -> int:
    """`value`, or the only value of a numpy scalar or a torch tensor without dimensions, if it is an int."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    raise UsageError(f"a block id must be an integer, not {reprlib.repr(value)}")


def check_copies(copies: Sequence[ChunkCopy], num_slots: int, num_blocks: Mapping[int, int]) -> None:
    """Before the first byte moves: raise UsageError for slots and blocks that do not exist.

    They would become copies of others. `num_blocks`: how many there are, by block table.
    """
    for copy in copies:
        if not 0 <= copy.slot < num_slots:
            raise UsageError(f"slot {copy.slot} is not within {num_slots} slots")
    for group, limit in num_blocks.items():
        ids = block_ids(list(chain.from_iterable(copy.runs[group].blocks for copy in copies)))
        if ids and (min(ids) < 0 or max(ids) >= limit):
            raise UsageError(f"block ids {min(ids)}..{max(ids)} are not within {limit} blocks")


def check_fit(memory: PagedMemory, layout: KVLayout, slab: SlabMap) -> None:
    """Raise UsageError unless the memory, the layout and the slab describe the same chunk."""
    pages = [row.shape[1] for row in memory.rows]
    if pages != [layer.page_bytes for layer in layout.layers]:
        raise UsageError("the registered KV tensors do not have the page sizes of the layout")
    if layout.chunk_bytes > slab.slot_bytes:
        raise UsageError(f"chunks of {layout.chunk_bytes} bytes do not fit slots of {slab.slot_bytes}")
