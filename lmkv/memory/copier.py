"""`Copier`: the interface of copiers, the descriptions of copies, and the checks that all copiers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from lmkv.errors import UsageError, short_repr

if TYPE_CHECKING:
    from lmkv.chunks.layout import KVLayout
    from lmkv.memory.paged import PagedMemory
    from lmkv.memory.slab import SlabMap

_P = TypeVar("_P", bound="HasLayers")


# Named tuples: a plan makes hundreds, in half the time of attrs' frozen classes.
class Run(NamedTuple):
    """Consecutive pages of a chunk, from index `first` on, and the block of each page."""

    first: int
    blocks: list[int]


class ChunkCopy(NamedTuple):
    """One chunk to copy: the slot of the chunk, and for each block table the run of pages to copy."""

    slot: int
    runs: tuple[Run, ...]


class Event(Protocol):
    """An event that is reached when a copy has ended. `query` returns whether the event is reached. `wait` blocks until
    the event is reached.
    """

    def query(self) -> bool: ...

    def wait(self) -> None: ...


class Done:
    """The event of a copy that has already ended when the copier's call returns."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = Done()


class Copier(Protocol):
    """Copies between one rank's paged memory and the rank's part of each slot. Not thread-safe.

    All calls come from the thread that launches the model's computation. A call of `store` copies the results of all
    computation launched before the call. Computation launched after `load(overlap=False)` reads the loaded blocks.
    After `load(overlap=True)`, the caller must first wait for the event that `load` returns.
    """

    @property
    def num_layers(self) -> int: ...

    def store(self, copies: Sequence[ChunkCopy]) -> Event:
        """Copy blocks into slots. The blocks may be overwritten as soon as the call returns."""
        ...

    def load(self, copies: Sequence[ChunkCopy], *, overlap: bool = False, after: Event | None = None) -> Event:
        """Copy slots into blocks. With `overlap`, computation does not wait for the copy, and must not read the blocks
        before the returned event is reached.

        The copy begins after all computation launched so far. With `after`, the copy begins after this earlier event
        instead. The caller must know that no computation launched later than this event uses the blocks.
        """
        ...

    def store_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """Store one layer at each `next` of the returned iterator. Call `next` after launching the layer's
        computation.
        """
        ...

    def load_layers(self, copies: Sequence[ChunkCopy]) -> Iterator[Event]:
        """Load one layer at each `next` of the returned iterator. Copies of later layers may already have begun."""
        ...

    def close(self, *, process_ends: bool = False) -> None:
        """Wait for all copies, and free the copier's resources. With `process_ends`, leave the pinned memory to the
        kernel, which frees it faster when the process ends.
        """
        ...


class HasLayers(Protocol):
    """A plane: an array with one page for each block. `layers`: indexes of the layers whose KV a page contains; several
    if layers are fused.
    """

    @property
    def layers(self) -> range: ...


def by_layer(planes: Sequence[_P], num_layers: int) -> tuple[list[list[_P]], list[list[_P]]]:
    """Group planes by layer. Return two lists with an element for each layer: the planes to load with this layer, and
    the planes to store with this layer.

    A plane of several layers is loaded with its first layer, and stored with its last layer.
    """
    to_load, to_store = (
        [[plane for plane in planes if plane.layers[at] == layer] for layer in range(num_layers)] for at in (0, -1)
    )
    return to_load, to_store


def block_ids(blocks: object) -> list[int]:
    """Return the ids in a sequence, a numpy array or a torch tensor of integers, as a list.

    Raises UsageError for any other type. For example, numpy would turn floats and booleans into wrong ids.
    """
    try:
        ids = blocks.tolist() if hasattr(blocks, "tolist") else blocks
    except (RuntimeError, TypeError):
        # A tensor without memory or layout, or a class.
        ids = None
    if not isinstance(ids, (list, Sequence)) or isinstance(ids, (str, bytes, bytearray)):
        raise UsageError(f"block ids must be a sequence of integers, not {short_repr(blocks)}")
    return list(ids) if {int}.issuperset(map(type, ids)) else list(map(_block_id, ids))


