"""Pages as numbers: what passes for the same computation, and what is found to be another one."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_pages_of_other_numbers_are_found_with_their_layer_rank_and_tokens(slab: Slab, dtype: torch.dtype) -> None:
    """And equal bytes and nearly equal numbers pass."""
    numbers = fill(slab, dtype)
    assert differences(slab, dtype) == []
    put(slab, 0, 1, 0, numbers[1, 0] * (1 + TOLERANCE[dtype] / 4), dtype)
    assert differences(slab, dtype) == []
    other = numbers[1, 1].clone()
    other[2] = torch.randn(NUMBERS)
    put(slab, 1, 1, 1, other, dtype)
    assert differences(slab, dtype) == [(0, 1, ("layer 1",), 16, 24)]
    assert differences(slab, dtype, rank=0) == [], "each rank compares its own part"
    other = fill(slab, dtype)[1, 0].clone()
    other[0] = 0
    put(slab, 0, 1, 0, other, dtype)
    assert differences(slab, dtype, copy=ChunkCopy(0, (Run(1, [1, 2, 3]),))) == [], "it was not copied"
    assert len(differences(slab, dtype)) == 1
    unknown = [Part("layer 0", 0, 0, NUMBERS * dtype.itemsize, torch.uint8)]
    assert Comparison(layout_of(dtype), slab, 1, unknown).differences([whole(0)], [1]) == [], "no tolerance"


def test_numbers_that_are_not_finite_differ_from_all_others(slab: Slab, dtype: torch.dtype) -> None:
    numbers = fill(slab, dtype)[1, 0].clone()
    numbers[3, 5] = float("nan")
    put(slab, 1, 1, 0, numbers, dtype)
    assert differences(slab, dtype) == [(0, 1, ("layer 0",), 24, 32)]
    put(slab, 0, 1, 0, numbers, dtype)
    assert differences(slab, dtype) == []


def test_the_deviation_is_relative() -> None:
    left, right = torch.randn(5, 90), torch.randn(5, 90)
    assert torch.allclose(deviation(1e-15 * left, 1e-15 * right), deviation(left, right))
    assert deviation(left, right).min() > 1
    assert deviation(left, left).max() == 0
    assert deviation(torch.ones(1, 8), torch.zeros(1, 8)) > 1


TOKENS, CHANNELS = 128, 32


def page_of(mean: float, seed: int) -> torch.Tensor:
    """A page of keys, `[page, token, channel]`: each channel has a mean of its own."""
    keys = torch.randn((1, TOKENS, CHANNELS), generator=torch.Generator().manual_seed(seed))
    return keys + mean * torch.randn(CHANNELS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_mean_hides_no_other_tokens(packed: bool) -> None:
    """`packed`: as CPUs have keys, with tokens next to each other."""
    pages = [page_of(40.0, seed) for seed in (1, 2)]
    left, right = [(page.transpose(1, 2) if packed else page).flatten(1) for page in pages]
    assert deviation(left, right, (1, CHANNELS), torch.finfo(torch.bfloat16).eps) > 2 * TOLERANCE[torch.bfloat16]
    rounded = left.bfloat16().float()
    assert deviation(left, rounded, (1, CHANNELS), torch.finfo(torch.bfloat16).eps) < TOLERANCE[torch.bfloat16] / 2


def test_the_last_token_of_a_page_is_seen() -> None:
    left = page_of(0.0, 1)
    right = left.clone()
    right[0, -1] = page_of(0.0, 2)[0, -1]
    assert deviation(left.flatten(1), right.flatten(1), (1, CHANNELS)) > 2 * TOLERANCE[torch.bfloat16]


def test_values_are_not_measured_by_the_spread_of_keys() -> None:
    left = torch.cat([100 * page_of(0.0, 1), page_of(0.0, 2)], 1).flatten(1)
    right = torch.cat([100 * page_of(0.0, 1), page_of(0.0, 3)], 1).flatten(1)
    assert deviation(left, right, (1, CHANNELS)) > 2 * TOLERANCE[torch.bfloat16]


def test_a_few_tokens_with_other_experts_are_no_wrong_page() -> None:
    left, right = page_of(0.0, 1), page_of(0.0, 1)
    right[0, 5:40] = page_of(0.0, 2)[0, 5:40]
    assert deviation(left.flatten(1), right.flatten(1), (1, CHANNELS)) > 1
    assert deviation(left.flatten(1), right.flatten(1), (1, CHANNELS), loose=0.5) == 0
    assert deviation(left.flatten(1), page_of(0.0, 2).flatten(1), (1, CHANNELS), loose=0.5) > 0.5


def test_numbers_have_the_roundings_of_what_they_are_computed_from(slab: Slab, dtype: torch.dtype) -> None:
    """As the states of recurrent layers, in float32, of a model in bfloat16."""
    numbers = fill(slab, dtype)
    put(slab, 0, 1, 0, numbers[1, 0] + 1.5 * TOLERANCE[dtype] * torch.randn(PAGES, NUMBERS), dtype)
    coarse = [Part("layer 0", 0, 0, NUMBERS * dtype.itemsize, dtype, source=torch.float8_e5m2)]
    if dtype in (torch.float32, torch.float16):
        assert Comparison(layout_of(dtype), slab, 1, parts_of(dtype)).differences([whole(0)], [1])
        assert Comparison(layout_of(dtype), slab, 1, coarse).differences([whole(0)], [1]) == []
