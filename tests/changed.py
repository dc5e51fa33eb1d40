"""`--changed`: the tests that import what was changed, as a pytest plugin; those that are nearest to it come first.

A test file depends on a file that it, or a file that it depends on, imports anywhere, names as a module ("lmkv.errors",
"tests.torture") or as a path ("examples/offline.py"). Imports within functions and under TYPE_CHECKING count, except
for those of a package's `__init__`, which say where its names are; names in a `conftest.py` do not. A file that is
gone, one that no test depends on, and one that is neither Python nor a page concern all tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lmkv", "packages", "tests", "benchmarks", "examples")
HOMES = {"kv_connector_torture": "packages/kv-connector-torture/"}
"""Folders of packages that are not at the root."""
NAMED = {
    "LMKVConnector": ("lmkv/vllm/connector.py", "lmkv/vllm/plugin.py"),
    "BLOCKS": ("lmkv/cli/app.py",),
    "redis_server": ("lmkv/backends/remote/redis.py",),
    "RedisServer": ("lmkv/backends/remote/redis.py",),
    "object_server": ("lmkv/backends/remote/objects.py",),
    "mooncake_servers": ("lmkv/backends/remote/mooncake.py",),
    "infinistore_server": ("lmkv/backends/remote/infinistore.py",),
}
"""Files that tests use under another name: the connector, the command in pages, and a backend by its server."""
_COMMAND = "lmkv/cli/app.py"
_READ_ALL_OF_LMKV = ("tests/test_architecture.py", "tests/test_doctests.py")
_MODULE = re.compile(r"(?:lmkv|tests|benchmarks)(?:\.\w+)+|kv_connector_torture(?:\.\w+)*")
_PATH = re.compile(r"(?:lmkv|packages|tests|benchmarks|examples|docs)/[\w./-]+|\w[\w-]*\.(?:py|md)")
_CAPITALS = re.compile(r"[A-Z]\w+")
_PAGES = (".md", ".svg", ".png")
_UNTESTED = ("LICENSE", ".gitignore")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed", nargs="?", const="HEAD", metavar="COMMIT", help="only tests of what has changed since COMMIT"
    )


def pytest_configure(config: pytest.Config) -> None:
    commit = config.getoption("changed")
    if commit:
        config.pluginmanager.register(Changed(distances(changed_since(commit))), "changed")


class Changed:
    """Selects test files by their `distance` from what was changed."""

    def __init__(self, distance: dict[str, int] | None) -> None:
        self._distance = distance

    def pytest_report_header(self) -> str:
        if self._distance is None:
            return "changed: something that concerns all tests"
        return f"changed: concerns {sum(map(is_test, self._distance))} files of tests"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if self._distance is None or not is_test(collection_path.name):
            return None
        return True if name_of(collection_path) not in self._distance else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._distance is not None:
            distance = self._distance
            items.sort(key=lambda item: distance.get(name_of(item.path), 99))


def name_of(path: Path) -> str:
    """The path of a file from the root of the checkout."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def is_test(name: str) -> bool:
    return Path(name).name.startswith("test_") and name.endswith(".py")


def changed_since(commit: str) -> set[str]:
    """Paths of the files that differ from a commit, new ones included."""
    commands = (
        ["git", "diff", "--no-renames", "--name-only", commit],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found = (subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in commands)
    return {line for printed in found for line in printed.splitlines()}


def distances(changed: Iterable[str]) -> dict[str, int] | None:
    """How many steps of imports each file is away from one that was changed; None if that concerns all."""
    concerned = {name for name in changed if name not in _UNTESTED}
    if any(not name.endswith((".py", *_PAGES)) or name == "tests/conftest.py" for name in concerned):
        return None
    if not all((ROOT / name).exists() for name in concerned):
        return None
    users = all_users()
    found = dict.fromkeys(concerned, 0)
    if any(name.startswith("lmkv/") for name in concerned):
        found |= dict.fromkeys(_READ_ALL_OF_LMKV, 1)
    if any(name.endswith(_PAGES) for name in concerned):
        found |= dict.fromkeys(users.get("tests/pages.py", ()), 1)
    queue = deque(found)
    while queue:
        name = queue.popleft()
        for user in users.get(name, ()):
            if user not in found:
                found[user] = found[name] + 1
                queue.append(user)
    for name in concerned:
        if name.endswith(".py") and not is_test(name) and not any(map(is_test, _users_of(name, users))):
            return None
    return found


@cache
def all_users() -> dict[str, set[str]]:
    """For each file those that depend on it in one step."""
    users: dict[str, set[str]] = {}
    for path in python_files():
        for used in dependencies(path):
            users.setdefault(used, set()).add(path.relative_to(ROOT).as_posix())
    return users


def _users_of(name: str, users: dict[str, set[str]]) -> set[str]:
    """Files that depend on this one, over any number of steps."""
    found, queue = set[str](), deque([name])
    while queue:
        new = users.get(queue.popleft(), set()) - found
        found |= new
        queue.extend(new)
    return found


@cache
def python_files() -> tuple[Path, ...]:
    return tuple(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))


