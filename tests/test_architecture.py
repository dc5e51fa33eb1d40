"""Who may import whom: docs/concepts keeps the picture, this test keeps to it.

Imports are read from the source, those inside functions and under TYPE_CHECKING included: what a module
needs only for its types, it knows all the same.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

import lmkv.errors

PACKAGE = Path(lmkv.errors.__file__).parent

VALUES = frozenset({"errors", "keys", "outcomes", "layout"})
TYPES = VALUES | {"hashing", "codec", "protocols"}
MEMORY = frozenset({"slab", "pages", "copier", "copiers", "cpu", "cuda", "device", "kernels", "pipeline"})
STORE = frozenset(
    {
        *("iopool", "tiered", "tier", "claims", "promotion", "promoter", "prefetch", "primary", "pins"),
        *("eviction", "descent", "secondary", "index", "listing", "breaker"),
    }
)
ENGINE = frozenset({"engine", "stack", "registry"})
CORE = TYPES | MEMORY | STORE | ENGINE | {"observe", "policies", "backends"}

ALLOWED: dict[str, frozenset[str]] = {
    **dict.fromkeys(VALUES, VALUES),
    **dict.fromkeys(("hashing", "codec", "protocols"), VALUES),
    "policies": TYPES | {"policies"},
    "observe": TYPES,
    # The primary tier's backend is the slab itself, seen as a backend.
    "backends": TYPES | {"backends", "slab"},
    **dict.fromkeys(MEMORY, TYPES | MEMORY),
    # Policies and backends are passed in: the store knows their protocols alone.
    **dict.fromkeys(STORE, TYPES | STORE | {"slab", "observe"}),
    # The stack turns a Config into objects; nothing below it sees one.
    **dict.fromkeys(ENGINE, CORE | {"config"}),
    "config": VALUES | {"policies"},
    "vllm": CORE | {"config", "vllm"},
    "sim": TYPES | {"policies", "sim"},
    "testing": CORE | {"config", "testing", ""},
    "cli": CORE | {"config", "cli", "sim", "testing", "vllm", ""},
    "": CORE | {"config"},
}
"""First part of a module's name below lmkv -> what it may import, "" being the package itself."""

FORBIDDEN: dict[str, frozenset[str]] = {
    "policies": frozenset({"torch", "numpy", "threading", "asyncio", "concurrent", "time", "random", "os"}),
    "sim": frozenset({"torch"}),
    "config": frozenset({"torch", "numpy"}),
}
"""What these may not import from outside."""

STANDARD_LIBRARY_AND_ATTRS = VALUES | {"protocols"}
STANDARD_LIBRARY = frozenset({"hashing"})


@frozen
class Imported:
    """`module` imports `target`: a module, or a name in one. `lazy`: not at import time."""

    module: str
    target: str
    lazy: bool = False

    @property
    def part(self) -> str:
        return part_of(self.module)

    @property
    def inside(self) -> bool:
        return self.target.split(".")[0] == "lmkv"


def part_of(name: str) -> str:
    return f"{name}.".split(".")[1]


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
    may_import_vllm = imported.part == "vllm" or (imported.part == "cli" and imported.lazy)
    if top == "vllm" and not may_import_vllm:
        yield f"{where}: only lmkv.vllm imports vllm, and commands when they run it"
    if top in FORBIDDEN.get(imported.part, ()):
        yield f"{where}: not in {imported.part}"
    if imported.part in STANDARD_LIBRARY and not standard:
        yield f"{where}: {imported.part} is made of the standard library alone"
    if imported.part in STANDARD_LIBRARY_AND_ATTRS and not standard and top != "attrs":
        yield f"{where}: {imported.part} is made of the standard library and attrs alone"


def inside_problems(imported: Imported, where: str) -> Iterator[str]:
    target = part_of(imported.target)
    if target not in ALLOWED:  # `from lmkv import Name`: the package itself
        target = ""
    if target not in ALLOWED[imported.part]:
        yield f"{where}: {imported.part or 'lmkv'} may not know {target or 'lmkv itself'}"
    parts = imported.target.split(".")
    home = imported.module.split(".")
    for at, name in enumerate(parts):
        # A private module may be used in its own package, a private name in its own module alone.
        is_module = ".".join(parts[: at + 1]) in MODULES
        if name.startswith("_") and not name.endswith("__") and not (is_module and parts[:at] == home[:at]):
            yield f"{where}: {name} is private"
    if imported.part == target == "backends" and imported.module != "lmkv.backends":
        backend = parts[2] if len(parts) > 2 else ""
        if not backend.startswith("_") and backend not in {"wrapper", "aio"}:
            yield f"{where}: a backend never imports another one"


