"""Ctrl-C within a call of the library: it raises, and leaves an engine that works, with all of its slots."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lmkv import Config, Engine
from lmkv.store.iopool import Deferred
from tests.forked import Child
from tests.interrupted import Interrupted
from tests.kit import LIMIT, eventually

BLOCK, CHUNK, BLOCKS = 4, 16, 64
HALF = BLOCKS // 2


class Paged:
    """Paged tensors: the first half of the blocks has values of its own, into the other half they are loaded."""

    def __init__(self, folder: str) -> None:
        self.tensors = [torch.randn(BLOCKS, BLOCK, 2, 8) for _ in range(2)]
        below = {"local_disk": folder, "max_local_disk_size": 0.001, "disk_min_free": 0}
        # 24 slots, which the fillers of `prepare` take.
        config = Config(chunk_size=CHUNK, max_local_cpu_size=24 * 4096 / 2**30, pin_ttl=3600.0, **below)  # type: ignore[arg-type]
        self.engine = Engine.open(self.tensors, block_size=BLOCK, model="m", config=config)
        self.store = self.engine.tiers
        self.fresh = 0

    def prompt(self, number: int, chunks: int = 6) -> tuple[list[int], range]:
        return [number] * (chunks * CHUNK), range(chunks * CHUNK // BLOCK)

    def works(self) -> None:
        """What is stored now is found, and has the right bytes."""
        self.fresh += 1
        tokens, blocks = self.prompt(1_000_000 + self.fresh, 3)
        for tensor in self.tensors:
            tensor[:HALF] = torch.randn(HALF, BLOCK, 2, 8)
            tensor[HALF:] = 0
        assert self.engine.store(tokens, blocks, wait=LIMIT) == len(tokens)
        assert self.engine.retrieve(tokens, [HALF + block for block in blocks]) == len(tokens)
        for tensor in self.tensors:
            assert torch.equal(tensor[: len(blocks)], tensor[HALF : HALF + len(blocks)])

    def is_whole(self) -> None:
        """`clear` frees every slot."""
        self.engine.clear()
        assert self.engine.drain(LIMIT)
        stats = self.engine.stats().store
        assert (stats.leased, stats.pinned, stats.writing, stats.loading) == (0, 0, 0, 0)
        assert self.store.slab.free_slots == self.store.slab.num_slots
        for tier in self.store.stats().tiers:
            assert tier.used_bytes == tier.chunks == 0

    def calls(self, number: int) -> dict[str, Callable[[], object]]:
        engine, (tokens, blocks) = self.engine, self.prompt(number)
        other = [HALF + block for block in blocks]
        return {
            "store": lambda: engine.store(tokens, blocks),
            "store and wait": lambda: engine.store([*tokens[:CHUNK], *tokens[CHUNK:]], blocks, wait=LIMIT),
            "retrieve": lambda: engine.retrieve(tokens, other, timeout=LIMIT),
            "prefetch": lambda: engine.prefetch(tokens),
            "pin": lambda: engine.pin(tokens),
            "unpin": lambda: engine.unpin(tokens),
            "lookup": lambda: engine.lookup(tokens),
            "forget": lambda: engine.clear(tokens),
            "clear": engine.clear,
        }

    def prepare(self, name: str, number: int) -> None:
        """Have the call do something: chunks are below for a load, in memory for a pin, and memory is full."""
        tokens, blocks = self.prompt(number)
        if not name.startswith("store"):
            assert self.engine.store(tokens, blocks, wait=LIMIT) == len(tokens)
            assert self.engine.drain(LIMIT)
        if name in ("retrieve", "prefetch", "lookup", "forget"):
            self.store.drop(self.engine.keys(tokens)[3:])
        if name == "unpin":
            self.engine.pin(tokens)
        for filler in range(4):
            tokens, blocks = self.prompt(500_000 + filler)
            self.engine.store(tokens, blocks)


@pytest.fixture
def paged(tmp_path: Path) -> Iterator[Paged]:
    paged = Paged(str(tmp_path))
    with paged.engine:
        yield paged


CALLS = ("store", "store and wait", "retrieve", "prefetch", "pin", "unpin", "lookup", "forget", "clear")


def interrupt_everywhere(paged: Paged, name: str, first: int, step: int) -> int:
    """Interrupt a call at every `step`th line; how often."""
    count = 0
    while True:
        paged.prepare(name, count)
        call = paged.calls(count)[name]
        with Interrupted(first + step * count) as interrupted, suppress(KeyboardInterrupt):
            call()
        assert not paged.store._lock.locked()
        if not interrupted.happened:
            return count
        paged.works()
        paged.is_whole()
        count += 1


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_before_any_line_loses_no_slot(paged: Paged, name: str) -> None:
    assert interrupt_everywhere(paged, name, first=3, step=11) > 2


def test_an_interrupt_between_a_change_and_its_plans_loses_no_write(paged: Paged) -> None:
    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code is Deferred.run.__code__ and frame.f_locals["self"].jobs:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        sys.settrace(interrupt)
        paged.engine.store(*paged.prompt(1))
    sys.settrace(None)
    paged.works()
    paged.is_whole()


@pytest.mark.nightly("histories")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_before_every_line_loses_no_slot(paged: Paged, name: str) -> None:
    interrupt_everywhere(paged, name, first=1, step=1)


# -- real signals ------------------------------------------------------------------------------------------


def be_interrupted(tell: Callable[[Any], None], folder: str, wanted: int, seed: int) -> None:
    """Call an engine, with a signal every now and then, until as many have come into calls."""
    paged, rng = Paged(folder), random.Random(seed)
    inside, count, over = False, 0, threading.Event()

    def interrupt(*_: object) -> None:
        nonlocal count, inside
        if inside:
            count, inside = count + 1, False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        while not over.is_set():
            time.sleep(random.expovariate(1000))
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    while count < wanted:
        before = count
        for _ in range(rng.randint(1, 4)):
            call = rng.choice(list(paged.calls(rng.randint(0, 8)).values()))
            inside = True
            try:
                call()
                inside = False
            except KeyboardInterrupt:
                continue
        # Pins and prefetches may have all slots, until they are cleared.
        if count > before:
            paged.is_whole()
            paged.works()
    over.set()
    paged.engine.close()
    tell(count)


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.nightly("histories"), pytest.mark.timeout(1800)])]
)
def test_signals_at_any_moment_lose_no_slot(tmp_path: Path, count: int) -> None:
    with Child(be_interrupted, str(tmp_path), count, count) as child:
        assert child.heard() >= count
        eventually(lambda: not child.alive)