def _block_id(value: Any) -> int:
    """Return a block's id as an int. `value`: an int, a numpy scalar or a torch tensor without dimensions."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    raise UsageError(f"a block id must be an integer, not {short_repr(value)}")


def check_copies(copies: Sequence[ChunkCopy], num_slots: int, num_blocks: Mapping[int, int]) -> dict[int, list[int]]:
    """Check all slots and block ids. Return for each block table the blocks of all copies, in the order of the copies.
    `num_blocks`: the number of blocks, by block table.

    Raises UsageError for a slot or block that does not exist. Without this check, numpy or a device would silently copy
    other pages.
    """
    found = {}
    for copy in copies:
        if not 0 <= copy.slot < num_slots:
            raise UsageError(f"slot {copy.slot} does not exist: there are {num_slots} slots")
    for group, limit in num_blocks.items():
        ids = found[group] = block_ids(list(chain.from_iterable(copy.runs[group].blocks for copy in copies)))
        if ids and (min(ids) < 0 or max(ids) >= limit):
            span = f"{short_repr(min(ids))}..{short_repr(max(ids))}"
            raise UsageError(f"block ids {span} do not exist: there are {limit} blocks")
    return found


def check_fit(memory: PagedMemory, layout: KVLayout, slab: SlabMap) -> None:
    """Raise UsageError if pages of `memory` and `layout` differ in size, or if a chunk does not fit into a slot of
    `slab`.
    """
    pages = [row.shape[1] for row in memory.rows]
    # A pipeline stage may have fewer layers than the one that the layout describes.
    if not pages or pages != [layer.page_bytes for layer in layout.layers[: len(pages)]]:
        raise UsageError("the KV tensors have other page sizes than the layout")
    if layout.slot_bytes > slab.slot_bytes:
        raise UsageError(f"a chunk has {layout.slot_bytes} bytes, but a slot has {slab.slot_bytes}")


# -- layer by layer ---------------------------------------------------------------------------------------


Guard = Callable[[], AbstractContextManager[object]]
"""A lock around each use of a copier, because copiers are not thread-safe."""


class _Layers:
    """Copies one layer after the other. `tokens`: how many of the prompt's first tokens are copied.

    `last`: the event of the latest layer's copy. `left`: the layers for which the caller has not called `wait` or
    `save`.
    """

    def __init__(self, events: Iterator[Event], num_layers: int, tokens: int, guard: Guard) -> None:
        self._events, self._num_layers, self._guard = events, num_layers, guard
        self._done = 0
        self.tokens, self.last = tokens, DONE
        self.left = set(range(num_layers))

    def _name(self, layer: object) -> None:
        if not isinstance(layer, int) or not 0 <= layer < self._num_layers:
            raise UsageError(f"there is no layer {short_repr(layer)}: the model has {self._num_layers} layers")
        self.left.discard(layer)

    def _upto(self, layer: int) -> None:
        while self._done <= layer:
            with self._guard():
                self.last = next(self._events)
            self._done += 1

    def finish(self) -> Event:
        """Copy the remaining layers, and return the event of the last copy."""
        self._upto(self._num_layers - 1)
        return self.last


class LayerReader(_Layers):
    """Loads blocks layer by layer. `Engine.retrieve_layers` yields a reader.

    Call `wait(layer)` before you launch computation that reads the layer. Methods raise UsageError for a layer that
    does not exist, and pass on the copier's exceptions.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        super().__init__(copier.load_layers(copies), copier.num_layers, tokens, guard)

    @property
    def complete(self) -> bool:
        """Whether the load of every layer has begun."""
        return self._done == self._num_layers

    def wait(self, layer: int) -> None:
        """Make all computation that is launched from now on wait until `layer` and all earlier layers are loaded."""
        self._name(layer)
        self._upto(layer)


class LayerWriter(_Layers):
    """Stores blocks layer by layer. `Engine.store_layers` yields a writer.

    Call `save(layer)` after you have launched the computation of the layer. Methods raise UsageError for a layer that
    does not exist, and pass on the copier's exceptions.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        super().__init__(copier.store_layers(copies), copier.num_layers, tokens, guard)

    def save(self, layer: int) -> None:
        """Mark `layer` as computed, and store it once all earlier layers are computed. Layers may be computed in any
        order.
        """
        self._name(layer)
        while self._done < self._num_layers and self._done not in self.left:
            self._upto(self._done)
