"""How long a request waits for chunks on a tier that does not deliver: its deadline, and a few steps."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM, request_for

LONGEST = 0.85
CHUNK = 8
REQUESTS = 120
EVERY = 8
"""Steps from one request to the next, of 0.01 simulated seconds each."""


def _prompt(number: int, chunks: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(50) for _ in range(chunks * CHUNK + 1)]


def _run(engine: SimulatedVLLM, requests: list[SimulatedRequest]) -> list[float]:
    """A new one each few steps, until all have ended; for how many simulated seconds each had to wait.

    There are blocks for all of them: what has not begun waits for its chunks, in the queue or loading.
    """
    waits = [0.0] * len(requests)
    coming, alive = list(enumerate(requests)), dict[int, SimulatedRequest]()
    for step in range(100_000):
        if coming and step % EVERY == 0:
            number, request = coming.pop(0)
            alive[number] = request
            engine.add(request)
        before = engine.now
        engine.step()
        for number, request in list(alive.items()):
            if request.status == "ended":
                del alive[number]
            elif request.status in ("waiting", "loading"):
                waits[number] += engine.now - before
        if not coming and not alive:
            return waits
    raise AssertionError("stuck")


@pytest.mark.parametrize("chunks", [3, 10], ids=["short", "between_steps"])
@pytest.mark.parametrize("spoiled", [{"latency": math.inf}, {"latency": 3.0}, {"error_rate": 1.0}], ids=str)
def test_the_wait_for_a_bad_disk_is_bounded(spoiled: dict[str, float], chunks: int) -> None:
    options: dict[str, Any] = {"num_blocks": 2000, "ram_chunks": 16, "lower_chunks": REQUESTS * (chunks + 1)}
    with SimulatedVLLM(1, prefix_caching=True, io_moves=200, load_or_recompute=True, **options) as engine:
        for number in range(REQUESTS):
            engine.serve(f"stores {number}", _prompt(number, chunks))
        engine.forget()
        hits = engine.counts["hits"]
        engine.serve("loads", _prompt(0, chunks))
        assert engine.counts["hits"] > hits, "a good disk delivers"
        engine.forget()
        for name, value in spoiled.items():
            setattr(engine.disks[0], name, value)
        waits = _run(engine, [request_for(f"{number}", _prompt(number, chunks)) for number in range(REQUESTS)])
        assert any(waits), "none had to wait: nothing was tested"
        assert max(waits) <= LONGEST
        if spoiled != {"latency": 3.0}:
            assert engine.store.stats().tiers[1].breaker != "closed"
            assert max(waits[-20:]) < 0.1, "nobody waits for a tier whose breaker is open"
        engine.disks[0].latency = 0.0
        engine.finish()
