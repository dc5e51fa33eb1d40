"""The documentation's pages and the code in them, for the tests that read and run it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from attrs import frozen

ROOT = Path(__file__).parents[1]
ONLY_ON_THE_SITE = {ROOT / "docs" / "index.md", ROOT / "docs" / "development" / "torture.md"}
_GLOBS = ("*.md", "docs/**/*.md", "packages/*/*.md")
PAGES = sorted({page for glob in _GLOBS for page in ROOT.glob(glob)} - ONLY_ON_THE_SITE)
"""Pages that are read on GitHub: all but the site's list of pages, and the page that includes another one."""


FENCE = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@frozen
class Block:
    """A code block of a page. `file`: the name it is extracted under, if it is."""

    page: str
    language: str
    code: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page}-{self.file or self.code.splitlines()[0][:30]}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for found in FENCE.finditer(page.read_text()):
            yield Block(page.name, found["language"], found["code"], found["file"])


BLOCKS = list(blocks())


def extracted(page: str, folder: Path) -> list[str]:
    """Write the page's files into `folder`; returns their names."""
    files = [block for block in BLOCKS if block.page == page and block.file]
    for block in files:
        (folder / str(block.file)).write_text(block.code)
    return [str(block.file) for block in files]


def loaded_module(script: Path) -> ModuleType:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
