"""DeviceCopier: whatever order a device chooses, every byte is the one that program order would give.

The oracle is a plain model of program order: what the computation wrote when it was launched, and what the
slots held when a load was ordered.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st

from lmkv.errors import UsageError
from lmkv.memory.copier import ChunkCopy, Event, Run
from lmkv.memory.cpu_copier import CPUCopier
from lmkv.memory.device_copier import DeviceCopier
from lmkv.memory.layerwise import LayerReader, LayerWriter
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.memory.simulated_device import SimulatedDevice

BLOCKS, PAGES, LAYERS, SLOTS = 12, 2, 3, 6

seeds = st.integers(0, 2**32)
favourites = st.sampled_from([None, 0, 1, 2])
shapes = st.sampled_from(["alike", "fused", "two sizes"])
detours = st.sampled_from([1, 1 << 20])
"""Pages of so many bytes are loaded directly: all of them, or none."""


def memory_of(shape: str) -> PagedMemory:
    if shape == "fused":
        whole = torch.zeros((BLOCKS, LAYERS, 64), dtype=torch.uint8)
        return PagedMemory.of(list(whole.unbind(1)))
    widths = [64, 24, 64] if shape == "two sizes" else [64] * LAYERS
    return PagedMemory.of([torch.zeros((BLOCKS, width), dtype=torch.uint8) for width in widths])


class World:
    """Paged memory that a model keeps writing to, slots, and what both must hold in the end."""

    def __init__(self, shape: str, seed: int, favourite: int | None = None, direct_bytes: int = 1 << 20) -> None:
        self.rng = random.Random(seed)
        self.memory = memory_of(shape)
        self.layout = self.memory.layout(4 * PAGES, [4])
        self.slab = Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes)
        self.device = SimulatedDevice(seed, favourite)
        self.copier = DeviceCopier(
            self.device, self.memory, self.layout, self.slab, buffer_bytes=1, direct_bytes=direct_bytes
        )
        # The same bytes and slots, where everything is done at once.
        self.expected = memory_of(shape)
        self.slots = Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes)
        self.oracle = CPUCopier(self.expected, self.layout, self.slots)

    def compute(self, block: int, layers: range | None = None) -> None:
        """The model writes a block, some time after now."""
        for index, (row, expected) in enumerate(zip(self.memory.rows, self.expected.rows, strict=True)):
            if layers is None or index in layers:
                value = self.rng.randrange(256)
                expected[block] = value
                self.device.compute.do(lambda row=row, value=value: row[block].fill_(value))

    def copies(self, slots: list[int]) -> list[ChunkCopy]:
        blocks = self.rng.sample(range(BLOCKS), PAGES * len(slots))
        return [ChunkCopy(slot, (Run(0, blocks[at * PAGES : (at + 1) * PAGES]),)) for at, slot in enumerate(slots)]

    def check(self) -> None:
        self.device.synchronize()
        for row, expected in zip(self.memory.rows, self.expected.rows, strict=True):
            assert torch.equal(row, expected)
        for slot in range(SLOTS):
            assert bytes(self.slab.view(slot)) == bytes(self.slots.view(slot)), f"slot {slot}"


@given(seed=seeds, favourite=favourites, shape=shapes, direct=detours)
def test_any_order_of_the_device_gives_what_program_order_gives(
    seed: int, favourite: int | None, shape: str, direct: int
) -> None:
    """Blocks are computed again right after a store of them, and stored right after a load into them."""
    world = World(shape, seed, favourite, direct)
    busy: dict[int, Event] = {}
    for _ in range(12):
        action = world.rng.choice(["compute", "store", "load"])
        if action == "compute":
            for block in world.rng.sample(range(BLOCKS), 6):
                world.compute(block)
            continue
        # As leases and reservations have it: a slot is another's once its event has happened.
        slots = world.rng.sample(range(SLOTS), world.rng.randrange(1, 5))
        for slot in slots:
            if slot in busy:
                busy.pop(slot).wait()
        copies = world.copies(slots)
        event = getattr(world.copier, action)(copies)
        getattr(world.oracle, action)(copies)
        busy.update(dict.fromkeys(slots, event))
    world.check()


@given(seed=seeds, favourite=favourites, shape=shapes, direct=detours)
def test_a_layer_is_there_when_the_model_comes_to_it(seed: int, favourite: int | None, shape: str, direct: int) -> None:
    world = World(shape, seed, favourite, direct)
    for slot in range(SLOTS):
        for view in (world.slab.view(slot), world.slots.view(slot)):
            view[:] = bytes([slot + 1]) * len(view)
    copies = world.copies([4, 1, 3])
    world.oracle.load(copies)
    wanted = [row.clone() for row in world.expected.rows]
    for row in world.memory.rows:
        world.device.compute.do(lambda row=row: row.fill_(7))
    blocks = [block for copy in copies for block in copy.runs[0].blocks]
    reader = LayerReader(world.copier, copies)
    read: list[torch.Tensor] = []
    for layer in range(LAYERS):
        reader.wait(layer)
        row = world.memory.rows[min(layer, len(world.memory.rows) - 1)]
        world.device.compute.do(lambda row=row: read.append(row[blocks].clone()))
    assert reader.complete
    reader.finish().wait()
    world.device.synchronize()
    for layer, got in enumerate(read):
        assert torch.equal(got, wanted[min(layer, len(wanted) - 1)][blocks])


@given(seed=seeds, favourite=favourites, shape=shapes)
def test_a_layer_is_stored_as_the_model_left_it(seed: int, favourite: int | None, shape: str) -> None:
    """In any order of layers; and what is computed once the step has ended is not stored."""
    world = World(shape, seed, favourite)
    copies = world.copies([5, 0, 2])
    blocks = [block for copy in copies for block in copy.runs[0].blocks]
    writer = LayerWriter(world.copier, copies)
    planes = len(world.memory.rows)
    for layer in world.rng.sample(range(LAYERS), LAYERS):
        for block in blocks:
            world.compute(block, range(layer, layer + 1) if planes == LAYERS else range(planes))
        writer.save(layer)
    world.oracle.store(copies)
    event = writer.finish()
    for block in blocks:
        world.compute(block)
    event.wait()
    world.check()


@given(seed=seeds, favourite=favourites, direct=detours)
def test_several_loads_by_layers_at_once(seed: int, favourite: int | None, direct: int) -> None:
    world = World("alike", seed, favourite, direct)
    for slot in range(SLOTS):
        for view in (world.slab.view(slot), world.slots.view(slot)):
            view[:] = bytes([slot + 1]) * len(view)
    copies = world.copies([4, 1, 3, 0])
    readers = [LayerReader(world.copier, copies[:2]), LayerReader(world.copier, copies[2:])]
    turns = [reader for reader in readers for _ in range(LAYERS)]
    world.rng.shuffle(turns)
    layers = dict.fromkeys(readers, 0)
    for reader in turns:
        reader.wait(layers[reader])
        layers[reader] += 1
    world.oracle.load(copies)
    for reader in readers:
        reader.finish().wait()
    world.check()


@given(seed=seeds, favourite=favourites, direct=detours)
def test_a_load_beside_the_computation_delays_none_of_it(seed: int, favourite: int | None, direct: int) -> None:
    world = World("alike", seed, favourite, direct)
    for block in range(BLOCKS):
        world.compute(block)
    copies = world.copies([2, 5])
    event = world.copier.load(copies, overlap=True)
    waiting = [item for item in world.device.compute.queue if isinstance(item, tuple) and item[0] == "wait"]
    assert not waiting
    world.oracle.load(copies)
    event.wait()
    world.check()


def test_staging_memory_is_bounded_and_chunks_cross_as_one_run() -> None:
    world = World("alike", 1)
    world.copier.store([ChunkCopy(slot, (Run(0, [slot, slot + 1]),)) for slot in range(SLOTS)]).wait()
    assert world.device.transfers == SLOTS, "one for a chunk, whatever its layers and pages"
    assert repr(world.copier) == "<DeviceCopier: 3 layers, staging buffers of 384 bytes>"
    assert world.device.allocated == 2 * world.layout.rank_bytes
    world.copier.load([ChunkCopy(slot, (Run(0, [slot, slot + 1]),)) for slot in range(SLOTS)]).wait()
    assert world.device.transfers == 2 * SLOTS
    assert world.device.allocated == 4 * world.layout.rank_bytes
    world.copier.close()
    assert world.device.closed


def test_part_of_a_chunk_is_loaded_and_nothing_else() -> None:
    world = World("two sizes", 2)
    world.slab.view(0)[:] = bytes([9]) * world.layout.slot_bytes
    world.copier.load([ChunkCopy(0, (Run(1, [7]),)), ChunkCopy(1, (Run(0, []),))]).wait()
    world.device.synchronize()
    for row in world.memory.rows:
        assert [block for block in range(BLOCKS) if row[block].any()] == [7]
        assert bool((row[7] == 9).all())


@pytest.mark.parametrize("action", ["store", "load", "store_layers", "load_layers"])
def test_what_does_not_exist_is_refused_before_anything_is_queued(action: str) -> None:
    world = World("alike", 3)
    for copy in (ChunkCopy(SLOTS, (Run(0, [0, 1]),)), ChunkCopy(0, (Run(0, [0, BLOCKS]),))):
        with pytest.raises(UsageError):
            getattr(world.copier, action)([ChunkCopy(0, (Run(0, [2, 3]),)), copy])
    assert not any(stream.queue for stream in world.device.streams)


@pytest.mark.parametrize("action", ["store", "load"])
def test_a_copy_that_fails_leaves_nothing_under_way(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("alike", 4)
    real = world.device.transfer
    calls: Iterator[int] = iter(range(100))

    def transfer(*args: object) -> None:
        if next(calls) == 2:
            raise OSError("the device is gone")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(world.device, "transfer", transfer)
    with pytest.raises(OSError, match="gone"):
        getattr(world.copier, action)(world.copies([0, 1, 2, 3]))
    assert not any(stream.queue for stream in world.device.streams)
