"""Layer by layer: copies that overlap the computation of the model's other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from lmkv.memory.copier import DONE, ChunkCopy, Copier, Event

Guard = Callable[[], AbstractContextManager[object]]
"""Entered around each use of the copier, which is not thread-safe."""


class _Layers:
    """The copies of one layer after the other, each begun by the thread that launches the computation."""

    def __init__(self, events: Iterator[Event], num_layers: int, guard: Guard) -> None:
        self._events = events
        self._guard = guard
        self.num_layers = num_layers
        self.done = 0
        self.last: Event = DONE

    def upto(self, layer: int) -> None:
        while self.done <= layer:
            with self._guard():
                self.last = next(self._events)
            self.done += 1


class LayerReader:
    """Fills blocks layer by layer. `tokens`: how many of the prompt's leading ones are there in the end.

    `wait(layer)` comes before what reads that layer is launched; the following layers are on their way
    meanwhile. Raises what the copier raises.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        self.tokens = tokens
        self._layers = _Layers(copier.load_layers(copies), copier.num_layers, guard)

    @property
    def complete(self) -> bool:
        """Whether every layer was waited for."""
        return self._layers.done == self._layers.num_layers

    def wait(self, layer: int) -> None:
        """Order what is launched from now on after this layer's load, and those of the layers before it."""
        self._layers.upto(layer)

    def finish(self) -> Event:
        """Load what nobody waited for; the event of all of it."""
        self._layers.upto(self._layers.num_layers - 1)
        return self._layers.last


class LayerWriter:
    """Takes blocks into slots layer by layer: `save(layer)` comes once what writes it was launched.

    `tokens`: how many of the prompt's leading ones will be stored in the end. Raises what the copier raises.
    """

    def __init__(
        self, copier: Copier, copies: Sequence[ChunkCopy], *, tokens: int = 0, guard: Guard = nullcontext
    ) -> None:
        self.tokens = tokens
        self._layers = _Layers(copier.store_layers(copies), copier.num_layers, guard)
        self._computed: set[int] = set()

    def save(self, layer: int) -> None:
        """Store this layer, as soon as those before it are: layers may be computed in any order."""
        self._computed.add(layer)
        while self._layers.done in self._computed:
            self._layers.upto(self._layers.done)

    @property
    def last(self) -> Event:
        """The event of what has been begun."""
        return self._layers.last

    def finish(self) -> Event:
        """Store the rest, all of it computed by now; the event of everything."""
        self._layers.upto(self._layers.num_layers - 1)
        return self.last
