#!/usr/bin/env python3
"""Write the tables of moving-from-lmcache.md from lmkv/lmcache.toml: python docs/lmcache_tables.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lmkv.config import Config
from lmkv.lmcache import table

PAGE = Path(__file__).with_name("moving-from-lmcache.md")
BEGIN = "<!-- From here to the end mark: python docs/lmcache_tables.py -->\n"
END = "<!-- End -->\n"


def page() -> str:
    """The page as it must be."""
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    return head + BEGIN + "\n".join(["", *tables(), "", END]) + tail


def tables() -> Iterator[str]:
    yield from ("### Used", "", "| LMCache | default there | here | default here | |", "|---|---|---|---|---|")
    yield from used()
    yield from ("", "### Refused", "", "| keys | why |", "|---|---|", *by_reason("refused"))
    yield from ("", "### Without effect", "", "| keys | why |", "|---|---|", *by_reason("without_effect"))


def used() -> Iterator[str]:
    settings = {setting.name: setting for setting in Config().describe()}
    for entry in table().values():
        if entry.kind == "mapped":
            here = settings[entry.setting]
            default = {"None": "none", "True": "true", "False": "false"}.get(str(here.default), str(here.default))
            unit = f" {here.unit}" if here.unit.isalpha() else ""
            yield f"| `{entry.key}` | {entry.default}{unit} | `{here.name}` | {default}{unit} | {entry.note} |"


def by_reason(kind: str) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for entry in table().values():
        if entry.kind == kind:
            reasons.setdefault(entry.why, []).append(f"`{entry.key}`")
    for why, keys in reasons.items():
        yield f"| {', '.join(keys)} | {why} |"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