def dependencies(path: Path) -> set[str]:
    """Paths of all files that this one imports or names."""
    tree = ast.parse(path.read_text())
    is_package = path.name == "__init__.py"
    module = path.relative_to(ROOT).with_suffix("").parts
    package = module[:-1]
    found = set[str]()
    for node in nodes(tree, at_import=is_package):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.update(files_of(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                found.update(files_of(f"{base if node.level else node.module}.{alias.name}"))
                found.update(NAMED.get(alias.name, ()))
        elif path.name == "conftest.py":
            continue
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lmkv":
            found.update(files_of(f"lmkv.{node.attr}"))
        elif isinstance(node, ast.Call | ast.List) and names_the_command(node):
            found.add(_COMMAND)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(files_named_in(node.value))
    # A folder's own `conftest.py` is in the hands of each of its tests.
    if is_test(path.name):
        above = [parent / "conftest.py" for parent in path.parents if parent.is_relative_to(ROOT)]
        found.update(each.relative_to(ROOT).as_posix() for each in above if each.exists())
    return found - {path.relative_to(ROOT).as_posix()}


def nodes(tree: ast.AST, *, at_import: bool) -> Iterator[ast.AST]:
    """All nodes but docstrings, or those that run when the module is imported."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if at_import and (for_types or isinstance(child, ast.FunctionDef)):
            continue
        yield child
        yield from nodes(child, at_import=at_import)


def names_the_command(node: ast.Call | ast.List) -> bool:
    """Whether this is `["lmkv", ...]` or `somewhere.with_name("lmkv")`."""
    first = (node.elts if isinstance(node, ast.List) else node.args)[:1]
    called = isinstance(node, ast.List) or (isinstance(node.func, ast.Attribute) and node.func.attr == "with_name")
    return called and any(isinstance(each, ast.Constant) and each.value == "lmkv" for each in first)


def files_named_in(text: str) -> Iterator[str]:
    if len(text) < 500:
        for name in _CAPITALS.findall(text):
            yield from NAMED.get(name, ())
        for name in _MODULE.findall(text):
            yield from files_of(name)
            main = _place(name) / "__main__.py"
            if main.exists():
                yield main.relative_to(ROOT).as_posix()
        for name in _PATH.findall(text):
            yield from places_of(name)


@cache
def places_of(name: str) -> tuple[str, ...]:
    """The files that a path in a text may mean: from the root, or of that name in any folder."""
    if (ROOT / name).is_file():
        return (name,)
    pages = (page for glob in ("*.md", "docs/**/*.md", "packages/*/*.md") for page in ROOT.glob(glob))
    known = python_files() if name.endswith(".py") else pages
    found = (path.relative_to(ROOT).as_posix() for path in known if path.name == Path(name).name)
    return tuple(path for path in found if path.endswith(name))


@cache
def files_of(name: str) -> tuple[str, ...]:
    """The files behind a module, or a name in one: also its packages' `__init__`."""
    parts = name.split(".")
    if parts[0] not in (*FOLDERS, *HOMES):
        return ()
    folders = [_place(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
    paths = [path for folder in folders for path in (folder / "__init__.py", folder.with_suffix(".py"))]
    found = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
    home = _homes(found[-1]).get(parts[-1]) if found and found[-1].endswith("__init__.py") else None
    # A name whose module is gone would lead here again.
    leads_on = home is not None and ROOT.joinpath(*home.split(".")[:-1]).with_suffix(".py").is_file()
    return (*found, *(files_of(home) if home and leads_on else ()))


def _place(name: str) -> Path:
    """Where a module is, without its ending."""
    parts = name.split(".")
    return ROOT.joinpath(HOMES.get(parts[0], ""), *parts)


@cache
def _homes(package: str) -> dict[str, str]:
    """Where the names of a package are that its `__init__` imports lazily."""
    found = {}
    for node in ast.walk(ast.parse((ROOT / package).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found
