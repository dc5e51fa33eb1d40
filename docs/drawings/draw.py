#!/usr/bin/env python3
"""Draw each .dot file here as SVG, for light and dark pages: python docs/drawings/draw.py (apt install graphviz)"""

from __future__ import annotations

import hashlib
import re
import subprocess
from html import unescape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = HERE / "style.css"
SOURCES = sorted(HERE.glob("*.dot"))


# Of Helvetica, which Graphviz measures with: characters by their width, in thousandths of the font's size.
WIDTHS = {
    **dict.fromkeys("ijl'|", 222),
    **dict.fromkeys(" ,.:;/\\!fItI[]", 278),
    **dict.fromkeys('r-()"`', 333),
    **dict.fromkeys("ckszvxyJ", 500),
    **dict.fromkeys("+=<>FTZ", 600),
    **dict.fromkeys("ABEKPSVXY&", 667),
    **dict.fromkeys("CDHNRUw", 722),
    **dict.fromkeys("GOQ", 778),
    **dict.fromkeys("mM%W@", 889),
}
OTHERS = 556
TEXT = re.compile(r'<text ([^>]*?font-size="([\d.]+)")(?: textLength="[^"]*" lengthAdjust="\w*")?>([^<]*)</text>')


def width(text: str, size: float) -> float:
    return sum(WIDTHS.get(each, OTHERS) for each in unescape(text)) * size / 1000


def fitted(svg: str) -> str:
    """Each text as wide as it is in Helvetica: a browser has another font, in which it would leave its box."""
    return TEXT.sub(_fitted, svg)


def _fitted(found: re.Match[str]) -> str:
    start, size, text = found.groups()
    length = width(text, float(size))
    return f'<text {start} textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs">{text}</text>'


def digest(source: Path) -> str:
    """Digest of a drawing's source. The drawing has it, so that a test sees when it is out of date."""
    return hashlib.sha256(source.read_bytes() + STYLE.read_bytes()).hexdigest()


def drawn(source: Path) -> str:
    """Graphviz's SVG without its comments, and with the style that depends on the page's colours."""
    svg = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True).stdout
    svg = re.sub(r"<!--.*?-->\n", "", svg, flags=re.DOTALL)
    style = f"<!-- of {digest(source)} -->\n<style>\n{STYLE.read_text()}</style>\n"
    start, end, rest = fitted(svg).partition('xlink">\n')
    return start + end + style + rest


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".svg").write_text(drawn(source), "utf-8")
