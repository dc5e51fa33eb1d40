"""Audited loads: what copies leave in vLLM's blocks is read back. Each fault is one of the copier."""

from __future__ import annotations

import logging
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmkv.memory.copier import ChunkCopy, Run
from lmkv.protocols import Presence
from lmkv.vllm import compat
from lmkv.vllm.plan import JobReport, ReadTask, WorkerReport
from lmkv.vllm.plan.block_map import Group
from lmkv.vllm.scheduler.telemetry import merge
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, Table
from tests.vllm.scheduler.test_audit import TOKENS, alarm, ask, engine as audited, total as counted
from tests.vllm.scheduler.test_schedules import drive, one_of_a_few_conversations
from tests.vllm.wrong_loads import FAULTS, Fault, Faulty, into_another_block, one_in_twenty, one_row, turned, unwritten

MODES: dict[str, dict[str, Any]] = {
    "within a step": {"load_mode": "sync"},
    "between steps": {"load_mode": "async"},
    "layer by layer": {"load_mode": "sync", "layerwise": True},
}


GROUPS_OF_16: list[list[Table]] = [[Group(16)], [Group(16), Group(16, window=32)], [Group(16), Group(16, state=1)]]


class Whatever(list[str]):
    """Forgets what the simulated model has read: a late alarm is one behind the step that reads."""

    def append(self, value: str) -> None:
        pass


def engine(rng: int = 0, **options: Any) -> SimulatedVLLM:
    """Every hit is loaded: those that are computed are tests/vllm/scheduler/test_audit.py's."""
    made = audited(rng, **options)
    made.scheduler.audit.on = False
    return made


def filled(rng: int = 0, **options: Any) -> SimulatedVLLM:
    """An engine that has stored the prompt."""
    made = engine(rng, **options)
    ask(made, "stores")
    return made


def loading(running: SimulatedVLLM, name: str) -> SimulatedRequest:
    """A request with a long answer, whose load has ended and was compared once."""
    running.forget()
    request = running.begin(name, TOKENS, 20)
    while not request.loaded or running.scheduler.loads.busy:
        running.step()
    return request


def overwritten_without_alarm(running: SimulatedVLLM, request: SimulatedRequest) -> None:
    running.wrong = Whatever()
    for block in request.blocks[0]:
        running.write(0, running.memories[0][1], [((block, slice(None)), 0)])
    running.finish()
    assert counted(running, "lmkv_wrong_loads") == 0


