"""The worker side over a simulated device: when it finds its slab, what it allocates, and what it reports."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, strategies as st

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.device import DeviceCopier, DeviceError, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab, SlabMap, SlabRef, attach, slab_name
from lmkv.vllm.plan import CopyTask, JobReport, StepPlan, WorkerReport
from lmkv.vllm.worker import Worker
from tests.kit import LIMIT, eventually, raised
from tests.simulated_device import SimulatedDevice, SimulatedStream
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

LAYOUT = KVLayout(8, (LayerPages(64, 2),) * 2)
BLOCKS, SLOTS = 12, 4
ENGINE = slab_name(f"test-worker-{os.getpid()}", LAYOUT)
ONE = (ChunkCopy(1, (Run(0, [2, 3]),)),)
NOWHERE = "/proc/1/fd/999999"


def load(job: int = 1, copies: Sequence[ChunkCopy] = ONE, **more: Any) -> CopyTask:
    return CopyTask(job, [*copies], **more)


def store(job: int = 1, copies: Sequence[ChunkCopy] = ONE) -> CopyTask:
    return CopyTask(job, [*copies], stores=True)


def rows_of_a_model() -> list[torch.Tensor]:
    return [torch.zeros((BLOCKS, 64), dtype=torch.uint8) for _ in range(2)]


def reported(worker: Worker) -> WorkerReport:
    """What it has to report, of one step or another."""
    report = worker.take_report()
    assert report is not None
    return report


def ended(worker: Worker) -> WorkerReport:
    """What it reports once a job has ended."""
    eventually(lambda: worker.poll() or bool(worker._report.jobs))
    return reported(worker)


def pinned(worker: Worker) -> bool:
    copier = worker.copier
    if isinstance(copier, DeviceCopier):
        copier.pins.wait()
    return copier is not None


def refused(worker: Worker, ref: SlabRef) -> WorkerReport:
    """Reports of tasks that fail."""
    worker.begin(StepPlan([load(1)], [store(2)], ref))
    worker.load()
    worker.save()
    report = reported(worker)
    assert [job.ok for job in report.jobs.values()] == [False, False]
    return report


@frozen
class Served:
    """A worker that serves a model on a simulated device."""

    worker: Worker
    device: SimulatedDevice
    rows: list[torch.Tensor]


@frozen
class Bench:
    """Makes workers and slabs, which end with the test."""

    patch: pytest.MonkeyPatch
    workers: ExitStack
    slabs: ExitStack

    def serve(self, seed: int = 0, *, engine: str = "", staging_bytes: int = 1000) -> Served:
        device, rows = SimulatedDevice(seed), rows_of_a_model()
        device.adopt(rows)
        self.patch.setattr("lmkv.vllm.worker.make_staging", lambda memory, nbytes: Staging(device, memory, nbytes))
        worker = self.workers.enter_context(closing(Worker(0, LAYOUT, engine=engine, staging_bytes=staging_bytes)))
        worker.register(PagedMemory(rows, fuse=False))
        return Served(worker, device, rows)

    def on_cpu(self, *, layerwise: bool = False) -> tuple[Worker, list[torch.Tensor]]:
        rows = rows_of_a_model()
        worker = self.workers.enter_context(closing(Worker(0, LAYOUT, layerwise=layerwise)))
        worker.register(PagedMemory(rows, fuse=False))
        return worker, rows

    def slab(self, *, slot_bytes: int = 4096, engine: str = "", filled: int = 0) -> Slab:
        slab = self.slabs.enter_context(closing(Slab(slot_bytes, SLOTS * slot_bytes, shared=True, engine=engine)))
        slab.view(1)[:256] = bytes([filled]) * 256
        return slab


@contextmanager
def a_bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as slabs, ExitStack() as workers:
        yield Bench(patch, workers, slabs)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with a_bench() as made:
        yield made


def test_the_slab_is_found_and_pinned_before_the_first_order(bench: Bench) -> None:
    served = bench.serve(engine=ENGINE)
    assert "no copier yet" in repr(served.worker)
    # vLLM makes the scheduler's side, whose slab this is, after the worker's.
    slab = bench.slab(engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    assert [found.last - found.first for found in served.device.registered] == [SLOTS * 4096]
    copier = served.worker.copier
    served.worker.begin(StepPlan(slab=slab.ref))
    assert served.worker.copier is copier, "the first task brings the same slab"
    # As a process that is just being forked has it.
    other = os.dup(int(Path(slab.ref.path).name))
    served.worker.begin(StepPlan(slab=evolve(slab.ref, path=f"/proc/{os.getpid()}/fd/{other}")))
    os.close(other)
    assert served.worker.copier is copier
    served.worker.close()
    assert not served.device.registered


def test_a_worker_that_finds_no_slab_can_be_closed(bench: Bench) -> None:
    served = bench.serve(engine=f"{ENGINE}-none")
    served.worker.close()
    assert "no copier yet" in repr(served.worker)


def test_an_order_of_another_slab_than_the_one_found_brings_its_own(bench: Bench) -> None:
    """Two engines may have the same name, when users give it."""
    served = bench.serve(engine=ENGINE)
    bench.slab(engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    served.worker.begin(StepPlan([load()], slab=bench.slab(engine=ENGINE, filled=9).ref))
    served.worker.load()
    served.device.synchronize()
    assert bool((served.rows[0][2:4] == 9).all())


def test_the_devices_memory_is_taken_when_tensors_are_registered(bench: Bench) -> None:
    served = bench.serve(staging_bytes=4000)
    assert served.device.allocated == 5000
    assert served.device.moves == len(served.rows), "and kernels are compiled"
    copies = [ChunkCopy(slot, (Run(0, [2 * slot, 2 * slot + 1]),)) for slot in range(SLOTS)]
    served.worker.begin(StepPlan([load(1, copies)], [store(2, copies)], bench.slab().ref))
    served.worker.load()
    served.worker.save()
    assert served.device.allocated == 5000


def test_a_load_is_reported_with_the_devices_seconds(bench: Bench) -> None:
    """Those until the next step ends are the model's."""
    served = bench.serve()
    served.worker.begin(StepPlan([load()], slab=bench.slab().ref))
    served.worker.load()
    served.device.synchronize()
    served.device.now += 1000.0
    seconds = ended(served.worker).jobs[1].seconds
    assert seconds < 0.0001, "a simulated copy takes a few microseconds; the host's clock says more"


