"""Who may import whom: docs/development/architecture.md keeps the picture, this test keeps to it.

Imports are read from the source, those inside functions and under TYPE_CHECKING included: a module knows the
modules that it needs only for types, too.
"""

from __future__ import annotations

import ast
import functools
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from operator import itemgetter
from pathlib import Path

import pytest
from attrs import frozen

import lmkv
import lmkv.backends
import lmkv.errors
import lmkv.policies

PACKAGE = Path(lmkv.errors.__file__).parent

BASE = frozenset({"errors", "protocols", "chunks"})
STORE = BASE | {"memory", "store"}
BACKENDS_ROOMS = frozenset({"backends", "backends.disk", "backends.remote"})
BUILT = STORE | BACKENDS_ROOMS | {"plugins", "policies", "config", "build"}

ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "protocols": frozenset({"errors"}),
    "chunks": frozenset({"errors", ""}),
    "medium": frozenset(),
    "plugins": frozenset({"errors"}),
    "policies": frozenset({"errors", "protocols", "plugins"}),
    "simulation": frozenset({"errors", "protocols", "policies", "store"}),
    "config": frozenset({"errors", "policies", "plugins", "chunks"}),
    "memory": frozenset({"errors", "chunks"}),
    # Policies and backends are passed in: the store knows their protocols alone, and no room above it.
    "store": STORE,
    # Host memory's backend is the slab itself, seen as a backend. A backend never imports another one.
    "backends": BASE | {"medium", "memory", "backends.disk", "backends.remote"},
    "backends.disk": BASE | {"medium"},
    "backends.remote": BASE | {"medium"},
    # Only what is built from a Config sees one.
    "build": BUILT,
    "engine": BUILT,
    "": BUILT | {"engine"},
    "agent": STORE,
    "vllm.plan": STORE,
    "vllm.scheduler": STORE | {"policies", "vllm.plan"},
    "vllm": BUILT | {"vllm.plan", "vllm.scheduler", "agent"},
    "testing": BASE | {"memory", "backends"},
    "cli": BUILT | {"", "engine", "vllm", "agent", "simulation"},
}
"""Room -> other rooms that it may import. A room is a folder or a module at the root, "" the package."""

BUDGET = {
    "errors": 85,
    "protocols": 148,
    "chunks": 552,
    "medium": 55,
    "plugins": 34,
    "policies": 989,
    "simulation": 420,
    "config": 2359,
    "memory": 1317,
    "store": 3619,
    "backends": 389,
    "backends.disk": 1065,
    "backends.remote": 1950,
    "build": 112,
    "engine": 459,
    "": 62,
    "agent": 1310,
    "vllm": 2243,
    "vllm.plan": 855,
    "vllm.scheduler": 2549,
}
"""Lines of code, without blanks, comments and docstrings, of a room that runs beside the model, at most."""

AIM = {
    "errors": 60,
    "protocols": 150,
    "plugins": 30,
    "build": 100,
    "": 50,
    "chunks": 500,
    "policies": 830,
    "simulation": 400,
    "config": 560,
    "memory": 1090,
    "store": 2080,
    "engine": 440,
    "agent": 690,
    "backends": 300,
    "backends.disk": 930,
    "backends.remote": 1280,
    "vllm": 1560,
    "vllm.plan": 560,
    "vllm.scheduler": 1900,
    "medium": 55,
}
"""Lines that a design of all rooms at once gave each of them, before what `BEYOND` names was asked for."""

BEYOND = {
    "errors": "texts from outside are cut and shown without secrets",
    "build": "one function opens a remote store for the engine and for doctor",
    "": "names are imported at their first use",
    "chunks": "values of another encoding in stores, salts of authenticated files",
    "plugins": "entry points, or a place in a module",
    "policies": "hints have owners and ends, quotas divide what tails and states take",
    "simulation": "traces are read within bounds of bytes and time",
    "config": "files, flags and variables of LMCache in both modes, of vLLM's own offloading, of several",
    "memory": "loads are read back and compared, on the device",
    "store": "claims with owners, a breaker for each kind of call, calls that an interrupt cuts short",
    "engine": "options of each request are checked",
    "agent": "a private socket, bounds for callers and for other engines, a page that documents itself",
    "backends": "a file backend over aiofiles as the example",
    "backends.disk": "folders that others may write to, forks, media that change",
    "backends.remote": "clients in their own processes, sentinels, clusters, bounds of every answer",
    "vllm": "identity of weights, adapters and code; three minor versions of vLLM",
    "vllm.plan": "identities of images and adapters, every mark by which vLLM says that a model is not cached",
    "vllm.scheduler": "audited loads, changes of weights, reasons of misses, estimates for other sizes",
}
"""Why a room has more lines than its aim."""

