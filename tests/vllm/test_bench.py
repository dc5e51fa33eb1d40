"""The conversations of `lmkv bench`, with real engines."""

from __future__ import annotations

import pytest

from lmkv.cli.measure.conversations import skipped
from lmkv.cli.measure.load import ALONE, HALF, NEW_TARGET, measure_load
from lmkv.cli.measure.vllm_manager import MANAGER, measure_vllm_manager


def test_evictions_are_timed_beside_vllms_manager() -> None:
    [found] = measure_vllm_manager(quick=True)
    assert (list(found.bars), found.reference) == ([MANAGER, "lmkv"], MANAGER)
    assert all(value > 0 for value in found.bars.values())
    assert len(found.ratios["lmkv"]) == 50


@pytest.mark.nightly("tools")
@pytest.mark.timeout(900)
def test_conversations_are_answered_alike_and_hit_more() -> None:
    said: list[str] = []
    all_talks, itself, hits, *first_tokens, new, new_itself = measure_load(quick=True, say=said.append)
    assert len(said) == 2
    for comparison in (all_talks, new):
        assert (list(comparison.bars), comparison.reference) == ([ALONE, HALF], ALONE)
        assert comparison.note == "all answers are equal"
        assert not comparison.targets
    for comparison, beside, target in ((itself, all_talks, 1.0), (new_itself, new, NEW_TARGET)):
        assert (list(comparison.bars), comparison.reference) == ([skipped(HALF), HALF], skipped(HALF))
        assert comparison.bars[HALF] == beside.bars[HALF]
        assert comparison.targets == {HALF: target}
    assert len(first_tokens) == 3
    assert all(value > 0 for comparison in (all_talks, new, *first_tokens) for value in comparison.bars.values())
    assert hits.bars[HALF] > hits.bars[ALONE]
    # With vLLM's own cache alone. It hits a little more or less when requests end in another order.
    assert hits.bars[skipped(HALF)] < 1.5 * hits.bars[ALONE]
