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
from lmkv.memory.copier import ChunkCopy, Event, LayerReader, LayerWriter, Run
from lmkv.memory.copiers import CPUCopier
from lmkv.memory.device import DeviceCopier, DeviceError, LoadEvent, PinnedSlab, Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.simulated_device import SimulatedDevice
from tests.tables import raised

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


def pin_all(pins: PinnedSlab) -> None:
    while pins.pin_next():
        pass


class World:
    """Paged memory that a model keeps writing to, slots, and what both must hold in the end."""

    def __init__(
        self, shape: str, seed: int, favourite: int | None = None, direct_bytes: int = 1 << 20, *, staging: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        self.memory = memory_of(shape)
        self.layout = self.memory.layout(4 * PAGES, [4])
        self.slab = Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes)
        self.device = SimulatedDevice(seed, favourite)
        self.device.adopt(self.memory.rows)
        # Less than the order of a few chunks, so that it is given out again and again.
        self.staging = Staging(self.device, self.memory, staging or self.rng.choice([1, 500, 2000]))
        piece = self.rng.randrange(1, SLOTS + 1) * self.layout.slot_bytes
        self.pins = PinnedSlab(self.device, self.slab, threads=0, piece_bytes=piece)
        self.copier = DeviceCopier(
            self.staging, self.memory, self.layout, self.slab, direct_bytes=direct_bytes, pins=self.pins
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
                self.device.launch(lambda row=row, value=value: row[block].fill_(value))

    def copies(self, slots: list[int]) -> list[ChunkCopy]:
        blocks = self.rng.sample(range(BLOCKS), PAGES * len(slots))
        return [ChunkCopy(slot, (Run(0, blocks[at * PAGES : (at + 1) * PAGES]),)) for at, slot in enumerate(slots)]

    def fill_slots(self) -> None:
        for slot in range(SLOTS):
            for view in (self.slab.view(slot), self.slots.view(slot)):
                view[:] = bytes([slot + 1]) * len(view)

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
        action = world.rng.choice(["compute", "store", "load", "pin"])
        if action == "pin":
            world.pins.pin_next()
            continue
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
    world.fill_slots()
    copies = world.copies([4, 1, 3])
    world.oracle.load(copies)
    wanted = [row.clone() for row in world.expected.rows]
    for row in world.memory.rows:
        world.device.launch(lambda row=row: row.fill_(7))
    blocks = [block for copy in copies for block in copy.runs[0].blocks]
    reader = LayerReader(world.copier, copies)
    read: list[torch.Tensor] = []
    for layer in range(LAYERS):
        reader.wait(layer)
        row = world.memory.rows[min(layer, len(world.memory.rows) - 1)]
        world.device.launch(lambda row=row: read.append(row[blocks].clone()))
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
    writer, planes = LayerWriter(world.copier, copies), len(world.memory.rows)
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
    world.fill_slots()
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


def test_staging_memory_is_bounded_and_an_order_crosses_in_one_call() -> None:
    world = World("alike", 1, staging=8 * LAYERS * PAGES * 64 * SLOTS)
    assert repr(world.copier) == "<DeviceCopier: 3 layers, 18432 bytes of staging, <PinnedSlab: 0 of 6 slots>>"
    pin_all(world.pins)
    allocated, blocked = world.device.allocated, world.device.blocked
    copies = [ChunkCopy(slot, (Run(0, [slot, slot + 1]),)) for slot in range(SLOTS)]
    for calls, action in enumerate((world.copier.store, world.copier.load), 1):
        action(copies).wait()
        assert (world.device.calls, world.device.copies) == (calls, calls * SLOTS), "a run of bytes for each chunk"
    assert world.device.allocated == allocated == 18432 + 18432 // 4, "nothing more than at the registration"
    assert world.device.blocked == blocked
    world.copier.close()
    assert not world.device.registered


@given(seed=seeds, shape=shapes, direct=detours)
def test_no_copy_crosses_the_border_of_a_registration(seed: int, shape: str, direct: int) -> None:
    """Some slots are pinned, in one piece or in several, the others are not; neighbouring slots adjoin."""
    world = World(shape, seed, None, direct)
    for _ in range(world.rng.randrange(3)):
        world.pins.pin_next()
    for action in ("store", "load"):
        copies = world.copies(sorted(world.rng.sample(range(SLOTS), 6)))
        getattr(world.copier, action)(copies).wait()
        getattr(world.oracle, action)(copies)
    world.check()


def test_chunks_of_full_slots_are_still_copied_one_by_one() -> None:
    """Without padding between them they adjoin in host memory, and the border lies between them."""
    world = Aligned(pages=8, staging=4 << 20)
    pin_all(world.pins)
    assert len(world.device.registered) == SLOTS
    world.copier.store(world.copies).wait()
    assert world.device.copies == SLOTS
    assert world.device.calls == 1


class Aligned:
    """Slots without padding, each of which is a registration of its own."""

    def __init__(self, pages: int, *, staging: int = 1 << 20, queue_limit: int = 256) -> None:
        self.memory = PagedMemory.of([torch.zeros((SLOTS * pages, 4096), dtype=torch.uint8) for _ in range(LAYERS)])
        self.layout = self.memory.layout(pages, [1])
        assert self.layout.slot_bytes == self.layout.chunk_bytes
        self.slab = Slab(self.layout.slot_bytes, SLOTS * self.layout.slot_bytes)
        self.device = SimulatedDevice(5, queue_limit=queue_limit)
        self.device.adopt(self.memory.rows)
        self.staging = Staging(self.device, self.memory, staging)
        self.pins = PinnedSlab(self.device, self.slab, threads=0, piece_bytes=self.layout.slot_bytes)
        self.copier = DeviceCopier(self.staging, self.memory, self.layout, self.slab, pins=self.pins)
        blocks = [list(range(slot * pages, (slot + 1) * pages)) for slot in range(SLOTS)]
        self.copies = [ChunkCopy(slot, (Run(0, ids),)) for slot, ids in enumerate(blocks)]


def test_a_rank_populates_and_pins_its_own_part_of_every_slot() -> None:
    """As another process has the others: on its own NUMA node, and for its own device."""
    memory = memory_of("alike")
    layout = memory.layout(4 * PAGES, [4], num_ranks=4)
    slab, device = Slab(layout.slot_bytes, SLOTS * layout.slot_bytes), SimulatedDevice(1)
    device.adopt(memory.rows)
    copier = DeviceCopier(Staging(device, memory, 1000), memory, layout, slab, rank=2)
    copier.pins.wait()
    places = sorted((found.first - slab.address, found.last - found.first) for found in device.registered)
    assert places == [(slot * slab.slot_bytes + 2 * layout.rank_bytes, layout.rank_bytes) for slot in range(SLOTS)]
    copier.store([ChunkCopy(slot, (Run(0, [slot, slot + 1]),)) for slot in range(SLOTS)]).wait()
    copier.close()
    slab.close()


@pytest.mark.parametrize("action", ["store", "load"])
def test_a_long_order_never_fills_the_queue_of_a_stream(action: str) -> None:
    world = Aligned(pages=64, staging=4 << 20, queue_limit=40)
    pin_all(world.pins)
    world.device.blocked = 0
    getattr(world.copier, action)(world.copies).wait()
    assert world.device.blocked == 0


def test_a_copy_of_memory_that_is_not_pinned_blocks_the_caller_and_is_right() -> None:
    world = Aligned(pages=8)
    world.memory.rows[0].fill_(3)
    blocked = world.device.blocked
    world.copier.store(world.copies).wait()
    assert world.device.blocked > blocked
    assert bytes(world.slab.view(5)[:8]) == bytes([3]) * 8


def test_the_computation_waits_for_no_store_while_staging_memory_lasts() -> None:
    def waits(staging: int) -> int:
        world = Aligned(pages=8, staging=staging)
        pin_all(world.pins)
        world.device.synchronize()
        world.device.run = lambda steps: False  # type: ignore[method-assign]
        world.copier.store(world.copies)
        return sum(isinstance(item, tuple) and item[0] == "wait" for item in world.device.compute.queue)

    order = SLOTS * 8 * LAYERS * 4096
    assert waits(staging=order) == 0
    assert waits(staging=order // 2) > 0


def test_a_part_of_a_chunk_at_a_time_where_staging_memory_is_small() -> None:
    """One page has room, one chunk has not."""
    world = Aligned(pages=8, staging=3 * 4096)
    for row in world.memory.rows:
        row.random_(0, 256)
    wanted = [row.clone() for row in world.memory.rows]
    world.copier.store(world.copies).wait()
    for row in world.memory.rows:
        row.zero_()
    world.copier.load(world.copies).wait()
    world.device.synchronize()
    assert world.device.allocated == 2 * 3 * 4096 or world.device.allocated == 3 * 4096 + 4096
    assert all(torch.equal(row, old) for row, old in zip(world.memory.rows, wanted, strict=True))


def test_kernels_are_compiled_before_there_is_a_slab() -> None:
    for shape, nbytes in (("two sizes", 1 << 16), ("alike", 1 << 20)):
        memory, device = memory_of(shape), SimulatedDevice(1, memory_bytes=1 << 20)
        device.adopt(memory.rows)
        if shape == "alike":
            raised(DeviceError, "out of memory", Staging, device, memory, nbytes)
        else:
            Staging(device, memory, nbytes)
            assert device.moves == len(memory.rows)


def test_a_load_says_how_long_the_device_took_for_it() -> None:
    """Not how long nobody asked."""
    world = Aligned(pages=8)
    event = world.copier.load(world.copies)
    event.wait()
    assert isinstance(event, LoadEvent)
    world.device.now += 1000.0
    assert 0 < event.seconds < 1


@pytest.mark.parametrize("action", ["store", "load"])
def test_a_device_that_has_failed_fails_every_copy_and_can_be_closed(action: str) -> None:
    world = World("alike", 6)
    pin_all(world.pins)
    event = getattr(world.copier, action)(world.copies([0, 1]))
    world.device.fail("an uncorrectable memory error")
    for call in (event.query, event.wait, lambda: getattr(world.copier, action)(world.copies([2]))):
        raised(DeviceError, "uncorrectable", call)
    raised(DeviceError, "uncorrectable", world.copier.close)
    assert not world.device.registered


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
        raised(UsageError, "", getattr(world.copier, action), [ChunkCopy(0, (Run(0, [2, 3]),)), copy])
    assert not any(stream.queue for stream in world.device.streams)


@pytest.mark.parametrize("action", ["store", "load"])
def test_a_copy_that_fails_leaves_nothing_under_way(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("alike", 4)
    real = world.device.transfer
    calls: Iterator[int] = iter(range(100))

    def transfer(*args: object) -> None:
        if next(calls) == 2:
            raise OSError("no such device")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(world.device, "transfer", transfer)
    raised(OSError, "no such", lambda: getattr(world.copier, action)(world.copies([0, 1, 2, 3])))
    assert not any(stream.queue for stream in world.device.streams)
