"""The disk tier under real vLLM: restarts, promotion while queued, and prompts longer than host memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmkv.vllm.compat import yield_gil
from tests.kit import LIMIT, NEVER, listing_every
from tests.vllm.harness import external_hits, generated, over_disk, prompt

pytestmark = pytest.mark.quick


def sources(output: Any) -> dict[str, int]:
    return dict(output.kv_transfer_params["lmkv"]["sources"])


@pytest.mark.runner_v2
def test_a_prompt_hits_disk_after_a_restart(model: Path, tmp_path: Path) -> None:
    ids = prompt(30, 1500)
    with over_disk(model, tmp_path) as first:
        cold = first.ids([ids])
    with over_disk(model, tmp_path) as second:
        warm = second.run([ids])[0]
        assert external_hits(warm) == 1499
        assert sources(warm) == {"cpu": 0, "disk": 1499}
        assert generated([warm]) == cold
        again = second.again([ids])[0]
        assert sources(again) == {"cpu": 1499}, "a hit on disk is promoted"
        second.assert_nothing_leaked()


def test_what_another_server_stores_is_hit_without_a_listing(model: Path, tmp_path: Path) -> None:
    ids = prompt(33, 1500)
    with over_disk(model, tmp_path / "other") as first:
        cold = first.ids([ids])
    with listing_every(NEVER), over_disk(model, tmp_path / "kv") as second:
        shutil.copytree(tmp_path / "other", tmp_path / "kv", dirs_exist_ok=True)
        warm = second.run([ids])[0]
        assert sources(warm) == {"cpu": 0, "disk": 1499}
        assert generated([warm]) == cold
        second.assert_nothing_leaked()


def test_another_model_does_not_see_the_files(model: Path, tmp_path: Path) -> None:
    from lmkv.cli.small_model import SmallModel

    other = tmp_path / "other"
    SmallModel(layers=4, hidden=256, max_position=8192, seed=1).write(other)
    ids = prompt(31, 600)
    with over_disk(model, tmp_path / "kv") as first:
        first.run([ids])
    with over_disk(other, tmp_path / "kv") as second:
        assert external_hits(second.run([ids])[0]) == 0


@pytest.mark.runner_v2
def test_a_prompt_four_times_the_ram_tier_is_loaded_from_disk(model: Path, tmp_path: Path) -> None:
    ids = prompt(32, 16 * 256 + 40)
    space = {"max_model_len": 4608, "kv_cache_memory_bytes": 20 << 20, "max_num_batched_tokens": 512}
    with over_disk(model, tmp_path, ram_chunks=4, **space) as running:
        cold = running.ids([ids])
        assert running.store.drain(LIMIT)
        # Copies down are refused when too many wait: another pass stores what is missing.
        for _ in range(100):
            running.forget_local()
            if running.store.stats().tiers[1].chunks == 17:
                break
            running.run([ids])
            assert running.store.drain(LIMIT)
        warm = running.run([ids])[0]
        assert external_hits(warm) == 16 * 256 + 39
        assert generated([warm]) == cold
        assert sources(warm).get("disk", 0) >= 12 * 256
        running.assert_nothing_leaked()


@pytest.mark.runner_v2
def test_damaged_files_are_recomputed_with_equal_output(model: Path, tmp_path: Path) -> None:
    ids = prompt(33, 1500)
    with over_disk(model, tmp_path) as first:
        cold = first.ids([ids])
    files = sorted(tmp_path.rglob("*.kv1"))
    assert len(files) == 6
    for index, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 + index] ^= 1
        path.write_bytes(data)
    with over_disk(model, tmp_path) as second:
        warm = second.run([ids])[0]
        assert external_hits(warm) == 0
        assert generated([warm]) == cold
        assert second.store.stats().tiers[1].read_failures > 0
        second.assert_nothing_leaked()


@pytest.mark.runner_v2
@pytest.mark.parametrize("length", [1500, 4136])
def test_files_lost_after_the_promise_are_recomputed(model: Path, tmp_path: Path, length: int) -> None:
    """Both ways of loading: promoted while queued, and between steps after the blocks are allocated."""
    ids = prompt(34, length)
    space = {"max_model_len": 4608, "kv_cache_memory_bytes": 20 << 20}
    with over_disk(model, tmp_path, ram_chunks=8, **space) as first:
        cold = first.ids([ids])
    with over_disk(model, tmp_path, ram_chunks=8, **space) as second:
        for path in sorted(tmp_path.rglob("*.kv1"))[::2]:
            path.unlink()
        warm = second.run([ids])[0]
        assert generated([warm]) == cold
        second.assert_nothing_leaked()


def test_a_running_server_prefetches_what_a_request_names(model: Path, tmp_path: Path) -> None:
    coming = prompt(35, 1000)
    with over_disk(model, tmp_path) as first:
        first.run([coming])
    with over_disk(model, tmp_path) as second:
        second.run([prompt(36, 40)], params={"lmkv.prefetch_tokens": coming})
        assert second.store.drain(LIMIT)
        assert second.store.stats().primary.chunks == 3 + 2, "with the tails of both prompts"
        assert sources(second.run([coming])[0]) == {"cpu": 999}


@pytest.mark.parametrize("how", ["reset", "pause"])
def test_a_reset_keeps_the_disk_which_is_hit_under_equal_weights(model: Path, tmp_path: Path, how: str) -> None:
    ids = prompt(38, 600)
    with over_disk(model, tmp_path) as running:
        running.run([ids])
        assert running.store.drain(LIMIT)
        files = sorted(tmp_path.rglob("*.kv1"))
        core = running.llm.llm_engine.engine_core.engine_core
        if how == "reset":
            assert core.reset_prefix_cache(reset_connector=True)
        else:
            core.pause_scheduler("abort", clear_cache=True)
            core.resume_scheduler()
        assert running.store.drain(LIMIT)
        assert len(files) == 3
        assert sorted(tmp_path.rglob("*.kv1")) == files
        assert sources(running.run([ids])[0]) == {"cpu": 0, "disk": 599}


def test_an_engine_in_the_callers_process_lets_the_disks_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that computes nothing would keep the interpreter from them; an engine's own process pauses by itself."""
    slept: list[float] = []
    monkeypatch.setattr("lmkv.vllm.compat.time", SimpleNamespace(sleep=slept.append))
    for processes in ("0", "1"):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
        yield_gil()
        assert slept == [0.001]
