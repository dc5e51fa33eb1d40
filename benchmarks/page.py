"""The figures of the README and of docs/performance.md, in one file: some twelve minutes on a quiet machine.

    python -m benchmarks.page [--redis URL] [--quick] [--json] [--write docs/results/performance.json]

First tokens of a repeated prompt from each tier (`benchmarks.ttft`), conversations of more users than host memory
takes (`benchmarks.talk`), and lmkv's share of the time where no prompt repeats (`benchmarks.talk --within`). Then
`python docs/plot.py` draws the pictures, and `python docs/tables.py` writes the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from benchmarks import talk, ttft
from benchmarks.rounds import Row, arguments, finish

FIRST_TOKENS = ["--rounds", "9"]
CONVERSATIONS = ["--users", "16", "--over", "2", "--rounds", "5"]
WITHIN = ["--within", "--rounds", "20"]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    quick = ["--quick"] if options.quick else []
    redis = ["--redis", options.redis] if options.redis else []
    yield from ttft.rows(*ttft.parsed([*FIRST_TOKENS, *redis, *quick]))
    yield from talk.measured(talk.parsed([*CONVERSATIONS, *quick]))
    yield from talk.measured(talk.parsed([*WITHIN, *quick]))


def main() -> int:
    parser = arguments(__doc__, quick="three rounds of first tokens, one of the others")
    parser.add_argument("--redis", metavar="URL", help="a Redis on loopback, whose database is used")
    options = parser.parse_args()
    return finish(rows(options), options)


if __name__ == "__main__":
    sys.exit(main())
