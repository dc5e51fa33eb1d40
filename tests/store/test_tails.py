"""How many slots tails and states may have."""

from __future__ import annotations

import pytest

from lmkv.chunks.hashing import StateKey, TailKey
from lmkv.store.entries import shares


@pytest.mark.parametrize(
    ("slots", "tails", "states"), [(1, 1, 1), (24, 3, 16), (80, 10, 53), (512, 32, 341), (3200, 100, 2133)]
)
def test_tails_have_a_smaller_share_of_a_larger_memory(slots: int, tails: int, states: int) -> None:
    found = shares(slots)
    assert (found[TailKey].limit, found[StateKey].limit) == (tails, states)
