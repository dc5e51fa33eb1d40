"""The tools for the first day on a GPU run to their end without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_first_run, gpu_probe
from benchmarks._accelerator import Accelerator
from benchmarks.gpu_first_run import Step, advice, failures
from benchmarks.gpu_probe import Probe
from tests.pages import ROOT


def test_the_benchmark_of_copies() -> None:
    rows = gpu.measure(Accelerator(simulate=True), 1, layers=2, chunks=2)
    names = {row.name.partition(",")[0] for row in rows}
    assert names == {"store", "load", "load by layers", "store by layers"}
    assert all(row.value > 0 for row in rows)


def test_the_probe_finds_what_the_simulated_device_does() -> None:
    found = dict(gpu_probe.facts(Probe(Accelerator(simulate=True), 4096)))
    assert [name for name in found if "FAILED" in name] == []
    assert found["borders: inside one, failed of 20"] == found["borders: pageable, failed of 20"] == 0
    assert found["borders: across two, failed of 20"] == found["borders: into pageable, failed of 20"] == 20


def test_a_part_of_the_probe_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "queue", lambda probe: 1 // 0)
    found = dict(gpu_probe.facts(Probe(Accelerator(simulate=True), 4096)))
    assert "ZeroDivisionError" in found["queue: FAILED"]
    assert found["borders: inside one, failed of 20"] == 0


def test_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu_first_run.py", "--simulate", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {name: facts["exit code"] for name, facts in found["steps"].items()} == dict.fromkeys(
        ("probe", "tests", "copies"), 0
    )
    assert "passed" in str(found["steps"]["tests"])
    assert found["next"] == [gpu_first_run.SIMULATED]
    assert "probe: borders: across two, failed of 20: 20" in done.stdout.splitlines()


def test_a_step_that_crashes_or_hangs_is_a_fact() -> None:
    crashed = gpu_first_run.run(Step("a", ("-c", "import os; print('before', flush=True); os.abort()"), 60))
    assert crashed["exit code"] < 0
    assert crashed["last lines"][0] == "before"
    hung = gpu_first_run.run(Step("b", ("-c", "import time; time.sleep(600)"), 1))
    assert hung["exit code"] == -9
    assert hung["last lines"] == ["ended after 1 s"]
    assert failures({"a": crashed, "b": hung})[1] == "b ended with code -9: mend this first"


def test_the_commands_of_the_first_run_are_programs_that_exist() -> None:
    for step in gpu_first_run.steps(simulate=False):
        script = next(word for word in reversed(step.command) if word.endswith(".py"))
        assert (ROOT / script).exists()
    assert sum(step.seconds for step in gpu_first_run.steps(simulate=False)) <= 1000


GOOD: dict[str, dict[str, Any]] = {
    "probe": {"exit code": 0, "borders: across two, failed of 20": 20},
    "vllm": {"exit code": 0, "cold seconds": 1.0},
    "vllm with lmkv": {"exit code": 0, "cold seconds": 1.01, "hit tokens": 100, "outputs are equal": True},
}


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        ("probe", {}, "docs/performance.md"),
        ("probe", {"borders: inside one, failed of 20": 3}, "copies inside one registration fail"),
        ("probe", {"stalls: populated, pieces of 128 MiB, worst launch, ms": 30.0}, "PIECE_BYTES"),
        ("probe", {"locked memory: not root, limit 64 KiB, 1 GiB registered": False}, "RLIMIT_MEMLOCK does stop"),
        ("vllm with lmkv", {"cold seconds": 1.2}, "stores cost 20% of a cold request"),
        ("vllm with lmkv", {"outputs are equal": False}, "outputs differ"),
        ("vllm with lmkv", {"hit tokens": 0}, "nothing was loaded"),
        ("vllm with lmkv", {"wrong outputs beside aborts": 1}, "wrong KV"),
    ],
)
def test_what_to_do_next_follows_from_the_facts(step: str, changes: dict[str, Any], said: str) -> None:
    [line] = advice({**GOOD, step: GOOD[step] | changes})
    assert said in line


@pytest.mark.vllm
def test_the_part_on_vllm(tmp_path: Path) -> None:
    settings = {"max_local_cpu_size": 0.2, "chunk_size": 32, "local_disk": str(tmp_path)}
    settings |= {"max_local_disk_size": 1, "disk_min_free": 0}
    options = ["--small", "--tokens", "512", "--connector", "LMKVConnector", "--aborts"]
    command = [sys.executable, "benchmarks/_gpu_vllm.py", *options, "--settings", json.dumps(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["outputs are equal"]
    assert found["hit tokens"] > 0
    assert found["wrong outputs beside aborts"] == 0
