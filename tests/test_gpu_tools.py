"""The tools for the first day on a GPU run to their end without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_first_run, gpu_probe
from benchmarks._accelerator import Accelerator
from benchmarks._gpu_vllm import Watched, compare
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
    for way in ("to", "from"):
        assert f"batches: 64 copies {way} the device in one call, the caller, us" in found
        assert f"small copies: 16 KiB {way} the device beside calls of 256 MiB, worst us" in found


@pytest.mark.parametrize(
    ("output", "errors", "answer"),
    [
        ("registered\n", "a warning", True),
        ("", "lmkv.memory.device.DeviceError: a registration failed with CUDA error 304", False),
        ("", "ModuleNotFoundError: No module named 'torch'", "not known"),
        ("", "PermissionError: [Errno 13] Permission denied: '/root'", "not known"),
        ("", "", "not known"),
    ],
)
def test_only_the_driver_says_whether_memory_may_be_locked(output: str, errors: str, answer: object) -> None:
    """A child that is not root may fail to import what it needs, which is no answer."""
    found = dict(gpu_probe.locked_memory_facts(output, errors))
    assert found.pop("locked memory: not root, limit 64 KiB, 1 GiB registered") == answer
    assert bool(found) is (answer is not True)


def test_a_part_of_the_probe_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "queue", lambda probe: 1 // 0)
    found = dict(gpu_probe.facts(Probe(Accelerator(simulate=True), 4096)))
    assert "ZeroDivisionError" in found["queue: FAILED"]
    assert found["borders: inside one, failed of 20"] == 0


@pytest.mark.nightly("tools")
def test_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = first_run(out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {name: facts["exit code"] for name, facts in found["steps"].items()} == dict.fromkeys(
        ("probe", "tests", "copies"), 0
    )
    assert "passed" in str(found["steps"]["tests"])
    assert found["next"] == [gpu_first_run.SIMULATED]
    assert "probe: borders: across two, failed of 20: 20" in done.stdout.splitlines()


def test_a_step_that_crashes_or_hangs_is_a_fact(tmp_path: Path) -> None:
    crash = Step("a", ("-c", "import os; print('before', flush=True); os.abort()"), 60)
    crashed = gpu_first_run.run(crash, tmp_path / "a.log")
    assert crashed["exit code"] < 0
    assert crashed["last lines"][0] == "before"
    assert (tmp_path / "a.log").read_text().startswith("before")
    hung = gpu_first_run.run(Step("b", ("-c", "import time; time.sleep(600)"), 1), tmp_path / "b.log")
    assert hung["exit code"] == -9
    assert hung["last lines"] == ["ended after 1 s"]
    assert failures({"a": crashed, "b": hung})[1] == "b ended with code -9: mend this first"


def test_the_commands_of_the_first_run_are_programs_that_exist() -> None:
    steps = gpu_first_run.steps(simulate=False)
    for step in steps:
        scripts = [word for word in step.command if word.endswith(".py")]
        assert all((ROOT / script).exists() for script in scripts)
        assert scripts or step.command[0] == "-c"
    assert max(step.seconds for step in steps) <= 180, "several fit a run of ten minutes"
    assert next(step.name for step in steps if "vllm" in step.name) == "vllm-import", "before others are measured"


def test_a_step_that_lacks_a_package_is_left_out_by_name(tmp_path: Path) -> None:
    found = gpu_first_run.run(Step("a", ("-c", "1 / 0"), 60, ("json", "no_such_package")), tmp_path / "a.log")
    assert found == {"exit code": None, "left out for want of": "no_such_package"}
    assert failures({"a": found}) == ["a was left out for want of no_such_package: install that, then --only a"]


def first_run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_first_run.py", "--simulate", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


def test_steps_that_run_one_by_one_are_put_together(tmp_path: Path) -> None:
    """Where a run may take less long than all of them."""
    out = tmp_path / "found.json"
    out.write_text(json.dumps({"simulated": True, "steps": {"copies": {"exit code": 0, "seconds": 1.0}}}))
    assert first_run(out, "--only", "probe").returncode == 0
    assert list(json.loads(out.read_text())["steps"]) == ["copies", "probe"]
    out.write_text(json.dumps({"simulated": False, "steps": {"copies": {"exit code": 0}}}))
    assert first_run(out, "--only", "probe").returncode == 0
    assert list(json.loads(out.read_text())["steps"]) == ["probe"], (
        "figures of another kind of device are no part of it"
    )


def test_a_step_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    done = first_run(tmp_path / "found.json", "--only", "probe,vlm")
    assert done.returncode == 2
    assert "no such steps: vlm" in done.stderr
    assert "probe" in first_run(tmp_path / "found.json", "--list").stdout


GOOD: dict[str, dict[str, Any]] = {
    "probe": {"exit code": 0, "borders: across two, failed of 20": 20},
    "vllm": {"exit code": 0, "cold seconds": 1.0},
    "vllm-lmkv": {
        "exit code": 0,
        "cold seconds": 1.01,
        "loaded tokens": 100,
        "batches compute alike": False,
        # In bfloat16, with batches of other shapes.
        "outputs are equal": False,
        "blocks with wrong bytes": 0,
    },
    "vllm-lmkv-alike": {
        "exit code": 0,
        "loaded tokens": 100,
        "batches compute alike": True,
        "outputs are equal": True,
        "blocks with wrong bytes": 0,
    },
    "vllm-lmkv-disk": {
        "exit code": 0,
        "loaded tokens": 100,
        "tokens from disk": 60,
        "blocks with wrong bytes": 0,
        "beside aborts: outputs that differ": 2,
    },
    "vllm-aborts": {"exit code": 0, "beside aborts: outputs that differ": 2},
}


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        ("probe", {}, "docs/performance.md"),
        ("probe", {"borders: inside one, failed of 20": 3}, "copies inside one registration fail"),
        ("probe", {"stalls: populated, pieces of 128 MiB, worst launch, ms": 30.0}, "PIECE_BYTES"),
        ("probe", {"locked memory: not root, limit 64 KiB, 1 GiB registered": False}, "RLIMIT_MEMLOCK does stop"),
        ("probe", {"locked memory: not root, limit 64 KiB, 1 GiB registered": "not known"}, "docs/performance.md"),
        ("probe", {"batches: status of stores": 801}, "refuses many copies in one call"),
        (
            "probe",
            {"small copies: 16 KiB from the device beside calls of 256 MiB, worst us": 4000},
            "sampled tokens wait behind stores",
        ),
        ("vllm-lmkv", {"cold seconds": 1.2}, "stores cost 20% of a cold request"),
        ("vllm-lmkv", {"loaded tokens": 0}, "nothing was loaded; read its log"),
        ("vllm-lmkv", {"blocks with wrong bytes": 1}, "wrong KV"),
        ("vllm-lmkv-alike", {"outputs are equal": False}, "though batches compute alike"),
        ("vllm-lmkv-disk", {"beside aborts: blocks with wrong bytes": 1}, "wrong KV"),
        ("vllm-lmkv-disk", {"beside aborts: outputs that differ": 3}, "more outputs differ than without lmkv"),
        ("vllm-lmkv-disk", {"tokens from disk": 0}, "nothing was loaded from the disk"),
    ],
)
def test_what_to_do_next_follows_from_the_facts(step: str, changes: dict[str, Any], said: str) -> None:
    [line] = advice({**GOOD, step: GOOD[step] | changes})
    assert said in line


def watched(prompt: int, loaded: int, byte: int, output: int) -> Watched:
    return Watched(prompt, loaded, [torch.full((4, 8), byte, dtype=torch.uint8)], [output])


def test_bytes_are_compared_of_what_was_loaded_and_of_nothing_else() -> None:
    """An aborted run rounds differently, and that is not an error."""
    stored = [watched(0, 0, 1, 1), watched(1, 0, 2, 2)]
    good = watched(1, 32, 2, 7)
    good.kv[0][2:] = 99
    assert compare(stored, [good], 16) == {"blocks loaded": 2, "blocks with wrong bytes": 0, "outputs that differ": 1}
    bad = watched(0, 48, 1, 1)
    bad.kv[0][1, 7] = 0
    assert compare(stored, [bad], 16) == {"blocks loaded": 3, "blocks with wrong bytes": 1, "outputs that differ": 0}


def on_vllm(*options: str) -> dict[str, Any]:
    command = [sys.executable, "benchmarks/_gpu_vllm.py", "--small", "--tokens", "512", "--aborts", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.vllm
@pytest.mark.nightly("tools")
def test_the_part_on_vllm() -> None:
    # So little host memory that the disk is needed.
    settings = {**gpu_first_run.DISK, "max_local_cpu_size": 0.0005, "chunk_size": 32}
    found = on_vllm("--connector", "LMKVConnector", "--settings", json.dumps(settings))
    assert found["outputs are equal"]
    assert found["loaded tokens"] > 0
    assert found["tokens from disk"] > 0
    assert found["blocks loaded"] > 0
    assert found["beside aborts: blocks loaded"] > 0
    assert found["blocks with wrong bytes"] == found["beside aborts: blocks with wrong bytes"] == 0
    assert found["outputs that differ"] == found["beside aborts: outputs that differ"] == 0
    control = on_vllm()
    assert (control["loaded tokens"], control["blocks loaded"]) == (0, 0)
    assert control["beside aborts: outputs that differ"] == 0


@pytest.mark.vllm
@pytest.mark.nightly("tools")
def test_the_benchmark_of_requests_on_vllm(tmp_path: Path) -> None:
    options = ["--small", "--tokens", "512", "--rounds", "1", "--only", "vLLM alone,lmkv with a disk"]
    command = [sys.executable, "benchmarks/gpu_requests.py", *options, "--disk", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [row["name"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]]
    for what in ("first token of one prompt", "all of 4 prompts"):
        assert any(name.startswith(f"lmkv with a disk: {what}, loaded") for name in names)
        assert not any(name.startswith(f"vLLM alone: {what}, loaded") for name in names)