def broken(running: SimulatedVLLM, fault: Fault) -> Faulty:
    running.wrong = Whatever()
    worker = running.workers[-1]
    copier = worker.wrap_copier(partial(Faulty, fault=fault, slots=running.store.slab.array))
    copier.at = worker._layout.span(len(running.workers) - 1, 0)[0]
    return copier


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [False, True])
def test_a_wrong_copy_is_found_by_the_first_audited_load(
    fault: Fault, mode: str, device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(device=device, ranks=2, **MODES[mode]) as running:
        copier = broken(running, fault)
        for number in range(200):
            assert counted(running, "lmkv_wrong_loads") == 0
            with caplog.at_level(logging.ERROR, logger="lmkv.vllm"):
                ask(running, f"r{number}")
            if copier.touched:
                break
        assert counted(running, "lmkv_wrong_loads") == 1
        [line] = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
        where = {unwritten: "tokens 12 to 15", one_in_twenty: "tokens 12 to 15", one_row: "tokens 8 to 11"}
        assert f"wrong load: request r{number}, {where.get(fault, 'tokens 8 to 15')}" in line
        assert ("1 layers (layer 0)" if fault is one_row else "2 layers (layer 0, layer 1)") in line
        assert " on ranks [1]" in line
        assert f"copied {mode}" in line
        late = device and mode != "between steps"
        assert "vLLM computes the tokens" in line or (late and "the request continues" in line)
        copier.fault = lambda copies, _: copies
        assert ask(running, "loads it again").loaded >= len(TOKENS) - 4, "the stored chunk is right, and stays"
        assert counted(running, "lmkv_wrong_loads") == 1


def test_a_request_that_goes_on_with_wrong_kv_stores_and_shares_nothing_more() -> None:
    with filled(device=True, prefix_caching=True, load_mode="sync") as running:
        copier = broken(running, turned)
        running.forget()
        request = running.begin("goes on", [*TOKENS, 1, 2, 3], 30)
        while not counted(running, "lmkv_wrong_loads"):
            running.step()
            merge(running.samples, running.scheduler.take_samples())
        copier.fault = lambda copies, _: copies
        assert not running.cached, "no other gets its blocks"
        assert request.status == "running"
        running.finish()
        keys = running.scheduler.keys_of(request.all_token_ids, "a", {})
        assert running.store.catalog.lookup(keys[:5]) == [Presence.READY] * 5
        assert set(running.store.catalog.lookup(keys[5:])) == {Presence.MISS}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_at_a_rate_it_is_found_sooner_or_later(mode: str, fault: Fault) -> None:
    with filled(3, **MODES[mode]) as running:
        running.scheduler.audit.sampler.rate = 0.1
        copier = broken(running, fault)
        while not counted(running, "lmkv_wrong_loads"):
            ask(running, "again")
            assert copier.touched <= 40


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("preempted", [False, True])
def test_a_later_write_into_its_blocks_is_found(
    device: bool, preempted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that comes when the load has been compared already."""
    with filled(device=device) as running:
        request = loading(running, "victim")
        assert counted(running, "lmkv_wrong_loads") == 0
        running.wrong = Whatever()
        running.write(0, running.memories[0][1], [((request.blocks[0][2], slice(3, 4)), 0x77)])
        running.step()
        if preempted:
            running.preempt(request)
        with caplog.at_level(logging.ERROR, logger="lmkv.vllm"):
            running.finish()
        assert counted(running, "lmkv_wrong_loads") == 1
        [line] = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
        assert "wrong block after a correct load: request victim, tokens 8 to 11" in line
        assert "1 layers (layer 1)" in line
        assert counted(running, "lmkv_wrong_chunks") == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [False, True])
def test_a_load_that_writes_into_another_requests_block_is_found(
    mode: str, device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with filled(device=device, **MODES[mode]) as running:
        victim = loading(running, "victim")
        copier = broken(running, into_another_block)
        copier.victim = victim.blocks[0][5]
        running.begin("writes", TOKENS)
        while not copier.touched:
            running.step()
        copier.fault = lambda copies, _: copies
        running.finish()
        line = alarm(caplog)
        assert "wrong block after a correct load: request victim, tokens 20 to 23" in line


def test_blocks_that_vllm_writes_into_before_it_hands_the_plan_over_are_not_read_again() -> None:
    with filled() as running:
        request = loading(running, "loads")
        blocks = request.blocks[0]
        running.scheduler.request_finished(request)
        running.scheduler.plan_step({}, lambda _: None, overwritten=set(blocks[3:5]))
        [task] = running.scheduler.take_plan().reads
        assert [block for copy in task.copies for run in copy.runs for block in run.blocks] == [
            *blocks[:3],
            *blocks[6:10],
        ], "of a chunk, what comes before the first of them"
        running.abort(request)
        running.scheduler.on_report(WorkerReport({task.job: JobReport(1, ok=True)}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", [False, True])
def test_blocks_of_an_answer_of_one_token_are_read_again(
    mode: str, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load within a step and the request are reported to have ended together; on a device that may be too late."""
    with filled(device=device, **MODES[mode]) as running:
        tasks, read = [], (builder := running.scheduler._builder).read

        def noted(load: int, copies: list[ChunkCopy]) -> ReadTask:
            tasks.append(load)
            return read(load, copies)

        monkeypatch.setattr(builder, "read", noted)
        for number in range(10):
            ask(running, f"r{number}")
        assert len(tasks) >= (1 if device else 10)


@pytest.mark.parametrize("how", ["reset", "suspect"])
def test_what_was_lost_with_a_reset_raises_no_alarm(how: str) -> None:
    with filled() as running:
        request = loading(running, "loads")
        running.scheduler.reset() if how == "reset" else running.scheduler.changes.suspect()
        overwritten_without_alarm(running, request)


@pytest.mark.slow("nothing but many hits shows that there are no false alarms")
@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=[pytest.mark.nightly("histories"), pytest.mark.timeout(1800)])]
)
def test_honest_hits_raise_no_alarm(count: int) -> None:
    """Blocks of 16 on the simulated device, with preemptions, aborts, drafts, resets, windows and states."""
    total, seed = Counter[str](), 0
    while total["lmkv_audited_hits"] + total["lmkv_audited_loads"] < count:
        rng, seed = random.Random(seed), seed + 1
        options: dict[str, Any] = {
            "num_blocks": rng.randint(24, 60),
            "chunk_size": rng.choice([16, 32]),
            "ram_chunks": rng.randint(4, 24),
            "lower_chunks": rng.choice([0, 40]),
            "depth": rng.choice([1, 1, 2, 3]),
            "drafts": rng.random() < 0.5,
            "ranks": rng.choice([1, 2]),
            "layerwise": rng.random() < 0.4,
            "lookahead": rng.choice([0, 0, 1]),
            "load_mode": rng.choice(["auto", "sync", "async"]),
            "prefix_caching": rng.random() < 0.4,
            "aborts": rng.choice([0.0, 0.05]),
        }
        groups = GROUPS_OF_16[seed % len(GROUPS_OF_16)]
        with SimulatedVLLM(rng, groups=groups, device=True, audit_rate=1.0, **options) as running:
            drive(running, [one_of_a_few_conversations(rng, number) for number in range(30)], 120)
            for name in ("lmkv_audited_hits", "lmkv_audited_loads", "lmkv_wrong_chunks", "lmkv_wrong_loads"):
                total[name] += counted(running, name)
            assert total["lmkv_wrong_chunks"] == total["lmkv_wrong_loads"] == 0, (seed, options)


