"""What a replay and the live estimate say, against real runs of vLLM."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmkv.agent.client import Client
from lmkv.cli.server import write_requests
from lmkv.policies import make_policy
from lmkv.simulation import replay
from lmkv.simulation.trace import read_trace
from tests.kit import LIMIT
from tests.vllm.harness import engine

CHUNK = 32
SMALL = 1 / 64
"""GiB."""


def conversations(seed: int, chunks: int, at_once: int) -> list[list[int]]:
    """Prompts of sessions that take turns and grow, `at_once` of them, until there are so many different chunks."""
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    open_sessions: list[list[int]] = []
    made = 0
    while made < chunks:
        if len(open_sessions) < at_once or chance.random() < 0.15:
            session = [chance.randrange(100, 900) for _ in range(4 * CHUNK)]
            open_sessions = [*open_sessions[1 - at_once :], session]
            made += 4
        else:
            session = open_sessions[int(len(open_sessions) * chance.random() ** 0.5)]
        if len(session) < 20 * CHUNK:
            grown = chance.randrange(1, 3)
            session += [chance.randrange(100, 900) for _ in range(grown * CHUNK)]
            made += grown
        prompts.append([*session, 5])
    return prompts


@contextmanager
def served(model: Path, gib: float, caplog: pytest.LogCaptureFixture, **more: object) -> Iterator[tuple[Any, Client]]:
    extra = {
        **more,
        "max_local_cpu_size": gib,
        "chunk_size": CHUNK,
        "cache_policy": "LRU",
        "save_unfull_chunk": False,
        "save_decode_cache": False,
        "load_or_recompute": False,
        "agent_listen": "127.0.0.1:0",
        "agent_token": "letmein",
    }
    caplog.clear()
    logging.getLogger("lmkv").propagate = True
    with caplog.at_level("INFO", "lmkv"), engine(model, extra=extra) as made:
        url = next(line.split()[-1] for line in caplog.messages if "the agent API is at" in line)
        with Client(url, "letmein") as client:
            yield made, client


def run(made: Any, client: Client, prompts: list[list[int]]) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Measured hit ratio, the trace that was recorded, and the live estimate."""
    after = client.trace()["next"]
    for prompt in prompts:
        made.run([prompt])
        # So that all hits are lmkv's.
        made.forget_local()
    trace = client.trace(after)
    measured = sum(each["hit"] for each in trace["requests"]) / sum(each["tokens"] for each in trace["requests"])
    return measured, trace, client.value()


def test_replay_and_estimate_agree_with_vllm(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(model, SMALL, caplog) as (made, client):
        slots, slot_bytes = made.store.slab.num_slots, made.store.slab.slot_bytes
        prompts = conversations(3, 5 * slots, slots // 8)
        measured, trace, value = run(made, client, prompts)
    assert len(trace["requests"]) == len(prompts)
    assert 0.1 < measured < 0.9

    file = io.StringIO()
    file.write(json.dumps({"lmkv_trace": 1, **{name: trace[name] for name in ("chunk_tokens", "chunk_bytes")}}) + "\n")
    write_requests(file, trace["requests"])
    assert all(str(token) not in file.getvalue().split() for token in prompts[0])
    (tmp_path / "trace.jsonl").write_text(file.getvalue())
    recorded = read_trace(tmp_path / "trace.jsonl")
    predicted = replay(recorded, make_policy("LRU"), slots * slot_bytes, slot_bytes)
    assert predicted.hit_ratio == pytest.approx(measured, abs=0.02)

    [host] = value["tiers"]
    now, twice = host["points"][1], host["points"][2]
    assert now["hit_ratio"] == pytest.approx(measured, abs=0.02)
    with served(model, 2 * SMALL, caplog) as (made, client):
        assert made.store.slab.num_slots == 2 * slots
        larger, _, _ = run(made, client, prompts)
    assert larger > measured + 0.03, "the larger tier must find more, or the estimate says nothing"
    assert twice["hit_ratio"] == pytest.approx(larger, abs=0.02)

    disk = {"local_disk": str(tmp_path / "kv"), "max_local_disk_size": 2 * SMALL, "disk_min_free": 0.0}
    with served(model, SMALL, caplog, **disk, prefetch_deadline=LIMIT) as (made, client):
        both, _, value = run(made, client, prompts)
    _, below = value["tiers"]
    assert both > measured + 0.03
    assert below["points"][1]["hit_ratio"] == pytest.approx(both, abs=0.02)
    assert below["without"]["hit_ratio"] == pytest.approx(measured, abs=0.02), "the run without a disk"
