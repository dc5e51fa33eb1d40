"""Pages and docstrings are read once: short sentences, an actor in each, and the words that readers know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import FENCE, ROOT

DOCS = ROOT / "docs"
_OF_DOCS = {*DOCS.glob("*.md"), *DOCS.glob("development/*.md")}
TORTURE = ROOT / "packages" / "kv-connector-torture" / "README.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", TORTURE, *sorted(_OF_DOCS)]
DEVELOPERS = {*DOCS.glob("development/*.md"), DOCS / "write-a-backend.md", ROOT / "CONTRIBUTING.md", TORTURE}
CODE = sorted((ROOT / "lmkv").rglob("*.py"))
USERS = [page for page in PAGES if page not in DEVELOPERS]
"""Pages of users: their sentences are short, too."""
MOST_WORDS = 25
MOST_LINES = 2700
"""Of all pages of users together, without what is generated."""

AVOIDED = {
    r"\bbeside\b": "compared with, with, next to",
    r"\bwhose\b": "a sentence of its own",
    r"\bof (its|their|his|our|your) own\b": "its, or: separate",
    r"\bnone of ours\b": "not lmkv's",
    r"\bfor ever\b": "forever",
    r"\bby hand\b": "the command that did it",
    r"\bwhoever\b": "anyone who",
    r"\bgives? way\b": "is evicted",
    r"\bin vain\b": "without success",
    r"\bit is told\b": "somebody tells",
    r"\bso (many|long|much) (tokens|leading|chunks|seconds)\b": "this number of",
    r"\bgoes? on\b": "continues",
    r"\bleft alone\b": "skipped",
    r"\bends the start\b": "the server does not start",
}
IN_DOCSTRINGS = [word for word in AVOIDED if "whose" not in word and "goes" not in word and "by hand" not in word]
QUESTIONS = re.compile(r"(What|That|Of|By|Who|Whose) ")
FILE_AS_TITLE = re.compile(r"\[`?[\w./-]+\.(?:md|py|ya?ml|json|toml|txt)`?\]\(")
GENERATED = re.compile(r"<!-- From here.*?<!-- End -->", re.DOTALL)


def own(page: Path) -> str:
    """A page without code and without what is generated."""
    text = GENERATED.sub("", FENCE.sub("", page.read_text()))
    return re.sub(r"^( {4,}|:::|---|:link|:gutter|:caption|:hidden).*$", "", text, flags=re.MULTILINE)


def plain(text: str) -> str:
    """Links as their text, code as one word."""
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(\S[^*_]*)[*_]{1,2}", r"\1", text)


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs, entries of lists and cells of tables."""
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=\|)", own(page)):
        if part.lstrip().startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", part) if cell.strip(" -"))
        elif not part.lstrip().startswith("#"):
            yield re.sub(r"^\s*(?:[*-]|\d+\.) ", "", " ".join(part.split()))


def sentences(page: Path) -> Iterator[str]:
    for paragraph in paragraphs(page):
        yield from (each for each in re.split(r"(?<=[.!?:])\s+", plain(paragraph)) if each)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_words_that_readers_stumble_over_are_avoided(page: Path) -> None:
    text = plain(own(page))
    found = [(match[0], better) for word, better in AVOIDED.items() for match in re.finditer(word, text, re.IGNORECASE)]
    found += [(each, "begin with the actor") for each in sentences(page) if QUESTIONS.match(each) and each[-1] != "?"]
    found += [(match[0], "the page's title") for match in FILE_AS_TITLE.finditer(own(page))]
    assert found == []


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_users_pages_are_short(page: Path) -> None:
    long = {each: len(each.split()) for each in sentences(page) if len(each.split()) > MOST_WORDS}
    assert long == {}


def test_the_users_pages_are_read_in_an_hour() -> None:
    pages = {page: GENERATED.sub("", page.read_text()).count("\n") for page in USERS}
    assert sum(pages.values()) <= MOST_LINES
    assert (ROOT / "README.md").read_text().count("\n") <= 110
    assert (DOCS / "performance.md").read_text().count("\n") <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_one_title(page: Path) -> None:
    if page.name != "torture.md":
        assert len(re.findall(r"^# ", FENCE.sub("", page.read_text()), re.MULTILINE)) == 1


def docstrings(module: Path) -> Iterator[str]:
    """All texts that stand alone: of modules, classes and functions, and of the values before them."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


@pytest.mark.parametrize("module", CODE, ids=lambda module: str(module.relative_to(ROOT)))
def test_docstrings_avoid_the_same_words(module: Path) -> None:
    found = [text for text in docstrings(module) for word in IN_DOCSTRINGS if re.search(word, text, re.IGNORECASE)]
    found += [text for text in docstrings(module) if QUESTIONS.match(text)]
    assert found == []