@pytest.mark.parametrize("groups", [[Group(8), Group(8, state=1)], [Group(4), Group(4, window=8)]])
@pytest.mark.parametrize("device", [False, True])
def test_states_and_windows_are_read_back(groups: list[Table], device: bool) -> None:
    with filled(groups=groups, device=device) as running:
        for number in range(4):
            ask(running, f"r{number}")
        assert counted(running, "lmkv_audited_loads") >= 4
        assert counted(running, "lmkv_wrong_loads") == 0
        last = len(groups) - 1
        broken(
            running,
            lambda copies, _: [
                ChunkCopy(copy.slot, (*copy.runs[:last], Run(copy.runs[last].first, []))) for copy in copies
            ],
        )
        ask(running, "wrong")
        assert counted(running, "lmkv_wrong_loads") == 1


def test_loads_end_if_that_is_wanted() -> None:
    with filled(audit_action="disable") as running:
        broken(running, turned)
        ask(running, "wrong")
        assert running.scheduler.audit.loads_off
        assert ask(running, "computes").loaded == 0


def test_every_other_audited_hit_is_loaded() -> None:
    with engine() as running:
        running.scheduler.audit.on = True
        ask(running, "stores")
        assert [ask(running, f"r{number}").loaded > 0 for number in range(4)] == [False, True, False, True]
        assert counted(running, "lmkv_audited_hits") == counted(running, "lmkv_audited_loads") == 2


def test_a_hit_that_was_computed_is_loaded_and_read_back_when_it_is_drawn_again() -> None:
    with engine(audit_rate=0.5) as running:
        running.scheduler.audit.on = True
        ask(running, "stores")
        # Computed; drawn again; and what was drawn is not drawn for the load as well.
        running.scheduler.audit.sampler.draw = iter([0.1, 0.1]).__next__
        assert ask(running, "computes").loaded == 0
        assert ask(running, "loads").loaded > 0
        assert counted(running, "lmkv_audited_loads") == 1


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_sleep_has_taken_is_not_read_back(ended: bool) -> None:
    """`ended`: the load was compared once before the engine fell asleep."""
    with filled(device=True, load_mode="async") as running:
        running.forget()
        worker = running.workers[0]
        request = running.begin("loads", TOKENS, 20)
        while not (request.loaded and not running.scheduler.loads.busy if ended else worker._running):
            running.step()
        worker.suspend()
        worker.resume()
        overwritten_without_alarm(running, request)


@pytest.mark.parametrize("every", [False, True])
def test_which_blocks_vllm_may_write_into_early(every: bool) -> None:
    output = SimpleNamespace(
        kv_cache_block_copies=[(1, 2)],
        new_block_ids_to_zero=[3],
        scheduled_new_reqs=[SimpleNamespace(block_ids=([4], [5]))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([6], [])]),
    )
    assert compat.written_early(output, every=every) == ({2, 3, 4, 5, 6} if every else {2, 3})


def test_an_alarm_names_the_load_that_its_chunk_was_computed_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The load itself was not audited: what was stored behind it is the first that is seen."""
    with engine(audit_rate=0.0, load_mode="sync") as running:
        audit = running.scheduler.audit
        ask(running, "stores", TOKENS[:24])
        audit.on = True
        ask(running, "loads and goes on")
        key = running.scheduler.keys_of(TOKENS, "a", {})[4]
        slot = running.store.snapshot().held[key].slot
        running.store.slab.array[slot, :64] = np.flip(running.store.slab.array[slot, :64])
        audit.sampler.rate = 1.0
        ask(running, "audited")
        line = alarm(caplog)
        assert "the chunk was computed by request loads and goes on after 24 loaded tokens" in line


@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_has_no_memory_to_read_blocks_back_loads_as_ever(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with filled(device=True, **MODES[mode]) as running:
        monkeypatch.setattr("lmkv.memory.comparison.ReadBack.begin", full)
        assert ask(running, "loads").loaded >= len(TOKENS) - 4
        assert "could not be read back" in caplog.text
        assert counted(running, "lmkv_failed_loads") == 0
