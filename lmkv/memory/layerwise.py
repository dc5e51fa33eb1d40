"""Copies layer by layer, which overlap the computation of other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from lmkv.errors import UsageError, short_repr
from lmkv.memory.copier import DONE, ChunkCopy, Copier, Event

Guard = Callable[[], AbstractContextManager[object]]
"""A lock of the copier, taken around each use because copiers are not thread-safe."""


class _Layers:
    """Copies one layer after the other. `done`: layers begun. `last`: the event of the latest of them."""

    def __init__(self, events: Iterator[Event], num_layers: int, guard: Guard) -> None:
        self._events = events
        self._guard = guard
        self.num_layers = num_layers
        self.done = 0
        self.last: Event = DONE

    def check(self, layer: object) -> None:
        if not isinstance(layer, int) or not 0 <= layer < self.num_layers:
            raise UsageError(f"there is no layer {short_repr(layer)}: there are {self.num_layers}")

    def upto(self, layer: int) -> None:
        while self.done <= layer:
            with self._guard():
                self.last = next(self._events)
            self.done += 1


class LayerReader:
    """Fills blocks layer by layer. `tokens`: how many leading tokens of the prompt are loaded in the end.

    Call `wait(layer)` before you launch computation that reads that layer; later layers are copied meanwhile.
    Raises UsageError for a layer that does not exist, and the copier's exceptions.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        self.tokens = tokens
        self._layers = _Layers(copier.load_layers(copies), copier.num_layers, guard)
        self.unread = set(range(copier.num_layers))
        """Layers that nobody has waited for yet."""

    @property
    def complete(self) -> bool:
        """Whether the load of every layer has begun."""
        return self._layers.done == self._layers.num_layers

    def wait(self, layer: int) -> None:
        """Have computation that is launched from now on see this layer, and the layers before it, loaded."""
        self._layers.check(layer)
        self._layers.upto(layer)
        self.unread.discard(layer)

    def finish(self) -> Event:
        """Load the layers that `wait` was not called for; returns the event of the whole load."""
        self._layers.upto(self._layers.num_layers - 1)
        return self._layers.last


class LayerWriter:
    """Stores blocks layer by layer. `tokens`: how many leading tokens of the prompt are stored in the end.

    Call `save(layer)` once you have launched the computation of that layer. Raises UsageError for a layer that does
    not exist, and the copier's exceptions.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        self.tokens = tokens
        self._layers = _Layers(copier.store_layers(copies), copier.num_layers, guard)
        self._computed: set[int] = set()

    def save(self, layer: int) -> None:
        """Store this layer once the layers before it are stored: they may be computed in any order."""
        self._layers.check(layer)
        self._computed.add(layer)
        while self._layers.done in self._computed:
            self._layers.upto(self._layers.done)

    @property
    def last(self) -> Event:
        """The event of the layers that have been begun."""
        return self._layers.last

    def finish(self) -> Event:
        """Store the layers that are left, all computed by now; returns the event of the whole store."""
        self._layers.upto(self._layers.num_layers - 1)
        return self.last
