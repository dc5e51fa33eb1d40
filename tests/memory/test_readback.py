"""What is read back from paged memory: every bit of every page counts, and its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmkv.memory.comparison import Part, ReadBack, page_digests
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.copiers import CPUCopier
from lmkv.memory.device import Staging
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.simulated_device import SimulatedDevice

BLOCKS, PAGE = 24, 48


def digest(page: torch.Tensor) -> int:
    return int(page_digests(page[None], torch.tensor([0])))


@pytest.mark.parametrize("nbytes", [1, 3, 8, 45, 4096])
def test_each_bit_and_its_place_count(nbytes: int) -> None:
    page = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    known = {digest(page)}
    for at in {0, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            other = page.clone()
            other[at] ^= 1 << bit
            known.add(digest(other))
    assert len(known) == 1 + 8 * len({0, nbytes // 2, nbytes - 1})
    if nbytes > 1:
        assert digest(page) != digest(page.roll(1))
        signs = page.clone()
        signs[[0, -1]] ^= 0x80
        assert digest(signs) != digest(page), "two signs do not cancel out"


def test_pages_are_read_in_the_order_of_the_blocks_and_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randint(0, 256, (BLOCKS, 2 * PAGE), dtype=torch.uint8)[:, :PAGE]
    blocks = torch.tensor([5, 3, 3, 0, 23])
    expected = [digest(rows[block]) for block in blocks.tolist()]
    assert page_digests(rows, blocks).tolist() == expected
    monkeypatch.setattr("lmkv.memory.comparison._WORDS", 2 * PAGE // 4)
    assert page_digests(rows, blocks).tolist() == expected
    assert page_digests(rows, blocks[:0]).tolist() == []


class World:
    """Two planes with two layers each, in chunks of four pages, of which some are copied from slots into blocks."""

    def __init__(self, device: bool) -> None:
        tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(2)]
        self.memory = PagedMemory(tensors, fuse=False)
        self.layout = self.memory.layout(32, [8])
        self.slab = Slab(self.layout.slot_bytes, 4 * self.layout.slot_bytes)
        self.slab.array[:] = torch.randint(0, 256, self.slab.array.shape, dtype=torch.uint8).numpy()
        half = PAGE // 2
        parts = [Part(f"{n} {at}", n, at, half, torch.float32) for n in range(2) for at in (0, half)]
        self.device = SimulatedDevice() if device else None
        staging = None
        if self.device is not None:
            self.device.adopt(tensors)
            staging = Staging(self.device, self.memory, 1000)
        self.back = ReadBack(self.memory, self.layout, parts, 0, staging)
        self.copies = [ChunkCopy(1, (Run(1, [4, 9, 2]),)), ChunkCopy(3, (Run(0, [7, 8]),))]
        CPUCopier(self.memory, self.layout, self.slab).load(self.copies)

    def differences(self) -> list[tuple[int, tuple[str, ...], int, int, tuple[int, ...]]]:
        reading = self.back.begin(self.copies)
        reading.wait()
        found = self.back.differences(
            self.copies, self.back.digests(reading, self.copies), self.back.of_slots(self.copies, self.slab)
        )
        return [(each.copy, each.layers, each.first, each.end, each.blocks) for each in found]


@pytest.fixture(params=[False, True], ids=["CPU", "device"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.slab.close()


def test_what_was_copied_is_equal(world: World) -> None:
    assert world.differences() == []


def test_a_wrong_byte_is_found_with_its_layer_tokens_and_block(world: World) -> None:
    world.memory.rows[1][2, PAGE - 1] ^= 1
    assert world.differences() == [(0, ("1 24",), 24, 32, (2,))]
    world.memory.rows[0][8, 0] ^= 1
    assert world.differences() == [(0, ("1 24",), 24, 32, (2,)), (1, ("0 0",), 8, 16, (8,))]


def test_other_blocks_are_not_looked_at(world: World) -> None:
    world.memory.rows[0][5] = 7
    assert world.differences() == []


def test_a_device_reads_in_the_order_of_its_computation() -> None:
    world = World(device=True)
    device = world.device
    assert device is not None
    before = world.back.begin(world.copies)
    device.launch(lambda: world.memory.rows[0][4].fill_(1))
    after = world.back.begin(world.copies)
    device.synchronize()
    known = world.back.of_slots(world.copies, world.slab)
    found = [
        world.back.differences(world.copies, world.back.digests(reading, world.copies), known)
        for reading in (before, after)
    ]
    assert [len(each) for each in found] == [0, 1]
    world.slab.close()
