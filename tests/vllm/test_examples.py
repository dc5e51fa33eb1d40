"""The examples that need vLLM, as a reader would run them, at a small size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import extracted
from tests.vllm.server import child_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = ["--num-prompts", "3", "--prompt-tokens", "600", "--max-local-cpu-size", "0.25"]


def run(script: Path, *arguments: str, folder: Path | None = None) -> str:
    """What the script prints on its standard output."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=folder,
        # In one process it starts sooner; test_multiprocess has the other mode.
        env=child_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("flags", "loaded"), [([], "1,536"), (["--without-lmkv"], "0")])
def test_cpu_offloading(flags: list[str], loaded: str) -> None:
    printed = run(EXAMPLES / "cpu_offloading.py", *SIZES, *flags)
    assert re.search(r"^First run: \d+\.\d\d s, 0 of 1,800 prompt tokens not computed$", printed, re.MULTILINE)
    assert re.search(rf"^Second run: .* s, {loaded} of 1,800 prompt tokens not computed$", printed, re.MULTILINE)
    assert re.search(r"^Speedup \(first run / second run\): \d+\.\d\d$", printed, re.MULTILINE)


def test_the_tutorials_first_step(model: Path, tmp_path: Path) -> None:
    extracted("tutorial.md", tmp_path)
    (tmp_path / "small-model").symlink_to(model)
    printed = run(tmp_path / "offline.py", folder=tmp_path)
    assert printed.splitlines()[-2:] == ["first: 0 tokens loaded", "second: 1792 tokens loaded"]
