"""`LayerwiseTransfer`: the copies of one step, layer by layer, while the model computes the other layers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from lmkv.errors import UsageError
from lmkv.memory.copier import Copier, Event
from lmkv.memory.layerwise import LayerReader, LayerWriter
from lmkv.vllm.metadata import CopyOrder

logger = logging.getLogger("lmkv.vllm")


class NotReadyError(UsageError):
    """The worker cannot copy now, or ever. The log says so once; a copy that fails is logged each time."""


class LayerwiseTransfer:
    """Copies a step's loads or stores layer by layer while the model computes the other layers.

    `orders` succeed or fail together. Begins at once; no method raises.
    """

    def __init__(self, orders: Sequence[CopyOrder], copier: Callable[[], Copier], *, loads: bool) -> None:
        self.orders = orders
        self.started = time.monotonic()
        self._pipeline: LayerReader | LayerWriter | None = None
        self._saved: set[int] = set()
        self._attempt(lambda: self._begin(copier(), loads))

    def _begin(self, copier: Copier, loads: bool) -> None:
        copies = [copy for order in self.orders for copy in order.copies]
        self._pipeline = LayerReader(copier, copies) if loads else LayerWriter(copier, copies)

    def step(self, layer: int) -> None:
        """The model is about to read this layer, or has written it."""
        pipeline = self._pipeline
        if isinstance(pipeline, LayerReader):
            self._attempt(lambda: pipeline.wait(layer))
        elif layer in self._saved:
            if pipeline is not None:
                logger.error("lmkv: the model computed a layer twice in one step; its store is discarded")
            self._fail()
        elif pipeline is not None:
            self._saved.add(layer)
            self._attempt(lambda: pipeline.save(layer))

    def _fail(self) -> None:
        """Fail after the copies that have begun have ended: their slots may be given to others next."""
        pipeline, self._pipeline = self._pipeline, None
        if isinstance(pipeline, LayerWriter):
            with contextlib.suppress(Exception):
                pipeline.last.wait()

    def finish(self) -> Event | None:
        """The event of all copies; None when they failed, and then none of them is running any more."""
        pipeline, events = self._pipeline, list[Event]()
        if pipeline is None:
            return None
        unread = isinstance(pipeline, LayerReader) and bool(pipeline.unread)
        self._attempt(lambda: events.append(pipeline.finish()))
        if unread and events:
            # The model has read layers before they were loaded. The copies must end before vLLM is told so:
            # it then computes the same blocks again.
            logger.error("lmkv: the model did not wait for the layers of a load, which therefore failed")
            events.pop().wait()
        return events[0] if events else None

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except NotReadyError as error:
            logger.debug("lmkv: copies fail: %s", error)
            self._pipeline = None
        except Exception:
            logger.exception("lmkv: a copy of %d orders failed", len(self.orders))
            self._pipeline = None
