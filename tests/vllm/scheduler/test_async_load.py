"""Loads between steps: blocks are given back only once nothing is copied into them any more."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from lmkv.chunks.hashing import chunk_keys
from lmkv.memory.copier import ChunkCopy
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.scheduler.loads import AsyncLoad
from tests.vllm.scheduler.simulated_vllm import SimulatedRequest, SimulatedVLLM

CHUNK, CHUNKS = 8, 6
KEYS = chunk_keys(range(CHUNK * CHUNKS), bytes(32), CHUNK)
BLOCKS = list(range(1, 2 * CHUNKS + 1))


@pytest.fixture
def engine() -> Iterator[SimulatedVLLM]:
    options = {"num_blocks": 60, "groups": [Group(4)], "chunk_size": CHUNK, "ram_chunks": 20}
    with closing(SimulatedVLLM(random.Random(0), **options)) as engine:
        engine.store.reserve(KEYS).commit()
        yield engine


def load_of(engine: SimulatedVLLM, window: int) -> AsyncLoad:
    block_map, clock, promote = BlockMap(CHUNK, (Group(4),)), lambda: engine.now, engine.store.promote
    return AsyncLoad(engine.store, block_map, KEYS, [BLOCKS], 0, CHUNK * CHUNKS, window, 1.0, clock, math.inf, promote)


def test_a_load_that_is_stopped_does_not_end_while_a_window_is_copied(engine: SimulatedVLLM) -> None:
    load = load_of(engine, window=2)
    window = load.advance()
    assert window is not None
    assert [copy.runs[0].blocks for copy in window.copies] == [[1, 2], [3, 4]]
    load.stop()
    assert load.advance() is None, "vLLM would free blocks 1 to 4, and a copy writes them still"
    window.lease.release()
    load.copied(ok=True)
    last = load.advance()
    assert last is not None
    assert (last.last, last.failed_blocks) == (True, BLOCKS[4:])


def test_a_window_that_failed_ends_the_load(engine: SimulatedVLLM) -> None:
    load = load_of(engine, window=2)
    window = load.advance()
    assert window is not None
    window.lease.release()
    load.copied(ok=False)
    last = load.advance()
    assert last is not None
    assert (last.last, last.failed_blocks) == (True, BLOCKS)
    assert load.advance() is None


@pytest.mark.parametrize(("ram_chunks", "windows"), [(20, [6]), (8, [2, 2, 2])])
def test_what_is_in_host_memory_is_loaded_as_one_window(ram_chunks: int, windows: list[int]) -> None:
    """Unless it is more than half of it: others need slots, too."""
    options = {"num_blocks": 60, "groups": [Group(4)], "chunk_size": CHUNK, "ram_chunks": ram_chunks}
    with closing(SimulatedVLLM(random.Random(0), load_mode="async", **options)) as engine:
        tokens = list(range(CHUNK * CHUNKS))
        engine.add(SimulatedRequest("stores", list(tokens), len(tokens), 1, "a"))
        engine.finish()
        order, loaded = engine.scheduler._builder.load, []

        def noted(copies: list[ChunkCopy], *args: Any, **options: Any) -> Any:
            loaded.append(len(copies))
            return order(copies, *args, **options)

        engine.scheduler._builder.load = noted  # type: ignore[method-assign]
        engine.add(SimulatedRequest("loads", list(tokens), len(tokens), 1, "a"))
        engine.finish()
        assert loaded == windows


def test_an_aborted_load_costs_nobody_else_a_store(caplog: pytest.LogCaptureFixture) -> None:
    """No step has read its blocks: what others store in the same step is as it should be."""
    options = {"num_blocks": 200, "groups": [Group(4)], "chunk_size": CHUNK, "ram_chunks": 10, "lower_chunks": 60}
    with closing(SimulatedVLLM(random.Random(0), load_mode="async", io_moves=0, **options)) as engine:
        engine.local_hits = 0.0
        long = [token % 50 for token in range(8 * CHUNK + 1)]
        engine.add(SimulatedRequest("stores", list(long), len(long), 1, "a"))
        engine.finish()
        others = [(7 * token + 3) % 50 for token in range(9 * CHUNK)]
        engine.add(SimulatedRequest("evicts", others, len(others), 1, "a"))
        engine.finish()
        loads = SimulatedRequest("loads", list(long), len(long), 1, "a")
        engine.add(loads)
        for _ in range(10):
            engine.step()
        assert loads.status == "loading", "its chunks are on their way for ever: no I/O gets on"
        for number in range(6):
            new = [(11 * token + number) % 50 for token in range(CHUNK + 1)]
            engine.add(SimulatedRequest(f"new {number}", new, len(new), 1, "b"))
        engine.abort(loads)
        engine.finish()
        assert engine.total("lmkv_failed_stores") == {}
        assert engine.total("lmkv_failed_loads") == {}
        assert "recomputed" not in caplog.text, "nobody computes it"
