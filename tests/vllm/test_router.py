"""A router that people run, Dynamo's, over the KV events of a real engine: it knows where a prompt's blocks are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit import LIMIT, eventually
from tests.servers import needs_package
from tests.vllm.harness import BLOCK, Engine
from tests.vllm.test_kv_events import DISK, RAM, Subscriber, block_hashes, more_than_fits, one_more_step, subscriber

pytestmark = pytest.mark.nightly("fleet")


class Router:
    """Dynamo's selection service, with one engine."""

    def __init__(self, folder: Path) -> None:
        from dynamo._core import SelectionService

        self._loop = asyncio.new_event_loop()
        self._service = self._call(lambda: _made(SelectionService))
        worker = {
            "worker_id": 7,
            "model_name": "small",
            "endpoint": "http://localhost",
            "block_size": BLOCK,
            "kv_events_endpoint": f"ipc://{folder}/live",
            "replay_endpoint": f"ipc://{folder}/replay",
            "data_parallel_size": 1,
        }
        self._call(lambda: self._service.upsert_worker(worker))

    def _call(self, start: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            return await start()

        return self._loop.run_until_complete(run())

    def counts(self, ids: list[int]) -> tuple[int, int, int]:
        """Of the prompt's leading blocks: those on the device, those there or in host memory, and on disk as well."""
        asked = {"model_name": "small", "token_ids": ids}
        (worker,) = self._call(lambda: self._service.overlap_scores(asked))["workers"]
        return worker["device_blocks"], worker["host_pinned_blocks"], worker["disk_blocks"]

    def close(self) -> None:
        self._service.shutdown()
        self._loop.close()


async def _made(kind: Callable[..., Any]) -> Any:
    return kind(indexer_threads=1)


def expected(running: Engine, events: Subscriber, ids: list[int]) -> tuple[int, int, int]:
    """The same, with nothing on the device: as many as are in RAM, and from there on disk."""
    places, ends = events.read().places, []
    hashes, at = block_hashes(running, ids), 0
    for place in (RAM, DISK):
        while at < len(hashes) and hashes[at] in places.get(place, ()):
            at += 1
        ends.append(at)
    return 0, ends[0], ends[1]


def test_dynamo_knows_where_the_blocks_are_under_eviction_pressure(model: Path, tmp_path: Path) -> None:
    needs_package("dynamo", "pip install --no-deps ai-dynamo-runtime")
    prompts, limited = more_than_fits(model, tmp_path)
    with limited as running, subscriber(tmp_path) as events:
        router, seen = Router(tmp_path), set()
        for ids in [*prompts, *prompts]:
            running.run([ids])
            assert running.store.drain(LIMIT)
            running.forget_local()
            one_more_step(running)
            for other in prompts:
                eventually(lambda: router.counts(other) == expected(running, events, other))  # noqa: B023
                seen.add(router.counts(other))
        router.close()
        assert events.index.removed > 10
        assert len(seen) > 10