WHOLE = 20573

FORBIDDEN: dict[str, frozenset[str]] = {
    "policies": frozenset({"torch", "numpy", "threading", "asyncio", "concurrent", "time", "random", "os"}),
    "config": frozenset({"torch", "numpy"}),
}
"""Packages from outside that these rooms may not import."""

STANDARD_LIBRARY_AND_ATTRS = frozenset({"errors", "protocols"})
STANDARD_LIBRARY = "lmkv.chunks.hashing"
BACKENDS = ("lmkv.backends.cpu", "lmkv.backends.disk", "lmkv.backends.adapters")
NO_CODE = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE), *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}


@frozen
class Imported:
    """`module` imports `target`: a module, or a name in one. `lazy`: not at import time."""

    module: str
    target: str
    lazy: bool = False

    @property
    def room(self) -> str:
        return room_of(self.module)

    @property
    def inside(self) -> bool:
        return self.target.split(".")[0] == "lmkv"


def room_of(name: str) -> str:
    """The innermost room that a module, or a name in one, belongs to."""
    parts = name.split(".")[1:]
    rooms = (".".join(parts[:depth]) for depth in (2, 1))
    return next((room for room in rooms if room in ALLOWED), "")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(module: str, source: str, *, is_package: bool = False) -> Iterator[Imported]:
    """Every import in `source`; `from a import b` gives a.b, which may be a module or a name."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node, lazy in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(module, alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield Imported(module, f"{origin}.{alias.name}", lazy)


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it is inside a function or under TYPE_CHECKING."""
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    lazy = lazy or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        yield child, lazy
        yield from walk(child, lazy)


def problems(imported: Imported) -> Iterator[str]:
    """Everything that is wrong with one import, in words."""
    where = f"{imported.module} imports {imported.target}"
    if imported.inside:
        yield from inside_problems(imported, where)
        return
    top = imported.target.split(".")[0]
    standard = top in sys.stdlib_module_names
    outer = imported.room.split(".")[0]
    may_import_vllm = outer == "vllm" or (outer == "cli" and imported.lazy)
    if top == "vllm" and not may_import_vllm:
        yield f"{where}: only lmkv.vllm imports vllm, and commands when they run it"
    if top in FORBIDDEN.get(imported.room, ()):
        yield f"{where}: not in {imported.room}"
    if imported.module == STANDARD_LIBRARY and not standard:
        yield f"{where}: {imported.module} is made of the standard library alone"
    if imported.room in STANDARD_LIBRARY_AND_ATTRS and not standard and top != "attrs":
        yield f"{where}: {imported.room} is made of the standard library and attrs alone"


def inside_problems(imported: Imported, where: str) -> Iterator[str]:
    room, target = imported.room, room_of(imported.target)
    if target not in ALLOWED[room] | {room}:
        yield f"{where}: {room or 'lmkv'} may not know {target or 'lmkv itself'}"
    if any(name.startswith("_") and not name.endswith("__") for name in imported.target.split(".")):
        yield f"{where}: it is private"
    is_backend = room == "backends" and imported.module != "lmkv.backends"
    if is_backend and imported.target.startswith(BACKENDS):
        yield f"{where}: a backend never imports another one"


def all_problems(module: str, source: str, *, is_package: bool = False) -> list[str]:
    return [problem for imported in imports_of(module, source, is_package=is_package) for problem in problems(imported)]


def test_every_room_is_there() -> None:
    rooms = {room_of(name) for name in MODULES}
    assert rooms == set(ALLOWED)
    # A new module at the root is a new room: say in ALLOWED what it may import.
    assert {room_of(name) for name in MODULES if name.count(".") == 1} <= set(ALLOWED) - {""}
    assert len(list(PACKAGE.glob("*.py"))) <= 9