def test_tensors_that_are_registered_again_have_the_slab_pinned_once(bench: Bench) -> None:
    served, slab = bench.serve(), bench.slab()
    served.worker.begin(StepPlan(slab=slab.ref))
    pinned(served.worker)
    served.worker.register(PagedMemory(served.rows, fuse=False))
    served.worker.begin(StepPlan([load()], slab=slab.ref))
    served.worker.load()
    pinned(served.worker)
    assert len(served.device.registered) == 1


def test_a_device_that_fails_fails_its_orders_and_the_worker_closes(bench: Bench) -> None:
    served = bench.serve()
    served.worker.begin(StepPlan([load(1)], [store(2)], bench.slab().ref))
    served.worker.load()
    served.device.fail("an uncorrectable memory error")
    served.worker.save()
    served.worker.poll()
    assert not reported(served.worker).jobs[2].ok
    served.worker.close()
    raised(DeviceError, "", served.device.synchronize)


@given(seed=st.integers(0, 2**32))
def test_what_is_reported_has_ended_and_is_right(seed: int) -> None:
    """Stores and loads in any order of steps, with a model that computes in between; pinned sooner or later."""
    with a_bench() as bench:
        any_order_of_steps(random.Random(seed), bench.serve(seed), bench.slab())


def any_order_of_steps(rng: random.Random, served: Served, slab: Slab) -> None:
    worker, device, rows = served.worker, served.device, served.rows
    content: dict[int, int] = {}
    free = list(range(SLOTS))
    running: dict[int, tuple[CopyTask, int]] = {}
    values = dict.fromkeys(range(0, BLOCKS, 2), 0)
    for job in range(12):
        busy = {block for task, _ in running.values() for copy in task.copies for block in copy.runs[0].blocks}
        block = rng.choice([block for block in values if block not in busy] or [0])
        stores = bool(free) and rng.random() < 0.6
        slots = [slot for slot in content if slot not in {task.copies[0].slot for task, _ in running.values()}]
        if block in busy or not (stores or slots):
            continue
        slot = free.pop() if stores else rng.choice(slots)
        task = CopyTask(job, [ChunkCopy(slot, (Run(0, [block, block + 1]),))], stores)
        worker.begin(StepPlan([] if stores else [task], [task] if stores else [], slab.ref))
        worker.load()
        if stores:
            values[block] = job + 1
            for row in rows:
                device.launch(lambda row=row, block=block, value=job + 1: row[block : block + 2].fill_(value))
        else:
            values[block] = content[slot]
        worker.save()
        running[job] = (task, values[block])
        for _ in range(rng.randrange(4)):
            worker.poll()
        report = worker.take_report() or WorkerReport()
        assert all(job.ok for job in report.jobs.values())
        for number in report.jobs:
            finished, value = running.pop(number)
            copy = finished.copies[0]
            if finished.stores:
                assert bytes(slab.view(copy.slot)[:256]) == bytes([value]) * 256
                content[copy.slot] = value
            else:
                first = copy.runs[0].blocks[0]
                assert all(bool((row[first : first + 2] == value).all()) for row in rows)


