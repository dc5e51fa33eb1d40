"""`lmkv top`: shows the tiers and requests of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmkv.cli.server import TokenFile, Url, clean, client_of, duration, unavailable
from lmkv.config import GIB
from lmkv.errors import printable
from lmkv.protocols import miss_in_words

if TYPE_CHECKING:
    from lmkv.agent.client import Client

_LEVELS = "▁▂▃▄▅▆▇█"
_BINS = 24
FEW = 50
"""Smallest number of sampled requests for an estimate. The file page.html has the same number."""
_NOTHING = 0.0005
_BESIDE = 8
"""Number of lines of the terminal that headings and borders take."""


def top(
    url: Url = "",
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between updates.")] = 2.0,
    token_file: TokenFile = None,
    advise: Annotated[
        bool, typer.Option("--advise", help="Estimate how much time more memory or disk would save.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, as JSON.")] = False,
) -> None:
    """Watch a running server's tiers and requests until Ctrl+C; print them once if the output is not a terminal."""
    # What tiers and requests are called is no markup.
    console = Console(highlight=False, markup=False, emoji=False)
    with client_of(url, token_file) as client:
        seen = look(client)
        if as_json:
            typer.echo(json.dumps(seen))
        elif advise:
            for sentence in advice(clean(seen["value"])):
                console.print(sentence)
        elif not console.is_terminal:
            console.print(picture(seen, rows=20))
        else:
            watch(console, client, seen, interval)


def look(client: Client) -> dict[str, Any]:
    return {"stats": client.stats(), "history": client.history(), "value": client.value(), **client.requests()}


