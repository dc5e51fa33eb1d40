"""`lmkv config`: shows settings with their sources, checks a file, and converts LMCache's file.

`lmkv doctor` and a starting server report settings in the same words. The exit status is 2 if a setting is refused, 1
if there is a warning or an unknown setting, and 0 otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from attrs import asdict, evolve
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmkv import plugins
from lmkv.cli.server import fail, json_object
from lmkv.config import Config, Setting, SettingsResult, command_lines, lmcache, read_yaml
from lmkv.config.command import TRANSFER, Command
from lmkv.config.parsers import Secret
from lmkv.config.shell import quoted, without_shell, words_of_unit
from lmkv.config.sources import given_settings, read_text, variables_in
from lmkv.config.urls import RemoteURL
from lmkv.errors import ConfigError, mask_secrets

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Show, check and convert settings, lmkv's own and those of other connectors.",
)


Content = Mapping[Any, object]
"""Content of a YAML file."""

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Ranks = Annotated[
    int | None,
    typer.Option("--tensor-parallel-size", min=1, help="vLLM's option; lmkv multiplies LMCache's sizes by it."),
]


@app.command("show")
def show(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A YAML file of settings; by default the one that LMKV_CONFIG_FILE names."),
    ] = None,
    extra: Annotated[str, typer.Option(help="kv_connector_extra_config, as JSON.")] = "{}",
    tensor_parallel_size: Ranks = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting with its value and source: default, file, variable, or kv_connector_extra_config."""
    try:
        answer = with_problems_here(read_settings(file, os.environ, json_object(extra), tensor_parallel_size))
    except ConfigError as error:
        fail(error, as_json=as_json, status=2)
    config = answer.config
    if as_json:
        settings = [asdict(setting) for setting in config.describe()] if config is not None else []
        typer.echo(json.dumps({**as_dict(answer), "settings": settings}))
    elif config is not None:
        show_table(config.describe(), remarks(answer))
    end(answer, as_json=as_json)


def read_settings(
    file: Path | None, env: Mapping[str, str], extra: Mapping[str, object], ranks: int | None
) -> SettingsResult:
    """Read all settings of the user, and return the result.

    `file`: a file with lmkv's settings is read together with `env` and `extra`. A file with LMCache's settings, with
    variables or with a command is read alone.
    """
    # A pipe can be read only once.
    if file is not None and file.is_file():
        found, command = read_file(file, ranks)
        if found.of_lmcache or command is not None or is_of_variables(file):
            return found
    return SettingsResult.to(file=file, env=env, extra=extra, ranks=ranks)


def as_dict(answer: SettingsResult) -> dict[str, Any]:
    return {
        "ok": not answer.problems,
        "problems": list(answer.problems),
        "remarks": remarks(answer),
        "readings": [asdict(each) for each in answer.readings],
    }


def remarks(answer: SettingsResult) -> list[str]:
    return [text for _, text in answer.notes]


def end(answer: SettingsResult, *, as_json: bool) -> None:
    """Print the refused settings, and exit with `answer.status`."""
    if answer.problems and not as_json:
        fail("\n".join(answer.problems), status=2)
    raise typer.Exit(answer.status)


def show_table(settings: list[Setting], remarks: list[str]) -> None:
    """Print a table of settings. The cells are `Text` objects, because rich would read markup in a str."""
    table = Table("setting", "value", "source", header_style="bold")
    for setting in settings:
        table.add_row(Text(setting.name), Text(str(setting), overflow="fold"), Text(setting.source, overflow="fold"))
    console = Console()
    console.print(table)
    for remark in remarks:
        console.print(Text(remark), soft_wrap=True)


