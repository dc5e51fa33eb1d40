"""When `lmkv demo` reports success, and how long it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from lmkv.cli import demo
from lmkv.cli.demo import Measurement, Medium, Plan, same_outputs, summarize, wait_for_files
from lmkv.cli.engines import Answer
from lmkv.cli.stores import FolderFacts

PLAN, ENGINE = Plan(tokens=1000), ("vllm 0.0", "cpu")
FACTS = FolderFacts("/", 1 << 40, direct_io=True)
COLD = Answer(token_ids=(1, 2), ttft_s=2.0, hit_tokens=0, load_gb_s=None, sources={"cpu": 0})
WARM = Answer(token_ids=(1, 2), ttft_s=0.1, hit_tokens=768, load_gb_s=9.0, sources={"cpu": 768})
LOADED = Answer(token_ids=(1, 2), ttft_s=0.5, hit_tokens=768, load_gb_s=9.0, sources={"cpu": 0, "disk": 768})


def summary(loaded: list[Answer], warm: Answer = WARM) -> Measurement:
    count, disk = len(loaded), Medium.DISK
    return summarize(PLAN, [COLD] * count, [warm] * count, loaded, engine=ENGINE, tier=disk, facts=FACTS)


def test_the_best_time_and_the_worst_hit_count() -> None:
    shown = summary([LOADED, evolve(LOADED, ttft_s=0.25)])
    assert (shown.cold_ttft_s, shown.warm_ttft_s, shown.disk_ttft_s, shown.speedup) == (2.0, 0.1, 0.25, 8.0)
    assert (shown.hit_tokens, shown.hit_tier) == (768, "disk")
    assert shown.passed


def test_without_a_restart_host_memory_is_what_counts() -> None:
    warm = [WARM, evolve(WARM, ttft_s=0.2, load_gb_s=None)]
    shown = summarize(PLAN, [COLD] * 2, warm, warm, engine=ENGINE, tier=Medium.RAM)
    assert (shown.hit_tier, shown.speedup, shown.load_gb_s, shown.disk_ttft_s) == ("cpu", 20.0, 9.0, None)
    assert shown.passed
    short = [WARM, evolve(WARM, hit_tokens=512)]
    assert not summarize(PLAN, [COLD] * 2, short, short, engine=ENGINE, tier=Medium.RAM).passed


def test_a_hit_in_another_engine_is_of_the_remote_store() -> None:
    loaded = [evolve(LOADED, sources={"redis": 768})] * 2
    shown = summarize(PLAN, [COLD] * 2, [WARM] * 2, loaded, engine=ENGINE, tier=Medium.REMOTE)
    assert (shown.remote_ttft_s, shown.disk_ttft_s, shown.hit_tier, shown.passed) == (0.5, None, "redis", True)


@pytest.mark.parametrize(
    "worse",
    [
        evolve(LOADED, hit_tokens=512, sources={"cpu": 0, "disk": 512}),
        evolve(LOADED, sources={"cpu": 768}),
        evolve(LOADED, sources={"cpu": 256, "disk": 512}),
        evolve(LOADED, hit_tokens=0, sources={}),
        evolve(LOADED, token_ids=(1, 3)),
    ],
)
def test_one_answer_that_falls_short_is_no_success(worse: Answer) -> None:
    assert not summary([LOADED, worse]).passed


def test_no_hit_has_no_tier() -> None:
    assert summary([evolve(LOADED, hit_tokens=0, sources={})]).hit_tier == "none"


def test_an_output_from_memory_that_differs_is_no_success() -> None:
    assert not summary([LOADED], warm=evolve(WARM, token_ids=(9, 9))).outputs_equal


def test_runs_are_compared_answer_by_answer() -> None:
    other = evolve(COLD, token_ids=(5,))
    assert same_outputs([COLD, other], [WARM, evolve(WARM, token_ids=(5,))])
    assert not same_outputs([COLD, other], [other, COLD])


def test_waiting_for_files_ends_when_they_are_there(tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.kv1").touch()
    (tmp_path / ".c.tmp").touch()
    wait_for_files(tmp_path, 2, said.append)
    assert said == ["waiting for 2 chunks to be on disk"]


def test_waiting_for_files_is_bounded_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WRITE_TIMEOUT", 0.2)
    said: list[str] = []
    wait_for_files(tmp_path, 3, said.append)
    assert said[-1] == "only 0 of 3 chunks are on disk after 0 s"
