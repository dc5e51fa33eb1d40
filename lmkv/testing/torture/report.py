"""The report of a failure: what to run to see it again, the smallest schedule, and what differs."""

from __future__ import annotations

import json
import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from attrs import frozen

from lmkv.testing.torture.checks import Problem
from lmkv.testing.torture.schedule import Schedule
from lmkv.testing.torture.trial import PATIENCE, Setup

_LOG_LINES = 60
_MEANINGS = {
    "difference": "An answer differs from that of an engine without the connector.",
    "truthfulness": "More tokens are reported as cached than can have been.",
    "leak": "Something is still held after the last request.",
    "hang": "Something never ends.",
    "death": "The engine has died.",
}


@frozen
class Failure:
    """`schedule`: the smallest one, of `operations` at first. `failed`, `trials`: how often it did, when repeated."""

    problem: Problem
    schedule: Schedule
    operations: int
    failed: int
    trials: int
    log: str


def write(folder: Path, failure: Failure, setup: Setup, found: Sequence[str], number: int) -> Path:
    """Write the report and the schedule for `--schedule` into the folder; the report's path. `found`: the command."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule = folder / f"schedule-{number}.json"
    schedule.write_text(failure.schedule.to_json())
    facts = {
        "problem": failure.problem.as_json(),
        "versions": versions(setup),
        "connector": setup.connector,
        "prefill": setup.prefill,
        "engine": setup.engine,
        "around": setup.around,
        "command": list(found),
        "failed": failure.failed,
        "trials": failure.trials,
    }
    (folder / f"report-{number}.json").write_text(json.dumps(facts, indent=1) + "\n")
    report = folder / f"report-{number}.md"
    report.write_text("\n".join(_lines(failure, setup, found, schedule)) + "\n")
    return report


def _lines(failure: Failure, setup: Setup, found: Sequence[str], path: Path) -> list[str]:
    problem, schedule = failure.problem, failure.schedule
    replay = ["python", "-m", "lmkv.testing.torture", "--schedule", path.name, *again(setup)]
    title = " ".join(problem.text.split())
    lines = [f"# {problem.kind.capitalize()}: {title}", "", _MEANINGS[problem.kind], ""]
    lines += ["Found with", "", f"    {shlex.join(found)}", "", "and seen again with", "", f"    {shlex.join(replay)}"]
    lines += ["", f"This schedule failed in {failure.failed} of {failure.trials} trials, each in a fresh process over"]
    lines += [f"fresh storage. It has {len(schedule.operations)} of {failure.operations} operations.", ""]
    lines += ["## Versions", "", *(f"* {name} {number}" for name, number in versions(setup).items()), ""]
    lines += ["## Engine", "", "    " + json.dumps({**schedule.engine, **setup.engine}), ""]
    lines += ["The connector, vLLM's `kv_transfer_config`:", "", "    " + json.dumps(setup.connector), ""]
    if setup.prefill is not None:
        lines += ["The connector of the prefill engine:", "", "    " + json.dumps(setup.prefill), ""]
    lines += [f"## The smallest schedule, on a model of the kind {schedule.kind}", ""]
    lines += [f"{number}. {operation}" for number, operation in enumerate(schedule.operations, 1)]
    lines += ["", "`d5[:30]` is 30 random tokens of a document, `r2[:9]` is 9 tokens of the right answer to r2.", ""]
    if problem.expected:
        lines += [f"## The answer to {problem.request}", "", f"    expected {problem.expected}"]
        lines += [f"    given    {problem.given}", "", f"They differ from token {problem.position} on.", ""]
    if failure.log.strip() and problem.kind in {"hang", "death"}:
        lines += ["## The end of its log", ""]
        lines += [f"    {line}" for line in failure.log.splitlines()[-_LOG_LINES:]]
    return lines


def again(setup: Setup) -> list[str]:
    """The options that make the same setup."""
    options = [] if setup.connector is None else ["--connector", json.dumps(setup.connector)]
    options += [] if setup.prefill is None else ["--prefill", json.dumps(setup.prefill)]
    options += ["--engine", json.dumps(setup.engine)] if setup.engine else []
    options += [word for name in setup.around for word in ("--around", name)]
    options += ["--patience", f"{setup.patience:g}"] if setup.patience != PATIENCE else []
    options += ["--model", setup.model] if setup.model else []
    options += ["--server", setup.server] if setup.server else []
    return options + (["--redis", setup.redis] if setup.redis else [])


def versions(setup: Setup) -> dict[str, str]:
    """Versions of Python, of vLLM with what it computes with, and of the package that the connector is from."""
    module = str((setup.connector or {}).get("kv_connector_module_path", "lmkv")).partition(".")[0]
    names = {"vllm", "torch", "transformers", module}
    found = {"Python": platform.python_version()}
    for name in sorted(names):
        for package in packages_distributions().get(name, ()):
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return found


def summary(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in Counter(counts).items())
