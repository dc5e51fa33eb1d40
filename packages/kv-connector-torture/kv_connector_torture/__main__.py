"""Test any KV connector of vLLM with random requests, and compare each answer with that of an engine without it.

    python -m kv_connector_torture --requests 5000
    python -m kv_connector_torture --minutes 10 --kinds gqa,windows --connector '{
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": "{folder}"}}'

Without --connector, this program tests vLLM's own prefix cache. In --connector, --prefill and --server, each trial
replaces `{folder}` by a fresh folder, `{redis}` by the URL of --redis, and `{port}` and `{port2}` by free ports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from kv_connector_torture import models, report
from kv_connector_torture.schedule import Operation, Schedule, make, shrink, simpler
from kv_connector_torture.storage import FAULTS
from kv_connector_torture.trial import PATIENCE, Result, Setup, Trials, resolved

_REPEATS = 3
_TO_SHRINK = 0.75
_IMPATIENT = 6
_LOG_LINES = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv_connector_torture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connector",
        type=_json,
        help="vLLM's kv_transfer_config, as JSON or @FILE; by default vLLM's prefix cache alone",
    )
    parser.add_argument("--prefill", type=_json, help="the same for a second engine, to which each request goes first")
    parser.add_argument("--requests", type=_count, help="end after this number of requests")
    parser.add_argument(
        "--minutes", type=_more_than_none, help="end after this number of minutes; 10 if --requests is absent"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule; each next schedule adds 1")
    parser.add_argument(
        "--kinds", default="gqa", help=f"kinds of models: some of {','.join(models.KINDS)}, or MODULE:TEXT"
    )
    parser.add_argument("--length", type=_count, default=120, help="number of requests of a schedule")
    parser.add_argument(
        "--weights", type=_count, default=1, help="number of models that take turns over the same storage"
    )
    parser.add_argument("--faults", default="", help=f"faults of stored data: some of {','.join(FAULTS)}")
    parser.add_argument("--redis", default="", help="URL of a separate database; each trial empties it")
    parser.add_argument("--server", default="", help="command of a server on {port} that the connector needs")
    parser.add_argument("--engine", type=_json, default="{}", help="more options of vLLM's engines, as JSON or @FILE")
    parser.add_argument(
        "--around", action="append", default=[], metavar="MODULE:NAME", help="context manager in which engines are made"
    )
    parser.add_argument("--model", type=_folder, help="folder of your own model, to test instead of --kinds")
    parser.add_argument(
        "--patience", type=_more_than_none, default=PATIENCE, help="seconds after which a request counts as hanging"
    )
    parser.add_argument("--failures", type=_count, default=1, help="end after this number of schedules that fail")
    parser.add_argument(
        "--shrink-minutes", type=float, default=5.0, help="most minutes to shrink each failing schedule"
    )
    parser.add_argument("--schedule", type=_schedule, metavar="FILE", help="run only the schedule in this file")
    parser.add_argument("--report", default="torture-report", help="folder for reports of failures")
    options = parser.parse_args()
    # Modules that kinds are from lie in this folder, as connectors do.
    sys.path.insert(0, os.getcwd())
    try:
        kinds = {wanted: models.names_of(wanted) for wanted in options.kinds.split(",") if wanted}
    except (ImportError, AttributeError) as error:
        parser.error(f"--kinds: {error}")
    options.faults = [name for name in options.faults.split(",") if name]
    for given, known in (([name for name in kinds if not kinds[name]], models.KINDS), (options.faults, FAULTS)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.kinds = [name for names in kinds.values() for name in names]
    if options.model:
        options.kinds = ["own"]
    elif not options.kinds or "own" in options.kinds:
        parser.error("--kinds has at least one kind, and `own` with --model only")
    return options


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(f"{error}: {text}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"not a JSON object: {text}")
    return found


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"less than 1: {text}")
    return number


def _more_than_none(text: str) -> float:
    if not (number := float(text)) > 0:
        raise ArgumentTypeError(f"not more than 0: {text}")
    return number


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ArgumentTypeError(f"no folder: {text}")
    return str(Path(text).resolve())


def _schedule(path: str) -> Schedule:
    try:
        return Schedule.from_json(Path(path).read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentTypeError(f"no schedule: {path}: {error}") from None


class Session:
    """All trials of one call of this program."""

    def __init__(self, options: argparse.Namespace, folder: Path, command: report.Command) -> None:
        self._options = options
        self._command = command
        self._setup = Setup(
            folder=folder,
            connector=options.connector,
            prefill=options.prefill,
            engine=options.engine,
            around=tuple(options.around),
            model=options.model or "",
            redis=options.redis,
            server=options.server,
            patience=options.patience,
        )
        self._trials = Trials(self._setup)
        self._counts: Counter[str] = Counter()
        self._failures = 0
        self._started = time.monotonic()

    def run(self) -> int:
        """Run trial after trial until a limit is reached, or one trial with the schedule of `--schedule`. Returns the
        exit status.
        """
        try:
            if self._options.schedule:
                self._try(self._options.schedule)
            else:
                self._try_many()
        except KeyboardInterrupt:
            self._say("interrupted")
            if not self._failures:
                return 130
        verdict = {0: "no failure", 1: "1 failure"}.get(self._failures, f"{self._failures} failures")
        self._say(f"{verdict}: {report.summary(self._counts)}")
        return 1 if self._failures else 0

    def _try_many(self) -> None:
        options = self._options
        minutes = options.minutes or (10.0 if options.requests is None else float("inf"))
        number = 0
        while self._failures < options.failures:
            left = (options.requests or sys.maxsize) - self._counts["requests"] - self._counts["aborts"]
            if left <= 0 or self._seconds > 60 * minutes:
                break
            self._try(self._made(number, min(options.length, left)))
            number += 1
        if not self._failures:
            for missing in self._untested():
                self._failures += 1
                self._say(f"nothing was tested: {missing}")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _say(self, text: str) -> None:
        print(f"torture: {self._seconds:.0f}s {text}", flush=True)

    def _made(self, number: int, requests: int) -> Schedule:
        options, kinds = self._options, self._options.kinds
        kind, seed = kinds[number % len(kinds)], options.seed + number
        rng, made = random.Random(f"engine {seed}"), models.kind_of(kind)
        engine = {
            "num_gpu_blocks_override": made.blocks + rng.choice((0, 4, 12)),
            "max_num_batched_tokens": rng.choice((40, 96, 200, 640)),
            "enable_prefix_caching": self._setup.connector is None or rng.random() < 0.7,
        }
        engine = {name: value for name, value in engine.items() if name not in made.tortured}
        more = {"adapters": made.adapters, "weights": options.weights, "faults": options.faults}
        return make(seed, kind, requests, engine, **more)

    def _try(self, schedule: Schedule) -> None:
        self._trials.answers.clear()
        result = self._trials.run(schedule)
        self._counts.update(result.counts)
        done = f"seed {schedule.seed}, {schedule.kind}, {result.seconds:.1f} s: {report.summary(result.counts)}"
        self._say(done)
        if result.problem is not None:
            self._failures += 1
            at = "before the first operation" if result.at is None else f"at operation {result.at + 1}"
            self._say(f"{result.problem.kind} {at}: {result.problem.text}")
            self._report(result)

    def _report(self, result: Result) -> None:
        """Search for the smallest schedule that fails in the same way as `result`, and write a report. After Ctrl-C,
        the report has the smallest schedule found until then.
        """
        assert result.problem is not None
        before, search = self._trials.count, Search(self._trials, result, 60 * self._options.shrink_minutes)
        try:
            if result.at is None:
                print(*result.log.splitlines()[-_LOG_LINES:], sep="\n")
            else:
                minutes = f"{self._options.shrink_minutes:g} minutes"
                self._say(f"looks for a smaller schedule, for {minutes} at most, or until Ctrl-C")
                search.go(self._setup.patience)
        finally:
            failure = report.Failure(search.last, len(result.schedule.operations), search.repeats or [True])
            path = report.write(Path(self._options.report), failure, self._setup, self._command, self._failures)
            size = f"{len(search.last.schedule.operations)} of {failure.operations} operations"
            self._say(f"{size} after {self._trials.count - before} more trials: {path}")

    def _untested(self) -> list[str]:
        """Return the names of the counts that are 0: what they count was not tested."""
        names = set(self._counts) | {"requests", "preemptions", "aborts", "resets", "cached_tokens"}
        if self._setup.connector is not None:
            names |= {"external_tokens", "restarts"}
        if self._options.faults:
            names.add("faults")
        return [f"no {name.replace('_', ' ')}" for name in sorted(names) if not self._counts[name]]


@define
class Search:
    """Searches for the smallest schedule that fails in the same way as a given result, within a given number of
    seconds.

    `last`: the result of the smallest such schedule so far. `repeats`: for each repeat of this schedule, whether it
    failed again.
    """

    _trials: Trials
    _found: Result
    _seconds: float
    last: Result = field(init=False)
    repeats: list[bool] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.last = evolve(self._found, schedule=resolved(self._found))

    def go(self, patience: float) -> None:
        """Search for the smallest schedule. The last quarter of the time is for repeats. `patience`: see `Setup`."""
        started, whole = time.monotonic(), self.last
        end, enough = started + self._seconds, started + _TO_SHRINK * self._seconds
        # A hang takes all patience in each trial: most trials get less.
        waits = self._found.problem is not None and self._found.problem.kind in {"leak", "hang"}
        less = patience / _IMPATIENT if waits else patience

        def fails(operations: list[Operation]) -> bool:
            return bool(self._fails(operations, less, enough))

        shrink(self.last.schedule.operations, fails, simpler=simpler, over=lambda: time.monotonic() > enough)
        for _ in range(_REPEATS):
            again = self._fails(self.last.schedule.operations, patience, end)
            if again is None:
                break
            self.repeats.append(again)
        if waits and self.repeats and not any(self.repeats):
            # It only needs more patience.
            self.last, self.repeats = whole, []

    def _fails(self, operations: Sequence[Operation], patience: float, deadline: float) -> bool | None:
        """Return whether the operations fail in the same way as the given result, or None if the deadline comes before
        the trial ends.
        """
        tried = self._trials.run(self._found.schedule.cut(operations), patience=patience, deadline=deadline)
        assert self._found.problem is not None
        same = tried.problem is not None and tried.problem.nature == self._found.problem.nature
        self.last = tried if same else self.last
        return None if tried.cut_off else same


def main() -> int:
    options, command = arguments(), report.Command.given()
    # The process of a trial is ended with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Processes of trials start somewhere else than this one.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        return Session(options, Path(folder), command).run()


if __name__ == "__main__":
    sys.exit(main())
