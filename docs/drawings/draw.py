#!/usr/bin/env python3
"""Draw each .dot file here as SVG, for light and dark pages: python docs/drawings/draw.py (apt install graphviz)"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
STYLE = HERE / "style.css"
SOURCES = sorted(HERE.glob("*.dot"))


def digest(source: Path) -> str:
    """What the drawing is of; it is in the drawing, so that a test sees when it is out of date."""
    return hashlib.sha256(source.read_bytes() + STYLE.read_bytes()).hexdigest()


def drawn(source: Path) -> str:
    """Graphviz's SVG without its comments, and with the style that depends on the page's colours."""
    svg = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True).stdout
    svg = re.sub(r"<!--.*?-->\n", "", svg, flags=re.DOTALL)
    style = f"<!-- of {digest(source)} -->\n<style>\n{STYLE.read_text()}</style>\n"
    start, end, rest = svg.partition('xlink">\n')
    return start + end + style + rest


if __name__ == "__main__":
    for source in SOURCES:
        source.with_suffix(".svg").write_text(drawn(source), "utf-8")