def test_no_room_is_above_and_below_its_own_folder() -> None:
    inner = {room for room in ALLOWED if "." in room}
    both = {room for room in inner if room in ALLOWED[above := room.split(".")[0]] and above in ALLOWED[room]}
    assert both == set()


def test_a_module_imports_what_it_may() -> None:
    found = (
        all_problems(name, path.read_text(), is_package=path.name == "__init__.py") for name, path in MODULES.items()
    )
    assert [problem for problems in found for problem in problems] == []


FORBIDDEN_IMPORTS = {
    "lmkv.policies.queues": [
        *("import torch.nn", "from threading import Lock", "def f():\n    import torch"),
        *("from ..store.tiered import TieredStore", "from lmkv.backends import disk"),
    ],
    "lmkv.store.tiered": [
        *(
            "if TYPE_CHECKING:\n    from lmkv.policies.queues import LRU",
            "from lmkv.backends.disk import LocalDiskBackend",
        ),
        *("from lmkv import config", "import vllm.config", "from lmkv.vllm import worker"),
        *("import lmkv", "from .. import engine"),
    ],
    "lmkv.chunks.hashing": ["import numpy as np", "from attrs import define"],
    "lmkv.chunks.namespace": ["from lmkv.protocols import ChunkKey"],
    "lmkv.protocols": ["import numpy"],
    "lmkv.backends.adapters": ["from lmkv.backends.cpu import CPUPinnedBackend"],
    "lmkv.backends.disk.chunkfile": ["from lmkv.policies import LRU"],
    "lmkv.engine": ["from lmkv.store.tiered import _close"],
    "lmkv.cli.findings": ["import vllm"],
    "lmkv.vllm.scheduler.match": ["from lmkv.config import Config"],
    "lmkv.testing.faults": ["import vllm"],
}
ALLOWED_IMPORTS = {
    "lmkv.policies.queues": "from lmkv.protocols import ChunkKey\nfrom ..errors import UsageError",
    "lmkv.backends.disk.chunkfile": "from lmkv.chunks.codec import encode\nfrom .folder import ChunkFolder",
    "lmkv.store.tiered": "from lmkv import protocols\nimport threading\nfrom lmkv.memory.slab import Slab",
    "lmkv.cli.demo": "def run():\n    import vllm\nif TYPE_CHECKING:\n    from vllm import LLM",
    "lmkv.vllm.worker": "import vllm\nfrom lmkv.config import Config\nfrom .metadata import Orders",
    "lmkv.chunks.hashing": "from __future__ import annotations\nimport hashlib",
}


def test_a_forbidden_import_is_found_and_an_allowed_one_is_not_complained_of() -> None:
    every_one = [(module, source) for module, sources in FORBIDDEN_IMPORTS.items() for source in sources]
    assert [row for row in every_one if len(all_problems(*row)) != 1] == []
    assert [row for row in ALLOWED_IMPORTS.items() if all_problems(*row)] == []


def test_packages_beside_lmkv_know_nothing_of_it() -> None:
    """They serve any connector, and are installed without it."""
    files = [path for path in (PACKAGE.parent / "packages").rglob("*.py") if path.parent.name != "tests"]
    assert files
    for path in files:
        imports = {imported.target.split(".")[0] for imported in imports_of(path.parent.name, path.read_text())}
        assert not imports & {"lmkv", "tests", "benchmarks"}, path


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count, so that the whole can be read from below."""
    below = {
        name: {
            target
            for imported in imports_of(name, path.read_text(), is_package=path.name == "__init__.py")
            for target in (imported.target, imported.target.rpartition(".")[0])
            if target in MODULES and target != name
        }
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    list(TopologicalSorter({name: found & set(below) for name, found in below.items()}).static_order())


def test_protocols_ask_for_six_members_at_most() -> None:
    """With more, nobody would write one."""
    required = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            is_protocol = isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases)
            if isinstance(node, ast.ClassDef) and is_protocol:
                members = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
                required[f"{name}.{node.name}"] = len(members)
    assert {"lmkv.protocols.Backend", "lmkv.protocols.Policy"} <= set(required)
    assert {name: count for name, count in required.items() if count > 6} == {}


# -- size ----------------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """Lines with code on them: no blanks, comments or docstrings."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_code_lines_are_counted() -> None:
    source = '"""A\n\nB."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """D."""\n    return x\n'
    assert code_lines(source) == 5


