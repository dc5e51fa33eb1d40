"""How fast the model computes is taken from the outputs of its steps, not from when they are scheduled."""

from __future__ import annotations

import pytest

from lmkv.vllm.plan import WorkerReport
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pipelined_steps_do_not_look_faster_than_they_are(depth: int) -> None:
    """vLLM schedules up to `depth` steps at once; each takes a second then, one after the other."""
    with SimulatedVLLM(depth=depth) as engine:
        scheduler, waiting = engine.scheduler, []
        for step in range(12):
            engine.now += 0.001
            scheduler.loads.end_step(1000, 1)
            waiting.append(engine.scheduler.take_plan().timed)
            if step >= depth - 1:
                engine.now += 1.0
                engine.scheduler.on_report(WorkerReport(steps={waiting.pop(0)}))
        assert 900 < scheduler.timing.cost.prefill_speed < 1100
        assert scheduler.loads.timed_steps == len(waiting)


def test_workers_report_the_end_of_the_steps_that_are_timed() -> None:
    with SimulatedVLLM(depth=2) as engine:
        for number in range(20):
            engine.begin(f"r{number}", range(number, number + 48), 2)
        engine.finish()
        assert engine.scheduler.timing.cost.prefill_speed > 0
        assert engine.scheduler.loads.timed_steps == 0
