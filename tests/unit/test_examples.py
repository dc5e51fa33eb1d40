"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_standalone() -> None:
    done = subprocess.run(
        [sys.executable, "examples/standalone.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "retrieved   1280 tokens, every byte equal" in done.stdout
    assert "prefetched  1280 tokens into host memory, from {'disk': 1280}" in done.stdout
    assert "own stack   768 tokens in cpu 3 chunks, disk 3 chunks" in done.stdout
