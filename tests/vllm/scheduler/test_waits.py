"""How long a request is held back for chunks on a tier that does not deliver: a second at most."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from lmkv.testing.faults import FaultyBackend
from lmkv.vllm.geometry import Group
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

LONGEST = 1.0
CHUNK = 8
REQUESTS = 240


def _hang(disk: FaultyBackend) -> None:
    disk.black_hole()


def _slow(disk: FaultyBackend) -> None:
    disk.latency = 3.0


def _fail(disk: FaultyBackend) -> None:
    disk.error_rate = 1.0


def _request(number: int, round_: int, chunks: int) -> SimulatedRequest:
    rng = random.Random(number)
    tokens = [rng.randrange(50) for _ in range(chunks * CHUNK + 1)]
    return SimulatedRequest(f"{round_}-{number}", tokens, len(tokens), 1, "a")


def _run(engine: SimulatedVLLM, requests: list[SimulatedRequest]) -> list[float]:
    """A new one each few steps, until all have ended; for how many simulated seconds each was held back.

    There are blocks for all of them: whoever has not begun waits for its chunks, in the queue or loading.
    """
    waits = [0.0] * len(requests)
    alive: dict[int, SimulatedRequest] = {}
    for count in range(100_000):
        if count % 4 == 0 and count // 4 < len(requests):
            alive[count // 4] = requests[count // 4]
            engine.add(requests[count // 4])
        before = engine.now
        engine.step()
        # The threads of the tier want to get on, too.
        time.sleep(0.0002)
        for number, request in list(alive.items()):
            if request.status == "ended":
                del alive[number]
            elif request.status in ("waiting", "loading"):
                waits[number] += engine.now - before
        if count // 4 >= len(requests) and not alive:
            return waits
    raise AssertionError("stuck")


@pytest.mark.parametrize("chunks", [3, 20], ids=["short", "between steps"])
@pytest.mark.parametrize("spoil", [_hang, _slow, _fail])
def test_the_wait_for_a_bad_disk_is_bounded(spoil: Callable[[FaultyBackend], None], chunks: int) -> None:
    engine = SimulatedVLLM(
        random.Random(1),
        num_blocks=2000,
        groups=[Group(4)],
        chunk_size=CHUNK,
        ram_chunks=32,
        lower_chunks=REQUESTS * chunks,
    )
    try:
        for number in range(REQUESTS):
            engine.add(_request(number, 0, chunks))
            engine.finish()
        hits = engine.counts["hits"]
        engine.add(_request(0, 1, chunks))
        engine.finish()
        assert engine.counts["hits"] > hits, "a good disk delivers"
        spoil(engine.disks[0])
        waits = _run(engine, [_request(number, 2, chunks) for number in range(REQUESTS)])
        assert any(waits), "none was held back: nothing was tested"
        assert sorted(waits)[REQUESTS * 99 // 100] <= LONGEST
        if spoil is not _slow:
            assert engine.store.stats().tiers[1].breaker != "closed"
            assert max(waits[-20:]) < 0.1, "an open breaker holds nobody back"
        engine.disks[0].release()
        engine.disks[0].latency = 0.0
        engine.now += 10
        engine.finish()
    finally:
        engine.now += 1000
        engine.close()