def test_while_the_engine_sleeps_its_memory_is_not_touched(bench: Bench) -> None:
    served, slab = bench.serve(), bench.slab()
    worker, device = served.worker, served.device

    def works(plan: StepPlan) -> bool:
        worker.begin(plan)
        worker.load()
        worker.save()
        jobs = ended(worker).jobs
        return jobs[max(jobs)].ok

    worker.begin(StepPlan([], [store(1)], slab.ref))
    worker.save()
    copier, staging = worker.copier, device.allocated
    assert staging > 0
    worker.suspend()
    worker.suspend()
    assert device.allocated == 0, "staging memory is given back"
    memory, device.memory = device.memory, []
    assert not works(StepPlan([], [store(2)]))
    assert not works(StepPlan([load(3)]))
    assert worker.take_failed_blocks() == {2, 3}
    device.synchronize()
    device.memory = memory
    worker.resume()
    worker.resume()
    assert device.allocated == staging
    assert works(StepPlan([], [store(4)])), "the copy that ran at first had ended: the device has not failed"
    assert works(StepPlan([load(5)]))
    assert worker.copier is copier, "the slab stays pinned"


def test_a_worker_without_staging_memory_after_the_sleep_says_so_and_fails_its_orders(bench: Bench) -> None:
    served, slab = bench.serve(), bench.slab()
    served.worker.begin(StepPlan(slab=slab.ref))
    served.worker.suspend()
    served.device.memory_bytes = 100
    served.worker.resume()
    assert "no memory for copies" in refused(served.worker, slab.ref).refusal


def test_a_load_between_steps_does_not_wait_for_the_step_that_orders_it(bench: Bench) -> None:
    """vLLM has it begin once the step's computation is launched, which uses none of its blocks."""
    served, slab = bench.serve(), bench.slab(filled=9)
    device, seen = served.device, list[bool]()
    served.worker.begin(StepPlan(slab=slab.ref))
    pinned(served.worker)
    device.synchronize()
    with bench.patch.context() as patch:
        patch.setattr(device, "run", lambda steps: False)
        # The step before: it may still read the blocks.
        device.compute.queue.append(lambda: seen.append(bool(served.rows[0][2].any())))
        served.worker.begin(StepPlan([load(between_steps=True, finishes="r")], slab=slab.ref))
        device.compute.queue.append(lambda: seen.append(True))
        forward = device.compute.queue[-1]
        served.worker.load()

        def ready() -> list[SimulatedStream]:
            return [stream for stream in device.streams if stream.ready and stream.queue[0] is not forward]

        while streams := ready():
            streams[0].step()
        assert bool((served.rows[0][2:4] == 9).all()), "while the step's computation has not begun"
        assert seen == [False]


def test_a_load_within_the_step_waits_for_all_that_was_launched(bench: Bench) -> None:
    served, seen = bench.serve(), list[bool]()
    served.worker.begin(StepPlan([load()], slab=bench.slab(filled=9).ref))
    served.device.compute.queue.append(lambda: seen.append(bool(served.rows[0][2].any())))
    served.worker.load()
    served.device.synchronize()
    assert seen == [False]


# -- what cannot work ------------------------------------------------------------------------------------


def test_where_the_right_slab_cannot_be_mapped_the_one_found_before_is_not_used(bench: Bench) -> None:
    served, found = bench.serve(engine=ENGINE), bench.slab(engine=ENGINE)
    eventually(lambda: pinned(served.worker))
    served.rows[0].fill_(7)
    refused(served.worker, evolve(found.ref, path=NOWHERE, name=f"{found.ref.name}-another"))
    assert not any(found.view(1)[:256])


