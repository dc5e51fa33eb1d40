"""The documentation as a site: `python3 dev.py docs` builds it into build/docs."""

import re
from pathlib import Path
from typing import Any

from lmkv import __version__

README = Path(__file__).parents[1] / "README.md"

project = "lmkv"
copyright = "The lmkv authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["drawings"]

# The pages are written for GitHub: its anchors, and links to files beside the pages.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = False
napoleon_use_rtype = False
# The site is built without a network: what is not lmkv's own has no address here.
nitpick_ignore_regex = [
    (
        r"py:\w+",
        r"(abc|collections|enum|httpx|os|torch)\..*|callable|optional|sequence|Copier|lmkv\.(config|memory)\.\S+",
    )
]

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"lmkv {release}"
html_show_sourcelink = False
html_copy_source = False


def begin_with_the_readme(app: Any, page: str, source: list[str]) -> None:
    """The first page is the README up to its list of pages, with links as from this folder."""
    if page == "index":
        beginning = README.read_text("utf-8").partition("## Read on")[0]
        source[0] = re.sub(r"\]\((?![a-z]+:|#)", "](../", beginning).replace("](../docs/", "](") + source[0]


def link_to_packages(app: Any, page: str, source: list[str]) -> None:
    """The page of a distribution beside lmkv is its README, which a page of this folder includes."""
    source[0] = source[0].replace("](../packages/kv-connector-torture/README.md", "](torture.md")


def setup(app: Any) -> None:
    app.connect("source-read", begin_with_the_readme)
    app.connect("source-read", link_to_packages)
