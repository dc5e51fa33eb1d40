"""The documentation is true: its links resolve, its code runs, its tables say what the code says."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

import lmkv
from lmkv import errors
from lmkv.config import Config
from tests.forked import python
from tests.pages import BLOCKS, FENCE, PAGES, ROOT, Block, extracted
from tests.tables import every
from tests.test_architecture import ALLOWED

LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:docs|examples|benchmarks|tests|lmkv|requirements)/[\w./-]+\.(?:py|md|txt|toml))`")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- links ---------------------------------------------------------------------------------------------


def test_links_within_and_files_that_are_named_exist() -> None:
    broken = []
    for page in PAGES:
        for found in LINK.finditer(prose(page)):
            path, _, anchor = found["target"].partition("#")
            target = (page.parent / path).resolve() if path else page
            if ":" not in path and (not target.exists() or (anchor and anchor not in anchors(target))):
                broken.append((name_of(page), found["target"]))
        broken += [(name_of(page), path) for path in NAMED_FILE.findall(prose(page)) if not (ROOT / path).exists()]
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            targets = [found["target"].partition("#")[0] for found in LINK.finditer(prose(page))]
            ahead += [(page.parent / path).resolve() for path in targets if path.endswith(".md")]
    assert set(PAGES) <= reached


# -- code ----------------------------------------------------------------------------------------------


def test_code_is_of_its_language(tmp_path: Path) -> None:
    def check(block: Block) -> None:
        (tmp_path / "lmkv.yaml").write_text(block.code)
        match block.language:
            case "python":
                compile(block.code, block.page, "exec")
            case "json":
                json.loads(block.code)
            case "yaml":
                assert Config.load(file=tmp_path / "lmkv.yaml", env={}).sources

    assert {"python", "json", "yaml"} <= {block.language for block in BLOCKS}
    every(BLOCKS, check)


def test_the_backend_of_the_docs_passes_the_suite_and_is_short(tmp_path: Path) -> None:
    assert "test_sqlite_backend.py" in extracted("write-a-backend.md", tmp_path)
    printed = python(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite_backend.py")
    passed = re.search(r"(\d+) passed", printed)
    assert passed
    assert int(passed[1]) >= 20
    assert "failed" not in printed
    body = (tmp_path / "sqlite_backend.py").read_text().partition("class SQLiteBackend:\n")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40


@pytest.mark.parametrize(
    ("page", "script", "printed"),
    [
        ("write-a-backend.md", "use_it.py", ["stored 768", "retrieved 768", "equal True"]),
        ("policies.md", "own_policy.py", ["[b'b']"]),
        ("library.md", "library.py", ["stored 768", "on disk 768", "prefetched 768 {'disk': 768}", "retrieved 768"]),
    ],
)
def test_the_scripts_of_the_docs_print_what_they_say(
    page: str, script: str, printed: list[str], tmp_path: Path
) -> None:
    extracted(page, tmp_path)
    assert python(tmp_path, script).splitlines() == printed


# -- tables --------------------------------------------------------------------------------------------


def rows(page: str) -> list[str]:
    return [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]


TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
DRAW = runpy.run_path(str(ROOT / "docs" / "drawings" / "draw.py"))


def test_what_pages_have_from_the_code_is_up_to_date() -> None:
    """On failure: python docs/tables.py, or python docs/drawings/draw.py"""
    assert [name for name in TABLES["PAGES"] if (ROOT / "docs" / name).read_text() != TABLES["page"](name)] == []
    for source in DRAW["SOURCES"]:
        drawing = source.with_suffix(".svg").read_text()
        assert DRAW["digest"](source) in drawing, source
        assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("source", DRAW["SOURCES"], ids=name_of)
def test_texts_of_drawings_fit_their_boxes_in_any_font(source: Path) -> None:
    """Each says how wide it is, and a browser squeezes it to that."""
    space = "{http://www.w3.org/2000/svg}"
    drawing = ElementTree.fromstring(source.with_suffix(".svg").read_text())
    boxes = [each for each in drawing.iter(f"{space}g") if (each.get("class") or "").startswith("node")]
    assert len(boxes) >= 5
    assert all(each.get("textLength") for each in drawing.iter(f"{space}text"))
    for box in boxes:
        [outline] = list(box.iter(f"{space}path"))
        across = [float(pair.split(",")[0]) for pair in re.findall(r"-?[\d.]+,-?[\d.]+", outline.get("d") or "")]
        for text in box.iter(f"{space}text"):
            middle, half = float(text.get("x") or 0), float(text.get("textLength") or 0) / 2
            assert text.get("text-anchor") == "middle"
            assert min(across) + 3 < middle - half < middle + half < max(across) - 3, text.text


PLOT = runpy.run_path(str(ROOT / "docs" / "plot.py"))


@pytest.mark.parametrize("name", PLOT["FIGURED"])
def test_pictures_are_of_the_latest_results(name: str) -> None:
    """On failure: python docs/plot.py"""
    picture = (ROOT / "docs" / "figures" / name).read_text()
    assert picture == PLOT["drawn"](name)
    assert "prefers-color-scheme: dark" in picture


def test_code_scrolls_on_the_site() -> None:
    """A broken line would lose its indentation."""
    config = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    sheets = [
        ROOT / "docs" / folder / name for folder in config["html_static_path"] for name in config["html_css_files"]
    ]
    rules = "".join(sheet.read_text() for sheet in sheets)
    assert re.search(r"\.highlight pre[^{]*\{[^}]*white-space: pre; overflow-x: auto", rules)


def test_every_exception_is_explained() -> None:
    exceptions = {name for name, found in vars(errors).items() if isinstance(found, type)} - {"LmkvError"}
    table = (ROOT / "docs" / "library.md").read_text().partition("## Exceptions")[2].partition("## ")[0]
    explained = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert exceptions == explained
    sources = "".join(path.read_text() for path in Path(lmkv.__file__).parent.rglob("*.py"))
    assert {name for name in exceptions if not re.search(rf"(?<!class )\b{name}\(", sources)} == set(), "never raised"


def test_every_value_that_refuses_by_itself_is_named() -> None:
    """It raises ValueError as attrs does, and no exception of lmkv's."""
    page = (ROOT / "docs" / "library.md").read_text()
    for name in lmkv.__all__:
        doc = getattr(getattr(lmkv, name), "__doc__", None) or ""
        if re.search(r"Raises\n\s+-+\n\s+ValueError", doc):
            assert f"`{name}`" in page


