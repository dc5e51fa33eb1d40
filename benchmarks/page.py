"""The figures of the README and of docs/performance.md, in one file. `--quick` takes seven minutes on two quiet cores.

    python -m benchmarks.page [--redis URL] [--quick] [--json] [--write docs/results/performance.json]

The file has first tokens of a repeated prompt from each tier (`benchmarks.ttft`), and conversations of more users than
host memory can hold (`benchmarks.talk`). It also has lmkv's share of the time if no prompt repeats (`benchmarks.talk
--within`). Afterwards, `python docs/plot.py` draws the pictures, and `python docs/tables.py` writes the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from benchmarks import talk, ttft
from benchmarks.rounds import Row, arguments, finish

CONVERSATIONS = ["--users", "16", "--over", "2"]
ROUNDS, FEW = (9, 5, 20), (3, 2, 5)
"""Numbers of rounds, complete and with `--quick`: of first tokens, of conversations, and of the time within lmkv."""


def rows(options: argparse.Namespace) -> Iterator[Row]:
    first, talks, within = (["--rounds", str(number)] for number in (FEW if options.quick else ROUNDS))
    redis = ["--redis", options.redis] if options.redis else []
    yield from ttft.rows(*ttft.parsed([*first, *redis]))
    yield from talk.measured(talk.parsed([*CONVERSATIONS, *talks]))
    yield from talk.measured(talk.parsed(["--within", *within]))


def main() -> int:
    parser = arguments(__doc__, quick="a third of the rounds")
    parser.add_argument("--redis", metavar="URL", help="a Redis on loopback, whose database is used")
    options = parser.parse_args()
    return finish(rows(options), options)


if __name__ == "__main__":
    sys.exit(main())
