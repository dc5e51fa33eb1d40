"""`lmkv config`: shows settings with their sources, checks a file, and converts LMCache's file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from attrs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkv.cli.doctor import json_object
from lmkv.cli.server import fail
from lmkv.config import Config, Setting, lmcache, read_yaml
from lmkv.config.lmcache import Translation
from lmkv.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Show, check and convert settings, lmkv's own and LMCache's.")


Content = Mapping[Any, object]
"""Content of a YAML file."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command("show")
def show(
    extra: Annotated[str, typer.Option(help="kv_connector_extra_config, as JSON.")] = "{}", as_json: AsJson = False
) -> None:
    """Show every setting with its value and source: default, file, variable, or kv_connector_extra_config."""
    try:
        config = Config.load(env=os.environ, extra=json_object(extra))
    except ConfigError as error:
        fail(error, as_json=as_json)
    remarks = [remark for _, remark in config.remarks]
    if as_json:
        settings = [asdict(setting) for setting in config.describe()]
        typer.echo(json.dumps({"ok": True, "problems": [], "settings": settings, "remarks": remarks}))
    else:
        show_table(config.describe(), remarks)


def show_table(settings: list[Setting], remarks: list[str]) -> None:
    """A table of settings. A `Text` is not read as markup, as a str would be."""
    table = Table("setting", "value", "source", header_style="bold")
    for setting in settings:
        table.add_row(Text(setting.name), Text(str(setting), overflow="fold"), Text(setting.source, overflow="fold"))
    console = Console()
    console.print(table)
    for remark in remarks:
        console.print(Text(remark), soft_wrap=True)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A YAML file, lmkv's or LMCache's.")], as_json: AsJson = False
) -> None:
    """Check a file. If it cannot be used, print the reason and exit with code 1."""
    try:
        content = read_yaml(file)
        theirs = is_lmcache(content)
        config = of_lmcache(file, content) if theirs else of_lmkv(file, content)
    except ConfigError as error:
        fail(error, as_json=as_json)
    remarks = [remark for _, remark in config.remarks]
    if as_json:
        found = {"of": "LMCache" if theirs else "lmkv", "settings": list(config.sources), "remarks": remarks}
        typer.echo(json.dumps({"ok": True, "problems": [], **found}))
        return
    whose = "LMCache's settings, which can be used as they are" if theirs else "lmkv's settings"
    typer.echo("\n".join([f"{file}: {whose}: {', '.join(config.sources) or 'none'}", *remarks]))


def of_lmkv(file: Path, content: Content) -> Config:
    return Config.of((key, value, f"file {file}") for key, value in content.items())


def of_lmcache(file: Path, content: Content) -> Config:
    translation = translated(file, content)
    translation.check()
    return Config.of(translation.settings, translation.remarks())


def translated(file: Path, content: Content) -> Translation:
    # The content is passed on, because a pipe can be read only once.
    return lmcache.translate({lmcache.ENV_FILE: str(file)}, {}, lambda _: content)


def is_lmcache(content: Content) -> bool:
    """Whether a file's content is LMCache's. A file of settings that both have counts as lmkv's."""
    keys, ours, theirs = set(content), own_keys(), {*lmcache.table(), "extra_config"}
    return bool(keys & (theirs - ours)) and not keys & (ours - theirs)


def own_keys() -> set[str]:
    return {setting.name for setting in Config().describe()}


@app.command("migrate")
def migrate(file: Annotated[Path, typer.Argument(help="LMCache's YAML file.")], as_json: AsJson = False) -> None:
    """Print lmkv's YAML for a file of LMCache's, with a comment on each setting that is left out.

    Exit code 1 if a left-out setting changes which KV is served, or where it is stored.
    """
    try:
        content = read_yaml(file)
        if own := set(content) & (own_keys() - set(lmcache.table())):
            fail(f"file {file}: is lmkv's already: LMCache has no {', '.join(sorted(own))}", as_json=as_json)
        translation = translated(file, content)
        config = Config.of(translation.settings)
    except ConfigError as error:
        fail(error, as_json=as_json)
    settings = {name: written(getattr(config, name)) for name in config.sources}
    refused = ", ".join(key for key, _ in translation.refused)
    problems = [f"left out, though it matters: {refused}"] if refused else []
    if as_json:
        found = {"settings": settings, "left_out": list(left_out(translation))}
        typer.echo(json.dumps({"ok": not problems, "problems": problems, **found}))
        raise typer.Exit(len(problems))
    typer.echo(f"# From {file.name!r}, settings of LMCache's.")
    for name, value in settings.items():
        typer.echo(yaml.safe_dump({name: value}), nl=False)
    for line in left_out(translation):
        typer.echo(f"# {line}")
    if problems:
        fail(problems[0])


def written(value: object) -> object:
    """A value as a file has it, passwords in URLs included."""
    return [url.text for url in value] if isinstance(value, tuple) else value


def left_out(translation: Translation) -> Iterator[str]:
    """Each key of LMCache's that lmkv's file does not have, and why."""
    for key, _ in translation.refused:
        yield f"Left out, though it matters: {key}: {lmcache.table()[key].why}"
    for key in translation.without_effect:
        entry = lmcache.table()[key]
        reason = f"has no effect without {entry.needs}" if entry.needs else "is switched off"
        yield f"Left out: {key}: {entry.why if entry.kind == 'without_effect' else reason}"
    for name in translation.unknown:
        yield f"Left out, unknown: {name}"
