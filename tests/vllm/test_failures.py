"""What fails outside of copies: the disk is gone or silent, the engine sleeps, weights change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkv.backends.disk.backend import LocalDiskBackend
from lmkv.testing.faults import FaultyBackend
from tests.vllm.harness import Engine, engine, external_hits, prompt

CHUNK_BYTES = 256 * 4096
DEADLINE = 0.8


@contextlib.contextmanager
def over_faulty_disk(model: Path, folder: Path, **options: Any) -> Iterator[tuple[Engine, FaultyBackend]]:
    disks: list[FaultyBackend] = []

    def make(*args: Any, **more: Any) -> FaultyBackend:
        disks.append(FaultyBackend(LocalDiskBackend(*args, **more)))
        return disks[-1]

    extra = {
        "local_disk": str(folder),
        "max_local_disk_size": 1.0,
        "max_local_cpu_size": 64 * CHUNK_BYTES / 2**30,
        "disk_min_free": 0.0,
        "prefetch_deadline": DEADLINE,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkv.build.LocalDiskBackend", make)
        with engine(model, extra=extra, **options) as running:
            yield running, disks[0]


def filled(model: Path, folder: Path, ids: list[int]) -> list[int]:
    with over_faulty_disk(model, folder) as (running, _):
        answer = running.ids([ids])[0]
        assert running.store.drain(20)
    return answer


def time_until_computed(running: Engine, ids: list[int]) -> float:
    """Seconds that a request waits before the model begins with it; it is aborted then."""
    from vllm import SamplingParams

    core, started = running.llm.llm_engine, time.monotonic()
    core.add_request("waits", {"prompt_token_ids": ids}, SamplingParams(max_tokens=8, detokenize=False))
    while not running.scheduler.running:
        core.step()
        if time.monotonic() - started > 30:
            break
    waited = time.monotonic() - started
    core.abort_request(["waits"])
    return waited


def test_a_disk_that_hangs_adds_a_bounded_wait(model: Path, tmp_path: Path) -> None:
    ids = prompt(60, 1500)
    answer = filled(model, tmp_path, ids)
    with over_faulty_disk(model, tmp_path) as (running, disk):
        assert running.store.wait_indexed(10)
        disk.black_hole()
        try:
            assert time_until_computed(running, ids) < DEADLINE + 1.0
            assert running.ids([ids]) == [answer]
        finally:
            disk.release()
        assert running.store.drain(20)
        running.assert_nothing_leaked()


def waits_of(running: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Filled with the seconds from a request's first lookup to its first answer, by request."""
    since: dict[str, float] = {}
    waits: dict[str, float] = {}
    ask = running.connector.get_num_new_matched_tokens

    def noted(request: Any, computed: int) -> Any:
        answer = ask(request, computed)
        name, now = request.request_id, time.monotonic()
        since.setdefault(name, now)
        if answer[0] is not None:
            waits.setdefault(name, now - since[name])
        return answer

    monkeypatch.setattr(running.connector, "get_num_new_matched_tokens", noted)
    return waits


def answers_of(running: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """The answers, and the longest step. A request comes once nobody computes: none waits for room."""
    from vllm import SamplingParams

    core, found = running.llm.llm_engine, dict[str, list[int]]()
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    pending, due, longest = list(enumerate(prompts)), time.monotonic(), 0.0
    while pending or core.has_unfinished_requests():
        if pending and not running.scheduler.running and time.monotonic() >= due:
            number, ids = pending.pop(0)
            core.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            due = time.monotonic() + 0.05
        begun = time.monotonic()
        outputs = core.step()
        longest = max(longest, time.monotonic() - begun)
        for output in outputs:
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[str(number)] for number in range(len(prompts))], longest


@pytest.mark.parametrize("spoiled", ["hangs", "is slow", "fails"])
def test_many_requests_over_a_bad_disk_wait_for_the_deadline_at_most(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: str
) -> None:
    crowd = [prompt(1000 + number, 300) for number in range(120)]
    with over_faulty_disk(model, tmp_path) as (running, _):
        answers = [answer for ids in crowd for answer in running.ids([ids], max_tokens=2)]
        assert running.store.drain(20)
    with over_faulty_disk(model, tmp_path, kv_cache_memory_bytes=256 << 20) as (running, disk):
        assert running.store.wait_indexed(10)
        assert running.store.stats().tiers[1].chunks == len(crowd)
        if spoiled == "hangs":
            disk.black_hole()
        disk.latency = 3.0 if spoiled == "is slow" else 0.0
        disk.error_rate = float(spoiled == "fails")
        waits = waits_of(running, monkeypatch)
        try:
            found, longest_step = answers_of(running, crowd)
            assert found == answers
        finally:
            disk.latency = 0.0
            disk.release()
        assert len(waits) == len(crowd)
        assert max(waits.values()) > 0, "none was held back: nothing was tested"
        # A request hears of its deadline between two steps.
        assert sorted(waits.values())[len(crowd) * 99 // 100] <= DEADLINE + 2 * longest_step
        assert running.store.drain(20)
        running.assert_nothing_leaked()


def test_a_disk_that_fails_opens_its_breaker_and_comes_back(model: Path, tmp_path: Path) -> None:
    ids = prompt(62, 1500)
    answer = filled(model, tmp_path, ids)
    with over_faulty_disk(model, tmp_path) as (running, disk):
        assert running.store.wait_indexed(10)
        disk.error_rate = 1.0
        for _ in range(3):
            assert running.ids([ids], params={"lmkv.skip_save": True}) == [answer]
            running.forget_local()
            assert running.store.drain(20)
        assert running.store.stats().tiers[1].breaker != "closed"
        disk.error_rate = 0.0
        time.sleep(1.1)
        again = running.run([ids])[0]
        assert external_hits(again) > 0
        assert running.store.stats().tiers[1].breaker == "closed"


def test_weights_that_changed_in_place_leave_no_hit_in_any_tier(model: Path, tmp_path: Path) -> None:
    ids = prompt(63, 600)
    with over_faulty_disk(model, tmp_path) as (running, _):
        before = running.ids([ids])[0]
        assert running.store.drain(20)
        running.llm.apply_model(_change)
        assert running.llm.llm_engine.engine_core.reset_prefix_cache(reset_connector=True)
        changed = running.run([ids])[0]
        assert external_hits(changed) == 0
        assert list(changed.outputs[0].token_ids) != before
        running.forget_local()
        again = running.run([ids])[0]
        assert external_hits(again) == 512
        assert again.outputs[0].token_ids == changed.outputs[0].token_ids


def _change(network: Any) -> None:
    for layer in network.model.layers:
        layer.input_layernorm.weight.data.mul_(torch.linspace(-2, 2, layer.input_layernorm.weight.numel()))
