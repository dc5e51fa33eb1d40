"""The torture kit on real vLLM: silent where nothing is wrong, in lmkv as well, and not where something is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
TOO_LONG = """
from lmkv.vllm.connector import LMKVConnector

class Theirs(LMKVConnector):
    def get_num_new_matched_tokens(self, request, computed):
        tokens, later = super().get_num_new_matched_tokens(request, computed)
        fits = tokens and computed + tokens + 32 < request.num_prompt_tokens
        return (tokens + 32 if fits else tokens), later
"""


def process(*options: str, folder: Path = ROOT, paths: str = PATHS) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kv_connector_torture", *options]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def torture(*options: str, **where: Any) -> tuple[int, str]:
    """The exit status, and what it says."""
    with process(*options, **where) as running:
        said, _ = running.communicate(timeout=800)
    return running.returncode, said


def test_lmkv_under_faults_is_right(tmp_path: Path) -> None:
    lmkv = ["--connector", "@tests/torture/lmkv.json", "--around", "tests.torture.hooks:faults", "--patience", "120"]
    wanted = ["--kinds", "tests.torture.kinds:", "--faults", "delete,truncate,flip,empty"]
    size = ["--requests", "400", "--length", "100", "--seed", "7", "--report", str(tmp_path / "report")]
    code, said = torture(*lmkv, *wanted, *size)
    assert code == 0, said
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", said.splitlines()[-1])}
    assert counts["requests"] + counts["aborts"] >= 400


def test_vllms_own_prefix_cache_is_right(tmp_path: Path) -> None:
    code, said = torture("--requests", "60", "--report", str(tmp_path / "report"))
    assert code == 0, said
    assert "no failure" in said
    assert not (tmp_path / "report").exists()


def test_a_seeded_bug_is_found_and_its_schedule_becomes_smaller(tmp_path: Path) -> None:
    around = "tests.torture.seeded:pages_of_another_request"
    options = ["--connector", json.dumps(LMKV), "--around", around, "--shrink-minutes", "0.3"]
    code, said = torture(*options, "--minutes", "5", "--report", str(tmp_path))
    assert code == 1, said
    assert "# Difference: request r" in (tmp_path / "report-1.md").read_text()
    smallest = Schedule.from_json((tmp_path / "schedule-1.json").read_text())
    assert len(smallest.operations) < 20


def test_a_hit_that_is_too_long_is_found_again_with_the_command_of_the_report(tmp_path: Path) -> None:
    """The connector is found by a path that is relative to the folder of the first call."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "theirs.py").write_text(TOO_LONG)
    (tmp_path / "elsewhere").mkdir()
    theirs = json.dumps({**LMKV, "kv_connector": "Theirs", "kv_connector_module_path": "theirs"})
    options = ["--connector", theirs, "--minutes", "5", "--shrink-minutes", "0.2", "--report", "out"]
    code, said = torture(*options, folder=tmp_path, paths=f"plugins{os.pathsep}{PATHS}")
    assert code == 1, said
    text = (tmp_path / "out" / "report-1.md").read_text()
    assert text.startswith("# Truthfulness: ")
    [command] = re.findall(r"^and seen again with\n\n    (.+)$", text, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    again = subprocess.run(
        f"{command} --shrink-minutes 0.01",
        shell=True,
        cwd=tmp_path / "elsewhere",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert again.returncode == 1, again.stdout
    assert "truthfulness at operation " in again.stdout


def test_a_leak_is_made_smaller_within_its_minutes(tmp_path: Path) -> None:
    """Each trial that leaks takes all of its patience."""
    options = ["--connector", json.dumps(LMKV), "--around", "tests.torture.seeded:kept_blocks", "--patience", "24"]
    code, said = torture(*options, "--minutes", "5", "--shrink-minutes", "0.5", "--report", str(tmp_path))
    assert code == 1, said
    seconds = {text: int(at) for at, text in re.findall(r"^torture: (\d+)s (.+)$", said, re.MULTILINE)}
    [begun] = [at for text, at in seconds.items() if text.startswith("looks for a smaller schedule")]
    [done] = [at for text, at in seconds.items() if "more trials" in text]
    # What is cut off is begun no more and ended at once.
    assert done - begun <= 33, said
    assert (tmp_path / "report-1.md").read_text().startswith("# Leak: ")
    assert len(Schedule.from_json((tmp_path / "schedule-1.json").read_text()).operations) < 20


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
    code, said = torture(*options, "--report", str(tmp_path))
    assert code == 0, said


def test_a_process_that_is_killed_has_a_place_also_when_interrupted(tmp_path: Path) -> None:
    options = ["--connector", json.dumps(LMKV), "--around", "tests.torture.seeded:killed", "--report", str(tmp_path)]
    with process(*options) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "looks for a smaller schedule" in line:
                running.send_signal(signal.SIGINT)
    assert running.returncode == 1
    text = (tmp_path / "report-1.md").read_text()
    assert text.startswith("# Death: the process has died: Killed\n")
    assert "Seen at operation " in text


def test_an_engine_that_does_not_start_is_told_at_once(tmp_path: Path) -> None:
    nowhere = {**LMKV, "kv_connector": "Nowhere"}
    code, said = torture("--connector", json.dumps(nowhere), "--report", str(tmp_path))
    assert code == 1, said
    assert "death before the first operation: ValidationError" in said
    assert "Unsupported connector type: Nowhere" in said
    assert "after 0 more trials" in said
