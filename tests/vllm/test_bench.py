"""The conversations of `lmkv bench`, with real engines."""

from __future__ import annotations

import pytest

from lmkv.cli.measure.load import ALONE, OVER, measure_load


@pytest.mark.timeout(900)
def test_conversations_are_answered_alike_however_little_memory_there_is() -> None:
    said: list[str] = []
    throughput, *first_tokens, new = measure_load(quick=True, say=said.append)
    assert len(said) == 3
    assert throughput.note == "all answers are equal"
    for comparison in (throughput, *first_tokens):
        assert list(comparison.bars) == [ALONE, *OVER]
        assert comparison.reference == ALONE
    assert list(new.bars) == [ALONE, "lmkv, RAM for half"]
    assert all(value > 0 for comparison in (throughput, *first_tokens, new) for value in comparison.bars.values())
