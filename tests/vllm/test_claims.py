"""Claims of clients of a real vLLM cost other clients no more than they may, and end with their owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.chunks.namespace import salt_label
from tests.vllm.harness import CHUNK, Engine, engine, external_hits, prompt

SLOTS = 32
ALICE = [prompt(seed, 3 * CHUNK) for seed in range(4)]
"""Three slots each."""


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Engine]:
    slot = 2 * 4 * 128 * 4 * CHUNK
    quotas = {"alice": 40}
    extra = {"max_local_cpu_size": (SLOTS + 0.5) * slot / 2**30, "quotas": quotas, "load_or_recompute": False}
    with engine(model, extra=extra, enable_prefix_caching=False) as running:
        yield running


@pytest.fixture
def running(served: Engine) -> Iterator[Engine]:
    yield served
    served.store.clear()
    served.assert_nothing_leaked()


def run(engine: Engine, salt: str, *prompts: list[int], **params: Any) -> list[int]:
    """Serve prompts one after the other; the tokens that each has loaded."""
    return [external_hits(engine.run([ids], salts=[salt], params=params, max_tokens=1)[0]) for ids in prompts]


@pytest.mark.parametrize(
    "claim",
    [{"lmkv.pin": 86_000}, {"agent_hint": {"priority": 9}}, {"agent_hint": {"waits_seconds": 86_000}}],
    ids=["pin", "priority", "waits"],
)
def test_a_flood_of_claims_leaves_a_tenant_its_quota(running: Engine, claim: dict[str, Any]) -> None:
    assert running.store.slab.num_slots == SLOTS
    for seed in range(100, 100 + SLOTS):
        run(running, "mallory", prompt(seed, CHUNK), **claim)
    assert run(running, "alice", *ALICE) == [0] * 4
    assert run(running, "alice", *ALICE) == [3 * CHUNK - 1] * 4
    used = running.store.hints.used_bytes()["cpu"]
    assert set(used) <= {salt_label("alice"), ""}


def test_a_request_of_one_token_has_its_claims_carried_out(running: Engine) -> None:
    run(running, "alice", ALICE[0], **{"lmkv.pin": 600, "agent_hint": {"priority": 3, "session_id": "worker-7"}})
    assert running.store.stats().pinned == 3
    scheduler = running.connector.sides.scheduler
    mallory, alice = (scheduler.root_of(salt, {}) for salt in ("mallory", "alice"))
    assert not running.store.hints.end_session(mallory, "worker-7")
    assert running.store.hints.end_session(alice, "worker-7")
