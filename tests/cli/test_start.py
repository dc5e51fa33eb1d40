"""The `lmkv` command starts at once, and needs no more than what a subcommand is about."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import lmkv
from lmkv import errors
from lmkv.cli.app import COMMANDS, Commands, app
from lmkv.errors import how_to_install

WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from lmkv.cli import main
main()
"""


def without(modules: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command where these modules cannot be imported."""
    command = [sys.executable, "-c", WITHOUT, modules, *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LMKV_", "LMCACHE_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def seconds(*command: str) -> float:
    """The least processor time of five runs."""
    times = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_it_takes_little_longer_than_python(option: str) -> None:
    run = f"import sys; sys.argv = ['lmkv', {option!r}]; from lmkv.cli import main; main()"
    assert seconds("-c", run) - seconds("-c", "pass") < 0.3


def test_the_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{lmkv.__version__}\n"


HEAVY = "torch,numpy,transformers,vllm,matplotlib"


@pytest.mark.parametrize(
    "words", [("--help",), *((name, "--help") for name in ("config", "top", "lookup", "prefetch", "pin", "record"))]
)
def test_help_needs_nothing_of_an_engine(words: tuple[str, ...]) -> None:
    done = without(HEAVY, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout


@pytest.mark.parametrize("name", ["top", "lookup", "prefetch", "pin", "unpin", "clear"])
def test_what_speaks_to_a_server_needs_no_torch(name: str) -> None:
    words = [name, "--url", "127.0.0.1:1", *{"top": ["--json"], "clear": ["--yes"]}.get(name, ["a prompt"])]
    # All that docs/install.md leaves out on a machine for these commands alone.
    done = without("torch,aiofiles,transformers,vllm,fastapi,uvicorn", *words)
    assert done.returncode == 1
    assert done.stderr.startswith("no server answers at http://127.0.0.1:1")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("doctor",), ("bench",), ("inspect", ".")])
def test_what_needs_an_engines_packages_says_so(words: tuple[str, ...]) -> None:
    done = without("torch,numpy", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(": install lmkv with its dependencies\n")
    assert done.stderr.startswith("this command needs ")


def test_help_is_grouped_and_has_examples() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for text in ("Try", "Configure", "Folders of chunks", "Running servers", "Examples:", "lmkv top --url 127.0.0.1"):
        assert text in shown
    group = get_command(app)
    assert isinstance(group, Commands)
    for name in COMMANDS:
        group.load(name)
    for name, command in group.commands.items():
        assert command.help, name
        inner = getattr(command, "commands", {"": command}).values()
        options = {option for each in inner for parameter in each.params for option in parameter.opts}
        assert "--json" in options, name
    for name in ("inspect", "clear", "top", "config check"):
        assert "<bool>" not in CliRunner().invoke(app, [*name.split(), "--help"]).stdout, name
    module = {name: import_module(place) for name, (place, _, _) in COMMANDS.items()}
    assert all(hasattr(found, "app" if name == "config" else name) for name, found in module.items())


def test_a_name_that_is_close_is_named() -> None:
    done = CliRunner().invoke(app, ["docter"])
    assert (done.exit_code, "doctor" in done.output) == (2, True)


INSTALLED = {
    "a folder, editable": (
        {"url": "file:///home/me/lmkv%20new", "dir_info": {"editable": True}},
        "pip install -e '/home/me/lmkv new[redis]'",
    ),
    "a folder": ({"url": "file:///srv/lmkv", "dir_info": {}}, "pip install '/srv/lmkv[redis]'"),
    "a wheel": (
        {"url": "file:///tmp/lmkv-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install '/tmp/lmkv-0.1.0-py3-none-any.whl[redis]'",
    ),
    "a repository": (
        {"url": "https://example.org/lmkv", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        "pip install 'lmkv[redis] @ git+https://example.org/lmkv@abc'",
    ),
    "an address": (
        {"url": "https://example.org/lmkv-0.1.0.tar.gz", "archive_info": {}},
        "pip install 'lmkv[redis] @ https://example.org/lmkv-0.1.0.tar.gz'",
    ),
    "unknown": (None, "install the extra 'redis' of lmkv as you installed lmkv, for example pip install '.[redis]'"),
}


@pytest.mark.parametrize("how", INSTALLED)
def test_a_hint_installs_from_where_lmkv_is_from(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    origin, hint = INSTALLED[how]
    info = tmp_path / "lmkv-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmkv\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert how_to_install("redis") == hint


def test_no_hint_names_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(errors.__file__).parent
    named: Any = [path.name for path in root.rglob("*.py") if "pip install lmkv" in path.read_text()]
    named += [path.name for path in root.rglob("*.py") if "pip install 'lmkv[" in path.read_text()]
    assert named == ["errors.py"], "which writes from where"