@app.command("check")
def check(
    words: Annotated[
        list[str],
        typer.Argument(
            help="A YAML file of lmkv or LMCache, a list of LMCache's variables, or -- and a command line.",
            metavar="FILE",
        ),
    ],
    tensor_parallel_size: Ranks = None,
    as_json: AsJson = False,
) -> None:
    """Check a file or a command line, and say whether each setting is used, without effect, refused or unknown."""
    try:
        answer, command = read_words(words, tensor_parallel_size)
        answer = with_problems_here(answer)
    except ConfigError as error:
        fail(error, as_json=as_json, status=2)
    if as_json:
        settings = list(answer.config.sources) if answer.config is not None else []
        found = {"of": "LMCache" if answer.of_lmcache else "lmkv", "settings": settings}
        typer.echo(json.dumps({**as_dict(answer), **found}))
    else:
        whose = "settings of the command" if command else f"{'LMCache' if answer.of_lmcache else 'lmkv'}'s settings"
        of_file = f"{words[0]}: " if os.path.exists(words[0]) else ""
        verdict = ("which can be used as they are", "which can be used, with remarks", "which cannot be used")
        typer.echo(f"{of_file}{whose}, {verdict[answer.status]}")
        told = " ".join((*answer.problems, *remarks(answer)))
        for reading in answer.readings:
            if reading.kind != "refused" and f"{reading.key} " not in told:
                typer.echo(f"  {reading.in_words}")
        for remark in remarks(answer):
            typer.echo(remark)
        if command is not None and command.replaces:
            typer.echo(f"the command starts {command.replaces}: lmkv config migrate prints it with LMKVConnector")
    end(answer, as_json=as_json)


def odd_folder(setting: str, folder: str) -> str:
    """Return a warning if a folder is probably a mistake, else "". `setting`: the name of the setting."""
    path = Path(folder)
    if not path.is_absolute():
        return f"{setting} {folder} is relative to the folder in which the server starts: write an absolute path"
    if setting == "local_disk" and Path("/dev/shm") in path.parents:
        return f"{setting} {folder} is in memory: name a folder on a disk, or set shared_memory instead"
    if not path.parent.exists():
        return f"{setting} {folder}: lmkv will make the missing folder {path.parent}: is the disk mounted?"
    return ""


def with_problems_here(answer: SettingsResult) -> SettingsResult:
    """Check folders, secret files and addresses on this machine. Returns a copy of `answer` with the new problems."""
    config = answer.config
    if config is None:
        return answer
    notes, problems = list(answer.notes), list[str]()
    if config.local_disk and not Path(config.local_disk).is_absolute():
        # Usual in a library, and unusual in a server.
        notes.append((logging.WARNING, odd_folder("local_disk", config.local_disk)))
    for name, read in (
        ("remote_password_file", "password"),
        ("agent_token_file", "token"),
        ("authentication_key_file", "authentication_bytes"),
    ):
        file = getattr(config, name)
        if file and not os.path.exists(file):
            notes.append((logging.INFO, f"{name} {file} is not on this machine"))
        else:
            problems += error_of(partial(getattr, config, read))
    for url in config.remotes:
        problems += error_of(partial(check_address, config, url))
    kept = None if problems else config
    return evolve(answer, config=kept, notes=tuple(notes), problems=(*answer.problems, *problems))


def error_of(call: Callable[[], object]) -> list[str]:
    """Return a list with the text of the ConfigError that a call raises, or an empty list if the call succeeds."""
    try:
        call()
    except ConfigError as error:
        return [str(error)]
    return []


def check_address(config: Config, url: RemoteURL) -> None:
    """Raise ConfigError if lmkv would refuse `url`, the address of a remote store. Does not connect to the store."""
    module = {"redis": "redis", "s3": "obstore"}.get(url.scheme if url.store_kind == "objects" else url.store_kind)
    if module is None or find_spec(module) is None:
        return
    if url.warning or not all(map(os.path.exists, re.findall(r"ssl_\w+=(/[^&]+)", url.text))):
        # The server may have what this machine has not: a variable for the sentinels' service, or the file.
        return
    from lmkv.backends.remote.base import RemoteOptions

    options = RemoteOptions(prefix=config.remote_prefix, ttl=config.remote_ttl or None, timeout=config.remote_timeout)
    try:
        plugins.load(url.place, "remote_url")(url.text, bytes(32), options).close()
    except ConfigError as error:
        raise ConfigError(f"{config.source('remote_url')}: remote_url = {error}") from None


