#!/usr/bin/env python3
"""Write the parts of pages that come from the code, between their marks: python docs/tables.py"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmkv.config import Config, Setting
from lmkv.config.lmcache import KnownSetting, commands, table
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


# -- settings of others ---------------------------------------------------------------------------------


def moving() -> Iterator[str]:
    """A table for each source: its settings, what they are here, and why."""
    sources = {
        "LMCache in the engine's process": table(),
        "LMCache's server": commands()["server"],
        "vLLM's own offloading": commands()["offloading"],
    }
    for title, entries in sources.items():
        yield from (f"### {title}", "", "| there | here | |", "|---|---|---|", *mapped(entries))
        for kind, here in {"joined": "`remote_url`", "refused": "refused", "without_effect": "without effect"}.items():
            yield from by_reason(entries, kind, here)
        yield ""


def mapped(entries: Mapping[str, KnownSetting]) -> Iterator[str]:
    ours = {setting.name: setting for setting in Config().describe()}
    for entry in entries.values():
        if entry.kind == "mapped":
            here = ours[entry.setting]
            there = f"{entry.default}{unit(here)}"
            same = not entry.default or there == default(here)
            defaults = "" if same else f"default there {there}, here {default(here)}"
            yield f"| `{entry.key}` | `{here.name}` | {'; '.join(filter(None, [defaults, entry.note]))} |"


def by_reason(entries: Mapping[str, KnownSetting], kind: str, here: str) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for entry in entries.values():
        if entry.kind == kind:
            reasons.setdefault(entry.why, []).append(f"`{entry.key}`")
    for why, keys in reasons.items():
        yield f"| {', '.join(keys)} | {here} | {why} |"


# -- commands ------------------------------------------------------------------------------------------


def options() -> Iterator[str]:
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
    "command-options.md": options,
    "configuration.md": settings,
    "moving-from-lmcache.md": moving,
    "vllm.md": fields,
}


if __name__ == "__main__":
    for name in PAGES:
        (HERE / name).write_text(page(name), "utf-8")
