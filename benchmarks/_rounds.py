"""What the benchmarks share: their common options, and what `lmkv bench` measures and reports with."""

from __future__ import annotations

import argparse

from lmkv.cli.measure.timing import Row, finish, interleaved, machine, median_ratio

__all__ = ["Row", "arguments_of", "finish", "interleaved", "machine", "median_ratio"]


def arguments_of(page: str | None, *, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --quick and --json, for the program that `page` describes. `quick`: what that means."""
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser
