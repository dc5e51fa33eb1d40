"""The page at `/`: one file, which loads nothing and runs no script but its own."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

PAGE = files("lmkv.agent").joinpath("page.html").read_text(encoding="utf-8")


def _hash_of(element: str) -> str:
    found = re.search(f"<{element}>(.*?)</{element}>", PAGE, re.DOTALL)
    assert found is not None
    return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
