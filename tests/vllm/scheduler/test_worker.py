"""The worker side over a simulated device: when it finds its slab, what it allocates, and what it reports."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, strategies as st

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.device import DeviceError, Staging
from lmkv.memory.device_copier import DeviceCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab, SlabMap, SlabRef, attach, slab_name
from lmkv.vllm.plan.block_map import Group
from lmkv.vllm.plan.metadata import CopyOrder, StepPlan, WorkerReport
from lmkv.vllm.worker import Worker
from tests.kit import LIMIT, eventually
from tests.simulated_device import SimulatedDevice, SimulatedStream
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

LAYOUT = KVLayout(8, (LayerPages(64, 2),) * 2)
BLOCKS, SLOTS = 12, 4
ENGINE = slab_name(f"test-worker-{os.getpid()}", LAYOUT)


@frozen
class Served:
    """A worker that serves a model on a simulated device."""

    worker: Worker
    device: SimulatedDevice
    rows: list[torch.Tensor]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def serve(patch: pytest.MonkeyPatch, seed: int = 0, *, engine: str = "", staging_bytes: int = 1000) -> Served:
    device = SimulatedDevice(seed)
    rows = [torch.zeros((BLOCKS, 64), dtype=torch.uint8) for _ in range(2)]
    device.adopt(rows)
    patch.setattr("lmkv.vllm.worker.make_staging", lambda memory, nbytes: Staging(device, memory, nbytes))
    worker = Worker(0, LAYOUT, engine=engine, staging_bytes=staging_bytes)
    worker.register(PagedMemory(rows, fuse=False))
    return Served(worker, device, rows)


def pinned(worker: Worker) -> bool:
    copier = worker._copier
    if isinstance(copier, DeviceCopier):
        copier.pins.wait()
    return copier is not None


def test_the_slab_is_found_and_pinned_before_the_first_order(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch, engine=ENGINE)
    assert "no copier yet" in repr(served.worker)
    # vLLM makes the scheduler's side, whose slab this is, after the worker's.
    slab = Slab(4096, SLOTS * 4096, shared=True, engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    assert [found.last - found.first for found in served.device.registered] == [SLOTS * 4096]
    copier = served.worker._copier
    served.worker.begin(StepPlan(slab=slab.ref))
    assert served.worker._copier is copier, "the first order brings the same slab"
    # As a process that is just being forked has it.
    other = os.dup(int(Path(slab.ref.path).name))
    served.worker.begin(StepPlan(slab=evolve(slab.ref, path=f"/proc/{os.getpid()}/fd/{other}")))
    os.close(other)
    assert served.worker._copier is copier
    served.worker.close()
    assert not served.device.registered
    slab.close()


def test_a_worker_that_finds_no_slab_can_be_closed(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch, engine=f"{ENGINE}-none")
    served.worker.close()
    assert "no copier yet" in repr(served.worker)


def test_an_order_of_another_slab_than_the_one_found_brings_its_own(patch: pytest.MonkeyPatch) -> None:
    """Two engines may have the same name, when users give it."""
    served = serve(patch, engine=ENGINE)
    wrong = Slab(4096, SLOTS * 4096, shared=True, engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    right = Slab(4096, SLOTS * 4096, shared=True, engine=ENGINE)
    right.view(1)[:256] = bytes([9]) * 256
    served.worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))])], slab=right.ref))
    served.worker.load()
    served.device.synchronize()
    assert bool((served.rows[0][2:4] == 9).all())
    served.worker.close()
    wrong.close()
    right.close()


def test_the_devices_memory_is_taken_when_tensors_are_registered(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch, staging_bytes=4000)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    assert served.device.allocated == 5000
    assert served.device.moves == len(served.rows), "and kernels are compiled"
    copies = [ChunkCopy(slot, (Run(0, [2 * slot, 2 * slot + 1]),)) for slot in range(SLOTS)]
    served.worker.begin(StepPlan([CopyOrder(1, copies)], [CopyOrder(2, copies, stores=True)], slab.ref))
    served.worker.load()
    served.worker.save()
    assert served.device.allocated == 5000
    served.worker.close()
    slab.close()


def test_a_load_is_reported_with_the_devices_seconds(patch: pytest.MonkeyPatch) -> None:
    """Those until the next step ends are the model's."""
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    served.worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))])], slab=slab.ref))
    served.worker.load()
    served.device.synchronize()
    served.device.now += 1000.0

    def reported() -> bool:
        served.worker.poll()
        return bool(served.worker._report.jobs)

    eventually(reported)
    report = served.worker.take_report()
    assert report is not None
    assert report.jobs[1].seconds < 0.0001, "a simulated copy takes a few microseconds; the host's clock says more"
    served.worker.close()
    slab.close()


