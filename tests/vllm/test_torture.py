"""A short run of the torture, as a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_short_torture() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--requests", "300", "--seed", "7", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["requests"] >= 300
    assert (counts["differences"], counts["leaks"], counts["hangs"], counts["alarms"]) == (0, 0, 0, 0)
    assert counts["audited_hits"] > 0
