"""The report of a failure: the command that repeats the failure, the smallest schedule, and the differences."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from attrs import field, frozen

from kv_connector_torture.checks import Problem
from kv_connector_torture.engine import OPTIONS
from kv_connector_torture.models import kind_of
from kv_connector_torture.trial import PATIENCE, Result, Setup

_LOG_LINES = 60
_PROGRAM = "kv_connector_torture"
_VARIABLES = ("VLLM_", "UCX_")
_MEANINGS = {
    "difference": "An answer differs from that of an engine without the connector.",
    "truthfulness": "More tokens are reported as cached than can have been.",
    "leak": "Blocks or requests are not given back.",
    "hang": "Something never ends.",
    "alarm": "A check of --around has failed.",
    "death": "The engine has died.",
}

_LEGEND = """Prompts are made of parts: `b2[:90]` and `d5[:30]` are the first 90 and 30 random tokens of a document, the
same in all prompts, and `r2[:9]` is the first 9 tokens of the right answer to r2. A salt is vLLM's `cache_salt`. A step
is one of the engine; `step count=0` goes on until all requests have ended."""
_LIBRARIES = ("flexkv", "hf3fs", "lmcache", "mooncake", "mori", "nixl")
"""Packages of connectors that vLLM registers itself. The name of such a connector contains the name of its package."""


@frozen
class Failure:
    """A failure to report. `result`: the result of the smallest failing schedule.

    `operations`: the number of operations in the schedule that failed first. `repeats`: for each repeat of the smallest
    schedule, whether it failed again.
    """

    result: Result
    operations: int
    repeats: Sequence[bool]

    @property
    def problem(self) -> Problem:
        assert self.result.problem is not None
        return self.result.problem


@frozen
class Command:
    """The call of this program: the options, the current folder, and the environment variables on which the program
    depends.
    """

    options: Sequence[str]
    folder: Path
    variables: Mapping[str, str] = field(factory=dict)

    @classmethod
    def given(cls) -> Command:
        """Return the call of this process. Must be called before the program sets environment variables."""
        names = sorted(name for name in os.environ if name == "PYTHONPATH" or name.startswith(_VARIABLES))
        return cls(sys.argv[1:], Path.cwd(), {name: os.environ[name] for name in names})

    def __str__(self) -> str:
        return shlex.join(["python", "-m", _PROGRAM, *self.options])

    def with_options(self, options: Sequence[str]) -> str:
        """Return the command with other options, as text for a shell in any folder."""
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.variables.items())
        words = [sys.executable, "-m", _PROGRAM, *options]
        return f"cd {shlex.quote(str(self.folder))} && {variables}{shlex.join(words)}"


def write(folder: Path, failure: Failure, setup: Setup, found: Command, number: int) -> Path:
    """Write a report, and the schedule for `--schedule`, into `folder`. Returns the path of the report.

    `found`: the command that has found the failure. `number`: the number of the failure, for the names of files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    schedule = folder / f"schedule-{number}.json"
    schedule.write_text(failure.result.schedule.to_json())
    facts = {
        "problem": {**failure.problem.as_json(), "at": failure.result.at},
        "versions": versions(setup),
        "connector": setup.connector,
        "prefill": setup.prefill,
        "engine": setup.engine,
        "around": setup.around,
        "command": str(found),
        "failed": sum(failure.repeats),
        "trials": len(failure.repeats),
    }
    (folder / f"report-{number}.json").write_text(json.dumps(facts, indent=1) + "\n")
    report = folder / f"report-{number}.md"
    report.write_text("\n".join(_lines(failure, setup, found, schedule)) + "\n")
    return report


def _lines(failure: Failure, setup: Setup, found: Command, path: Path) -> list[str]:
    problem, schedule, at = failure.problem, failure.result.schedule, failure.result.at
    kind = kind_of(schedule.kind)
    options = {**OPTIONS, **kind.options, **kind.tortured}
    replay = found.with_options(["--schedule", str(path.resolve()), *again(setup)])
    title = " ".join(problem.text.split())
    meaning = "No engine has started." if at is None else f"{_MEANINGS[problem.kind]} Seen at operation {at + 1}."
    lines = [f"# {problem.kind.capitalize()}: {title}", "", meaning, ""]
    lines += ["Found with", "", f"    {found}", "", "and seen again with", "", f"    {replay}", ""]
    lines += [f"This schedule failed in {sum(failure.repeats)} of {len(failure.repeats)} trials, each in a fresh"]
    lines += [f"process over fresh storage. It has {len(schedule.operations)} of {failure.operations} operations.", ""]
    lines += ["## Versions", "", *(f"* {name} {number}" for name, number in versions(setup).items()), ""]
    lines += ["## Engine", "", "    " + json.dumps({**options, **schedule.engine, **setup.engine}), ""]
    lines += ["The connector, vLLM's `kv_transfer_config`; `{folder}` is a fresh folder for each trial:", ""]
    lines += ["    " + json.dumps(setup.connector), ""]
    if kind.connector:
        lines += ["with, for this kind of model,", "", "    " + json.dumps(kind.connector), ""]
    if setup.prefill is not None:
        lines += ["The connector of the prefill engine:", "", "    " + json.dumps(setup.prefill), ""]
    lines += [f"## The smallest schedule, on a small model of the kind {schedule.kind} with random weights", ""]
    lines += [f"{number}. {operation}" for number, operation in enumerate(schedule.operations, 1)]
    lines += ["", _LEGEND, ""]
    if problem.expected:
        lines += [f"## The answer to {problem.request}", "", f"    expected {problem.expected}"]
        lines += [f"    given    {problem.given}", "", f"They differ from token {problem.position} on.", ""]
    if failure.result.log.strip() and problem.kind in {"leak", "hang", "death"}:
        lines += ["## The end of its log", ""]
        lines += [f"    {line}" for line in failure.result.log.splitlines()[-_LOG_LINES:]]
    return lines


def again(setup: Setup) -> list[str]:
    """Return the options of this program that make the same setup."""
    options = [] if setup.connector is None else ["--connector", json.dumps(setup.connector)]
    options += [] if setup.prefill is None else ["--prefill", json.dumps(setup.prefill)]
    options += ["--engine", json.dumps(setup.engine)] if setup.engine else []
    options += [word for name in setup.around for word in ("--around", name)]
    options += ["--patience", f"{setup.patience:g}"] if setup.patience != PATIENCE else []
    options += ["--model", setup.model] if setup.model else []
    options += ["--server", setup.server] if setup.server else []
    return options + (["--redis", setup.redis] if setup.redis else [])


def versions(setup: Setup) -> dict[str, str]:
    """Return the versions of Python, of vLLM and the packages with which it computes, and of the connectors'
    packages.
    """
    connectors, installed = json.dumps([setup.connector, setup.prefill]), packages_distributions()
    names = {"lmkv", "vllm", "torch", "transformers", *re.findall(r'"kv_connector_module_path": "(\w+)', connectors)}
    named = tuple(name for name in _LIBRARIES if name in connectors.lower())
    names |= {module for module in installed if module.startswith(named)}
    # Packages that are installed from their working tree are known by their own name only.
    packages = {package for name in names for package in installed.get(name, [name])}
    found = {"Python": platform.python_version()}
    for package in sorted(packages):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def summary(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in Counter(counts).items())
