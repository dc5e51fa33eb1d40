"""One memory tier for the engines of a node: a folder in memory, under each one's own slab and over the disk."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv import Config, Engine
from lmkv.store.iopool import IOPool, Job, Priority
from tests.forked import Child, Tell
from tests.kit import LIMIT, NEVER, listing_every

CHUNK, BLOCK, BLOCKS = 16, 4, 16
COST = 2 * 4096
"""Bytes of a chunk's file: its header, and its tokens' KV in a page."""


def tensors(value: float) -> list[torch.Tensor]:
    return [torch.full((BLOCKS, BLOCK, 2, 4), value)]


def open_engine(folder: Path, value: float = 0.0, **settings: Any) -> tuple[Engine, list[torch.Tensor]]:
    """It has listed the folder once, and does not do so again."""
    defaults = {"max_local_cpu_size": 0.001, "max_shared_memory_size": 0.01, "disk_min_free": 0}
    config = Config(chunk_size=CHUNK, shared_memory=str(folder), **{**defaults, **settings})
    memory = tensors(value)
    with listing_every(NEVER):
        engine = Engine.open(memory, block_size=BLOCK, model="m", config=config)
    assert engine.wait_indexed(LIMIT)
    return engine, memory


def store(engine: Engine, tokens: range) -> None:
    assert engine.store(tokens, range(len(tokens) // BLOCK), wait=LIMIT) == len(tokens)
    assert engine.drain(LIMIT)


def neighbour(tell: Tell, folder: str) -> None:
    """Store a prompt, tell that, and go on until somebody ends it."""
    engine, _ = open_engine(Path(folder), value=7.0)
    store(engine, range(64))
    tell("stored")
    threading.Event().wait()


def sources(engine: Engine, tokens: range) -> dict[str, int]:
    """Where they come from when they are prefetched."""
    prefetch = engine.prefetch(tokens)
    assert prefetch.wait(LIMIT)
    found = dict(prefetch.sources)
    prefetch.cancel()
    return found


def test_what_another_process_stores_is_found_at_once_and_outlives_it(memory_path: Path) -> None:
    engine, memory = open_engine(memory_path)
    with engine, Child(neighbour, str(memory_path)) as other:
        assert other.heard() == "stored"
        assert engine.retrieve(range(64), range(BLOCKS)) == 64
        assert torch.equal(memory[0], tensors(7.0)[0])
        assert other.kill() == -signal.SIGKILL
    later, memory = open_engine(memory_path)
    with later:
        assert sources(later, range(64)) == {"shared_memory": 64}
        assert later.retrieve(range(64), range(BLOCKS)) == 64
        assert torch.equal(memory[0], tensors(7.0)[0]), "when every engine has ended it is still there"


def test_it_is_over_the_disk(memory_path: Path, tmp_path: Path) -> None:
    disk = {"local_disk": str(tmp_path), "max_local_disk_size": 0.01}
    engine, _ = open_engine(memory_path, **disk)
    with engine:
        store(engine, range(64))
        assert [tier.name for tier in engine.stats().store.tiers] == ["cpu", "shared_memory", "disk"]
    again, _ = open_engine(memory_path, **disk)
    with again:
        assert sources(again, range(64)) == {"shared_memory": 64}
    for path in memory_path.rglob("*.kv1"):
        path.unlink()
    restarted, _ = open_engine(memory_path, **disk)
    with restarted:
        assert sources(restarted, range(64)) == {"disk": 64}


def test_files_are_neither_synced_nor_tried_past_the_page_cache(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr("lmkv.backends.disk.probe_direct", lambda folder: bool(tried.append(folder)))
    monkeypatch.setattr("os.fdatasync", lambda fd: tried.append(str(fd)))
    engine, _ = open_engine(memory_path)
    with engine:
        store(engine, range(64))
    assert tried == []


@pytest.mark.parametrize(("with_disk", "threads"), [(False, 4), (True, 8)])
def test_reads_do_not_compete_for_the_cores(
    memory_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_disk: bool, threads: int
) -> None:
    made: list[IOPool] = []

    def make(*args: Any) -> IOPool:
        made.append(IOPool(*args))
        return made[-1]

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("lmkv.store.tiered.IOPool", make)
    disk = {"local_disk": str(tmp_path), "max_local_disk_size": 0.01} if with_disk else {}
    engine, _ = open_engine(memory_path, local_cpu=False, **disk)
    with engine:
        store(engine, range(64))
        gate = threading.Event()
        assert engine.drain(LIMIT)
        [pool] = made
        before = set(threading.enumerate())
        pool.submit([Job(lambda after: bool(gate.wait(LIMIT)), Priority.LOAD, lambda after: None, "alone")] * 40)
        new = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("lmkv-io")]
        gate.set()
        assert engine.retrieve(range(64), range(BLOCKS)) == 64
    assert len(new) == threads
