"""What a copier is told to move, and what every one of them checks and promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

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


def check_copies(copies: Sequence[ChunkCopy], num_slots: int, limits: Mapping[int, int]) -> None:
    """Before the first byte moves: raise UsageError for slots and blocks that do not exist.

    They would become copies of others. `limits`: how many blocks there are, by block table.
    """
    for copy in copies:
        if not 0 <= copy.slot < num_slots:
            raise UsageError(f"slot {copy.slot} is not within {num_slots} slots")
        for group, limit in limits.items():
            blocks = copy.runs[group].blocks
            if blocks and (min(blocks) < 0 or max(blocks) >= limit):
                raise UsageError(f"block ids {min(blocks)}..{max(blocks)} are not within {limit} blocks")


def check_fit(memory: PagedMemory, layout: KVLayout, slab: SlabMap) -> None:
    """Raise UsageError unless the memory, the layout and the slab describe the same chunk."""
    pages = [row.shape[1] for row in memory.rows]
    if pages != [layer.page_bytes for layer in layout.layers]:
        raise UsageError("the registered KV tensors do not have the page sizes of the layout")
    if layout.chunk_bytes > slab.slot_bytes:
        raise UsageError(f"chunks of {layout.chunk_bytes} bytes do not fit slots of {slab.slot_bytes}")
