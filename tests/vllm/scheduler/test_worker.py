"""The worker side over a simulated device: when it finds its slab, what it allocates, and what it reports."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, strategies as st

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.device import DeviceError, Staging
from lmkv.memory.device_copier import DeviceCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from lmkv.testing.simulated_device import SimulatedDevice
from lmkv.vllm.metadata import CopyOrder, StepPlan
from lmkv.vllm.worker import Worker
from tests.kit import eventually

LAYOUT = KVLayout(8, (LayerPages(64, 2),) * 2)
BLOCKS, SLOTS = 12, 4
ENGINE = f"test-worker-{os.getpid()}"


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
    copier = worker._copier
    worker.suspend()
    worker.suspend()
    memory, device._memory = device._memory, []
    assert not ended(2, stores=True)
    assert not ended(3, stores=False)
    assert worker.take_failed_blocks() == {2, 3}
    device.synchronize()
    device._memory = memory
    worker.resume()
    assert ended(4, stores=True), "the copy that ran when it fell asleep had ended: the device has not failed"
    assert ended(5, stores=False)
    assert worker._copier is copier, "the slab stays pinned"
    worker.close()
    slab.close()
