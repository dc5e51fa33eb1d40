"""The page at `/`: one file, which loads nothing and runs no script but its own."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files

PAGE = files("lmkv.agent").joinpath("page.html").read_text(encoding="utf-8")


def source_of(text: str) -> str:
    """A script or a style as a source of a Content-Security-Policy: by its hash."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _source_of(element: str) -> str:
    return source_of(PAGE.partition(f"<{element}>")[2].partition(f"</{element}>")[0])


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_source_of('script')}; style-src {_source_of('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
