"""The tool for GPUs: what it makes of its rounds, and each of its steps on a CPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import Book, alike, alone_steps, command, rounds_of, summary
from benchmarks.gpu.plan import CONNECTORS, Plan, together
from tests.pages import ROOT

ROUNDS = [
    {"alone": {"computed": 1.0}, "lmkv": {"computed": 2.0, "hit": 0.5, "alike": 1.0}},
    {"alone": {"computed": 2.0}, "lmkv": {"computed": 2.0, "hit": 0.7, "alike": 0.5}, "native": {"computed": 8.0}},
]


def plan(**options: Any) -> Plan:
    given = {"tiny": True, "shape": "tiny", "graphs": "none", "settings": {}, "llm": {}, "rounds": 5, "out": Path("/x")}
    return Plan(argparse.Namespace(**given | options))


def test_ratios_are_taken_within_a_round_and_shares_are_not_divided() -> None:
    found = summary(ROUNDS)
    assert found["alone"] == {"computed": 1.5, "computed, of lmkv": 0.75}
    assert found["lmkv"] == {"computed": 2.0, "computed, of alone": 1.5, "hit": 0.6, "alike": 0.75}
    assert found["native"] == {"computed": 8.0, "computed, of alone": 4.0, "computed, of lmkv": 4.0}


def test_answers_are_alike_where_they_begin_alike() -> None:
    assert alike([[1, 2], [3]], [[1, 9], [4]]) == 0.5


def test_engines_that_fit_the_device_run_together_and_lmkv_is_in_each_group() -> None:
    engines = ["alone", "lmkv", "native", "lmcache"]
    assert together(engines, 20e9, 0) == [engines]
    assert together(engines, 20e9, 90e9) == [engines]
    assert together(engines, 20e9, 62e9) == [["lmkv", "alone", "native"], ["lmkv", "lmcache"]]
    assert together(engines, 20e9, 30e9) == [[each] for each in engines]


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path) -> None:
    book = Book(tmp_path / "gpu.json", 1.0)
    book.note("alone: script", rounds=[1])
    assert not Book(tmp_path / "gpu.json", 1.0).done("alone: script")
    book.note("alone: script", status="done")
    again = Book(tmp_path / "gpu.json", 1.0)
    assert again.done("alone: script")
    assert again.facts["alone: script"]["rounds"] == [1]


def test_any_connector_is_named_with_its_settings() -> None:
    made = plan(settings={"MyConnector": {"gib": 8}, "lmkv": {"chunk_size": 64}})
    own = made.connector("MyConnector", None)
    assert own == {"kv_connector": "MyConnector", "kv_connector_extra_config": {"gib": 8}}
    ours = made.connector("lmkv", None)["kv_connector_extra_config"]
    assert ours == {"max_local_cpu_size": made.host_bytes / 2**30, "chunk_size": 64}
    assert made.connector("alone", None) == {}
    assert set(CONNECTORS) >= {"alone", "lmkv", "native", "lmcache"}


def test_each_step_has_its_rounds() -> None:
    steps = ["script", "long-8k", "long-32k", "decode", "mixed", "talks", "128k"]
    wide = Plan(plan().options, wide=True)
    assert [work[0] for made in (plan(), wide) for work in rounds_of(made, steps)] == steps
    names = [name for name, _ in alone_steps(plan(), Book(Path("/x"), 1.0), ["alone", "lmkv", "native"])]
    assert names == ["tests", "torture, lmkv", "sleep, lmkv", "torture, native", "sleep, native"]


def test_a_step_that_crashes_or_hangs_is_a_fact() -> None:
    crashed = command(["-c", "import os; print('before', flush=True); os.abort()"], 60)
    assert crashed["exit code"] < 0
    assert crashed["last lines"][0] == "before"
    assert command(["-c", "import time; time.sleep(600)"], 1)["last lines"] == ["ended after 1 s"]


def tool(out: Path, *words: str) -> dict[str, Any]:
    words = ("--tiny", "--rounds", "1", "--box", "3000", "--start", "600", "--out", str(out), *words)
    program = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return found


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_prompt_on_a_cpu_is_answered_alike_and_hit(tmp_path: Path) -> None:
    found = tool(tmp_path, "--engines", "alone,lmkv", "--steps", "long-8k,decode")
    shown = found["alone+lmkv: long-8k"]["summary"]
    assert found["alone+lmkv: long-8k"]["failed"] == {}
    assert shown["lmkv"]["hit"] > 0.9
    assert shown["lmkv"]["alike"] == 1.0
    assert {"loaded", "computed", "computed, of alone", "vLLM's cache"} <= set(shown["lmkv"])
    assert found["alone+lmkv: decode"]["summary"]["lmkv"]["alike"] == 1.0


@pytest.mark.vllm
@pytest.mark.nightly("tools")
@pytest.mark.timeout(3000)
def test_every_step_starts_and_ends_on_a_cpu(tmp_path: Path) -> None:
    steps = "facts,tests,torture,sleep,script,long-8k,long-32k,decode,mixed,talks,128k"
    found = tool(tmp_path, "--engines", "alone,idle,lmkv,NoSuchConnector", "--steps", steps)
    label = "alone+idle+lmkv+NoSuchConnector"
    assert "failed" in found[f"{label}: engines"]["NoSuchConnector"]
    for step in ("script", "long-8k", "long-32k", "decode", "mixed", "talks", "128k"):
        facts = found[f"{label}: {step}"]
        assert (facts["status"], facts["failed"]) == ("done", {}), step
        assert facts["summary"]["lmkv"]["alike"] == 1.0, step
        assert set(facts["summary"]) == {"alone", "idle", "lmkv"}
    assert found["tests"]["exit code"] == found["torture, lmkv"]["exit code"] == 0
    assert found["sleep, lmkv"]["alike"] == 1.0
    assert found["facts"]["device"] == "cpu"