NAMED_THREAD = re.compile(
    r"(?:Thread(?:PoolExecutor)?\(.{0,150}?|name: str = )f?\"(lmkv-[\w-]+?)-?(?:\{[^\"]*)?\"", re.DOTALL
)


def test_every_thread_is_in_the_table() -> None:
    sources = "".join(path.read_text() for path in sorted(Path(lmkv.__file__).parent.rglob("*.py")))
    named = set(NAMED_THREAD.findall(sources))
    assert {"lmkv-io", "lmkv-index", "lmkv-agent", "lmkv-populate", "lmkv-pin"} <= named
    table = {row.split("`")[1] for row in rows("development/concurrency.md") if row.startswith("| `lmkv-")}
    assert {re.sub(r"-[A-Z]+$", "", name) for name in table} == named


def test_the_rooms_of_the_page_are_those_of_the_test() -> None:
    """Which of them may import which, and that none is left out."""
    page = (ROOT / "docs" / "development" / "architecture.md").read_text().partition("## Rooms")[2]
    found = re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)
    named = {name for cell in found for name in re.findall(r"`([\w.]+)`", cell)}
    assert named == set(ALLOWED) - {""}


def test_every_request_option_is_explained() -> None:
    source = (Path(lmkv.__file__).parent / "vllm" / "plan" / "options.py").read_text()
    known = set(re.findall(r"\"(lmkv\.\w+)", source))
    explained = {
        re.sub(r"\.<name>$", "", row.split("`")[1]) for row in rows("request-options.md") if row.startswith("| `lmkv.")
    }
    assert explained == known


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")


def test_every_test_that_proves_a_row_exists() -> None:
    for page in ("evidence/vllm.md", "evidence/remote.md", "evidence/documents.md"):
        named = NAMED_TEST.findall((ROOT / "docs" / page).read_text())
        assert named
        for path, name in named:
            defined = rf"^ *def {name.split('::')[-1]}\("
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_row_of_the_documents_names_a_test_or_is_open() -> None:
    items = [row.split("|") for row in rows("evidence/documents.md") if re.match(r"\| \d", row)]
    assert [int(number) for _, number, *_ in items] == list(range(1, 50))
    unproved = [row for row in items if "tests/" not in row[4]]
    assert unproved == [row for row in items if re.search(r"\bopen\b", row[3])]


# -- log lines -----------------------------------------------------------------------------------------


def words(text: str) -> str:
    """A text without the values in it: placeholders, numbers, quotes."""
    text = re.sub(r"\{[^{}]*\}|%[\d.]*[sdrf]|<[^<>]*>|\d[\d.]*", " ", text)
    return " ".join(re.sub(r"['\"`]", "", text).split())


def test_log_lines_that_pages_quote_are_those_of_the_code() -> None:
    sources = "".join(path.read_text() for path in sorted(Path(lmkv.__file__).parent.rglob("*.py")))
    joined = words(re.sub(r"\"\s*\n\s*f?\"", "", sources))
    page = (ROOT / "docs" / "troubleshoot.md").read_text().partition("## Failures in the log")[2]
    quoted = [code for row in page.splitlines() if row.startswith("| `") for code in row.split("|")[1].split("`")[1::2]]
    # An error of a backend is made of its name, what it did and the chunk.
    composed = re.compile(r"backend '\w+': (read|write) of chunk \.\.\. failed")
    parts = [words(part) for line in quoted if not composed.fullmatch(line) for part in line.split("...")]
    assert len(quoted) >= 12
    assert [part for part in parts if len(part) > 8 and part not in joined] == []