def watch(console: Console, client: Client, seen: dict[str, Any], interval: float) -> None:
    """Show the state of the server every `interval` seconds, until Ctrl+C or until the server does not respond.

    `seen`: the server's first responses.
    """
    with Live(picture(seen, room(console, seen)), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                seen = look(client)
                live.update(picture(seen, room(console, seen)), refresh=True)
        except KeyboardInterrupt:
            pass


def room(console: Console, seen: dict[str, Any]) -> int:
    """Return how many lines for requests are left in the terminal below the state in `seen`."""
    stats, value = seen["stats"], sampled(seen)
    beside = _BESIDE + len(stats["tiers"]) + len(stats.get("engines", ())) + (len(value) + 2 if value else 0)
    return max(1, console.height - beside)


def picture(seen: dict[str, Any], rows: int) -> Group:
    seen = clean(seen)
    stats = seen["stats"]
    parts: list[RenderableType] = [headline(seen), Text(), tiers(stats["tiers"])]
    if value := sampled(seen):
        parts += [Text(), sizes(value)]
    if "engines" in stats:
        parts += [Text(), engines(stats["engines"])]
    return Group(*parts, Text(), requests(seen["requests"][:rows], stats["time"]))


def headline(seen: dict[str, Any]) -> Text:
    stats = seen["stats"]
    share = percent(stats["hit_tokens"], stats["lookup_tokens"])
    words = Text.assemble(("hit rate ", "bold"), f"{share} of {stats['lookup_tokens']:,} tokens")
    if stats["loads_off"]:
        words.append("   an audit has switched loads off", "bold red")
    line = sparkline(seen["history"]["samples"])
    return words.append_text(Text(f"   last hour {line}", "dim")) if line.strip() else words


def percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def sparkline(samples: list[dict[str, Any]]) -> str:
    """Return the hit rate over time as a line of bars. A blank is a sample without lookups."""
    size = max(1, -(-len(samples) // _BINS))
    picked = [*samples[:-1:size], *samples[-1:]]
    changes = [
        (after["hit_tokens"] - before["hit_tokens"], after["lookup_tokens"] - before["lookup_tokens"])
        for before, after in pairwise(picked)
    ]
    # Negative where an engine was unavailable.
    return "".join(_LEVELS[min(7, 8 * hit // of)] if of > 0 and 0 <= hit <= of else " " for hit, of in changes)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), expand=True, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return made


def tiers(found: list[dict[str, Any]]) -> Table:
    made = table("tier", "in use", "", "chunks", "served", "evicted", right=("chunks", "served", "evicted"))
    for tier in found:
        failing = "open" in (tier["breaker"], tier["write_breaker"])
        name = Text(shown(tier), "red" if failing else "bold")
        numbers = (f"{tier[each]:,}" for each in ("chunks", "hits", "evictions"))
        made.add_row(name, bar(tier), in_use(tier), *numbers)
    return made


def shown(tier: dict[str, Any]) -> str:
    return str(tier["name"]).replace("_", " ")


def sampled(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the estimated hit rates of each tier by size, or an empty list if too few requests were sampled."""
    value = seen.get("value", {})
    return list(value["tiers"]) if value.get("sampled_requests", 0) >= FEW else []


def sizes(found: list[dict[str, Any]]) -> Table:
    """Return a table with the fraction of all tokens that each tier would find with another size."""
    columns = ("half of it", "as it is", "twice", "four times")
    made = table("hit rate by size", *columns, right=columns)
    for tier in found:
        made.add_row(shown(tier), *(f"{point['hit_ratio']:.0%}" for point in tier["points"]))
    return made


def advice(value: dict[str, Any]) -> Iterator[str]:
    """Yield sentences on how many tokens each tier would hit with another size. `value`: the server's estimates."""
    if value.get("sampled_requests", 0) < FEW:
        yield f"Only {value.get('sampled_requests', 0)} requests were sampled so far: ask again later."
        return
    for tier in value["tiers"]:
        half, now, *larger = tier["points"]
        name = f"tier {shown(tier)}"
        for point in larger:
            more = point["hit_ratio"] - now["hit_ratio"]
            saved = point["saved_seconds"]
            hours = "" if saved is None else f", which saves {saved / 3600:.1f} hours of prefill a day"
            extra = size(point["bytes"] - now["bytes"])
            yield f"With {extra} more, {name} would hit {more:.1%} more of all tokens{hours}."
        lost = now["hit_ratio"] - half["hit_ratio"]
        if now["hit_ratio"] - tier["without"]["hit_ratio"] < _NOTHING:
            yield f"With this size, {name} is useless: without {name} as many tokens would hit."
        elif lost < _NOTHING:
            yield f"With half the size, {name} would hit as many tokens."
        else:
            yield f"With half the size, {name} would hit {lost:.1%} fewer of all tokens."


def bar(tier: dict[str, Any]) -> ProgressBar | Text:
    capacity = tier["capacity_bytes"]
    if not capacity:
        return Text()
    share = tier["used_bytes"] / capacity
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "cyan"
    return ProgressBar(
        total=capacity, completed=tier["used_bytes"], width=12, complete_style=style, finished_style=style
    )


def in_use(tier: dict[str, Any]) -> str:
    capacity = tier["capacity_bytes"]
    return size(tier["used_bytes"]) + (f" of {size(capacity)}" if capacity else "")


def size(nbytes: int) -> str:
    if nbytes >= GIB:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def engines(found: list[dict[str, Any]]) -> Table:
    made = table("engine", "host memory", "", "hit rate", right=("hit rate",))
    for engine in found:
        if unavailable(engine):
            made.add_row(str(engine["engine"]), Text(unavailable(engine), "red"))
        else:
            host, rate = engine["tiers"][0], percent(engine["hit_tokens"], engine["lookup_tokens"])
            made.add_row(str(engine["engine"]), bar(host), in_use(host), rate)
    return made


def requests(found: list[dict[str, Any]], now: float) -> Table | Text:
    if not found:
        return Text("no request has been scheduled yet", "dim")
    made = table("when", "request", "tokens", "vLLM", "loaded", "why not more", right=("tokens", "vLLM", "loaded"))
    for each in found:
        counts = (f"{each[name]:,}" for name in ("tokens", "vllm_tokens", "hit_tokens"))
        made.add_row(duration(now - each["time"]), Text(shortened(each["request"])), *counts, Text(why(each), "dim"))
    return made


def shortened(request: str, width: int = 20) -> str:
    """Return a request id, which a client has chosen, shortened and without control characters."""
    request = printable(request)
    return request if len(request) <= width else f"{request[: width - 9]}…{request[-8:]}"


def why(request: dict[str, Any]) -> str:
    missed = request.get("missed")
    if not missed:
        return ""
    ago = f", {duration(missed['seconds_ago'])} before" if "seconds_ago" in missed else ""
    return miss_in_words(missed["reason"], missed.get("tier", "").replace("_", " ")) + ago
