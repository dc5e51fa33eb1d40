"""Copies chunks layer by layer in a worker, and compares copied chunks for audits."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from attrs import frozen
from cachetools import LRUCache

from lmkv.chunks.layout import KVLayout
from lmkv.errors import UsageError
from lmkv.memory.comparison import Comparison, Difference, Digests, Part, PendingDigests, ReadBack
from lmkv.memory.copier import Copier, Event, LayerReader, LayerWriter
from lmkv.memory.device import Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap
from lmkv.vllm.plan import CopyTask, ReadTask

logger = logging.getLogger("lmkv.vllm")


_REMEMBERED = 10_000_000
"""Largest number of digests to keep for audited loads (80 MB). Digests are kept until the load's blocks are
released.
"""


class NotReadyError(UsageError):
    """The worker cannot make copies: it has no KV tensors or host memory yet, the engine sleeps, or copies have been
    refused for good.
    """


class LayerwiseTransfer:
    """Copies a step's loads or stores layer by layer while the model computes the other layers.

    `tasks`: the loads or the stores, which succeed or fail together. The constructor begins the first copies. No method
    raises.
    """

    def __init__(self, tasks: Sequence[CopyTask], copier: Callable[[], Copier], *, loads: bool) -> None:
        self.tasks = tasks
        self.started = time.monotonic()
        self._pipeline: LayerReader | LayerWriter | None = None
        self._saved: set[int] = set()
        self._attempt(lambda: self._begin(copier(), loads))

    def _begin(self, copier: Copier, loads: bool) -> None:
        copies = [copy for task in self.tasks for copy in task.copies]
        self._pipeline = LayerReader(copier, copies) if loads else LayerWriter(copier, copies)

    def step(self, layer: int) -> None:
        """For loads, wait until this layer is loaded, because the model is about to read it. For stores, begin to store
        this layer, which the model has just written.
        """
        pipeline = self._pipeline
        if isinstance(pipeline, LayerReader):
            self._attempt(lambda: pipeline.wait(layer))
        elif layer in self._saved:
            if pipeline is not None:
                logger.error("lmkv: the model computed a layer twice in one step; lmkv stores nothing of this step")
            self._fail()
        elif pipeline is not None:
            self._saved.add(layer)
            self._attempt(lambda: pipeline.save(layer))

    def _fail(self) -> None:
        """Mark the transfer as failed, after waiting for running stores. Without the wait, slots could be reused while
        a copy still writes into them.
        """
        pipeline, self._pipeline = self._pipeline, None
        if isinstance(pipeline, LayerWriter):
            with contextlib.suppress(Exception):
                pipeline.last.wait()

    def finish(self) -> Event | None:
        """Copy the remaining layers. Return an event with which callers wait for the last copy, or None if a copy has
        failed. After a failure, no copy is running.
        """
        pipeline, events = self._pipeline, list[Event]()
        if pipeline is None:
            return None
        unread = isinstance(pipeline, LayerReader) and bool(pipeline.left)
        self._attempt(lambda: events.append(pipeline.finish()))
        if unread and events:
            # The model has read layers before they were loaded. The copies must end before vLLM learns of it and
            # recomputes the same blocks.
            logger.error("lmkv: the model read layers before lmkv had loaded them; lmkv counts the load as failed")
            events.pop().wait()
        return events[0] if events else None

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except NotReadyError as error:
            logger.debug("lmkv: this step loads and stores nothing more: %s", error)
            self._pipeline = None
        except Exception:
            logger.exception("lmkv: %d copies with use_layerwise failed; lmkv counts them as misses", len(self.tasks))
            self._pipeline = None


def _number(digests: Digests) -> int:
    return sum(len(copy) for part in digests for copy in part)


@frozen
class Comparing:
    """A comparison in the background, as an event. If the comparison fails, `query` and `differences` raise its
    exception, but `wait` does not.
    """

    _future: Future[list[Difference]]

    def query(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self) -> None:
        self._future.exception()

    @property
    def differences(self) -> list[Difference]:
        """The chunks that differ. If the comparison is still running, reading this property waits."""
        return self._future.result()


class Comparer:
    """Compares copied chunks for audits on one rank, in one background thread, one copy task after the other. A copy
    task is a list of copies that succeed or fail together.

    Until the comparison of a task has ended, callers must not change the task's slots in host memory.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pool: ThreadPoolExecutor | None = None
        self._parts: Sequence[Part] = ()
        self._layout: KVLayout | None = None
        self._back: ReadBack | None = None
        self.forget()

    def register(
        self, memory: PagedMemory, layout: KVLayout | None, parts: Sequence[Part], staging: Staging | None
    ) -> None:
        """Set the paged memory (vLLM's KV tensors) from which `read` reads blocks. `parts`: for each layer, the content
        of its pages.
        """
        self._parts, self._layout = parts, layout
        self._back = None if layout is None else ReadBack(memory, layout, parts, self._rank, staging)
        self.forget()

    def forget(self) -> None:
        """Forget the digests of all loaded blocks, because the content of the paged memory is about to be lost."""
        self._loaded: LRUCache[int, Digests] = LRUCache(_REMEMBERED, _number)

    def begin(self, task: CopyTask, slab: SlabMap | None) -> Comparing:
        """For each copy of a store, compare the filled slot with the copy's slot in `task.compares`. The store must
        have ended. `slab`: the host memory with all slots.
        """
        assert self._layout is not None
        assert slab is not None
        comparison = Comparison(self._layout, slab, self._rank, self._parts)
        return self._submit(lambda: comparison.differences(task.copies, task.compares))

    def read(self, task: CopyTask | ReadTask) -> PendingDigests:
        """Begin to read the blocks of a task, after all work that was launched on the device until now."""
        assert self._back is not None
        return self._back.begin(task.copies)

    def compare_load(self, task: CopyTask, reading: PendingDigests, slab: SlabMap | None) -> Comparing:
        """Compare loaded blocks with the slots from which they were loaded. `reading`: the result of `read` for this
        load. If all blocks are equal, keep their digests for `compare_again`.
        """
        back, loaded = self._back, self._loaded
        assert back is not None
        assert slab is not None

        def differences() -> list[Difference]:
            found = back.digests(reading, task.copies)
            wrong = back.differences(task.copies, found, back.of_slots(task.copies, slab))
            if not wrong and _number(found) <= _REMEMBERED:
                loaded[task.job] = found
            return wrong

        return self._submit(differences)

    def compare_again(self, task: ReadTask, reading: PendingDigests) -> Comparing:
        """Compare a second read of a load's blocks with the first. `reading`: the result of the second `read`. If
        `compare_load` has kept no digests of this load, nothing is compared.
        """
        back, loaded = self._back, self._loaded
        assert back is not None

        def differences() -> list[Difference]:
            known = loaded.pop(task.load, None)
            found = back.digests(reading, task.copies)
            return [] if known is None else back.differences(task.copies, found, known)

        return self._submit(differences)

    def _submit(self, compare: Callable[[], list[Difference]]) -> Comparing:
        self._pool = self._pool or ThreadPoolExecutor(1, "lmkv-compare")
        return Comparing(self._pool.submit(compare))

    def close(self) -> None:
        """Wait for the running comparison. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
