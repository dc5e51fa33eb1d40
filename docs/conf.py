"""The documentation as a site: `python3 dev.py docs` builds it into build/docs."""

from typing import Any

from lmkv import __version__

project = "lmkv"
copyright = "The lmkv authors"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# The evidence stays in the repository: it is for those who change lmkv.
exclude_patterns = ["drawings", "evidence", "results", "deploy"]

# The pages are written for GitHub: its anchors, and links to files of the repository.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_rtype = False
# The site is built without a network: names of other packages have no address here.
nitpick_ignore_regex = [
    (
        r"py:\w+",
        r"(abc|collections|enum|httpx|os|torch)\..*|callable|optional|sequence|Copier|lmkv\.(config|memory)\.\S+",
    )
]

copybutton_prompt_text = "$ "

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"lmkv {release}"
html_logo = "static/logo.svg"
html_show_sourcelink = False
html_copy_source = False


def link_to_packages(app: Any, page: str, source: list[str]) -> None:
    """The README of kv-connector-torture is a page of the site, which includes it."""
    source[0] = source[0].replace("(../packages/kv-connector-torture/README.md", "(development/torture.md")
    source[0] = source[0].replace("(../../packages/kv-connector-torture/README.md", "(torture.md")


def setup(app: Any) -> None:
    app.connect("source-read", link_to_packages)