def test_tensors_that_are_registered_again_have_the_slab_pinned_once(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    served.worker.begin(StepPlan(slab=slab.ref))
    pinned(served.worker)
    served.worker.register(PagedMemory(served.rows, fuse=False))
    served.worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))])], slab=slab.ref))
    served.worker.load()
    pinned(served.worker)
    assert len(served.device.registered) == 1
    served.worker.close()
    slab.close()


def test_a_device_that_fails_fails_its_orders_and_the_worker_closes(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    copies = [ChunkCopy(1, (Run(0, [2, 3]),))]
    served.worker.begin(StepPlan([CopyOrder(1, copies)], [CopyOrder(2, copies, stores=True)], slab.ref))
    served.worker.load()
    served.device.fail("an uncorrectable memory error")
    served.worker.save()
    served.worker.poll()
    report = served.worker.take_report()
    assert report is not None
    assert not report.jobs[2].ok
    served.worker.close()
    with pytest.raises(DeviceError):
        served.device.synchronize()
    slab.close()


@given(seed=st.integers(0, 2**32))
def test_what_is_reported_has_ended_and_is_right(seed: int) -> None:
    """Stores and loads in any order of steps, with a model that computes in between; pinned sooner or later."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        served = serve(patch, seed)
    worker, device, rows = served.worker, served.device, served.rows
    slab = Slab(4096, SLOTS * 4096, shared=True)
    content: dict[int, int] = {}
    free = list(range(SLOTS))
    running: dict[int, tuple[CopyOrder, int]] = {}
    values = dict.fromkeys(range(0, BLOCKS, 2), 0)
    for job in range(12):
        busy = {block for order, _ in running.values() for copy in order.copies for block in copy.runs[0].blocks}
        block = rng.choice([block for block in values if block not in busy] or [0])
        stores = bool(free) and rng.random() < 0.6
        slots = [slot for slot in content if slot not in {order.copies[0].slot for order, _ in running.values()}]
        if block in busy or not (stores or slots):
            continue
        slot = free.pop() if stores else rng.choice(slots)
        order = CopyOrder(job, [ChunkCopy(slot, (Run(0, [block, block + 1]),))], stores)
        worker.begin(StepPlan([] if stores else [order], [order] if stores else [], slab.ref))
        worker.load()
        if stores:
            values[block] = job + 1
            for row in rows:
                device.launch(lambda row=row, block=block, value=job + 1: row[block : block + 2].fill_(value))
        else:
            values[block] = content[slot]
        worker.save()
        running[job] = (order, values[block])
        for ended in report_of(worker, rng):
            finished, value = running.pop(ended)
            copy = finished.copies[0]
            if finished.stores:
                assert bytes(slab.view(copy.slot)[:256]) == bytes([value]) * 256
                content[copy.slot] = value
            else:
                first = copy.runs[0].blocks[0]
                assert all(bool((row[first : first + 2] == value).all()) for row in rows)
    worker.close()
    slab.close()


def report_of(worker: Worker, rng: random.Random) -> list[int]:
    """The jobs that have ended, seen after a while."""
    for _ in range(rng.randrange(4)):
        worker.poll()
    report = worker.take_report()
    assert report is None or all(job.ok for job in report.jobs.values())
    return list(report.jobs) if report else []


def test_while_the_engine_sleeps_its_memory_is_not_touched(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch)
    worker, device = served.worker, served.device
    slab = Slab(4096, SLOTS * 4096, shared=True)
    copies = [ChunkCopy(1, (Run(0, [2, 3]),))]

    def ended(job: int, *, stores: bool) -> bool:
        worker.begin(StepPlan(*([], [CopyOrder(job, copies, stores=True)]) if stores else ([CopyOrder(job, copies)],)))
        worker.load()
        worker.save()
        eventually(lambda: worker.poll() or bool(worker._report.jobs))
        report = worker.take_report()
        assert report is not None
        return report.jobs[job].ok

    worker.begin(StepPlan([], [CopyOrder(1, copies, stores=True)], slab.ref))
    worker.save()
    copier, staging = worker._copier, device.allocated
    assert staging > 0
    worker.suspend()
    worker.suspend()
    assert device.allocated == 0, "staging memory is given back"
    memory, device._memory = device._memory, []
    assert not ended(2, stores=True)
    assert not ended(3, stores=False)
    assert worker.take_failed_blocks() == {2, 3}
    device.synchronize()
    device._memory = memory
    worker.resume()
    worker.resume()
    assert device.allocated == staging
    assert ended(4, stores=True), "the copy that ran when it fell asleep had ended: the device has not failed"
    assert ended(5, stores=False)
    assert worker._copier is copier, "the slab stays pinned"
    worker.close()
    slab.close()


def test_a_worker_without_staging_memory_after_the_sleep_says_so_and_fails_its_orders(
    patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    served.worker.begin(StepPlan(slab=slab.ref))
    served.worker.suspend()
    served.device._memory_bytes = 100
    served.worker.resume()
    report = refused(served.worker, slab)
    assert "no staging memory left" in report.refusal
    served.worker.close()
    slab.close()


def refused(worker: Worker, slab: Slab) -> WorkerReport:
    """What is reported of an order that fails."""
    copies = [ChunkCopy(1, (Run(0, [2, 3]),))]
    worker.begin(StepPlan([CopyOrder(1, copies)], [CopyOrder(2, copies, stores=True)], slab.ref))
    worker.load()
    worker.save()
    report = worker.take_report()
    assert report is not None
    assert [job.ok for job in report.jobs.values()] == [False, False]
    return report


def test_a_load_between_steps_does_not_wait_for_the_step_that_orders_it(patch: pytest.MonkeyPatch) -> None:
    """vLLM has it begin once the step's computation is launched, which uses none of its blocks."""
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    slab.view(1)[:256] = bytes([9]) * 256
    device, seen = served.device, list[bool]()
    served.worker.begin(StepPlan(slab=slab.ref))
    pinned(served.worker)
    device.synchronize()
    patch.setattr(device, "run", lambda steps: False)
    order = CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))], between_steps=True, finishes="r")
    # The step before: it may still read the blocks.
    device.compute.queue.append(lambda: seen.append(bool(served.rows[0][2].any())))
    served.worker.begin(StepPlan([order], slab=slab.ref))
    device.compute.queue.append(lambda: seen.append(True))
    forward = device.compute.queue[-1]
    served.worker.load()

    def ready() -> list[SimulatedStream]:
        return [stream for stream in device.streams if stream.ready and stream.queue[0] is not forward]

    while streams := ready():
        streams[0].step()
    assert bool((served.rows[0][2:4] == 9).all()), "while the step's computation has not begun"
    assert seen == [False]
    patch.undo()
    served.worker.close()
    slab.close()