@functools.cache
def lines_of_rooms() -> Counter[str]:
    """Of the rooms that run beside the model."""
    found = Counter[str]()
    for name, path in MODULES.items():
        if room_of(name).split(".")[0] not in {"cli", "testing"}:
            found[room_of(name)] += code_lines(path.read_text())
    return found


def test_rooms_keep_to_their_budgets() -> None:
    found = lines_of_rooms()
    assert set(found) == set(BUDGET) == set(AIM)
    assert {room: lines for room, lines in found.items() if lines > BUDGET[room]} == {}
    assert found.total() < WHOLE


def test_a_room_beyond_its_aim_has_a_reason() -> None:
    far = {room: lines - AIM[room] for room, lines in lines_of_rooms().items() if lines > AIM[room]}
    for room, lines in sorted(far.items(), key=itemgetter(1), reverse=True):
        print(f"{lines:5} lines beyond the aim: {room or 'lmkv'}: {BEYOND.get(room)}")
    assert set(far) == set(BEYOND)


PAGE = 350
"""Lines of code of a module, at most, to which its user adds another one."""

ALONE: dict[str, str] = {
    "config.lmcache_server": "the options of another program, as vllm_options has those of vLLM",
    "memory.cuda": "machines without a GPU never load it",
    "memory.kernels": "it imports triton, which machines without a GPU have not",
}
"""Modules with one user, beside them, that stay files of their own, and why."""


def alone(sources: Mapping[str, tuple[Path, str]]) -> Iterator[str]:
    """Modules whose one importer lies in the same folder, and could take them in."""
    users: dict[str, set[str]] = {name: set() for name in sources}
    for name, (path, source) in sources.items():
        for imported in imports_of(name, source, is_package=path.name == "__init__.py"):
            found = next((each for each in (imported.target, imported.target.rpartition(".")[0]) if each in users), "")
            if found and found != name:
                users[found].add(name)
    for name, importers in users.items():
        user = next(iter(importers), name)
        beside = sources[user][0].name != "__init__.py" and sources[user][0].parent == sources[name][0].parent
        if len(importers) == 1 and beside and code_lines(sources[name][1]) + code_lines(sources[user][1]) <= PAGE:
            yield name.removeprefix("lmkv.")


def test_a_module_with_one_user_lies_with_it() -> None:
    """A page has a reason to be opened alone. One that an `__init__` publishes has users elsewhere."""
    found = set(alone({name: (path, path.read_text()) for name, path in MODULES.items()}))
    assert found - set(ALONE) == set()
    assert set(ALONE) - found == set(), "no longer alone: take it out of the list"


def test_a_module_with_one_user_is_found() -> None:
    def place(name: str) -> Path:
        return Path("lmkv") / name

    files = {
        "lmkv.a": (place("a.py"), "x = 1"),
        "lmkv.b": (place("b.py"), "from lmkv.a import x"),
        "lmkv.c": (place("c.py"), "from . import b"),
        "lmkv.d": (place("d.py"), "from lmkv import b\n" + "x = 1\n" * PAGE),
        "lmkv.e": (place("e.py"), "import lmkv.d"),
    }
    assert list(alone(files)) == ["a"]


# -- what is imported at run time ----------------------------------------------------------------------


def imported_by(*modules: str) -> set[str]:
    """The top-level packages in memory after these were imported by a fresh interpreter."""
    program = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
        print(*{name.partition(".")[0] for name in sys.modules})
    """
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", program, *modules]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=True)
    return set(done.stdout.split())


def test_importing_the_core_does_not_import_vllm() -> None:
    core = [name for name in MODULES if room_of(name).split(".")[0] not in {"vllm", "cli", "testing"}]
    assert "vllm" not in imported_by(*(name for name in core if not name.endswith(".kernels")))


def test_what_needs_no_torch_imports_none() -> None:
    names = ("lmkv", "lmkv.policies", "lmkv.testing", "lmkv.testing", "lmkv.config", "lmkv.protocols")
    assert not {"torch", "numpy"} & imported_by(*names, "lmkv.testing.faults", "lmkv.testing.strategies")


def test_every_public_name_can_be_imported() -> None:
    for package in (lmkv, lmkv.backends, lmkv.policies):
        for name in package.__all__:
            assert getattr(package, name) is not None
            assert name in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lmkv.nothing
