"""lmkv's metrics in vLLM's hands: how they are aggregated, serialised, registered and scraped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from lmkv.agent.client import Client
from lmkv.testing import ManualClock
from tests.kit import LIMIT, eventually
from tests.vllm.harness import BLOCK, Engine, engine, prompt
from tests.vllm.server import Server, serving_together
from tests.vllm.test_online import ask, report

LENGTH, HIT, CHUNKS = 1500, 1499, 6
TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
LABELS = ["model_name", "engine"]


def stats(**counters: int) -> Any:
    from lmkv.vllm.publishing import LMKVStats

    return LMKVStats({f"lmkv_{name}": {(): value} for name, value in counters.items()})


def received_of(sent: Any) -> Any:
    """What comes out of vLLM's wire. Before 0.32 it sends `data` itself."""
    payload = sent.to_dict() if hasattr(sent, "to_dict") else sent.data
    return msgspec.msgpack.decode(msgspec.msgpack.encode(payload))


def vllm_config(connector: str = "LMKVConnector", **extra: Any) -> Any:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra)
    return VllmConfig(kv_transfer_config=transfer)


def prometheus(config: Any, engines: int = 1) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    return KVConnectorProm(config, LABELS, {number: ["small", str(number)] for number in range(engines)})


def sample(name: str, number: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "small", "engine": str(number), **labels})


def test_stats_pass_vllms_wire_and_are_aggregated() -> None:
    from lmkv.vllm.connector import LMKVConnector

    sent = {"lmkv_hit_tokens": {("cpu",): 5}, "lmkv_load_seconds": {(): [0.5, 0.25]}}
    received = received_of(LMKVConnector.build_kv_connector_stats(sent))
    assert received == sent
    total = LMKVConnector.build_kv_connector_stats(received).aggregate(stats(loaded_tokens=1))
    total = total.aggregate(LMKVConnector.build_kv_connector_stats(sent))
    assert total.data["lmkv_hit_tokens"] == {("cpu",): 10}
    assert total.data["lmkv_load_seconds"] == {(): [0.5, 0.25, 0.5, 0.25]}
    assert total.reduce() == {"hit tokens cpu": 10}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_series_whose_labels_are_known_begin_at_zero_for_every_engine() -> None:
    metrics = prometheus(vllm_config(), engines=2)
    assert sample("lmkv_missed_tokens_total", reason="evicted") == 0
    assert sample("lmkv_lookup_tokens_total", 1) == 0
    values = {
        "lmkv_missed_tokens": {("evicted",): 7},
        "lmkv_tier_used_bytes": {("disk",): 4096},
        "lmkv_load_seconds": {(): [0.5, 0.25]},
    }
    metrics.observe(values, 1)
    metrics.observe(values, 1)
    assert sample("lmkv_missed_tokens_total", 1, reason="evicted") == 14
    assert sample("lmkv_missed_tokens_total", 0, reason="evicted") == 0
    assert sample("lmkv_tier_used_bytes", 1, tier="disk") == 4096
    assert (sample("lmkv_load_seconds_count", 1), sample("lmkv_load_seconds_sum", 1)) == (4, 1.5)


def test_a_second_engine_in_one_process_begins_anew() -> None:
    prometheus(vllm_config()).observe(stats(loaded_tokens=3).data)
    assert sample("lmkv_loaded_tokens_total") == 3
    prometheus(vllm_config()).observe(stats(loaded_tokens=4).data)
    assert sample("lmkv_loaded_tokens_total") == 4


def test_a_metric_that_cannot_be_registered_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    """As beside vLLM's own OffloadingConnector, which registers its names at once."""
    taken = Counter("vllm:kv_offload_load_bytes", "Another connector's.", LABELS)
    try:
        metrics = prometheus(vllm_config())
        values = {"vllm:kv_offload_load_bytes": {(): 1}, "lmkv_loaded_tokens": {(): 2}, "lmkv_unheard_of": {(): 1}}
        for _ in range(2):
            metrics.observe(values)
        assert sample("lmkv_loaded_tokens_total") == 4
        assert caplog.text.count("publishing vllm:kv_offload_load_bytes failed; /metrics lacks") == 1
    finally:
        REGISTRY.unregister(taken)


def test_within_a_multi_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    children = [
        {"kv_connector": "LMKVConnector", "kv_role": "kv_both"},
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    ]
    metrics = prometheus(vllm_config("MultiConnector", connectors=children))
    sent = MultiConnector.build_kv_connector_stats({"LMKVConnector": stats(loaded_tokens=5)})
    more = MultiConnector.build_kv_connector_stats({"LMKVConnector": stats(loaded_tokens=6)})
    received = MultiConnector.build_kv_connector_stats(received_of(sent)).aggregate(more)
    metrics.observe(received_of(received))
    assert sample("lmkv_loaded_tokens_total") == 11


def offloaded(running: Engine, ids: list[int]) -> dict[str, Any]:
    """vLLM's metrics of offloading, once the prompt was stored and loaded."""
    running.run([ids])
    running.again([ids])
    return {metric.name: metric for metric in running.llm.get_metrics() if metric.name.startswith("vllm:kv_off")}