def test_a_load_within_the_step_waits_for_all_that_was_launched(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    slab.view(1)[:256] = bytes([9]) * 256
    seen = list[bool]()
    served.worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))])], slab=slab.ref))
    served.device.compute.queue.append(lambda: seen.append(bool(served.rows[0][2].any())))
    served.worker.load()
    served.device.synchronize()
    assert seen == [False]
    served.worker.close()
    slab.close()


# -- what cannot work ------------------------------------------------------------------------------------


def test_where_the_right_slab_cannot_be_mapped_the_one_found_before_is_not_used(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch, engine=ENGINE)
    found = Slab(4096, SLOTS * 4096, shared=True, engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    served.rows[0].fill_(7)
    elsewhere = evolve(found.ref, path="/proc/1/fd/999999", name=f"{found.ref.name}-another")
    served.worker.begin(StepPlan([], [CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))], stores=True)], elsewhere))
    served.worker.save()
    report = served.worker.take_report()
    assert report is not None
    assert not report.jobs[1].ok
    assert not any(found.view(1)[:256])
    served.worker.close()
    found.close()


def test_a_slab_with_another_layout_is_refused(patch: pytest.MonkeyPatch) -> None:
    """Slots of the same size can have other pages in them."""
    served = serve(patch, engine=ENGINE)
    other = KVLayout(8, (LayerPages(72, 2),) * 2)
    assert other.slot_bytes == LAYOUT.slot_bytes
    slab = Slab(4096, SLOTS * 4096, shared=True, engine=slab_name("any", other))
    assert "another layout" in refused(served.worker, slab).refusal
    served.worker.close()
    slab.close()


