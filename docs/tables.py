#!/usr/bin/env python3
"""Write the parts of pages that come from the code, between their marks: python docs/tables.py"""

from __future__ import annotations

import json
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

GROUPS = {
    "Chunks and host memory": (
        *("chunk_size", "local_cpu", "max_local_cpu_size", "cache_policy", "quotas", "save_decode_cache"),
        *("save_unfull_chunk", "state_interval", "device_staging_size", "block_major", "pin_share", "pin_ttl"),
    ),
    "Shared memory": ("shared_memory", "max_shared_memory_size"),
    "Disk": ("local_disk", "max_local_disk_size", "disk_"),
    "Remote stores": ("remote_",),
    "Loading": (
        *("min_retrieve_tokens", "load_or_recompute", "load_mode", "use_layerwise", "prefetch_deadline"),
        "prefetch_share",
    ),
    "Security and audits": ("authentication_", "audit_", "media_by_name"),
    "Agent API": ("agent_",),
}
"""The settings of each table, by name or by the beginning of a name."""


def settings() -> Iterator[str]:
    left = {setting.name: setting for setting in Config().describe()}
    for group, names in GROUPS.items():
        yield from (f"### {group}", "", "| key | default | meaning |", "|---|---|---|")
        for name in names:
            for each in [each for each in left if each == name or (name.endswith("_") and each.startswith(name))]:
                setting = left.pop(each)
                yield f"| `{each}` | {default(setting)} | {setting.doc} |"
        yield ""
    if left:
        raise ValueError(f"GROUPS lacks {', '.join(left)}")


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
        yield f"| {f'`{path}`' if path else 'all of vLLM'} | {named(names)} |"
    yield f"| environment | {named(ENVIRONMENT)} |"


def named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# -- settings of others ---------------------------------------------------------------------------------


THEIRS = {
    "LMCache in the engine's process": "key of LMCache",
    "LMCache's server": "option of `lmcache server`",
    "vLLM's own offloading": "option or key of vLLM",
    "Tiers of LMCache's server and of vLLM": "key of a tier",
}


def moving() -> Iterator[str]:
    """A table for each source: its settings, lmkv's settings in their place, and the reason."""
    sources = {
        "LMCache in the engine's process": table(),
        "LMCache's server": commands()["server"],
        "vLLM's own offloading": commands()["offloading"],
        "Tiers of LMCache's server and of vLLM": commands()["tiers"],
    }
    for title, entries in sources.items():
        yield from (f"### {title}", "", f"| {THEIRS[title]} | lmkv | note |", "|---|---|---|", *mapped(entries))
        for kind, here in {"joined": "`remote_url`", "refused": "refused", "without_effect": "without effect"}.items():
            yield from by_reason(entries, kind, here)
        yield ""


def mapped(entries: Mapping[str, KnownSetting]) -> Iterator[str]:
    ours = {setting.name: setting for setting in Config().describe()}
    for entry in entries.values():
        if entry.kind == "mapped":
            here = ours[entry.setting]
            there = f"{entry.default}{unit(here)}"
            same = not entry.default or as_number(entry.default) == as_number(in_words(here.default))
            defaults = "" if same else f"default: `{there}` in LMCache, `{default(here)}` in lmkv"
            yield f"| `{entry.key}` | `{here.name}` | {'; '.join(filter(None, [defaults, entry.note]))} |"


def as_number(text: str) -> float | str:
    """300 and 300.0 are the same default."""
    try:
        return float(text)
    except ValueError:
        return text


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

    from lmkv.cli.app import COMMANDS, app

    found: Any = typer.main.get_command(app)
    for name in COMMANDS:
        found.load(name)
    yield from command("lmkv", found, None)


def command(name: str, found: Any, parent: Any) -> Iterator[str]:
    """A group's commands, or one command: what it does, and its arguments and options."""
    context = found.make_context(name, [], parent=parent, resilient_parsing=True)
    for inner, its in getattr(found, "commands", {}).items():
        yield from command(f"{name} {inner}", its, context)
    if not hasattr(found, "commands"):
        usage = " ".join(found.collect_usage_pieces(context))
        yield from (f"## {name}", "", f"    {name} {usage}".rstrip(), "", found.help or "", "")
        rows = [row for parameter in found.params if (row := parameter.get_help_record(context))]
        if rows:
            yield from ("| option | meaning |", "|---|---|")
            yield from (*(f"| `{cell(left)}` | {cell(right)} |" for left, right in rows), "")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- measured figures ----------------------------------------------------------------------------------

