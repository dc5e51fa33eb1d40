"""CPUCopier against an oracle that copies a byte at a time and knows nothing of rows, words or fusing."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lmkv import Config, Engine
from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.errors import UsageError
from lmkv.memory.copier import ChunkCopy, Run, block_ids
from lmkv.memory.copiers import CPUCopier, check_device, make_copier
from lmkv.memory.paged import PagedMemory
from lmkv.memory.slab import Slab
from tests.tables import every, raised

BLOCKS = 12
BLOCK_SIZE = 4
PAGES = 3
"""Blocks that make a chunk."""

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.uint8).to(dtype)


def interleaved(dtype: torch.dtype) -> list[torch.Tensor]:
    """All layers of a block side by side, as engines with a cross-layer layout have it."""
    whole = empty(BLOCKS, 5, 2, BLOCK_SIZE, 8, dtype=dtype)
    return list(whole.unbind(1))


def every_second(dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers with other memory between their blocks, so that they cannot be fused."""
    whole = empty(BLOCKS, 4, 2, BLOCK_SIZE, 8, dtype=dtype)
    return [whole[:, 0], whole[:, 2]]


LAYOUTS: dict[str, tuple[int, Callable[[torch.dtype], list[torch.Tensor]]]] = {
    "[B,H,N,C]": (0, lambda dtype: [empty(BLOCKS, 2, BLOCK_SIZE, 16, dtype=dtype) for _ in range(3)]),
    "[B,2,N,H,D]": (0, lambda dtype: [empty(BLOCKS, 2, BLOCK_SIZE, 2, 8, dtype=dtype) for _ in range(3)]),
    "[2,B,N,H,D]": (1, lambda dtype: [empty(2, BLOCKS, BLOCK_SIZE, 2, 8, dtype=dtype) for _ in range(3)]),
    "permuted": (0, lambda dtype: [empty(BLOCKS, 2, BLOCK_SIZE, 8, dtype=dtype).permute(0, 2, 1, 3) for _ in range(2)]),
    "interleaved": (0, interleaved),
    "every second": (0, every_second),
    "odd": (0, lambda dtype: [empty(BLOCKS, 3, 5, dtype=dtype), empty(BLOCKS, 7, dtype=dtype)]),
}


def bytes_of_block(tensor: torch.Tensor, axis: int, block: int) -> list[bytes]:
    """The memory of a block in each plane of a layer, in the order of addresses."""
    found = []
    for plane in [tensor] if axis == 0 else list(tensor):
        inner = plane[block]
        order = sorted(range(inner.ndim), key=lambda dim: -inner.stride(dim))
        found.append(bytes(inner.permute(order).contiguous().view(torch.uint8).flatten().tolist()))
    return found


def fill(tensors: Sequence[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        raw = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), generator=generator)
        tensor.copy_(raw.to(torch.uint8).view(tensor.dtype).view(tensor.shape))


def contents(tensors: Sequence[torch.Tensor], axis: int) -> list[list[list[bytes]]]:
    """The memory of every block of each layer."""
    return [[bytes_of_block(tensor, axis, block) for block in range(BLOCKS)] for tensor in tensors]


def after(
    before: list[list[list[bytes]]], source: list[list[list[bytes]]], moved: Mapping[int, int]
) -> list[list[list[bytes]]]:
    """The contents that remain where nothing was moved; `moved`: by block, the block of `source` that it got."""
    return [
        [theirs[moved[block]] if block in moved else own[block] for block in range(BLOCKS)]
        for own, theirs in zip(before, source, strict=True)
    ]


def expected(tensors: Sequence[torch.Tensor], axis: int, blocks: Sequence[int]) -> bytes:
    """A chunk: plane by plane, block by block. Layers whose planes are fused lie block by block."""
    planes: list[list[bytes]] = []
    for tensor in tensors:
        per_block = [bytes_of_block(tensor, axis, block) for block in blocks]
        planes += [list(pages) for pages in zip(*per_block, strict=True)]
    return b"".join(page for plane in planes for page in plane)


