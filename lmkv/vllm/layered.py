"""The loads or stores of a step, layer by layer: many orders as one pipeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from lmkv.copier import Copier, Event
from lmkv.pipeline import LayerReader, LayerWriter
from lmkv.vllm.metadata import CopyOrder

logger = logging.getLogger(__name__)


class Layered:
    """`orders` succeed or fail together; nothing here raises. Begins at once."""

    def __init__(self, orders: Sequence[CopyOrder], copier: Callable[[], Copier], *, loads: bool) -> None:
        self.orders = orders
        self.started = time.monotonic()
        self._pipeline: LayerReader | LayerWriter | None = None
        self._attempt(lambda: self._begin(copier(), loads))

    def _begin(self, copier: Copier, loads: bool) -> None:
        copies = [copy for order in self.orders for copy in order.copies]
        self._pipeline = LayerReader(copier, copies) if loads else LayerWriter(copier, copies)

    def step(self, layer: int) -> None:
        """The model comes to this layer, or leaves it."""
        pipeline = self._pipeline
        if isinstance(pipeline, LayerReader):
            self._attempt(lambda: pipeline.wait(layer))
        elif pipeline is not None:
            self._attempt(lambda: pipeline.save(layer))

    def finish(self) -> Event | None:
        """The event of all copies; None when they failed, and then nothing is under way any more."""
        pipeline, events = self._pipeline, list[Event]()
        if pipeline is None:
            return None
        unread = isinstance(pipeline, LayerReader) and not pipeline.complete
        self._attempt(lambda: events.append(pipeline.finish()))
        if unread and events:
            logger.error("lmkv: the model did not wait for the layers of a load, which therefore failed")
            events.pop().wait()
        return events[0] if events else None

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            logger.exception("lmkv: a copy of %d orders failed", len(self.orders))
            self._pipeline = None
