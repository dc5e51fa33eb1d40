"""Pages as numbers: what passes for the same computation, and what is found to be another one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lmkv.chunks.layout import KVLayout, LayerPages
from lmkv.memory.comparison import TOLERANCE, Comparison, Part, deviation
from lmkv.memory.copier import ChunkCopy, Run
from lmkv.memory.slab import Slab

NUMBERS = 64
PAGES = 4


def layout_of(dtype: torch.dtype) -> KVLayout:
    page = NUMBERS * dtype.itemsize
    return KVLayout(32, (LayerPages(page, PAGES), LayerPages(page, PAGES)), num_ranks=2)


def parts_of(dtype: torch.dtype) -> list[Part]:
    return [Part(f"layer {number}", number, 0, NUMBERS * dtype.itemsize, dtype) for number in range(2)]


def whole(slot: int) -> ChunkCopy:
    return ChunkCopy(slot, (Run(0, list(range(PAGES))),))


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def slab(dtype: torch.dtype) -> Iterator[Slab]:
    slab = Slab(layout_of(dtype).slot_bytes, 3 * layout_of(dtype).slot_bytes)
    yield slab
    slab.close()


def put(slab: Slab, slot: int, rank: int, layer: int, numbers: torch.Tensor, dtype: torch.dtype) -> None:
    offset, nbytes = layout_of(dtype).span(rank, layer)
    slab.array[slot, offset : offset + nbytes] = numbers.to(dtype).view(torch.uint8).numpy().reshape(-1)


def fill(slab: Slab, dtype: torch.dtype) -> torch.Tensor:
    """The same random chunk in slots 0 and 1; its numbers `[rank, layer, page, number]`."""
    numbers = torch.randn((2, 2, PAGES, NUMBERS), generator=torch.Generator().manual_seed(0))
    for slot in range(2):
        for rank in range(2):
            for layer in range(2):
                put(slab, slot, rank, layer, numbers[rank, layer], dtype)
    return numbers


def differences(slab: Slab, dtype: torch.dtype, rank: int = 1, copy: ChunkCopy | None = None) -> list[object]:
    comparison = Comparison(layout_of(dtype), slab, rank, parts_of(dtype))
    found = comparison.differences([copy or whole(0)], [1])
    return [(each.copy, each.rank, each.layers, each.first, each.end) for each in found]


def test_equal_bytes_pass(slab: Slab, dtype: torch.dtype) -> None:
    fill(slab, dtype)
    assert differences(slab, dtype) == []


def test_nearly_equal_numbers_pass(slab: Slab, dtype: torch.dtype) -> None:
    numbers = fill(slab, dtype)
    put(slab, 0, 1, 0, numbers[1, 0] * (1 + TOLERANCE[dtype] / 4), dtype)
    assert differences(slab, dtype) == []


def test_the_page_of_another_prompt_is_found_with_its_layer_rank_and_tokens(slab: Slab, dtype: torch.dtype) -> None:
    numbers = fill(slab, dtype)[1, 1].clone()
    numbers[2] = torch.randn(NUMBERS)
    put(slab, 1, 1, 1, numbers, dtype)
    assert differences(slab, dtype) == [(0, 1, ("layer 1",), 16, 24)]
    assert differences(slab, dtype, rank=0) == [], "each rank compares its own part"


def test_pages_that_were_not_copied_are_not_compared(slab: Slab, dtype: torch.dtype) -> None:
    numbers = fill(slab, dtype)[1, 0].clone()
    numbers[0] = 0
    put(slab, 0, 1, 0, numbers, dtype)
    assert differences(slab, dtype, copy=ChunkCopy(0, (Run(1, [1, 2, 3]),))) == []
    assert len(differences(slab, dtype)) == 1


def test_numbers_that_are_not_finite_differ_from_all_others(slab: Slab, dtype: torch.dtype) -> None:
    numbers = fill(slab, dtype)[1, 0].clone()
    numbers[3, 5] = float("nan")
    put(slab, 1, 1, 0, numbers, dtype)
    assert differences(slab, dtype) == [(0, 1, ("layer 0",), 24, 32)]
    put(slab, 0, 1, 0, numbers, dtype)
    assert differences(slab, dtype) == []


def test_a_type_without_a_tolerance_is_not_compared(slab: Slab, dtype: torch.dtype) -> None:
    fill(slab, dtype)
    put(slab, 1, 1, 0, torch.zeros(PAGES, NUMBERS), dtype)
    unknown = [Part("layer 0", 0, 0, NUMBERS * dtype.itemsize, torch.uint8)]
    assert Comparison(layout_of(dtype), slab, 1, unknown).differences([whole(0)], [1]) == []


def test_the_deviation_is_symmetric_and_relative() -> None:
    left, right = torch.randn(5, 9), torch.randn(5, 9)
    assert torch.equal(deviation(left, right), deviation(right, left))
    assert torch.allclose(deviation(1e-20 * left, 1e-20 * right), deviation(left, right))
    assert np.isclose(float(deviation(torch.ones(1, 8), torch.zeros(1, 8))), 1.0)