def test_a_slab_with_another_layout_is_refused(bench: Bench) -> None:
    """Slots of the same size can have other pages in them."""
    other = KVLayout(8, (LayerPages(72, 2),) * 2)
    assert other.slot_bytes == LAYOUT.slot_bytes
    for form, reason in (
        ({"engine": slab_name("any", other)}, "do not fit"),
        ({"slot_bytes": 8192}, "slots of 8192 bytes"),
    ):
        served = bench.serve(engine=ENGINE if "engine" in form else "")
        assert reason in refused(served.worker, bench.slab(**form).ref).refusal  # type: ignore[arg-type]


def test_a_slab_that_came_with_an_order_is_not_replaced_by_one_that_is_found(bench: Bench) -> None:
    right, wrong = (bench.slab(engine=f"{LAYOUT.digest}-{name}") for name in "rw")
    searching, found = threading.Event(), threading.Event()

    def search(*_: object) -> SlabRef:
        searching.set()
        assert found.wait(LIMIT)
        return wrong.ref

    bench.patch.setattr("lmkv.vllm.worker.wait_for_slab", search)
    worker = bench.serve(engine=ENGINE).worker
    assert searching.wait(LIMIT)
    worker.begin(StepPlan(slab=right.ref))
    copier = worker.copier
    assert copier is not None
    found.set()
    eventually(lambda: not any(thread.name == "lmkv-find-slab" for thread in threading.enumerate()))
    assert worker._slab_ref == right.ref
    assert worker.copier is copier