RESULTS = HERE / "results" / "performance.json"
FIRST_TOKENS = {
    "vLLM's prefix cache": "vllm prefix cache",
    "lmkv, host memory, within the step": "lmkv ram, within the step",
    "lmkv, host memory, between steps": "lmkv ram, between steps",
    "lmkv, shared memory": "lmkv shared memory",
    "lmkv, disk": "lmkv disk",
    "lmkv, Redis on this machine": "lmkv redis",
}
HOST = "host memory, within the step"
TALKS = {"vLLM alone": "vLLM alone", "vLLM with lmkv": "lmkv, RAM for 1 in 2"}
"""The names of the cases here, and in the results."""


def performance() -> Iterator[str]:
    found = json.loads(RESULTS.read_text("utf-8"))
    rows = {row["name"]: row for row in found["rows"]}
    computed = rows["first token, computed"]["value"]
    yield from ("| the prompt comes from | first token | faster than computing |", "|---|---|---|")
    yield f"| computing | {computed:.2f} s | |"
    for name, case in FIRST_TOKENS.items():
        if row := rows.get(f"first token, in use: {case}"):
            yield f"| {name} | {row['value']:.3f} s | {computed / row['value']:.0f} times |"
    yield from ("", "Conversations take turns, and host memory holds half of their KV:", "")
    yield from ("![Requests per second in conversations, with lmkv and without](figures/conversations.svg)", "")
    yield from ("| | requests/s | first token, median | p99 | prompt tokens cached |", "|---|---|---|---|---|")
    yield from (talk(rows, name, case) for name, case in TALKS.items())
    within = rows["within the connector"]
    low, high = within["within"]
    yield from ("", "## What does lmkv cost if nothing hits?", "")
    yield "In a server where every prompt is new, lmkv stores and evicts all the time."
    yield f"Its methods take {within['ratio']:.1%} of vLLM's time ({low:.1%} to {high:.1%}) with this small model."
    yield "With a larger model this share is smaller, because vLLM's steps take longer and lmkv's methods do not."
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield from ("", f"Measured on {found['date'][:10]} by `{found['command']}`, at commit {found['commit']}.")
    yield f"Machine: {found['machine']}. Versions: {versions}."


def headline() -> Iterator[str]:
    rows = {row["name"]: row["value"] for row in json.loads(RESULTS.read_text("utf-8"))["rows"] if "value" in row}
    computed = rows["first token, computed"]
    host, disk = (rows[f"first token, in use: {FIRST_TOKENS[f'lmkv, {tier}']}"] for tier in (HOST, "disk"))
    yield (
        "With a small model on two CPU cores, the first token of a repeated prompt of 8,000 tokens comes after"
        f" **{host * 1000:.0f} ms** with KV from host memory, **{disk * 1000:.0f} ms** with KV from a disk,"
        f" and **{computed:.1f} s** without lmkv. [How this was measured](docs/performance.md)."
    )
    yield from (
        "",
        "![Time to first token of a repeated prompt, computed and from each tier](docs/figures/first-token.svg)",
    )


def talk(rows: Mapping[str, Any], name: str, case: str) -> str:
    speed, cached = rows[f"throughput: {case}"], rows[f"prompt tokens not computed: {case}"]
    median, last = (rows[f"time to first token, {each}: {case}"]["value"] for each in ("p50", "p99"))
    return f"| {name} | {speed['value']:.1f} | {median:.3f} s | {last:.3f} s | {cached['value']:.0f} % |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands.md": options,
    "compatibility.md": fields,
    "configuration.md": settings,
    "moving-from-lmcache.md": moving,
    "performance.md": performance,
    "../README.md": headline,
}


if __name__ == "__main__":
    for name in PAGES:
        (HERE / name).write_text(page(name), "utf-8")
