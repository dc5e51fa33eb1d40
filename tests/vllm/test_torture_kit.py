"""`python -m kv_connector_torture` on real vLLM: silent where nothing is wrong, and not where something is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kv_connector_torture.schedule import Schedule
from tests.servers import needs_package

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "packages" / "kv-connector-torture")))
LMKV = {
    "kv_connector": "LMKVConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"chunk_size": 64, "max_local_cpu_size": 0.002},
}


def torture(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kv_connector_torture", *options]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)


def test_vllms_own_prefix_cache_is_right(tmp_path: Path) -> None:
    done = torture("--requests", "60", "--report", str(tmp_path / "report"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no failure" in done.stdout
    assert not (tmp_path / "report").exists()


def test_a_seeded_bug_is_found_and_its_schedule_becomes_smaller(tmp_path: Path) -> None:
    around = "tests.torture.seeded:pages_of_another_request"
    options = ["--connector", json.dumps(LMKV), "--around", around, "--shrink-minutes", "0.2"]
    done = torture(*options, "--minutes", "5", "--report", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "# Difference: request r" in (tmp_path / "report-1.md").read_text()
    smallest = Schedule.from_json((tmp_path / "schedule-1.json").read_text())
    assert len(smallest.operations) < 20


@pytest.mark.nightly("fleet")
def test_a_pair_of_engines_with_nixl_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_package("nixl", "pip install --no-deps nixl nixl-cu13")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    nixl = json.dumps(
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 6},
        }
    )
    options = ["--connector", nixl, "--prefill", nixl, "--requests", "120", "--length", "60", "--seed", "2"]
    done = torture(*options, "--report", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_process_that_is_killed_has_a_place_also_when_interrupted(tmp_path: Path) -> None:
    options = ["--connector", json.dumps(LMKV), "--around", "tests.torture.seeded:killed", "--report", str(tmp_path)]
    command = [sys.executable, "-m", "kv_connector_torture", *options]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "looks for a smaller schedule" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 1
    text = (tmp_path / "report-1.md").read_text()
    assert text.startswith("# Death: the process has died: Killed\n")
    assert "Seen at operation " in text


def test_an_engine_that_does_not_start_is_told_at_once(tmp_path: Path) -> None:
    nowhere = {**LMKV, "kv_connector": "Nowhere"}
    done = torture("--connector", json.dumps(nowhere), "--report", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "death before the first operation: ValidationError" in done.stdout
    assert "Unsupported connector type: Nowhere" in done.stdout
    assert "after 0 more trials" in done.stdout
