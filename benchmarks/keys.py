"""Chunk keys of a 131,072-token prompt beside the cost of any chain of sha256.

python benchmarks/keys.py [--quick] [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

# Not this folder: its copy.py would stand in for the standard library's.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import random

from benchmarks._timing import Row, arguments_of, finish, interleaved, median_ratio
from lmkv.chunks.hashing import chunk_keys
from lmkv.cli.measure.calls import KEYS_TARGET
from lmkv.cli.measure.limits import bare_chain

TOKENS, CHUNK = 131_072, 256


def main() -> int:
    options = arguments_of(__doc__).parse_args()
    tokens = random.Random(0).choices(range(150_000), k=TOKENS)
    assert bare_chain(tokens) == chunk_keys(tokens, bytes(32), CHUNK)
    cases = {"limit": lambda: bare_chain(tokens), "lmkv": lambda: chunk_keys(tokens, bytes(32), CHUNK)}
    times = interleaved(cases, rounds=15 if options.quick else 101)
    ratio = median_ratio(times, "lmkv", "limit")
    value = sorted(times["lmkv"])[len(times["lmkv"]) // 2] * 1e3
    row = Row(
        f"keys of {TOKENS:,} tokens", value, "ms", "array + streaming sha256", ratio, KEYS_TARGET, ratio <= KEYS_TARGET
    )
    return finish([row], options.json)


if __name__ == "__main__":
    sys.exit(main())
