#!/usr/bin/env python3
"""Write the parts of pages that come from the code, between their marks: python docs/tables.py"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lmkv.config import Config, Setting
from lmkv.config.lmcache import table
from lmkv.vllm.code import DRAFT_KEY, ENVIRONMENT, KEY

HERE = Path(__file__).parent
BEGIN = "<!-- From here to the end mark: python docs/tables.py -->\n"
END = "<!-- End -->\n"


def page(name: str) -> str:
    """The page as it must be."""
    head, _, rest = (HERE / name).read_text("utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    return head + BEGIN + "\n".join(["", *PAGES[name](), "", END]) + tail


# -- settings ------------------------------------------------------------------------------------------


def settings() -> Iterator[str]:
    yield from ("| key | default | meaning |", "|---|---|---|")
    for setting in Config().describe():
        yield f"| `{setting.name}` | {default(setting)} | {setting.doc} |"


def default(setting: Setting) -> str:
    return in_words(setting.default) + unit(setting)


def in_words(value: object) -> str:
    return {"None": "none", "True": "true", "False": "false"}.get(str(value), str(value))


def unit(setting: Setting) -> str:
    return f" {setting.unit}" if setting.unit.isalpha() else ""


# -- what a key is made of -----------------------------------------------------------------------------


def fields() -> Iterator[str]:
    yield from ("| configuration | fields |", "|---|---|")
    for path, names in {**KEY, "speculative_config": DRAFT_KEY}.items():
        yield f"| {f'`{path}`' if path else 'the whole'} | {named(names)} |"
    yield f"| environment | {named(ENVIRONMENT)} |"


def named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- LMCache's settings --------------------------------------------------------------------------------


def lmcache() -> Iterator[str]:
    yield from ("### Used", "", "| LMCache | default there | here | default here | |", "|---|---|---|---|---|")
    yield from used()
    yield from ("", "### Part of an address", "", "| keys | of |", "|---|---|", *by_reason("joined"))
    yield from ("", "### Refused", "", "| keys | why |", "|---|---|", *by_reason("refused"))
    yield from ("", "### Without effect", "", "| keys | why |", "|---|---|", *by_reason("without_effect"))


def used() -> Iterator[str]:
    ours = {setting.name: setting for setting in Config().describe()}
    for entry in table().values():
        if entry.kind == "mapped":
            here = ours[entry.setting]
            there = f"{entry.default}{unit(here)}"
            yield f"| `{entry.key}` | {there} | `{here.name}` | {default(here)} | {entry.note} |"


def by_reason(kind: str) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for entry in table().values():
        if entry.kind == kind:
            reasons.setdefault(entry.why, []).append(f"`{entry.key}`")
    for why, keys in reasons.items():
        yield f"| {', '.join(keys)} | {why} |"


# -- commands ------------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    import typer

    from lmkv.cli.app import app

    yield from command("lmkv", typer.main.get_command(app), None)


def command(name: str, found: Any, parent: Any) -> Iterator[str]:
    """A group's commands, or one command: what it does, and its arguments and options."""
    context = found.make_context(name, [], parent=parent, resilient_parsing=True)
    for inner in getattr(found, "commands", {}).values():
        yield from command(f"{name} {inner.name}", inner, context)
    if not hasattr(found, "commands"):
        usage = " ".join(found.collect_usage_pieces(context))
        yield from (f"## {name}", "", f"    {name} {usage}".rstrip(), "", found.help or "", "")
        rows = [row for parameter in found.params if (row := parameter.get_help_record(context))]
        if rows:
            yield from ("| | |", "|---|---|", *(f"| `{cell(left)}` | {cell(right)} |" for left, right in rows), "")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "command-options.md": commands,
    "configuration.md": settings,
    "moving-from-lmcache.md": lmcache,
    "vllm.md": fields,
}


if __name__ == "__main__":
    for name in PAGES:
        (HERE / name).write_text(page(name), "utf-8")
