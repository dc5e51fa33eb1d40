"""DeviceCopier on a real CUDA device, against the CPU's copier; needs nothing but torch and Triton."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from lmkv import Config, Engine
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.kit import LIMIT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

BLOCK, PAGES, LAYERS, BLOCKS, SLOTS = 16, 4, 4, 64, 8

SHAPES = {
    "small pages": (LAYERS, BLOCKS, 2, BLOCK, 16),
    "large pages": (LAYERS, BLOCKS, 8, BLOCK, 4096),
    "odd pages": (LAYERS, BLOCKS, 3, 5, 7),
}


class Pair:
    """The same memory on the device and on the CPU, each with a copier and slots of its own."""

    def __init__(self, shape: tuple[int, ...], *, block_major: bool = False) -> None:
        from lmkv.memory.cuda import CUDADevice
        from lmkv.memory.device_copier import DeviceCopier

        generator = torch.Generator().manual_seed(1)
        if block_major:
            shape = (shape[1], shape[0], *shape[2:])
        # Bytes of all values; as bfloat16 they are never computed with.
        whole = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        self.host = whole.view(torch.bfloat16)
        self.device = self.host.cuda()
        axis = 1 if block_major else 0
        memories = [PagedMemory.of(list(tensor.unbind(axis))) for tensor in (self.host, self.device)]
        self.layout = memories[0].layout(BLOCK * PAGES, [BLOCK])
        self.slabs = [Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes) for _ in range(2)]
        self.on_cpu = CPUCopier(memories[0], self.layout, self.slabs[0])
        self.on_gpu = DeviceCopier(
            CUDADevice(self.device.device, self.slabs[1]), memories[1], self.layout, self.slabs[1]
        )

    def copies(self, seed: int, slots: int = SLOTS) -> list[ChunkCopy]:
        rng = random.Random(seed)
        blocks = rng.sample(range(BLOCKS), slots * PAGES)
        return [
            ChunkCopy(slot, (Run(0, blocks[at * PAGES : (at + 1) * PAGES]),))
            for at, slot in enumerate(rng.sample(range(SLOTS), slots))
        ]

    def check(self) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.device.cpu().view(torch.int16), self.host.view(torch.int16))
        for slot in range(SLOTS):
            assert bytes(self.slabs[0].view(slot)) == bytes(self.slabs[1].view(slot))


@pytest.fixture(params=[(name, major) for name in SHAPES for major in (False, True)], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, major = request.param
    made = Pair(SHAPES[name], block_major=major)
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
    pair.device.zero_()
    pair.host.zero_()
    event.wait()
    pair.check()


def test_computation_sees_what_was_loaded_before_it(pair: Pair) -> None:
    pair.on_cpu.store(pair.copies(6))
    pair.on_gpu.store(pair.copies(6)).wait()
    pair.device.zero_()
    pair.host.zero_()
    copies = pair.copies(7)
    event = pair.on_gpu.load(copies)
    seen = pair.device.clone()
    pair.device.zero_()
    pair.on_cpu.load(copies)
    event.wait()
    assert torch.equal(seen.cpu().view(torch.int16), pair.host.view(torch.int16))


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


def test_the_slab_is_pinned_in_the_background_and_unpinned_at_the_end() -> None:
    from lmkv.memory.cuda import PinnedSlab

    slab = Slab(1 << 20, 64 << 20)
    pinned = PinnedSlab(slab, torch.device("cuda", 0))
    pinned._thread.join(LIMIT)
    assert pinned._pieces
    pinned.close()
    assert not pinned._pieces
    slab.close()


def test_an_engine_on_the_device() -> None:
    caches = [torch.randn((BLOCKS, 2, BLOCK, 64), device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    config = Config.load(chunk_size=4 * BLOCK, max_local_cpu_size=0.25, env={})
    tokens = list(range(300))
    blocks = list(range(20))
    kept = [cache[:16].clone() for cache in caches]
    with Engine.open(caches, block_size=BLOCK, model="m", config=config) as engine:
        assert engine.store(tokens, blocks) == 256
        for cache in caches:
            cache.zero_()
        assert engine.retrieve(tokens, [block + 30 for block in blocks]) == 256
    for cache, old in zip(caches, kept, strict=True):
        assert torch.equal(cache[30:46], old)
