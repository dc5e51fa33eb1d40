"""Torture lmkv under real vLLM, and compare every answer with those of an engine without a connector.

    python -m tests.torture --minutes 10 --seed 1
    python -m tests.torture --requests 10000 --json
    python -m tests.torture --runner v2 --variants drafts

Small models in float32, random conversations over shared beginnings, salts, aborts at any step, chunked
prefill, drafts of every kind, too few KV blocks, a tiny host memory over a small disk, and five in a hundred
copies, reads and writes failing, beside damaged files and a disk that is away now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.torture.run import Run
from tests.torture.watchdog import Watchdog
from tests.vllm import triton_cpu


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=None, help="end after so long (10 without --requests)")
    parser.add_argument("--requests", type=int, default=None, help="end after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default="", help="only engines whose names contain this")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1", help="vLLM's model runner")
    parser.add_argument("--audits", type=float, default=0.3, help="audit_rate")
    parser.add_argument("--json", action="store_true", help="end with the counts as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    minutes = options.minutes or (10.0 if options.requests is None else float("inf"))
    if options.runner == "v2":
        os.environ[triton_cpu.SWITCH] = "1"
        triton_cpu.install()
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="lmkv-torture-") as folder:
        run = Run(Path(folder), random.Random(options.seed), options.seed, options.variants, options.audits)

        def conclude() -> int:
            failed = run.counts.verdict()
            for line in (*run.counts.problems[:20], *failed):
                print(f"torture: {line}", flush=True)
            if options.json:
                print(json.dumps(run.counts.as_dict()), flush=True)
            return 1 if failed else 0

        def hung() -> None:
            run.counts.hang("no step ended for a long time")
            conclude()
            os._exit(3)

        with Watchdog(hung) as watchdog:
            try:
                run.go(deadline, options.requests, watchdog.alive)
            except Exception as error:  # noqa: BLE001 - whatever ended the engine is a result
                traceback.print_exc()
                run.counts.hang(f"the engine has died: {error!r}")
        return conclude()


if __name__ == "__main__":
    sys.exit(main())
