"""The conversations of `lmkv bench`, with real engines."""

from __future__ import annotations

import pytest

from lmkv.cli.measure.load import ALONE, HALF, ITSELF, measure_load


@pytest.mark.timeout(900)
def test_conversations_are_answered_alike_and_hit_more() -> None:
    said: list[str] = []
    throughput, itself, hits, *first_tokens, new = measure_load(quick=True, say=said.append)
    assert len(said) == 2
    for comparison in (throughput, hits, *first_tokens, new):
        assert list(comparison.bars) == [ALONE, HALF]
        assert comparison.reference == ALONE
    assert (list(itself.bars), itself.reference) == ([ITSELF, HALF], ITSELF)
    assert itself.bars[HALF] == throughput.bars[HALF]
    assert throughput.note == new.note == "all answers are equal"
    assert hits.bars[HALF] > hits.bars[ALONE]
    assert all(
        value > 0 for comparison in (throughput, itself, *first_tokens, new) for value in comparison.bars.values()
    )
