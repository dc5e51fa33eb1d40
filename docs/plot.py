#!/usr/bin/env python3
"""Draw the pictures of measured figures, for light and dark pages: python docs/plot.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "performance.json"
FIGURES = HERE / "figures"
WIDTH, LEFT, TOP, ROW, BAR, LETTER = 560, 172, 52, 30, 18, 7.4
STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px; }
text { fill: #1f2933; } .note { fill: #52606d; font-size: 12px; } .title { font-weight: 600; font-size: 16px; }
.other { fill: #9aa5b1; } .lmkv { fill: #2f8552; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; } .note { fill: #9aa5b1; } .other { fill: #616e7c; } .lmkv { fill: #5cbf88; }
}
"""

Bar = tuple[str, float, str, bool]
"""A name, a length, the words behind the bar, and whether it is lmkv's."""


def measured() -> dict[str, float]:
    """The figures by name, of the file that `python -m benchmarks.page --write` has written."""
    return {row["name"]: row["value"] for row in json.loads(RESULTS.read_text("utf-8"))["rows"]}


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


FIRST_TOKENS = {
    "vLLM's prefix cache": "vllm prefix cache",
    "lmkv, host memory": "lmkv ram, within the step",
    "lmkv, shared memory": "lmkv shared memory",
    "lmkv, disk": "lmkv disk",
    "lmkv, Redis": "lmkv redis",
}
"""The names of the cases here, and in the results."""


def first_tokens(found: Mapping[str, float]) -> Iterator[Bar]:
    computed = found["first token, computed"]
    yield "computed", computed, seconds(computed), False
    for name, case in FIRST_TOKENS.items():
        if (value := found.get(f"first token, in use: {case}")) is not None:
            yield name, value, f"{seconds(value)} ({computed / value:.0f}x)", name.startswith("lmkv")


CONVERSATIONS = {"vLLM alone": "vLLM alone", "vLLM with lmkv": "lmkv, RAM for 1 in 2"}


def conversations(found: Mapping[str, float]) -> Iterator[Bar]:
    for name, case in CONVERSATIONS.items():
        cached = found[f"prompt tokens not computed: {case}"]
        value = found[f"throughput: {case}"]
        yield name, value, f"{value:.1f} ({cached:.0f} % cached)", "lmkv" in name


FIGURED: dict[str, tuple[str, str, Callable[[Mapping[str, float]], Iterator[Bar]]]] = {
    "first-token.svg": (
        "Time to first token of a repeated prompt",
        "8,000 tokens, small model, 2 CPU cores; shorter is better",
        first_tokens,
    ),
    "conversations.svg": (
        "Requests per second in conversations",
        "host memory for half of the conversations; longer is better",
        conversations,
    ),
}


def drawn(name: str) -> str:
    """The picture `name` as it must be."""
    title, note, bars_of = FIGURED[name]
    bars = list(bars_of(measured()))
    height = TOP + ROW * len(bars) + 4
    # Each bar leaves room for the words behind it.
    scale = min((WIDTH - LEFT - 12 - LETTER * len(words)) / length for _, length, words, _ in bars)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{title}</text>',
        f'<text class="note" x="0" y="38">{note}</text>',
    ]
    for number, (label, length, words, ours) in enumerate(bars):
        top, width = TOP + ROW * number, max(2.0, scale * length)
        middle = top + BAR - 5
        kind = "lmkv" if ours else "other"
        lines += [
            f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{escape(label)}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 8:.1f}" y="{middle}">{escape(words)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for each in FIGURED:
        (FIGURES / each).write_text(drawn(each), "utf-8")