def test_offline_engines_have_them_too(model: Path) -> None:
    ids = prompt(70, 700)
    with engine(model, disable_log_stats=False) as running:
        found = offloaded(running, ids)
        assert found["vllm:kv_offload_load_bytes"].value == -(-699 // BLOCK) * BLOCK * 4096
        assert found["vllm:kv_offload_store_bytes"].value == -(-700 // BLOCK) * BLOCK * 4096
    samples = [each for family in REGISTRY.collect() for each in family.samples]
    assert sum(each.value for each in samples if each.name == "lmkv_hit_tokens_total") == 699


@pytest.mark.nightly("ranks")
def test_bytes_of_two_ranks_add_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    ids = prompt(71, 700)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, disable_log_stats=False, **ranks) as running:
        found = offloaded(running, ids)
        assert found["vllm:kv_offload_load_bytes"].value == -(-699 // BLOCK) * BLOCK * 4096
        assert found["vllm:kv_offload_load_size"].count == 2, "one copy of half the bytes on each rank"


@pytest.mark.parametrize(("tier", "prompts"), [("cpu", 2), ("disk", 3)])
def test_a_miss_says_from_where_and_when_it_was_evicted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, tier: str, prompts: int
) -> None:
    """Each other prompt has eight chunks: the last of them removes what the first one stored from its last tier."""
    clock, ids = ManualClock(), prompt(90, LENGTH)
    extra = {**small_tiers(tmp_path), "agent_listen": "127.0.0.1:0", "agent_token": "letmein"}
    extra["max_local_disk_size"] = 21.5 / 1024  # Tails take less there than in host memory.
    if tier == "cpu":
        del extra["local_disk"], extra["max_local_disk_size"]
    logging.getLogger("lmkv").propagate = True
    with caplog.at_level("INFO", "lmkv"), engine(model, clock=clock, extra=extra, skip_tokenizer_init=False) as running:
        for other in [ids, *(prompt(91 + number, 1900) for number in range(prompts))]:
            clock.advance(1000.0)
            running.run([other])
            assert running.store.drain(LIMIT)
        clock.advance(30.0)
        missed = running.again([ids])[0]
        found = missed.kv_transfer_params["lmkv"]["missed"]
        assert found == {"reason": "evicted", "tokens": HIT, "tier": tier, "seconds_ago": pytest.approx(30.0)}
        url = next(line.split()[-1] for line in caplog.messages if "the agent API is at" in line)
        with Client(url, "letmein") as client:
            explained = client.explain(missed.request_id)["explanation"]
        assert f"1,499 tokens were missed: evicted from {tier} 30 s before." in explained


# -- a server that is scraped ---------------------------------------------------------------------------


def small_tiers(folder: Path) -> dict[str, Any]:
    """Host memory for 16 chunks of 1 MiB, half of which may wait for the disk; a disk for 24."""
    return {
        "max_local_cpu_size": 16 / 1024,
        "local_disk": f"file://{folder}",
        "max_local_disk_size": 24.5 / 1024,
        "disk_min_free": 0.0,
        "prefetch_deadline": LIMIT,
        "load_or_recompute": False,
    }


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose own prefix cache can be reset."""
    options = small_tiers(tmp_path_factory.mktemp("kv"))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving_together(Server(model, log, options, VLLM_SERVER_DEV_MODE="1")) as (running,):
        yield running


class Scraped:
    """The increase of counters, and the values of gauges, since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = server.samples()

    def __call__(self, name: str, **labels: str) -> float:
        before = total(self._before, name, labels)
        return total(self._server.samples(), name, labels) - before

    def gauge(self, name: str, **labels: str) -> float:
        return total(self._server.samples(), name, labels)


def total(samples: dict[str, list[tuple[dict[str, str], float]]], name: str, labels: dict[str, str]) -> float:
    return sum(value for found, value in samples.get(name, []) if labels.items() <= found.items())


def step(server: Server) -> None:
    """vLLM reports while it steps: a request that lmkv has nothing to do with."""
    ask(server, prompt(0, 5), params={"lmkv.skip_load": True, "lmkv.skip_save": True})


def others(server: Server, *seeds: int) -> None:
    """Prompts of eight chunks each; afterwards vLLM itself has forgotten all."""
    for seed in seeds:
        store(server, prompt(seed, 1900), chunks=8)
    server.post("/reset_prefix_cache")


def store(server: Server, ids: list[int], chunks: int) -> None:
    """Ask with a prompt of so many chunks, and wait until all of them are in both tiers."""
    counted = Scraped(server)
    ask(server, ids)
    becomes(server, lambda: all_written(counted, chunks), "writes")


def all_written(counted: Scraped, chunks: int) -> bool:
    return counted("lmkv_tier_chunk_operations_total", tier="disk", operation="write") == chunks


def becomes(server: Server, true: Any, what: str) -> None:
    eventually(lambda: bool(true()) or (step(server), False)[1], what)


def test_what_is_scraped_is_what_the_requests_did(server: Server) -> None:
    ids = prompt(72, LENGTH)

    counted = Scraped(server)
    assert report(ask(server, ids))["missed"] == {"reason": "not_stored", "tokens": HIT}
    becomes(server, lambda: counted("lmkv_stored_tokens_total") == LENGTH, "a store")
    assert counted("lmkv_missed_tokens_total", reason="not_stored") == HIT
    assert counted("lmkv_missed_requests_total", reason="not_stored") == 1
    assert counted("lmkv_hit_tokens_total") == 0
    assert counted("lmkv_stored_chunks_total") == CHUNKS
    stored = -(-LENGTH // BLOCK) * BLOCK * 4096
    assert counted("vllm:kv_offload_store_bytes_total") == counted("vllm:kv_offload_store_size_sum") == stored
    assert counted("lmkv_store_seconds_count") == counted("vllm:kv_offload_store_size_count") > 0
    becomes(server, lambda: all_written(counted, CHUNKS), "writes")
    assert counted("lmkv_tier_operation_seconds_count", tier="disk", operation="write") == CHUNKS
    assert counted.gauge("lmkv_tier_chunks", tier="cpu") == CHUNKS
    assert counted.gauge("lmkv_tier_used_bytes", tier="cpu") == CHUNKS << 20
    assert counted.gauge("lmkv_tier_capacity_bytes", tier="cpu") == 16 << 20
    assert stored < counted.gauge("lmkv_tier_used_bytes", tier="disk") < stored + (1 << 20)

    server.post("/reset_prefix_cache")
    counted = Scraped(server)
    assert report(ask(server, ids))["sources"] == {"cpu": HIT}
    becomes(server, lambda: counted("lmkv_loaded_tokens_total") == HIT, "a load")
    assert counted("lmkv_hit_tokens_total", tier="cpu") == counted("lmkv_hit_tokens_total") == HIT
    assert counted("lmkv_hit_chunks_total", tier="cpu") == CHUNKS
    assert counted("vllm:external_prefix_cache_hits_total") == HIT
    loaded = -(-HIT // BLOCK) * BLOCK * 4096
    assert counted("vllm:kv_offload_load_bytes_total") == loaded
    assert counted("vllm:kv_offload_load_time_total") > 0
    assert counted("lmkv_load_seconds_count") == 1
    assert counted("vllm:kv_offload_lookup_sync_delay_seconds_count") >= 1

    others(server, 73, 74)
    counted = Scraped(server)
    assert report(ask(server, ids))["sources"] == {"cpu": 0, "disk": HIT}
    becomes(server, lambda: counted("lmkv_tier_bytes_total", tier="disk", operation="read") == stored, "reads")
    assert counted("lmkv_hit_tokens_total", tier="disk") == counted("lmkv_hit_tokens_total") == HIT
    assert counted("lmkv_hit_chunks_total", tier="disk") == CHUNKS
    assert counted("lmkv_tier_operation_seconds_count", tier="disk", operation="read") == CHUNKS
    assert counted("lmkv_tier_operation_seconds_sum", tier="disk", operation="read") > 0
    # The store's counters are read once a second: perhaps after the prefetch, and before its use.
    becomes(server, lambda: counted("lmkv_prefetch_hit_chunks_total") == CHUNKS, "a use of all prefetched chunks")
    assert counted("lmkv_prefetched_chunks_total") == CHUNKS

    counted = Scraped(server)
    others(server, 75, 76, 77, 78)
    evicted = report(ask(server, ids))["missed"]
    assert evicted.pop("seconds_ago") > 0
    assert evicted["tier"] in ("cpu", "disk")
    assert (evicted["reason"], evicted["tokens"]) == ("evicted", HIT)
    becomes(server, lambda: counted("lmkv_missed_tokens_total", reason="evicted") == HIT, "a miss")
    becomes(server, lambda: counted("lmkv_tier_evicted_chunks_total", tier="disk") > 0, "evictions")
    assert counted("lmkv_tier_evicted_chunks_total", tier="cpu") >= 4 * 7
    assert counted.gauge("lmkv_tier_used_bytes", tier="disk") <= 24.5 * (1 << 20)
    assert counted.gauge("lmkv_tier_breaker") == 0
    assert counted("lmkv_failed_loads_total") == counted("lmkv_failed_stores_total") == 0

    everything = Scraped(server)
    looked_up = everything.gauge("lmkv_lookup_tokens_total")
    assert looked_up == everything.gauge("lmkv_hit_tokens_total") + everything.gauge("lmkv_missed_tokens_total")


def test_every_metric_is_scraped_with_its_type(server: Server) -> None:
    from lmkv.vllm.scheduler.telemetry import METRICS

    scraped = server.get("/metrics")
    # The others need quotas or audits, which no server here has.
    never = {"vllm:kv_offload_allocation_failure", "lmkv_tenant_used_bytes"}
    never |= {"lmkv_audited_chunks", "lmkv_audited_states", "lmkv_wrong_chunks"}
    for name, metric in METRICS.items():
        full = f"{name}_total" if metric.kind == "counter" else name
        assert name in never or f"# TYPE {full} {metric.kind}" in scraped
