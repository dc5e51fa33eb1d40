"""`lmkv doctor`: checks the configuration, this machine and the remote stores, and says what will not work."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lmkv.cli.findings import Finding, examine
from lmkv.cli.server import json_object
from lmkv.cli.sizing import KVDtype, KVSize, kv_size
from lmkv.config.options import DEFAULT

MARKS = {"error": ("✗ ", "red"), "warning": ("! ", "yellow"), "ok": ("✓ ", "green")}


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML file of settings; by default the one that LMKV_CONFIG_FILE names."),
    ] = None,
    extra: Annotated[str, typer.Option(metavar="JSON", help="kv_connector_extra_config, as JSON.")] = "{}",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="A model's folder, config.json or name, to show how many tokens each tier holds."
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        KVDtype, typer.Option(help="vLLM's option of the same name, to compute sizes for --model.")
    ] = KVDtype.AUTO,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="vLLM's option of the same name, to compute sizes for --model.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also show settings that have their defaults.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Check the configuration, this machine and the remote stores before a start.

    Run it as the user of the server, with the server's variables: only these show the server's rights and settings.
    The exit status is 2 if a setting is refused, 1 for any other error and for a warning about what lmkv caches.
    """
    logging.getLogger("lmkv").setLevel(logging.ERROR)
    size = size_of(model, kv_cache_dtype, tensor_parallel_size or 1) if model else None
    examined = examine(os.environ, json_object(extra), size, tensor_parallel_size, file)
    findings = list(examined) if as_json else show(examined, show_all=show_all)
    problems = [found.problem for found in findings if found.problem]
    warnings = [found.warning for found in findings if found.warning]
    if as_json:
        answer: dict[str, Any] = {"ok": not problems, "problems": problems, "warnings": warnings}
        answer["findings"] = [{**asdict(found), "level": found.level} for found in findings]
        if size:
            answer["model"] = {**asdict(size), "token_bytes": size.token_bytes}
        typer.echo(json.dumps(answer))
    of_settings = [found for found in findings if found.area == "configuration"]
    refused = any(found.refused for found in findings)
    matters = any(found.warning for found in of_settings)
    sys.exit(2 if refused else int(bool(problems or matters or (strict and warnings))))


def size_of(model: Path, dtype: KVDtype, ranks: int) -> KVSize:
    try:
        return kv_size(model, dtype, ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def show(findings: Iterable[Finding], *, show_all: bool = False) -> list[Finding]:
    """Print the findings of each area as soon as the area is examined, then a verdict. Returns the findings."""
    # rich would read markup in a str, and does not in a `Text`.
    console, seen, hidden = Console(highlight=False), list[Finding](), 0
    for area, group in groupby(findings, key=lambda found: found.area):
        of_area = list(group)
        shown = [found for found in of_area if show_all or found.level != "ok" or not is_default(found)]
        seen, hidden = seen + of_area, hidden + len(of_area) - len(shown)
        table = Table.grid(padding=(0, 2))
        names = max((len(found.name) + 2 for found in shown), default=0)
        table.add_column(no_wrap=True, width=max(_NAMES, names))
        table.add_column(overflow="fold")
        for row in values_and_notes(shown, console.width - max(_NAMES, names) - 4):
            table.add_row(*row)
        if shown:
            console.print(Text(area, "bold"), Padding(table, (0, 0, 1, 2)), sep="\n")
    if hidden:
        console.print(Text(f"{hidden} settings have their defaults: --all shows them", "dim"))
    for found in seen:
        if found.problem:
            console.print(Text.assemble(("Will not work:", "red"), " ", found.problem), soft_wrap=True)
        elif found.warning:
            console.print(Text.assemble(("Warning:", "yellow"), " ", found.warning), soft_wrap=True)
    console.print(verdict(seen))
    return seen


_NAMES = 24
"""Width of the column of names in characters. The column is wider where a name is longer."""


def is_default(found: Finding) -> bool:
    return found.area == "configuration" and found.note == DEFAULT


def verdict(findings: Sequence[Finding]) -> str:
    counts = Counter(found.level for found in findings)
    parts = [f"{counts[level]} {level}{'s' * (counts[level] > 1)}" for level in ("warning", "error") if counts[level]]
    return ", ".join(parts) or "Nothing is wrong."


def values_and_notes(findings: list[Finding], room: int) -> Iterator[tuple[Text, Text]]:
    """Yield `(name, text)` for each finding. Notes stand next to the values, or below them if the terminal is too
    narrow.
    """
    beside = [found for found in findings if len(found.value) + 2 + len(found.note) <= room]
    width = max((len(found.value) for found in beside), default=0)
    for found in findings:
        fits = max(width, len(found.value)) + 2 + len(found.note) <= room
        gap = " " * (width - len(found.value) + 2) if fits else "\n"
        mark, colour = MARKS[found.level]
        plain = found.area == "configuration" and found.level == "ok"
        value = Text(found.value, "" if found.level == "ok" else colour)
        name = Text("  " if plain else mark, colour) + Text(found.name)
        yield name, Text.assemble(value, gap if found.note else "", (found.note, "dim"))
