"""Benchmarks with real engines, and `lmkv bench` of a hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import calls, talk
from lmkv.cli.bench import ALONE, DISK, OWN, RAM, first_tokens


def test_evictions_are_timed_beside_vllms_manager() -> None:
    rows = [row for row in calls.beside_vllm(10) if row.of]
    assert all(row.value > 0 and row.ratio for row in rows)
    assert sum(row.target is not None for row in rows) == 2, "LRU beside LRU, ARC beside ARC"


@pytest.mark.nightly("tools")
@pytest.mark.timeout(900)
def test_a_hit_is_shown_beside_vllm_alone(tmp_path: Path) -> None:
    rows = {row.name.rpartition(": ")[2]: row for row in first_tokens(1000, None, tmp_path, 1.0, 1)}
    assert list(rows) == [ALONE, OWN, RAM, DISK]
    assert rows[RAM].value < rows[ALONE].value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly("tools")
@pytest.mark.timeout(900)
def test_conversations_are_answered_alike_and_hit_more() -> None:
    rows = {row.name: row for row in talk.measured(talk.parsed(["--quick", "--over", "2"]))}
    ours = "lmkv, RAM for 1 in 2"
    assert rows[f"answers equal to those of {talk.ALONE}: {ours}"].value == 100
    hits = {name: rows[f"prompt tokens not computed: {name}"].value for name in (talk.ALONE, ours)}
    assert hits[ours] > hits[talk.ALONE]
