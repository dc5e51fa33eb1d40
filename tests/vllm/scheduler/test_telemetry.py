"""What the scheduler side counts, compared with what the requests did; and that it looks at tiers once a second."""

from __future__ import annotations

import json
import math
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lmkv.testing import ManualClock
from lmkv.testing.faults import FaultyBackend
from lmkv.vllm.plan import JobReport
from lmkv.vllm.scheduler.telemetry import METRICS, REASONS, Samples, Telemetry, Values, merge
from tests.kit import LIMIT, SLOT, chain, get, lower, memory, put, put_below, small_store
from tests.vllm.scheduler.simulated_vllm import SimulatedVLLM
from tests.vllm.scheduler.test_explain import OTHERS, PROMPT, asks, engine_of, serve

DOCS = Path(__file__).parents[3] / "docs"


def counted(engine: SimulatedVLLM) -> dict[str, Any]:
    """What came in since the last call; the tiers' counters as of now."""
    engine.now += 2.0
    merge(engine.samples, engine.scheduler.take_samples())
    values, engine.samples = engine.samples, {}
    engine.looked_up = 0
    return values


def test_a_store_a_hit_and_a_miss(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT)
    cold = counted(tiered)
    assert cold["lmkv_lookup_tokens"] == {(): len(PROMPT) - 1}
    assert cold["lmkv_missed_tokens"] == {("not_stored",): len(PROMPT) - 1}
    assert cold["lmkv_stored_tokens"] == {(): len(PROMPT)}
    assert cold["lmkv_stored_chunks"] == {(): 4}
    assert cold["lmkv_tier_chunks"] == {("cpu",): 4, ("lower",): 4}

    serve(tiered, PROMPT)
    warm = counted(tiered)
    assert warm["lmkv_hit_tokens"] == {("cpu",): len(PROMPT) - 1}
    assert warm["lmkv_hit_chunks"] == {("cpu",): 4}
    assert warm["lmkv_loaded_tokens"] == {(): len(PROMPT) - 1}
    assert "lmkv_missed_tokens" not in warm
    assert "lmkv_stored_tokens" not in warm

    serve(tiered, *OTHERS)
    assert counted(tiered)["lmkv_tier_evicted_chunks"] == {("cpu",): 4 + 16 - 10, ("lower",): 0}
    serve(tiered, PROMPT)
    below = counted(tiered)
    assert below["lmkv_hit_tokens"] == {("cpu",): 0, ("lower",): len(PROMPT) - 1}
    assert below["lmkv_hit_chunks"] == {("cpu",): 0, ("lower",): 4}
    assert below["lmkv_tier_chunk_operations"][("lower", "read")] == 4
    assert below["lmkv_prefetched_chunks"] == below["lmkv_prefetch_hit_chunks"] == {(): 4}