class Setup:
    def __init__(self, tensors: Sequence[torch.Tensor], axis: int, *, fuse: bool = False) -> None:
        from lmkv.memory.paged import block_rows, planes

        rows = [block_rows(plane) for tensor in tensors for plane in planes(tensor, axis)]
        self.memory = PagedMemory(rows, fuse=fuse)
        self.layout = self.memory.layout(BLOCK_SIZE * PAGES, [BLOCK_SIZE])
        self.slab = Slab(self.layout.slot_bytes, 4 * self.layout.slot_bytes)
        self.copier = CPUCopier(self.memory, self.layout, self.slab)

    def chunk(self, slot: int) -> bytes:
        return bytes(self.slab.view(slot, self.layout.chunk_bytes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chunk_is_its_pages_plane_by_plane(name: str, dtype: torch.dtype) -> None:
    axis, make = LAYOUTS[name]
    tensors = make(dtype)
    fill(tensors, 1)
    setup = Setup(tensors, axis)
    setup.copier.store([ChunkCopy(0, (Run(0, [7, 2, 11]),)), ChunkCopy(2, (Run(0, [0, 1, 3]),))]).wait()
    assert setup.chunk(0) == expected(tensors, axis, [7, 2, 11])
    assert setup.chunk(2) == expected(tensors, axis, [0, 1, 3])
    assert setup.chunk(1) == bytes(setup.layout.chunk_bytes), "nothing else is touched"


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_stored_is_loaded_into_other_blocks_and_nowhere_else(
    name: str, dtype: torch.dtype, fuse: bool
) -> None:
    axis, make = LAYOUTS[name]
    source, target = make(dtype), make(dtype)
    fill(source, 2)
    fill(target, 3)
    before = contents(target, axis)
    out, back = Setup(source, axis, fuse=fuse), Setup(target, axis, fuse=fuse)
    out.copier.store([ChunkCopy(1, (Run(0, [4, 9, 0]),))]).wait()
    back.slab.view(3)[:] = out.slab.view(1)
    back.copier.load([ChunkCopy(3, (Run(0, [5, 6, 1]),))]).wait()
    moved = {5: 4, 6: 9, 1: 0}
    assert contents(target, axis) == after(before, contents(source, axis), moved)


orders = st.permutations(range(BLOCKS))


@given(orders, orders, st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(0, PAGES)), max_size=4))
def test_parts_of_chunks_in_one_call(stored: list[int], loaded: list[int], parts: list[tuple[int, int]]) -> None:
    """A load that begins inside a chunk fills its blocks alone. `parts`: the first page, and how many, if any."""
    axis, make = LAYOUTS["[2,B,N,H,D]"]
    source, target = make(torch.bfloat16), make(torch.bfloat16)
    fill(source, 4)
    fill(target, 5)
    before = contents(target, axis)
    out, back = Setup(source, axis), Setup(target, axis)
    chunks = [stored[PAGES * slot : PAGES * (slot + 1)] for slot in range(4)]
    out.copier.store([ChunkCopy(slot, (Run(0, blocks),)) for slot, blocks in enumerate(chunks)]).wait()
    copies, moved, free = [], {}, iter(loaded)
    for slot, (first, count) in enumerate(parts):
        assert out.chunk(slot) == expected(source, axis, chunks[slot])
        back.slab.view(slot)[:] = out.slab.view(slot)
        blocks = list(itertools.islice(free, min(count, PAGES - first)))
        copies.append(ChunkCopy(slot, (Run(first, blocks),)))
        moved |= dict(zip(blocks, chunks[slot][first:], strict=False))
    back.copier.load(copies).wait()
    assert contents(target, axis) == after(before, contents(source, axis), moved)


