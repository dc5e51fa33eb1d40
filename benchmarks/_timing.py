"""Shared by the benchmarks: options, a path for child processes, and the timing of `lmkv bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmkv.cli.measure.timing import Row, finish, interleaved, interval, machine, median_ratio, percentile, turns

__all__ = ["Row", "arguments_of", "finish", "interleaved", "interval", "machine", "median_ratio", "percentile", "turns"]

REPOSITORY = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
"""Variables with which a process imports the packages of this repository."""


def arguments_of(page: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, for the program that `page` describes. `quick`: what that means."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser
