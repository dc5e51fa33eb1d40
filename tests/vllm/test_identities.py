"""Thousands of requests while weights, adapters and images change: each answer is that of what was served then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import redis_server
from tests.vllm.families import Family, llama
from tests.vllm.identities import Served, World, world
from tests.vllm.test_media import with_images, write_blip2

pytest.importorskip("redis")

REQUESTS = 1_000


def run(found: World, requests: Callable[[Served], Any], *changes: Callable[[], None]) -> None:
    """Rounds of requests; after one in five comes each of the changes, after one in a hundred a restart."""
    while found.counts["requests"] < REQUESTS:
        found.round(requests)
        for change in changes:
            if found.draw.random() < 0.2:
                change()
        if found.draw.random() < 0.01:
            found.restart()


def is_right(found: World, capsys: pytest.CaptureFixture[str], *more: str) -> None:
    with capsys.disabled():
        print(dict(found.counts))
    assert found.counts["differences"] == 0, found.counts
    assert found.counts["requests"] >= REQUESTS
    assert found.counts["hits"] > REQUESTS / 10, found.counts
    assert min(found.counts[each] for each in ("weights", "reset", "sleep", "restarts", *more)) > 0, found.counts


@pytest.mark.nightly("identities")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", [1, 2])
def test_adapters(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    base = Family(llama).write(tmp_path / "base")
    loras = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
    with redis_server("redis", tmp_path) as server, world(base, tmp_path, server.url, seed, loras) as found:
        run(found, found.with_adapters, found.change, found.change_adapters)
    is_right(found, capsys, "train", "drop", "preload")


@pytest.mark.nightly("identities")
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", [1, 2])
def test_images(tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_blip2(tmp_path / "blip2")
    with redis_server("redis", tmp_path) as server, world(model, tmp_path, server.url, seed, with_images({})) as found:
        run(found, found.with_images, found.change)
    is_right(found, capsys)