@pytest.mark.parametrize("name", ["[B,H,N,C]", "every second"])
def test_what_does_not_exist_is_refused_before_anything_moves(name: str) -> None:
    axis, make = LAYOUTS[name]
    tensors = make(torch.bfloat16)
    fill(tensors, 5)
    setup = Setup(tensors, axis)
    before = [tensor.clone() for tensor in tensors]
    moves = (setup.copier.store, setup.copier.load, setup.copier.store_layers, setup.copier.load_layers)

    def check(match: str, slot: int, blocks: Any) -> None:
        copies = [ChunkCopy(0, (Run(0, [1, 2, 3]),)), ChunkCopy(slot, (Run(0, blocks),))]
        for move in moves if match.startswith("a block id") else moves[:2]:
            raised(UsageError, match, move, copies)
        assert setup.chunk(0) == bytes(setup.layout.chunk_bytes)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))

    every([("block ids", 1, [4, block, 5]) for block in (-1, BLOCKS, BLOCKS + 1000, -BLOCKS)], check)
    every([("slot", slot, [4, 5, 6]) for slot in (-1, 4)], check)
    every([("a block id must be an integer, not", 1, given) for given in NO_BLOCKS], check)


def test_each_rank_has_its_own_segment_of_a_slot() -> None:
    axis, make = LAYOUTS["[B,2,N,H,D]"]
    ranks = [make(torch.bfloat16) for _ in range(3)]
    memories = [PagedMemory.of(tensors) for tensors in ranks]
    layout = memories[0].layout(BLOCK_SIZE * PAGES, [BLOCK_SIZE], num_ranks=3)
    slab = Slab(layout.slot_bytes, 2 * layout.slot_bytes)
    for rank in (2, 0, 1):
        fill(ranks[rank], rank)
        CPUCopier(memories[rank], layout, slab, rank).store([ChunkCopy(1, (Run(0, [3, 4, 5]),))])
    segments = [expected(tensors, axis, [3, 4, 5]) for tensors in ranks]
    assert bytes(slab.view(1, layout.chunk_bytes)) == b"".join(segments)
    assert bytes(slab.view(0, layout.chunk_bytes)) == bytes(layout.chunk_bytes)


def test_each_group_has_its_own_blocks() -> None:
    """Two block tables with blocks of other sizes and other numbers, and one that skips its window."""
    large, small = empty(6, 64, dtype=torch.uint8), empty(20, 16, dtype=torch.uint8)
    fill([large, small], 6)
    memory = PagedMemory([large, small], [0, 1], fuse=False)
    layout = memory.layout(16, [8, 4])
    assert layout.layers == (LayerPages(64, 2, 0), LayerPages(16, 4, 1))
    slab = Slab(layout.slot_bytes, layout.slot_bytes)
    copier = CPUCopier(memory, layout, slab)
    copier.store([ChunkCopy(0, (Run(0, [5, 0]), Run(2, [19, 7])))])
    chunk = bytes(slab.view(0, layout.chunk_bytes))
    assert chunk[:128] == bytes(large[5].tolist() + large[0].tolist())
    assert chunk[128 : 128 + 32] == bytes(32)
    assert chunk[160:192] == bytes(small[19].tolist() + small[7].tolist())
    raised(UsageError, "", copier.store, [ChunkCopy(0, (Run(0, [6, 0]), Run(2, [19, 7])))])


def test_memory_layout_and_slab_must_fit_each_other() -> None:
    axis, make = LAYOUTS["[B,H,N,C]"]
    setup, other = Setup(make(torch.bfloat16), axis), KVLayout(12, (LayerPages(99, 3),) * 3)
    raised(UsageError, "page sizes", CPUCopier, setup.memory, other, setup.slab)
    with pytest.raises(UsageError, match="but a slot has"):
        CPUCopier(setup.memory, setup.memory.layout(BLOCK_SIZE * PAGES, [BLOCK_SIZE], num_ranks=2), Slab(4096, 8192))


