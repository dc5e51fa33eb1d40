"""Loads between steps: blocks are given back only once nothing is copied into them any more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from lmkv.chunks.hashing import chunk_keys
from lmkv.memory.copier import ChunkCopy
from lmkv.vllm.plan.block_map import BlockMap, Group
from lmkv.vllm.scheduler.loads import AsyncLoad
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM

CHUNK, CHUNKS = 8, 6
KEYS = chunk_keys(range(CHUNK * CHUNKS), bytes(32), CHUNK)
BLOCKS = list(range(1, 2 * CHUNKS + 1))


@pytest.fixture
def engine() -> Iterator[SimulatedVLLM]:
    with SimulatedVLLM() as engine:
        engine.store.reserve(KEYS).commit()
        yield engine


def load_of(engine: SimulatedVLLM, window: int) -> AsyncLoad:
    block_map, clock, promote = BlockMap(CHUNK, (Group(4),)), lambda: engine.now, engine.store.promote
    return AsyncLoad(engine.store, block_map, KEYS, [BLOCKS], 0, CHUNK * CHUNKS, window, 1.0, math.inf, clock, promote)


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
    with SimulatedVLLM(ram_chunks=ram_chunks, load_mode="async") as engine:
        tokens = list(range(CHUNK * CHUNKS))
        engine.serve("stores", tokens)
        builder: Any = engine.scheduler._builder
        order, loaded = builder.load, []

        def noted(copies: list[ChunkCopy], *args: Any, **options: Any) -> Any:
            loaded.append(len(copies))
            return order(copies, *args, **options)

        builder.load = noted
        engine.serve("loads", tokens)
        assert loaded == windows


def test_an_aborted_load_costs_nobody_else_a_store(caplog: pytest.LogCaptureFixture) -> None:
    """No step has read its blocks: what others store in the same step is as it should be."""
    options: dict[str, Any] = {"num_blocks": 200, "ram_chunks": 10, "lower_chunks": 60, "local_hits": 0.0}
    with SimulatedVLLM(load_mode="async", io_moves=0, **options) as engine:
        long = [token % 50 for token in range(8 * CHUNK + 1)]
        engine.serve("stores", long)
        others = [(7 * token + 3) % 50 for token in range(9 * CHUNK)]
        engine.serve("evicts", others)
        loads = engine.begin("loads", long)
        for _ in range(10):
            engine.step()
        assert loads.status == "loading", "its chunks are on their way for ever: no I/O gets on"
        for number in range(6):
            new = [(11 * token + number) % 50 for token in range(CHUNK + 1)]
            engine.begin(f"new {number}", new, 1, "b")
        engine.abort(loads)
        engine.finish()
        assert engine.total("lmkv_failed_stores") == {}
        assert engine.total("lmkv_failed_loads") == {}
        assert "recomputed" not in caplog.text, "nobody computes it"