def test_slots_of_another_size_are_refused(patch: pytest.MonkeyPatch) -> None:
    served = serve(patch)
    slab = Slab(8192, SLOTS * 8192, shared=True)
    assert "slots of 8192 bytes" in refused(served.worker, slab).refusal
    served.worker.close()
    slab.close()


def test_a_slab_that_came_with_an_order_is_not_replaced_by_one_that_is_found(patch: pytest.MonkeyPatch) -> None:
    right, wrong = (Slab(4096, SLOTS * 4096, shared=True, engine=f"{LAYOUT.digest}-{name}") for name in "rw")
    searching, found = threading.Event(), threading.Event()

    def search(*_: object) -> SlabRef:
        searching.set()
        assert found.wait(LIMIT)
        return wrong.ref

    patch.setattr("lmkv.vllm.worker.wait_for_slab", search)
    served = serve(patch, engine=ENGINE)
    assert searching.wait(LIMIT)
    served.worker.begin(StepPlan(slab=right.ref))
    copier = served.worker._copier
    assert copier is not None
    found.set()
    assert served.worker._search is not None
    served.worker._search.join(LIMIT)
    assert served.worker._slab_ref == right.ref
    assert served.worker._copier is copier
    served.worker.close()
    right.close()
    wrong.close()


def test_a_rank_that_cannot_map_the_slab_tries_again_and_then_refuses(
    patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank on another machine never can; one that has no descriptor left for a moment can soon."""
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    elsewhere = evolve(slab.ref, path="/proc/1/fd/999999")
    copies = [ChunkCopy(1, (Run(0, [2, 3]),))]
    reports = []
    with caplog.at_level(logging.INFO, "lmkv"):
        for job in range(6):
            served.worker.begin(StepPlan([], [CopyOrder(job, copies, stores=True)], elsewhere))
            served.worker.save()
            reports.append(served.worker.take_report())
    assert [bool(report and report.refusal) for report in reports] == [False, False, True, True, True, True]
    assert not any(report.mapped for report in reports if report)
    assert len(caplog.records) == 1, "and says so once"
    served.worker.close()

    again = serve(patch)
    again.worker.begin(StepPlan([], [CopyOrder(1, copies, stores=True)], elsewhere))
    again.worker.begin(StepPlan([], [CopyOrder(2, copies, stores=True)], slab.ref))
    again.worker.save()
    again.device.synchronize()
    eventually(lambda: again.worker.poll() or bool(again.worker._report.jobs))
    report = again.worker.take_report()
    assert report is not None
    assert (report.jobs[2].ok, report.mapped, report.refusal) == (True, {0}, "")
    again.worker.close()
    slab.close()


def test_the_slab_is_sent_until_every_rank_has_mapped_it(patch: pytest.MonkeyPatch) -> None:
    """One may have no descriptor left when the other has reported its first copies."""
    world = SimulatedVLLM(random.Random(1), num_blocks=30, groups=[Group(4)], chunk_size=8, ram_chunks=9, ranks=2)
    attached: list[SlabRef] = []

    def fails_once(ref: SlabRef) -> SlabMap:
        attached.append(ref)
        if len(attached) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return attach(ref)

    patch.setattr("lmkv.vllm.worker.attach", fails_once)
    results = []
    for number in range(3):
        request: Any = SimulatedRequest(f"r{number}", [number] * 16, 16, 1, "")
        world.scheduler.on_new_request(request)
        world.scheduler.plan_step({request.request_id: 16}, lambda _: [[1, 2, 3, 4]])
        plan = world.scheduler.take_plan()
        merged = WorkerReport()
        for worker in world.workers:
            worker.begin(plan)
            worker.save()
            report = worker.take_report()
            assert report is not None
            merged = merged.merge(report)
        world.scheduler.on_report(merged)
        results.append((plan.slab is not None, [job.ok for job in merged.jobs.values()]))
    assert results == [(True, [False]), (True, [True]), (False, [True])]
    for worker in world.workers:
        worker.close()
    world.store.close()


def test_a_worker_that_does_not_cache_the_model_answers_every_order() -> None:
    """The scheduler side sees less of a model, and requests would wait for ever."""
    worker = Worker(0, None)
    worker.refuse("a state of its own")
    slab = Slab(4096, SLOTS * 4096, shared=True)
    report = refused(worker, slab)
    assert report.refusal == "a state of its own"
    assert worker.take_failed_blocks() == {2, 3}
    worker = Worker(0, None, block_level_failures=False)
    worker.refuse("a state of its own")
    worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2]),))], between_steps=True, finishes="r")]))
    worker.load()
    assert worker.take_finished() == ({"r"}, {"r"})
    worker.close()
    slab.close()


def test_where_the_process_ends_its_slab_stays_registered(patch: pytest.MonkeyPatch) -> None:
    """To unregister it takes longer than vLLM waits; the end of the process does it at once."""
    served = serve(patch)
    slab = Slab(4096, SLOTS * 4096, shared=True)
    served.worker.begin(StepPlan(slab=slab.ref))
    assert pinned(served.worker)
    served.worker.close(process_ends=True)
    assert served.device.registered
    served.worker.close()
    assert not served.device.registered
    slab.close()


# -- layer by layer --------------------------------------------------------------------------------------


def layerwise() -> tuple[Worker, Slab, list[torch.Tensor]]:
    rows = [torch.zeros((BLOCKS, 64), dtype=torch.uint8) for _ in range(2)]
    worker = Worker(0, LAYOUT, layerwise=True)
    worker.register(PagedMemory(rows, fuse=False))
    return worker, Slab(4096, SLOTS * 4096, shared=True), rows


def test_a_layer_that_is_computed_twice_in_a_step_is_not_stored_half_computed() -> None:
    """As microbatches do it: the first has come through the layer when it is saved."""
    worker, slab, rows = layerwise()
    worker.begin(StepPlan([], [CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))], stores=True)], slab.ref))
    for value in (5, 6):
        for layer, row in enumerate(rows):
            row.fill_(value)
            worker.save_layer(layer)
    worker.save()
    report = worker.take_report()
    assert report is not None
    assert not report.jobs[1].ok
    worker.close()
    slab.close()


def test_a_layer_that_is_read_without_a_wait_fails_the_load() -> None:
    """Also when the layers after it are waited for: an indexer's cache has a layer of its own."""
    worker, slab, _ = layerwise()
    worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, 3]),))])], slab=slab.ref))
    worker.load()
    worker.wait_for_layer(1)
    worker.save()
    report = worker.take_report()
    assert report is not None
    assert not report.jobs[1].ok
    assert worker.take_failed_blocks() == {2, 3}
    worker.close()
    slab.close()


def test_what_failed_of_a_load_by_layers_is_known_before_drafts_are_computed() -> None:
    """With them vLLM takes the failed blocks, and sends a token, before it has the connector end the step."""
    worker, slab, _ = layerwise()
    worker.begin(StepPlan([CopyOrder(1, [ChunkCopy(1, (Run(0, [2, BLOCKS]),))])], slab=slab.ref))
    worker.load()
    for layer in range(2):
        worker.wait_for_layer(layer)
    worker.poll()
    assert worker.take_failed_blocks() == {2, BLOCKS}
    worker.save()
    report = worker.take_report()
    assert report is not None
    assert not report.jobs[1].ok
    worker.close()
    slab.close()