def test_apart_layers_are_gathered_without_copying_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy would first make a contiguous copy of all pages: as large as the whole KV memory."""

    def take(pages: Any, *args: Any, **kwargs: Any) -> Any:
        assert pages.flags.c_contiguous
        return real(pages, *args, **kwargs)

    real = np.take
    monkeypatch.setattr(np, "take", take)
    for axis, make in LAYOUTS.values():
        setup = Setup(make(torch.bfloat16), axis)
        setup.copier.store([ChunkCopy(0, (Run(0, [1, 2, 3]),))])


def test_the_copier_is_chosen_by_the_device() -> None:
    axis, make = LAYOUTS["[B,H,N,C]"]
    setup = Setup(make(torch.bfloat16), axis)
    with closing(make_copier(setup.memory, setup.layout, setup.slab)) as copier:
        assert isinstance(copier, CPUCopier)
        assert repr(copier) == "<CPUCopier: 3 layers in 3 planes>"
        assert copier.store([]).query()


@pytest.mark.parametrize(("kind", "hip", "said"), [("xpu", None, "type 'xpu'"), ("cuda", "6.4", "an AMD GPU")])
def test_other_accelerators_are_refused_in_words(
    kind: str, hip: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROCm's devices are called "cuda", and there is no libcuda to load."""
    monkeypatch.setattr(torch.version, "hip", hip)
    raised(UsageError, f"CPUs and NVIDIA GPUs, not .*{said}", check_device, kind)
    check_device("cpu")


# -- block ids -----------------------------------------------------------------------------------------

NO_BLOCKS: list[list[Any]] = [
    *([1.0, 2.0, 3.0], [1, 2.5, 3], [1, float("nan"), 3], [True, False, True], [1, True, 3], [1, np.True_, 3]),
    *([1, None, 3], ["1", "2", "3"], [1, [2], 3], [torch.tensor([1]), 2, 3], [torch.tensor(1.0), 2, 3]),
    [torch.tensor(True), 2, 3],
]
NO_SEQUENCES: list[Any] = [
    *(None, "123", b"123", 7, {1: 2}, {1, 2, 3}, np.array([1.0, 2.0, 3.0]), np.array([True, False, True])),
    *(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]), np.array([[1, 2, 3]]), np.array(7)),
    *(torch.tensor([[1], [2], [3]]), np.array([1, None], dtype=object)),
]


def test_what_is_no_sequence_of_block_ids_is_refused_by_its_name() -> None:
    every(NO_SEQUENCES, lambda given: raised(UsageError, r"must be a.* integers?, not \S", block_ids, given))


def test_integers_of_all_kinds_are_block_ids() -> None:
    kinds: list[Any] = [
        *([7, 0, 3], (7, 0, 3), array("H", [7, 0, 3]), np.array([7, 0, 3], np.uint8), np.array([7, 0, 3], np.int64)),
        *(torch.tensor([7, 0, 3]), torch.tensor([7, 0, 3], dtype=torch.int16), [np.int32(7), 0, np.uint64(3)]),
        *([torch.tensor(7), 0, 3], np.array([7, 0, 3], dtype=object)),
    ]
    for kind in kinds:
        ids = block_ids(kind)
        assert ids == [7, 0, 3]
        assert {type(value) for value in ids} == {int}
        assert block_ids(kind[:0]) == []


def engine_of(tensors: Sequence[torch.Tensor]) -> Engine:
    config = Config.load(chunk_size=PAGES * BLOCK_SIZE, max_local_cpu_size=0.001, env={})
    return Engine.open(tensors, block_size=BLOCK_SIZE, model="m", config=config)


def test_an_engine_over_layers_of_different_block_counts_is_refused() -> None:
    """It would store one layer's last block for all those that only the other one has."""
    with pytest.raises(UsageError, match="64 and of 32 blocks cannot share a block table"):
        engine_of([torch.randn(64, 2, BLOCK_SIZE, 8), torch.randn(32, 2, BLOCK_SIZE, 8)])
