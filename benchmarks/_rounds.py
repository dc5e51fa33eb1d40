"""What the benchmarks share with `lmkv bench`, under the name that they know it by."""

from lmkv.cli.rounds import Row, finish, interleaved, machine, median_ratio

__all__ = ["Row", "finish", "interleaved", "machine", "median_ratio"]