def read_words(words: list[str], ranks: int | None, *, migrate: bool = False) -> tuple[SettingsResult, Command | None]:
    """Read the settings in a file or a command line. Returns `(result, command)`.

    `command`: replaces the given command line; None for a file of settings. `words`: the path of a file, or a command
    line. `ranks`: number of ranks of the engine. `migrate`: whether the settings must be LMCache's.
    """
    if len(words) == 1 and re.fullmatch(r"[A-Za-z_]\w*=\S*", words[0]):
        raise ConfigError(f"{words[0].partition('=')[0]} is a variable without a command: {command_lines.GIVE_COMMAND}")
    if len(words) == 1 and (" " not in words[0] or os.path.exists(words[0])):
        return read_file(Path(words[0]), ranks, migrate=migrate)
    # A text with blanks is a whole command in quotes.
    words = ["sh", "-c", *words] if len(words) == 1 else words
    plain, others = without_shell(words)
    answer, command = SettingsResult.to_command(plain, ranks or 1)
    left = [(logging.INFO, "lmkv ignores the other commands of the shell script")] if others else []
    exported = [source for _, _, source in given_settings({}, None, os.environ, {}, read_yaml)]
    if exported:
        told = "not checked, because only lmkv doctor reads exported variables"
        left.append((logging.INFO, f"{lmcache.join_names(exported)}: {told}"))
    return evolve(answer, notes=(*answer.notes, *left)), command


def read_file(file: Path, ranks: int | None, *, migrate: bool = False) -> tuple[SettingsResult, Command | None]:
    """Read the settings in a file. Returns `(result, command)`.

    `command`: replaces the command line that the file has; None for a file of settings.
    `ranks`: number of ranks of the engine. `migrate`: whether the settings must be LMCache's.
    """
    if file.suffix == ".service":
        return read_words(words_of_unit(read_text(file)), ranks, migrate=migrate)
    if is_of_variables(file):
        text = read_text(file)
        try:
            env = variables_in(text)
        except ConfigError as error:
            if file.suffix != ".sh":
                raise ConfigError(f"file {file}: {error}: {command_lines.GIVE_COMMAND}") from None
            script = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
            return read_words(["sh", "-c", script], ranks, migrate=migrate)
        answer = SettingsResult.to(env=env, ranks=ranks)
        if not answer.readings:
            told = [*remarks(answer), f"file {file}: no variable in it is lmkv's (LMKV_...) or LMCache's (LMCACHE_...)"]
            raise ConfigError("\n".join(told))
        return answer, None
    try:
        content = read_yaml(file)
    except ConfigError:
        if file.suffix in _SETTINGS:
            raise
        raise ConfigError(f"file {file} is not a file of settings: {command_lines.GIVE_COMMAND}") from None
    if migrate and not content:
        raise ConfigError(f"file {file} has no settings to migrate")
    try:
        words = command_lines.of_file(content)
    except ConfigError as error:
        raise ConfigError(f"file {file}: {error}") from None
    if words:
        # A connector alone does not say of how many ranks its engine is.
        return SettingsResult.to_command(words, ranks if "kv_connector" in content else ranks or 1)
    keys, ours, theirs = set(content), own_keys(), {*lmcache.table(), "extra_config"}
    if migrate and (own := keys & (ours - lmcache.table().keys())):
        why = f"already has lmkv's settings, so lmkv does not migrate the file: remove {', '.join(sorted(own))}"
        raise ConfigError(f"file {file} {why}, or use the file as it is")
    likely = ranks is not None or "lmc" in file.name.lower() or bool(migrate and keys & theirs)
    # The content is passed on, because a pipe can be read only once.
    env, read = {lmcache.ENV_FILE: str(file)}, lambda _: content
    if ((likely and keys) or keys & (theirs - ours)) and not keys & (ours - theirs):
        return SettingsResult.to(env=env, read=read, ranks=ranks), None
    answer = SettingsResult.to(file=file, env={}, read=read)
    if not keys & theirs or keys & (ours - theirs) or answer.problems:
        return answer, None
    # lmkv and LMCache both have these settings, so the file may be either's.
    notes = [(level, f"if this is a file of LMCache, {text}") for level, text in lmcache.translate(env, {}, read).notes]
    return evolve(answer, notes=(*answer.notes, *notes)), None