def test_a_lookup_that_vllm_had_to_ask_again(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    counted(tiered)
    tiered.disks[0].latency = math.inf
    request = asks(tiered, PROMPT)
    for waited in (0.0, 0.25, 0.25):
        tiered.now += waited
        assert tiered.scheduler.get_num_new_matched_tokens(request, 0)[0] is None
    tiered.disks[0].latency = 0.0
    assert tiered.store.drain(LIMIT)
    assert tiered.scheduler.get_num_new_matched_tokens(request, 0)[0] == len(PROMPT) - 1
    tiered.scheduler.request_finished(request)
    tiered.step()
    values = counted(tiered)
    assert values["vllm:kv_offload_lookup_async_delay_seconds"] == {(): [pytest.approx(0.5)]}
    assert len(values["vllm:kv_offload_lookup_sync_delay_seconds"][()]) == 4


def test_what_fails(tiered: SimulatedVLLM) -> None:
    serve(tiered, PROMPT, *OTHERS)
    counted(tiered)
    tiered.disks[0].error_rate = 1.0
    serve(tiered, PROMPT)
    failed = counted(tiered)
    assert failed["lmkv_tier_failures"][("lower", "read")] > 0
    while tiered.store.stats().tiers[1].breaker == "closed":
        serve(tiered, *OTHERS)
    assert counted(tiered)["lmkv_tier_breaker"][("lower", "read")] == 0.5, "it opened, and two seconds have passed"


def test_a_prefetch_that_nobody_used_expires() -> None:
    store = small_store(4, lower(memory(32, "disk")))
    clock = ManualClock()
    telemetry, keys = Telemetry(store, clock), chain("a", 3)
    put_below(store, keys)
    promotion = store.promote(keys[:2], prefetch=True)
    assert store.drain(LIMIT)
    promotion.release()
    store.lease(keys[:1]).release()
    put(store, chain("b", 4))
    values = telemetry.take()
    names = ("lmkv_prefetched_chunks", "lmkv_prefetch_hit_chunks", "lmkv_prefetch_expired_chunks")
    assert [values[name] for name in names] == [{(): 2}, {(): 1}, {(): 1}]
    store.close()


def test_tiers_are_looked_at_once_a_second() -> None:
    store, clock = small_store(4), ManualClock()
    telemetry = Telemetry(store, clock)
    assert telemetry.take()["lmkv_tier_used_bytes"] == {("cpu",): 0}
    put(store, chain("a", 2))
    clock.advance(0.9)
    assert telemetry.take() == {}
    clock.advance(0.2)
    values = telemetry.take()
    assert values["lmkv_tier_used_bytes"] == {("cpu",): 2 * SLOT}
    assert values["lmkv_tier_capacity_bytes"] == {("cpu",): 4 * SLOT}
    assert values["lmkv_tier_chunk_operations"] == {("cpu", "read"): 0, ("cpu", "write"): 2}
    with store.lease(chain("a", 1)):
        clock.advance(1.0)
        assert telemetry.take()["vllm:kv_offload_cpu_cache_usage_perc"] == {(): 0.25}
    store.close()


def test_copies_that_failed_are_counted_apart() -> None:
    store = small_store(4)
    telemetry = Telemetry(store, ManualClock())
    telemetry.take()
    telemetry.loaded(100, JobReport(1, True, 4096, 0.5))
    telemetry.loaded(100, JobReport(1, False))
    for kept in (True, False):
        telemetry.stored({"tokens": 64, "chunks": 2}, JobReport(1, True, 4096, 0.25), kept=kept)
    assert telemetry.take() == {
        "lmkv_loaded_tokens": {(): 100},
        "lmkv_load_seconds": {(): [0.5]},
        "lmkv_failed_loads": {(): 1},
        "lmkv_stored_tokens": {(): 64},
        "lmkv_stored_chunks": {(): 2},
        "lmkv_store_seconds": {(): [0.25]},
        "lmkv_failed_stores": {(): 1},
    }
    store.close()


def test_reads_and_writes_of_a_lower_tier_are_timed() -> None:
    clock = ManualClock()
    slow = FaultyBackend(memory(32, "disk"), verbs=frozenset({"read", "write"}), sleep=clock.advance)
    store = small_store(4, lower(slow), clock=clock)
    telemetry, keys = Telemetry(store, clock), chain("a", 1)
    slow.latency = 0.25
    put_below(store, keys)
    slow.latency = 0.5
    get(store, keys)
    clock.advance(1.0)
    timed = {("disk", "write"): [0.25], ("disk", "read"): [0.5]}
    assert telemetry.take()["lmkv_tier_operation_seconds"] == timed
    clock.advance(1.0)
    assert "lmkv_tier_operation_seconds" not in telemetry.take(), "each counts once"
    store.close()


def samples(rank: int) -> Values:
    made = Samples()
    made.add("lmkv_hit_tokens", 10 * rank, "cpu")
    made.observe("lmkv_load_seconds", float(rank))
    made.set("lmkv_pinned_chunks", rank)
    return made.take()


def test_counters_and_observations_add_up_and_gauges_are_replaced() -> None:
    first, second = samples(1), samples(2)
    total: Values = {}
    merge(total, first)
    merge(total, pickle.loads(pickle.dumps(second)))
    assert total == {
        "lmkv_hit_tokens": {("cpu",): 30},
        "lmkv_load_seconds": {(): [1.0, 2.0]},
        "lmkv_pinned_chunks": {(): 2},
    }
    assert first == samples(1), "what was merged is not changed"


def test_names_follow_prometheus_habits() -> None:
    for name, metric in METRICS.items():
        assert not name.endswith("_total"), "Prometheus' client appends it"
        assert metric.help.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert not metric.known or len(metric.labels) == 1


def test_every_counted_name_is_described() -> None:
    """Over a random schedule with everything in it."""
    rng = random.Random(1)
    with engine_of(ram_chunks=6, lower_chunks=8, num_blocks=60, load_faults=0.1, store_faults=0.1) as engine:
        serve(engine, *(rng.choice([PROMPT, *OTHERS]) for _ in range(30)))
        assert engine.samples.keys() <= METRICS.keys()
        # No hit is audited.
        expected = {name for name in METRICS if re.match("lmkv_(?!audit|wrong_)", name)}
        assert expected - engine.samples.keys() <= {
            "lmkv_failed_loads",
            "lmkv_failed_stores",
            "lmkv_promotion_seconds",
            "lmkv_stored_states",
            "lmkv_tenant_used_bytes",
        }


def test_the_docs_describe_every_metric() -> None:
    scraped = {f"{name}_total" if metric.kind == "counter" else name for name, metric in METRICS.items()}
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == scraped
    assert all(METRICS[name.removesuffix("_total")].kind == kind for name, kind in rows)


def test_the_docs_explain_every_reason() -> None:
    table = (DOCS / "metrics.md").read_text().partition("## Why tokens were missed")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == REASONS


def test_the_dashboard_asks_for_what_there_is() -> None:
    panels = json.loads((DOCS / "grafana" / "lmkv.json").read_text())["panels"]
    asked = " ".join(target["expr"] for panel in panels for target in panel.get("targets", []))
    names = {re.sub("_(total|bucket)$", "", name) for name in re.findall(r"(?:lmkv_|vllm:)\w+", asked)}
    assert names <= METRICS.keys()
    assert len(names) > 25