def test_a_rank_that_cannot_map_the_slab_tries_again_and_then_refuses(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank on another machine never can; one that has no descriptor left for a moment can soon."""
    worker, slab = bench.serve().worker, bench.slab()
    elsewhere = evolve(slab.ref, path=NOWHERE)
    with caplog.at_level(logging.INFO, "lmkv"):
        reports = [refused(worker, elsewhere) for _ in range(6)]
    assert [bool(report.refusal) for report in reports] == [False, False, True, True, True, True]
    assert not any(report.mapped for report in reports)
    assert worker.take_failed_blocks() == {2, 3}
    assert len(caplog.records) == 1, "and says so once"
    again = bench.serve()
    again.worker.begin(StepPlan([], [store(1)], elsewhere))
    again.worker.begin(StepPlan([], [store(2)], slab.ref))
    again.worker.save()
    again.device.synchronize()
    report = ended(again.worker)
    assert (report.jobs[2].ok, report.mapped, report.refusal) == (True, {0}, "")


def test_the_slab_is_sent_until_every_rank_has_mapped_it(bench: Bench) -> None:
    """One may have no descriptor left when the other has reported its first copies."""
    world = SimulatedVLLM(1, num_blocks=30, ram_chunks=9, ranks=2)
    attached: list[SlabRef] = []

    def fails_once(ref: SlabRef) -> SlabMap:
        attached.append(ref)
        if len(attached) == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return attach(ref)

    bench.patch.setattr("lmkv.vllm.worker.attach", fails_once)
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
            merged = merged.merge(reported(worker))
        world.scheduler.on_report(merged)
        results.append((plan.slab is not None, [job.ok for job in merged.jobs.values()]))
    assert results == [(True, [False]), (True, [True]), (False, [True])]
    for worker in world.workers:
        worker.close()
    world.store.close()


def test_a_worker_that_does_not_cache_the_model_answers_every_order(bench: Bench) -> None:
    """The scheduler side sees less of a model, and requests would wait for ever."""
    worker = Worker(0, None)
    worker.refuse("a state of its own")
    assert refused(worker, bench.slab().ref).refusal == "a state of its own"
    assert worker.take_failed_blocks() == {2, 3}
    worker = Worker(0, None, block_level_failures=False)
    worker.refuse("a state of its own")
    worker.begin(StepPlan([load(between_steps=True, finishes="r")]))
    worker.load()
    assert worker.take_finished() == ({"r"}, {"r"})
    worker.close()


def test_where_the_process_ends_its_slab_stays_registered(bench: Bench) -> None:
    """To unregister it takes longer than vLLM waits; the end of the process does it at once."""
    served = bench.serve()
    served.worker.begin(StepPlan(slab=bench.slab().ref))
    assert pinned(served.worker)
    served.worker.close(process_ends=True)
    assert served.device.registered
    served.worker.close()
    assert not served.device.registered


def test_a_block_that_does_not_exist_is_refused_and_orders_are_executed_once(bench: Bench) -> None:
    worker, _ = bench.on_cpu()
    worker.begin(StepPlan(stores=[store(1, [ChunkCopy(0, (Run(0, [2, BLOCKS]),))]), store(7)], slab=bench.slab().ref))
    for _ in range(2):
        worker.load()
        worker.save()
    assert {job: report.ok for job, report in reported(worker).jobs.items()} == {1: False, 7: True}
    assert not worker.take_failed_blocks(), "what could not be stored is sound where it is"
    assert worker.take_report() is None


def test_reports_merge_in_any_order() -> None:
    parts = [
        WorkerReport({1: JobReport(1, True, 10, 0.1), 2: JobReport(1, True, 5, 0.1)}),
        WorkerReport({1: JobReport(1, False, 10, 0.3)}),
        WorkerReport({3: JobReport(1, True, 1, 0.2)}),
    ]
    forward = parts[0].merge(parts[1]).merge(parts[2])
    assert forward == parts[2].merge(parts[1]).merge(parts[0])
    assert forward.jobs[1] == JobReport(2, False, 20, 0.3)


# -- layer by layer --------------------------------------------------------------------------------------


def test_layers_are_loaded_when_the_model_comes_to_them(bench: Bench) -> None:
    slab = bench.slab()
    slab.view(1)[:256] = bytes([1] * 128 + [2] * 128)
    worker, rows = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([load()], slab=slab.ref))
    worker.load()
    assert not any(bool(row.any()) for row in rows)
    worker.wait_for_layer(0)
    assert bool((rows[0][2:4] == 1).all())
    assert not bool(rows[1].any())
    worker.wait_for_layer(1)
    assert bool((rows[1][2:4] == 2).all())
    assert worker.take_report() is None, "reported when the step ends"
    worker.save()
    assert reported(worker).jobs[1].ok
    assert not worker.take_failed_blocks()


def test_layers_are_stored_once_saved_and_the_rest_when_the_step_ends(bench: Bench) -> None:
    slab = bench.slab()
    worker, rows = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([], [store()], slab.ref))
    worker.load()
    rows[0].fill_(5)
    worker.save_layer(0)
    rows[0].fill_(6)
    rows[1].fill_(7)
    worker.save()
    assert bytes(slab.view(1)[:256]) == bytes([5] * 128 + [7] * 128)
    assert reported(worker).jobs[1].ok


def test_what_is_loaded_between_steps_needs_no_layers(bench: Bench) -> None:
    worker, _ = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([load(between_steps=True, finishes="r")], slab=bench.slab().ref))
    worker.load()
    worker.save()
    assert worker.take_finished() == ({"r"}, set())


def test_a_layer_that_is_computed_twice_in_a_step_is_not_stored_half_computed(bench: Bench) -> None:
    """As microbatches do it: the first has come through the layer when it is saved."""
    worker, rows = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([], [store()], bench.slab().ref))
    for value in (5, 6):
        for layer, row in enumerate(rows):
            row.fill_(value)
            worker.save_layer(layer)
    worker.save()
    assert not reported(worker).jobs[1].ok


@pytest.mark.parametrize("waited", [0, 1])
def test_a_layer_that_is_read_without_a_wait_fails_the_load(waited: int, bench: Bench) -> None:
    """It was read before it was there: whole CUDA graphs would do that.

    Also when the layers after it are waited for: an indexer's cache has a layer of its own.
    """
    worker, _ = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([load()], slab=bench.slab().ref))
    worker.load()
    worker.wait_for_layer(waited)
    worker.save()
    assert not reported(worker).jobs[1].ok
    assert worker.take_failed_blocks() == {2, 3}


def test_what_failed_of_a_load_by_layers_is_known_before_drafts_are_computed(bench: Bench) -> None:
    """With them vLLM takes the failed blocks, and sends a token, before it has the connector end the step."""
    worker, _ = bench.on_cpu(layerwise=True)
    worker.begin(StepPlan([load(1, [ChunkCopy(1, (Run(0, [2, BLOCKS]),))])], slab=bench.slab().ref))
    worker.load()
    for layer in range(2):
        worker.wait_for_layer(layer)
    worker.poll()
    assert worker.take_failed_blocks() == {2, BLOCKS}
    worker.save()
    assert not reported(worker).jobs[1].ok
