"""Shared by the benchmarks: options, a path for child processes, and the timing of `lmkv bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lmkv.cli.measure.timing import (
    SURE,
    Row,
    finish,
    interleaved,
    interval,
    machine,
    median_ratio,
    percentile,
    turns,
    within,
)

__all__ = [
    "Row",
    "arguments_of",
    "finish",
    "interleaved",
    "interval",
    "machine",
    "median_ratio",
    "percentile",
    "sure_within",
    "turns",
]

REPOSITORY = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
"""Variables with which a process imports the packages of this repository."""


def sure_within(ratios: Sequence[float], digits: int = 2) -> str:
    """The interval of 95 % in words, or the range of few rounds."""
    found = within(ratios, digits) or f"{ratios[0]:.{digits}f}"
    return f"{'95 % within' if len(ratios) >= SURE else 'rounds of'} {found}"


def arguments_of(page: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, for the program that `page` describes. `quick`: what that means."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser
