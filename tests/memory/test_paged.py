"""PagedMemory: what is a page, what can be fused, what is refused."""

from __future__ import annotations

import pytest
import torch

from lmkv.chunks.layout import LayerPages
from lmkv.errors import UsageError
from lmkv.memory.paged import PagedMemory, block_rows, planes
from tests.tables import raised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint8])
def test_rows_are_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, 2, 4, 8, dtype=dtype)
    rows = block_rows(tensor)
    assert rows.shape == (6, 64 * tensor.element_size())
    assert rows.dtype is torch.uint8
    rows[3] = 1
    raw = tensor.view(torch.uint8)
    assert raw[3].eq(1).all()
    assert int(raw.sum()) == rows.shape[1]


def test_rows_of_a_part_of_a_tensor() -> None:
    whole = torch.arange(4 * 3 * 8, dtype=torch.uint8).view(4, 3, 8)
    rows = block_rows(whole[1:, 1])
    assert (rows.shape, rows.stride()) == ((3, 8), (24, 1))
    assert rows[0].tolist() == list(range(32, 40))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1), (0, 3, 1, 2)])
def test_the_order_inside_a_page_does_not_matter(order: tuple[int, ...]) -> None:
    tensor = torch.arange(5 * 2 * 3 * 4, dtype=torch.int16).view(5, 2, 3, 4)
    rows = block_rows(tensor.permute(order))
    assert torch.equal(rows, block_rows(tensor))


def test_dimensions_of_one_may_have_any_stride() -> None:
    tensor = torch.zeros(5, 8, dtype=torch.uint8).as_strided((5, 1, 8), (8, 999, 1))
    assert block_rows(tensor).shape == (5, 8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6, 8)[:, :, ::2],
        torch.zeros(4, 6, 8)[:, ::2],
        torch.zeros(4, 6, 8)[..., :5],
        torch.zeros(4, 1, 8).expand(4, 6, 8),
    ],
    ids=["every second value", "every second row", "cut rows", "expanded"],
)
def test_blocks_with_holes_are_refused(tensor: torch.Tensor) -> None:
    raised(UsageError, r"layer 7: .*not contiguous", block_rows, tensor, "layer 7")


@pytest.mark.parametrize("stride", [0, 4])
def test_blocks_that_share_memory_are_refused(stride: int) -> None:
    tensor = torch.zeros(100, dtype=torch.uint8).as_strided((4, 8), (stride, 1))
    raised(UsageError, "overlap", block_rows, tensor)


def test_planes() -> None:
    tensor = torch.zeros(2, 5, 8)
    assert [plane.shape for plane in planes(tensor, 0)] == [(2, 5, 8)]
    assert [plane.shape for plane in planes(tensor, 1)] == [(5, 8), (5, 8)]
    raised(UsageError, "block_axis must be 0 or 1", planes, tensor, 2)


def test_layers_of_a_block_in_one_run_are_fused() -> None:
    whole = torch.zeros(6, 4, 2, 8, dtype=torch.uint8)
    memory = PagedMemory.of(whole.unbind(1))
    assert [tuple(row.shape) for row in memory.rows] == [(6, 64)]
    assert memory.groups == [0]
    memory.rows[0][2] = 1
    assert whole[2].eq(1).all()
    assert int(whole.sum()) == 64


def test_keys_and_values_apart_are_not_fused() -> None:
    memory = PagedMemory.of([torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)], block_axis=1)
    assert [tuple(row.shape) for row in memory.rows] == [(6, 32)] * 4


def test_only_what_adjoins_in_every_block_is_fused() -> None:
    whole = torch.zeros(6, 5, 8, dtype=torch.uint8)
    layers = list(whole.unbind(1))
    memory = PagedMemory([block_rows(layer) for layer in (layers[0], layers[1], layers[3], layers[4])])
    assert [tuple(row.shape) for row in memory.rows] == [(6, 16), (6, 16)]
    memory = PagedMemory([block_rows(layer) for layer in (layers[1], layers[0])])
    assert len(memory.rows) == 2, "the order of the layers is kept"
    rows = [block_rows(layer) for layer in layers]
    assert len(PagedMemory(rows, [0, 0, 1, 1, 0]).rows) == 3, "one block table a plane"
    assert len(PagedMemory(rows, fuse=False).rows) == 5


def test_a_block_of_another_tensor_is_not_the_next_one() -> None:
    """Two tensors may lie next to each other in memory by chance."""
    storage = torch.zeros(96, dtype=torch.uint8)
    first, second = storage[:48].view(6, 8), storage[48:].view(6, 8)
    assert len(PagedMemory.of([first, second]).rows) == 2


def test_the_layout_of_memory() -> None:
    memory = PagedMemory([torch.zeros(6, 64).byte(), torch.zeros(9, 16).byte()], [0, 1], fuse=False)
    layout = memory.layout(16, [8, 4], num_ranks=2)
    assert layout.layers == (LayerPages(64, 2, 0), LayerPages(16, 4, 1))
    assert layout.chunk_bytes == 2 * (128 + 64)
    raised(UsageError, "chunk_size 12 is not a multiple of the block size 8", memory.layout, 12, [8, 4])
    raised(UsageError, "no KV tensors", PagedMemory, [])
    assert memory.device.type == "cpu"
