"""The examples run as they stand."""

from __future__ import annotations

from pathlib import Path

from tests.forked import python

ROOT = Path(__file__).resolve().parents[1]


def test_standalone() -> None:
    printed = python(ROOT, "examples/standalone.py")
    assert "retrieved   1280 tokens, every byte equal" in printed
    assert "prefetched  1280 tokens into host memory, from {'disk': 1280}" in printed
    assert "own stack   768 tokens in cpu 3 chunks, disk 3 chunks" in printed
    assert "by name     the same engine, closed" in printed
