"""DeviceCopier on a real CUDA device, against the CPU's copier; and the same tests on a simulated device.

What runs on the simulated one runs on a real one on the first day: nothing here is new there but the device.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lmkv import Config, Engine
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.copiers import CPUCopier
from lmkv.memory.device import DeviceCopier, PinnedSlab, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.memory.accelerator import Accelerator

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

BLOCK, PAGES, LAYERS, BLOCKS, SLOTS = 16, 4, 4, 64, 8

SHAPES = {
    "small pages": (LAYERS, BLOCKS, 2, BLOCK, 16),
    "large pages": (LAYERS, BLOCKS, 8, BLOCK, 1024),
    "odd pages": (LAYERS, BLOCKS, 3, 5, 7),
}

PIECES = {"one piece": 1 << 30, "3 MiB pieces": 3 << 20, "not pinned": 0}
"""Bytes of host memory per registration."""


class Pair:
    """The same memory on the device and on the CPU, each with a copier and slots of its own."""

    def __init__(
        self, accelerator: Accelerator, shape: tuple[int, ...], *, block_major: bool = False, piece_bytes: int = 1 << 30
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        if block_major:
            shape = (shape[1], shape[0], *shape[2:])
        # Bytes of all values; as bfloat16 they are never computed with.
        whole = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        self.host = whole.view(torch.bfloat16)
        self.accelerator, self.opened = accelerator, accelerator.open()
        self.device = accelerator.to_device(self.host)
        axis = 1 if block_major else 0
        memories = [PagedMemory.of(list(tensor.unbind(axis))) for tensor in (self.host, self.device)]
        self.layout = memories[0].layout(BLOCK * PAGES, [BLOCK])
        self.slabs = [Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes) for _ in range(2)]
        self.on_cpu = CPUCopier(memories[0], self.layout, self.slabs[0])
        pins = PinnedSlab(self.opened, self.slabs[1], threads=bool(piece_bytes), piece_bytes=piece_bytes)
        pins.wait()
        # Less than all slots have, so that it is used again.
        staging = Staging(self.opened, memories[1], 3 * self.layout.chunk_bytes)
        self.on_gpu = DeviceCopier(staging, memories[1], self.layout, self.slabs[1], pins=pins)

    def copies(self, seed: int, slots: int = SLOTS) -> list[ChunkCopy]:
        rng = random.Random(seed)
        blocks = rng.sample(range(BLOCKS), slots * PAGES)
        return [
            ChunkCopy(slot, (Run(0, blocks[at * PAGES : (at + 1) * PAGES]),))
            for at, slot in enumerate(rng.sample(range(SLOTS), slots))
        ]

    def clear(self) -> None:
        """The model writes zeros into every block."""
        self.accelerator.launch(self.device.zero_)
        self.host.zero_()

    def check(self) -> None:
        self.opened.synchronize()
        assert torch.equal(self.device.cpu().view(torch.int16), self.host.view(torch.int16))
        for slot in range(SLOTS):
            assert bytes(self.slabs[0].view(slot)) == bytes(self.slabs[1].view(slot))


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=GPU)])
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    return Accelerator(simulate=request.param == "simulated")


@pytest.fixture(params=itertools.product(SHAPES, (False, True), PIECES), ids=str)
def pair(request: pytest.FixtureRequest, accelerator: Accelerator) -> Iterator[Pair]:
    name, major, piece = request.param
    made = Pair(accelerator, SHAPES[name], block_major=major, piece_bytes=PIECES[piece])
    yield made
    made.on_gpu.close()
    for slab in made.slabs:
        slab.close()


def test_what_is_stored_and_loaded_is_what_the_cpu_stores_and_loads(pair: Pair) -> None:
    for seed in range(4):
        for action in ("store", "load"):
            copies = pair.copies(seed, slots=1 + 2 * seed)
            getattr(pair.on_gpu, action)(copies).wait()
            getattr(pair.on_cpu, action)(copies)
            pair.check()


def test_blocks_may_be_overwritten_as_soon_as_a_store_returns(pair: Pair) -> None:
    copies = pair.copies(5)
    pair.on_cpu.store(copies)
    event = pair.on_gpu.store(copies)
    pair.clear()
    event.wait()
    pair.check()


def test_computation_sees_what_was_loaded_before_it(pair: Pair) -> None:
    pair.on_cpu.store(pair.copies(6))
    pair.on_gpu.store(pair.copies(6)).wait()
    pair.clear()
    copies = pair.copies(7)
    event = pair.on_gpu.load(copies)
    seen: list[torch.Tensor] = []
    pair.accelerator.launch(lambda: seen.append(pair.device.clone()))
    pair.accelerator.launch(pair.device.zero_)
    pair.on_cpu.load(copies)
    event.wait()
    pair.opened.synchronize()
    assert torch.equal(seen[0].cpu().view(torch.int16), pair.host.view(torch.int16))


def test_layer_by_layer(pair: Pair) -> None:
    copies = pair.copies(8)
    for event in pair.on_gpu.store_layers(copies):
        last = event
    last.wait()
    pair.on_cpu.store(copies)
    pair.check()
    copies = pair.copies(9)
    for event in pair.on_gpu.load_layers(copies):
        last = event
    last.wait()
    pair.on_cpu.load(copies)
    pair.check()


def test_a_load_beside_the_computation(pair: Pair) -> None:
    copies = pair.copies(10)
    event = pair.on_gpu.load(copies, overlap=True)
    pair.on_cpu.load(copies)
    event.wait()
    pair.check()


def test_a_load_says_how_long_it_took(pair: Pair) -> None:
    event: Any = pair.on_gpu.load(pair.copies(11))
    event.wait()
    assert 0 < event.seconds < 60


def test_the_slab_is_pinned_in_the_background_and_unpinned_at_the_end(accelerator: Accelerator) -> None:
    slab = Slab(1 << 20, 64 << 20)
    pins = PinnedSlab(accelerator.open(), slab, piece_bytes=5 << 20)
    pins.wait()
    assert repr(pins) == "<PinnedSlab: 64 of 64 slots>"
    pins.close()
    # As often as one likes: nothing stays registered.
    again = PinnedSlab(accelerator.open(), slab)
    again.wait()
    assert repr(again) == "<PinnedSlab: 64 of 64 slots>"
    again.close()
    slab.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_staging_memory_is_of_no_pool_that_the_caller_has_begun() -> None:
    """vLLM's are copied to the host when the engine sleeps."""
    device, pool = Accelerator().open(), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        address, owner = device.allocate(64 << 20)
    assert not any(seen["address"] <= address < seen["address"] + seen["total_size"] for seen in pool.snapshot())
    before = torch.cuda.memory_allocated()
    del owner
    assert torch.cuda.memory_allocated() <= before - (64 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_an_engine_on_the_device() -> None:
    caches = [torch.randn((BLOCKS, 2, BLOCK, 64), device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    config, tokens = Config.load(chunk_size=4 * BLOCK, max_local_cpu_size=0.25, env={}), list(range(300))
    blocks = list(range(20))
    kept = [cache[:16].clone() for cache in caches]
    with Engine.open(caches, block_size=BLOCK, model="m", config=config) as engine:
        assert engine.store(tokens, blocks) == 256
        for cache in caches:
            cache.zero_()
        assert engine.retrieve(tokens, [block + 30 for block in blocks]) == 256
    for cache, old in zip(caches, kept, strict=True):
        assert torch.equal(cache[30:46], old)