def is_of_variables(file: Path) -> bool:
    return file.suffix in (".env", ".sh") or file.name == ".env"


_SETTINGS = ("", ".yaml", ".yml", ".json")
"""Suffixes of files that have only settings, and no command."""


def own_keys() -> set[str]:
    return {setting.name for setting in Config().describe()}


@app.command("migrate")
def migrate(
    words: Annotated[list[str], typer.Argument(help="An LMCache file, or -- and a command line.", metavar="FILE")],
    tensor_parallel_size: Ranks = None,
    as_json: AsJson = False,
) -> None:
    """Print lmkv's YAML for an LMCache file, with a comment on each setting that is left out.

    A command line works as well: `lmkv config migrate -- lmcache server --l1-size-gb 100`, or `-- vllm serve ...`.
    """
    try:
        answer, command = read_words(words, tensor_parallel_size, migrate=True)
        answer = with_problems_here(answer)
    except ConfigError as error:
        fail(error, as_json=as_json, status=2)
    # lmkv's variables stay before the program.
    own = {name.removeprefix("LMKV_").lower() for name in (command.variables if command else ())}
    own -= {name for name, _, _ in (command.settings if command else ())}
    settings = {name: written(value) for name, value in answer.values.items() if name not in own}
    line = "" if command is None else command_line(command, settings)
    if as_json:
        found = {"settings": settings, "left_out": list(left_out(answer))} | ({"command": line} if line else {})
        typer.echo(json.dumps({**as_dict(answer), **found}))
        raise typer.Exit(answer.status)
    if line:
        typer.echo(line)
        if (
            mask_secrets(line) != line
            or "--api-key" in line
            or any(isinstance(value, Secret) for value in answer.values.values())
        ):
            typer.echo(
                "# All users of this machine can see the command's password: move the settings into a file for "
                "LMKV_CONFIG_FILE"
            )
    else:
        typer.echo(f"# From {Path(words[0]).name!r}, settings of LMCache's.")
        for name, value in settings.items():
            typer.echo(yaml.safe_dump({name: value}), nl=False)
    for comment in (*left_out(answer), *remarks(answer)):
        typer.echo(f"# {comment}")
    end(answer, as_json=as_json)


def command_line(command: Command, settings: Mapping[str, object]) -> str:
    transfer: dict[str, object] = {"kv_connector": "LMKVConnector", "kv_role": command.role}
    transfer["kv_load_failure_policy"] = "recompute"
    if settings:
        transfer["kv_connector_extra_config"] = settings
    if command.several:
        beside = command.several["kv_connector_extra_config"]["connectors"]
        extra = {"connectors": [transfer if each is None else each for each in beside]}
        transfer = {"kv_load_failure_policy": "recompute", **command.several, "kv_connector_extra_config": extra}
    return " ".join(map(quoted, [*command.before, *(command.kept or ["MODEL"]), TRANSFER, json.dumps(transfer)]))


def written(value: object) -> object:
    """Return the value of a setting as in lmkv's YAML file, including passwords."""
    if isinstance(value, Secret):
        return value.value
    if isinstance(value, tuple):
        return value[0].text if len(value) == 1 else [url.text for url in value]
    return value


def left_out(answer: SettingsResult) -> Iterator[str]:
    """Yield a comment for each key of LMCache that is left out of lmkv's file, with the reason."""
    for each in answer.readings:
        if each.kind != "used":
            yield f"Left out{', although the setting matters' * (each.kind == 'refused')}: {each.in_words}"
