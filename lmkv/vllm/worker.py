"""The worker side of the connector: maps the slab (lmkv's host memory), makes the copies that the scheduler side plans,
and reports their results.

No method raises: an error becomes a failed job. After a failed store the chunks are not stored, and after a failed load
vLLM recomputes the blocks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from attrs import define

from lmkv.chunks.layout import KVLayout
from lmkv.errors import UsageError
from lmkv.memory.comparison import Difference, Part, PendingDigests
from lmkv.memory.copier import DONE, Copier, Event
from lmkv.memory.copiers import make_copier, make_staging
from lmkv.memory.device import STAGING_BYTES, LoadEvent, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import SlabMap, SlabRef, attach, wait_for_slab
from lmkv.vllm.copies import Comparer, Comparing, LayerwiseTransfer, NotReadyError
from lmkv.vllm.loaded import take_loads
from lmkv.vllm.plan import CopyTask, JobReport, ReadTask, StepPlan, WorkerReport
from lmkv.vllm.scheduler.telemetry import Samples, Values

C = TypeVar("C", bound=Copier)

logger = logging.getLogger(__name__)

_ATTACHES = 3
"""Number of attempts to map a slab before a rank fails all copy tasks."""


@define(eq=False)
class _Running:
    task: CopyTask | ReadTask
    event: Event
    started: float
    step: int
    reading: PendingDigests | None = None
    """The read of the blocks that an audited load within a step has filled."""
    seconds: float | None = None
    """Duration of the copy in seconds, or None until the copy has ended."""
    audited: bool = True
    """Whether the blocks still have the content that the load has copied."""


class Worker:
    """Executes the copy tasks of each `StepPlan` for one rank. A copy task is a list of chunks to copy. All calls come
    from the thread that runs the model.

    `rank`: the index of this worker's part in each slot (the space for one chunk in host memory). `layout`: the layout
    of a chunk; None if this rank cannot cache the model, so that every task fails.

    `share`: `(index, count)`: this rank's index among the ranks with the same KV, and their number. Only the rank with
    index 0 stores. `block_level_failures`: whether to report failed loads by block ids instead of request ids (see
    `BlockMap.one_full_table`). `layerwise`: whether to copy layer by layer while the model computes. The model must
    then call `wait_for_layer` and `save_layer`.

    `engine`: the name of the slab (see `slab_name`), which the worker maps as soon as the slab exists. `staging_bytes`:
    bytes of device memory for stores.
    """

    def __init__(
        self,
        rank: int,
        layout: KVLayout | None,
        share: tuple[int, int] = (0, 1),
        *,
        block_level_failures: bool = True,
        layerwise: bool = False,
        engine: str = "",
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._rank, self._share = rank, share
        self._layout = layout
        self._page_bytes: Counter[int] = Counter()
        self._stores = share[0] == 0
        self._block_level_failures = block_level_failures
        self._layerwise = layerwise
        self._engine = engine
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._search: threading.Thread | None = None
        self._attaching = threading.RLock()
        self._closing = threading.Event()
        self._reading: LayerwiseTransfer | None = None
        self._writing: LayerwiseTransfer | None = None
        self._memory: PagedMemory | None = None
        self._slab: SlabMap | None = None
        self._slab_ref: SlabRef | None = None
        self._copier: Copier | None = None
        self._refusal = ""
        self._failed_attaches = 0
        self._suspended = False
        self._launched: Event | None = None
        """The end of all device work before this step. Asynchronous loads begin then, because later work does not use
        their blocks.
        """
        self._due_loads: list[CopyTask] = []
        self._due_stores: list[CopyTask] = []
        """The stores of this step that have not begun yet. Each store is removed when it begins, so that none runs
        twice.
        """
        self._running: list[_Running] = []
        self._step = 0
        self._report = WorkerReport()
        self._samples = Samples()
        self._warned = False
        self._comparer = Comparer(rank)
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._finished_requests: set[str] = set()

    def __repr__(self) -> str:
        state = "ready" if self._copier is not None else "no copier yet"
        return f"<Worker: rank {self._rank}, {state}, {len(self._running)} copies running>"

    def refuse(self, reason: str) -> None:
        """Fail every copy task from now on. Later reports to the scheduler side contain the reason."""
        self._refusal = self._refusal or reason

    def register(self, memory: PagedMemory, parts: Sequence[Part] = ()) -> None:
        """Set the paged memory to copy from and to, and allocate staging memory on its device.

        `parts`: for each layer, the content of its pages.
        """
        with self._attaching:
            if self._copier is not None:
                # Unpin the slab: the next copier pins it again.
                self._copier.close()
            self._copier = None
            self._staging = make_staging(memory, self._staging_bytes)
            self._memory = memory
            self._comparer.register(memory, self._layout, parts, self._staging)
            self._page_bytes.clear()
            for row, group in zip(memory.rows, memory.groups, strict=True):
                self._page_bytes[group] += int(row.shape[1])
        if self._engine and self._search is None:
            self._search = threading.Thread(target=self._find_slab, name="lmkv-find-slab", daemon=True)
            self._search.start()

    def _find_slab(self) -> None:
        # vLLM makes the scheduler side, and so the slab, after it has compiled and captured the model.
        assert self._layout is not None
        ref = wait_for_slab(self._engine, self._layout.slot_bytes, self._closing)
        with self._attaching:
            # A slab from a task takes precedence.
            if ref is not None and self._slab_ref is None:
                self._attach(ref)

    def suspend(self) -> None:
        """Wait for the running copies before vLLM's sleep, and fail all copy tasks until `resume` is called.

        vLLM frees the device memory of the KV cache, and this call frees staging memory. Host memory stays pinned, and
        the paged memory keeps its address. Idempotent.
        """
        self._suspended = True
        self._comparer.forget()
        for item in self._running:
            item.audited = False
            with contextlib.suppress(Exception):  # `poll` reports it.
                item.event.wait()
        if self._staging is not None:
            try:
                self._staging.free()
            except Exception:
                logger.exception("lmkv: the device could not free lmkv's memory before the engine's sleep")

    def resume(self) -> None:
        """Accept copy tasks again after vLLM's sleep, when the KV cache has device memory again. Idempotent."""
        try:
            if self._staging is not None:
                self._staging.allocate()
            self._suspended = False
        except Exception as error:
            logger.exception("lmkv: after the engine's sleep the device has no memory for copies; lmkv caches nothing")
            self.refuse(f"after the engine's sleep the device has no memory for copies: {error}")

    def begin(self, plan: StepPlan) -> None:
        """Accept the copy tasks of a step. Each task is executed once, even if the model does not run in that step."""
        self._due_loads, self._due_stores = plan.loads, plan.stores
        self._step += 1
        for task in plan.reads:
            self._read_again(task)
        if plan.timed:
            self._report.steps.add(plan.timed)
        if plan.slab is not None:
            self._attach(plan.slab)
        self._launched = None
        if self._staging is not None and any(task.between_steps for task in plan.loads):
            # vLLM computes this step before these loads begin, and no part of it reads or writes their blocks.
            with contextlib.suppress(Exception):  # The load fails as well, and says so.
                self._launched = self._staging.record_event()

    def _read_again(self, task: ReadTask) -> None:
        item = _Running(task, DONE, time.monotonic(), self._step)
        reading = self._read(item)
        if reading is None:
            self._finish(task, 0.0, ok=False)
        else:
            item.event = reading
            self._follow(item)

    def _attach(self, ref: SlabRef) -> None:
        with self._attaching:
            if ref == self._slab_ref or self._closing.is_set() or self._refusal or self._layout is None:
                return
            try:
                # Release the old slab first: if the new one cannot be mapped, no copy may reach the old.
                self._slab_ref = None
                self._release_slab()
                self._check_slab(ref, self._layout)
                self._slab, self._slab_ref = attach(ref), ref
                if self._memory is not None:
                    self._made_copier()
            except UsageError as error:
                self.refuse(f"rank {self._rank} cannot use host memory: {error}")
            except Exception as error:
                # This rank runs on another machine than the scheduler, or has no descriptor left for a moment.
                self._failed_attaches += 1
                if self._failed_attaches == _ATTACHES:
                    self.refuse(f"rank {self._rank} cannot map host memory: {error!r}")
                logger.debug("lmkv: cannot map host memory at %s", ref.path, exc_info=True)

    def _check_slab(self, ref: SlabRef, layout: KVLayout) -> None:
        """Raise UsageError if the slab belongs to an engine whose layout is not `layout`."""
        if ref.slot_bytes != layout.slot_bytes or (self._engine and layout.digest not in ref.name):
            raise UsageError(f"slots of {ref.slot_bytes} bytes do not fit this rank's {layout}")

    def _release_slab(self) -> None:
        """Unpin and unmap the slab. No copy may be running."""
        copier, slab, self._copier, self._slab = self._copier, self._slab, None, None
        if copier is not None:
            copier.close()
        if slab is not None:
            slab.close()

    def load(self) -> None:
        """Begin the step's loads, before the model computes."""
        tasks, self._due_loads = self._due_loads, []
        if not tasks:
            return
        layerwise = [task for task in tasks if self._layerwise and task.copies and not task.between_steps]
        if layerwise:
            self._reading = LayerwiseTransfer(layerwise, self._ready_copier, loads=True)
            tasks = [task for task in tasks if task not in layerwise]
        self._execute(tasks, self._load)

    def _load(self, copier: Copier, task: CopyTask) -> Event:
        after = self._launched if task.between_steps else None
        return copier.load(task.copies, overlap=task.between_steps, after=after)

    def wait_for_layer(self, layer: int) -> None:
        """Wait until the KV of this layer is loaded, because the model is about to read the layer's KV."""
        if self._reading is not None:
            self._reading.step(layer)

    def save_layer(self, layer: int) -> None:
        """Begin to store the KV of this layer, which the model has just written."""
        if self._writing is None and self._layerwise and self._stores and self._due_stores:
            tasks, self._due_stores = self._due_stores, []
            self._writing = LayerwiseTransfer(tasks, self._ready_copier, loads=False)
        if self._writing is not None:
            self._writing.step(layer)

    def save(self) -> None:
        """Begin the step's stores. Call this method after launching the computation that writes the blocks."""
        reading, writing, self._reading, self._writing = self._reading, self._writing, None, None
        self._end(reading)
        self._end(writing)
        tasks, self._due_stores = self._due_stores, []
        if self._stores:
            self._execute(tasks, lambda copier, task: copier.store(task.copies))
        else:
            for task in tasks:
                self._finish(task, 0.0, ok=True)

    def _execute(self, tasks: Sequence[CopyTask], copy: Callable[[Copier, CopyTask], Event]) -> None:
        for task in tasks:
            started = time.monotonic()
            try:
                event = copy(self._ready_copier(), task) if task.copies else DONE
            except NotReadyError as error:
                level = logging.DEBUG if self._warned else logging.WARNING
                logger.log(level, "lmkv: this worker loads and stores nothing: %s", error)
                self._warned = True
                self._finish(task, 0.0, ok=False)
            except Exception:
                logger.exception(
                    "lmkv: a copy of %d chunks could not begin; lmkv counts them as misses", len(task.copies)
                )
                self._finish(task, time.monotonic() - started, ok=False)
            else:
                self._warned = False
                self._follow(self._started(task, event, started))

    def _started(self, task: CopyTask, event: Event, started: float) -> _Running:
        running = _Running(task, event, started, self._step)
        if task.audited and not task.between_steps:
            # Read now: the next step may give the blocks to others.
            running.reading = self._read(running)
        return running

    def _read(self, item: _Running) -> PendingDigests | None:
        try:
            return self._comparer.read(item.task)
        except Exception:
            # The device may lack memory for the reading. The load itself is right.
            logger.exception("lmkv: %d loaded chunks could not be read back for an audit", len(item.task.copies))
            item.audited = False
            return None

    def _follow(self, item: _Running) -> None:
        """Report a copy task if its copies and comparison have ended. Otherwise, check the task again in a later
        call.
        """
        try:
            while item.event.query():
                if item.seconds is None:
                    spent = time.monotonic() - item.started
                    item.seconds = item.event.seconds if isinstance(item.event, LoadEvent) else spent
                following = self._following(item)
                if following is None:
                    self._ended(item)
                    return
                item.event = following
        except Exception:
            logger.exception(
                "lmkv: a copy of %d chunks failed; lmkv counts the chunks as misses", len(item.task.copies)
            )
            self._finish(item.task, time.monotonic() - item.started, ok=False)
            return
        self._running.append(item)

    def _following(self, item: _Running) -> Event | None:
        """Begin the next phase of a copy task (a read or a comparison) and return its event. Return None if the task
        has ended.
        """
        task, event = item.task, item.event
        if isinstance(event, Comparing) or not item.audited:
            return None
        if isinstance(task, ReadTask):
            assert isinstance(event, PendingDigests)
            return self._comparer.compare_again(task, event)
        if isinstance(event, PendingDigests):
            return self._comparer.compare_load(task, event, self._slab)
        if task.compares:
            return self._comparer.begin(task, self._slab)
        if task.audited:
            return item.reading or self._read(item)
        return None

    def _ended(self, item: _Running) -> None:
        task, differences = item.task, list[Difference]()
        if isinstance(item.event, Comparing):
            differences = item.event.differences
        ok = True
        if isinstance(task, CopyTask):
            # It is recomputed if the differences are known before its blocks are read, or in the step that reads them.
            in_time = task.between_steps or item.step == self._step
            ok = not task.failed_blocks and not (task.audited and differences and in_time)
        self._finish(task, item.seconds or 0.0, ok=ok)
        self._report.jobs[task.job].differences = differences

    def _end(self, layerwise: LayerwiseTransfer | None) -> None:
        if layerwise is None:
            return
        event = layerwise.finish()
        for task in layerwise.tasks:
            if event is None:
                self._finish(task, time.monotonic() - layerwise.started, ok=False)
            else:
                self._follow(self._started(task, event, layerwise.started))

    @property
    def copier(self) -> Copier | None:
        """The copier, or None until the slab is mapped."""
        return self._copier

    def wrap_copier(self, wrap: Callable[[Copier], C]) -> C:
        """Replace the copier by `wrap(copier)` and return the new one. Tests inject faults in this way. Raises
        NotReadyError without a copier.
        """
        self._copier = copier = wrap(self._ready_copier())
        return copier

    def _ready_copier(self) -> Copier:
        if self._refusal or self._suspended:
            raise NotReadyError(self._refusal or "the engine sleeps, and its KV tensors have no memory")
        return self._made_copier()

    def _made_copier(self) -> Copier:
        with self._attaching:
            if self._copier is None:
                if self._memory is None or self._slab is None or self._layout is None:
                    raise NotReadyError("the worker has no KV tensors or no host memory yet")
                memory, layout, slab = self._memory, self._layout, self._slab
                self._copier = make_copier(memory, layout, slab, self._rank, self._staging, self._share)
            return self._copier

    def _finish(self, task: CopyTask | ReadTask, seconds: float, *, ok: bool) -> None:
        if isinstance(task, ReadTask):
            self._report.jobs[task.job] = JobReport(1, ok, seconds=seconds)
            return
        nbytes = sum(
            len(run.blocks) * self._page_bytes[group] for copy in task.copies for group, run in enumerate(copy.runs)
        )
        self._report.jobs[task.job] = JobReport(1, ok, nbytes, seconds)
        self._report.refusal = self._refusal
        if self._slab is not None:
            self._report.mapped = {self._rank * self._share[1] + self._share[0]}
        if ok and nbytes and (self._stores or not task.stores) and not task.compares:
            self._count("store" if task.stores else "load", nbytes, seconds)
        if not ok and not task.stores:
            self._fail(task)
        if task.finishes is not None:
            self._finished_requests.add(task.finishes)

    def _count(self, direction: str, nbytes: int, seconds: float) -> None:
        self._samples.add(f"vllm:kv_offload_{direction}_bytes", nbytes)
        self._samples.add(f"vllm:kv_offload_{direction}_time", seconds)
        self._samples.observe(f"vllm:kv_offload_{direction}_size", nbytes)

    def take_samples(self) -> Values:
        """Return the metrics' values since the last call."""
        return self._samples.take()

    def _fail(self, task: CopyTask) -> None:
        if not self._block_level_failures:
            if task.finishes is not None:
                self._failed_requests.add(task.finishes)
            return
        self._failed_blocks.update(task.failed_blocks)
        for copy in task.copies:
            self._failed_blocks.update(block for run in copy.runs for block in run.blocks)

    def poll(self) -> None:
        """Report the copies that have ended, without waiting for the others.

        Also end the step's layer-by-layer load, because vLLM asks for failed loads right after this call.
        """
        reading, self._reading = self._reading, None
        self._end(reading)
        running, self._running = self._running, []
        for item in running:
            self._follow(item)

    def take_report(self) -> WorkerReport | None:
        """Return a report of the jobs and timed steps that have ended, and of the adapters that were loaded, since the
        last call. Return None if there are none.
        """
        report, self._report = self._report, WorkerReport()
        report.adapters = take_loads()
        return report if report.jobs or report.steps or report.adapters else None

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that failed loads have not filled, since the last call of this method."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return `(finished, failed)`: the ids of requests with an ended asynchronous load, and those of them with a
        failed load.
        """
        finished, self._finished_requests = self._finished_requests, set()
        failed, self._failed_requests = self._failed_requests, set()
        return finished, failed

    def close(self, *, process_ends: bool = False) -> None:
        """Wait for the running copies, and unmap the slab. If `process_ends`, do not unmap the slab, because the kernel
        does so when the process ends. Idempotent.
        """
        self._closing.set()
        if self._search is not None:
            self._search.join()
        running, self._running = self._running, []
        # Before the slab is unmapped, because the device uses it. A failed device does not.
        with contextlib.suppress(Exception):
            for item in running:
                item.event.wait()
        self._comparer.close()
        try:
            if process_ends and self._copier is not None:
                self._copier.close(process_ends=True)
            elif not process_ends:
                self._release_slab()
        except Exception:
            logger.exception("lmkv: the device failed; host memory is freed when this process ends")