def all_problems(module: str, source: str, *, is_package: bool = False) -> list[str]:
    return [
        problem
        for imported in imports_of(module, source, is_package=is_package)
        for problem in problems(imported)
    ]


def test_every_module_has_a_place() -> None:
    homeless = [name for name in MODULES if part_of(name) not in ALLOWED]
    assert not homeless, f"say in ALLOWED what these may import: {homeless}"
    assert {"lmkv.keys", "lmkv.hashing", "lmkv.policies.lru", "lmkv.config"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_it_may(module: str) -> None:
    path = MODULES[module]
    assert all_problems(module, path.read_text(), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lmkv.policies.lru", "import torch.nn"),
        ("lmkv.policies.lru", "from threading import Lock"),
        ("lmkv.policies.lru", "def f():\n    import torch"),
        ("lmkv.policies.lru", "from ..tiered import TieredStore"),
        ("lmkv.policies.lru", "from lmkv.backends import disk"),
        ("lmkv.tiered", "if TYPE_CHECKING:\n    from lmkv.policies.lru import LRU"),
        ("lmkv.tiered", "from lmkv.backends.disk import DiskBackend"),
        ("lmkv.tiered", "from lmkv import config"),
        ("lmkv.tiered", "import vllm.config"),
        ("lmkv.tiered", "from lmkv.vllm import worker"),
        ("lmkv.tiered", "import lmkv"),
        ("lmkv.tiered", "from . import engine"),
        ("lmkv.hashing", "import numpy as np"),
        ("lmkv.hashing", "from attrs import define"),
        ("lmkv.keys", "from lmkv.protocols import ChunkKey"),
        ("lmkv.keys", "import numpy"),
        ("lmkv.backends.disk", "from lmkv.backends.memory import MemoryBackend"),
        ("lmkv.backends.disk", "from lmkv.policies import LRU"),
        ("lmkv.engine", "from lmkv.tiered import _Entry"),
        ("lmkv.engine", "from lmkv.backends._files import publish"),
        ("lmkv.cli.doctor", "import vllm"),
        ("lmkv.sim.replay", "import torch"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(all_problems(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lmkv.policies.lru", "from lmkv.protocols import ChunkKey\nfrom ..errors import UsageError"),
        ("lmkv.backends.disk", "from lmkv.codec import encode\nfrom lmkv.backends import wrapper"),
        ("lmkv.tiered", "from lmkv import protocols\nimport threading\nfrom lmkv.slab import Slab"),
        ("lmkv.cli.demo", "def run():\n    import vllm\nif TYPE_CHECKING:\n    from vllm import LLM"),
        ("lmkv.vllm.worker", "import vllm\nfrom lmkv.config import Config\nfrom .metadata import Orders"),
        ("lmkv.hashing", "from __future__ import annotations\nimport hashlib"),
    ],
)
def test_an_allowed_import_is_not_complained_of(module: str, source: str) -> None:
    assert all_problems(module, source) == []


def test_a_package_may_import_its_own_private_modules() -> None:
    private = next(name for name in MODULES if name.startswith("lmkv.backends._"))
    source = f"from {private} import anything"
    assert all_problems("lmkv.backends.disk", source) == []
    assert all_problems("lmkv.engine", source) == [
        f"lmkv.engine imports {private}.anything: {private.split('.')[-1]} is private"
    ]


def test_importing_the_core_does_not_import_vllm() -> None:
    program = """if True:
        import importlib, sys
        for name in sys.argv[1:]:
            importlib.import_module(name)
            assert "vllm" not in sys.modules, name
    """
    # Each of them imports the first one first, however it is imported.
    names = ["lmkv", *(name for name in MODULES if part_of(name) in (CORE | {"config"}) - {"kernels"})]
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
