"""`Telemetry`: counts events of the scheduler side for vLLM's `/metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from lmkv.protocols import Clock
from lmkv.store.health import TierCounters, TierStats
from lmkv.store.tiered import TieredStore
from lmkv.vllm.plan import JobReport
from lmkv.vllm.plan.request import Miss

Values = dict[str, dict[tuple[str, ...], Any]]
"""For each metric and its label values: a counter's increase, a gauge's value, or a list of a histogram's
observations.
"""


REASONS = (
    *("not_stored", "no_state", "evicted", "too_short", "not_ready", "tier_unavailable"),
    *("deadline", "slower", "not_promoted", "limited", "skip_load", "not_taken", "failed", "audited", "switched_off"),
    "unidentified",
)
"""The reasons why tokens are not loaded. docs/metrics.md explains each of them."""
_TIER, _CALLS = ("tier",), ("tier", "operation")
_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
_LOOKUP_SECONDS = (1e-5, 5e-5, *_SECONDS[:-2])
_BYTES = (1e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8)
_INTERVAL = 1.0
"""Shortest time in seconds between two reads of the store's counters."""
_BREAKER = {"closed": 0.0, "half-open": 0.5, "open": 1.0}
_TOTALS = (
    ("evictions", "lmkv_tier_evicted_chunks", ()),
    ("dropped", "lmkv_tier_dropped_chunks", ()),
    ("write_rejects", "lmkv_tier_rejected_chunks", ()),
    ("lost", "lmkv_tier_lost_chunks", ()),
    ("hits", "lmkv_tier_chunk_operations", ("read",)),
    ("writes", "lmkv_tier_chunk_operations", ("write",)),
    ("read_bytes", "lmkv_tier_bytes", ("read",)),
    ("written_bytes", "lmkv_tier_bytes", ("write",)),
    ("read_failures", "lmkv_tier_failures", ("read",)),
    ("write_failures", "lmkv_tier_failures", ("write",)),
)
"""The attributes of a tier's counters, each with its metric and label values."""
_PREFETCH = (
    ("prefetched", "lmkv_prefetched_chunks"),
    ("prefetch_hits", "lmkv_prefetch_hit_chunks"),
    ("prefetch_expired", "lmkv_prefetch_expired_chunks"),
)


@frozen
class Metric:
    """A metric. `known`: for a metric with one label, the label's values. Their series begin at 0, even if nothing was
    counted.
    """

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(text: str, *labels: str, known: tuple[str, ...] = ()) -> Metric:
    return Metric("counter", text, labels, known)


def _gauge(text: str, *labels: str) -> Metric:
    return Metric("gauge", text, labels)


def _histogram(text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric("histogram", text, labels, buckets=buckets)


METRICS = {
    "lmkv_lookup_tokens": _counter("Tokens looked up, without vLLM's own hits and each prompt's last token."),
    "lmkv_hit_tokens": _counter("Tokens looked up and found, by the tier that had them.", *_TIER),
    "lmkv_hit_chunks": _counter("Chunks looked up and found, by the tier that had them.", *_TIER),
    "lmkv_missed_tokens": _counter("Tokens looked up and not loaded, by reason.", "reason", known=REASONS),
    "lmkv_missed_requests": _counter("Requests that were not loaded completely, by reason.", "reason", known=REASONS),
    "lmkv_loaded_tokens": _counter("Tokens that were loaded."),
    "lmkv_failed_loads": _counter("Copies to the device that failed."),
    "lmkv_stored_tokens": _counter("Tokens that were stored in host memory."),
    "lmkv_stored_chunks": _counter("Chunks that were stored in host memory."),
    "lmkv_stored_states": _counter("States of recurrent layers that were stored in host memory."),
    "lmkv_host_states": _gauge("States of recurrent layers in host memory, which are no chunks."),
    "lmkv_failed_stores": _counter("Copies from the device that failed, or were thrown away."),
    "lmkv_load_seconds": _histogram("Time of a copy from host memory to the device, on the slowest rank.", _SECONDS),
    "lmkv_store_seconds": _histogram("Time of a copy from the device to host memory, on the slowest rank.", _SECONDS),
    "lmkv_promotion_seconds": _histogram("Time until a lower tier's chunks are in host memory.", _SECONDS, *_TIER),
    "lmkv_tier_operation_seconds": _histogram("Time of a chunk's read or write that succeeded.", _SECONDS, *_CALLS),
    "lmkv_tier_used_bytes": _gauge("Bytes in use.", *_TIER),
    "lmkv_tier_capacity_bytes": _gauge("Bytes that may be used; absent without a limit.", *_TIER),
    "lmkv_tenant_used_bytes": _gauge("Bytes of each tenant with a quota; empty: of all others.", "tier", "tenant"),
    "lmkv_predicted_hit_ratio": _gauge("Share of tokens found with this multiple of the tier's size.", "tier", "size"),
    "lmkv_tier_chunks": _gauge("Chunks stored.", *_TIER),
    "lmkv_tier_evicted_chunks": _counter("Chunks evicted by the tier's policy.", *_TIER),
    "lmkv_tier_dropped_chunks": _counter("Chunks not written because too many writes waited.", *_TIER),
    "lmkv_tier_rejected_chunks": _counter("Chunks not written: the tier had no room or was unavailable.", *_TIER),
    "lmkv_tier_lost_chunks": _counter("Indexed chunks that turned out to be missing or corrupt.", *_TIER),
    "lmkv_tier_chunk_operations": _counter("Chunks read or written.", *_CALLS),
    "lmkv_tier_bytes": _counter("Bytes read or written.", *_CALLS),
    "lmkv_tier_failures": _counter("Reads or writes that failed.", *_CALLS),
    "lmkv_tier_breaker": _gauge("0: the tier is used; 1: it is given up; 0.5: about to be tried again.", *_CALLS),
    "lmkv_leased_chunks": _gauge("Chunks of host memory that are referenced, pins included."),
    "lmkv_pinned_chunks": _gauge("Pinned chunks."),
    "lmkv_pending_io": _gauge("Reads and writes of lower tiers that wait or run."),
    "lmkv_prefetched_chunks": _counter("Chunks brought into host memory before they were asked for."),
    "lmkv_prefetch_hit_chunks": _counter("Prefetched chunks that were loaded later."),
    "lmkv_prefetch_expired_chunks": _counter("Prefetched chunks that left host memory without having been loaded."),
    "lmkv_audited_hits": _counter("Hits that were computed all the same, to compare them."),
    "lmkv_audited_tokens": _counter("Tokens of these hits, which were computed again."),
    "lmkv_audit_seconds": _counter("Seconds that computing these tokens takes, as measured."),
    "lmkv_audited_chunks": _counter("Chunks that were compared, by the tier that had them.", *_TIER),
    "lmkv_audited_states": _counter("States of recurrent layers that were compared, by tier.", *_TIER),
    "lmkv_wrong_chunks": _counter("Chunks and states that audits found wrong, by the tier that had them.", *_TIER),
    "lmkv_audited_loads": _counter("Loads whose blocks were read back and compared with the stored chunks."),
    "lmkv_wrong_loads": _counter("Loads that left something else in the blocks, or whose blocks were changed later."),
    "lmkv_loads_off": _gauge("1 once an audit has switched loads off, else 0."),
    # vLLM's own names, with vLLM's meaning: dashboards for its OffloadingConnector show them.
    "vllm:kv_offload_load_bytes": _counter("Total bytes loaded from offload storage to GPU."),
    "vllm:kv_offload_load_time": _counter("Total load time from offload storage to GPU, in seconds."),
    "vllm:kv_offload_load_size": _histogram("Histogram of KV offload load operation size, in bytes.", _BYTES),
    "vllm:kv_offload_store_bytes": _counter("Total bytes stored from GPU to offload storage."),
    "vllm:kv_offload_store_time": _counter("Total store time from GPU to offload storage, in seconds."),
    "vllm:kv_offload_store_size": _histogram("Histogram of KV offload store operation size, in bytes.", _BYTES),
    "vllm:kv_offload_lookup_sync_delay_seconds": _histogram("Time of a single offload lookup call.", _LOOKUP_SECONDS),
    "vllm:kv_offload_lookup_async_delay_seconds": _histogram(
        "Time from a request's first deferred lookup to its answer, or to the request's end.", _SECONDS
    ),
    "vllm:kv_offload_allocation_failure": _counter("Number of KV offload store allocation attempts that failed."),
    "vllm:kv_offload_cpu_cache_usage_perc": _gauge("Share of host memory's slots that are referenced, 0 to 1."),
    "vllm:kv_offload_cpu_cache_write_usage_perc": _gauge("Share of host memory's slots being stored to, 0 to 1."),
    "vllm:kv_offload_cpu_cache_read_usage_perc": _gauge("Share of host memory's slots referenced otherwise, 0 to 1."),
}


class Samples:
    """The values of metrics since the last call of `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Values = {}

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Increase a counter by `amount`. An increase by 0 begins the series with these labels."""
        with self._lock:
            series = self._values.setdefault(name, {})
            series[labels] = series.get(labels, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values.setdefault(name, {})[labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add an observation to a histogram."""
        with self._lock:
            self._values.setdefault(name, {}).setdefault(labels, []).append(value)

    def take(self) -> Values:
        with self._lock:
            values, self._values = self._values, {}
        return values


def merge(into: Values, other: Values) -> None:
    """Add the values `other` to `into`. `other` comes from a later time or another rank. Counters and histograms add
    up; gauges are replaced.
    """
    for name, series in other.items():
        merged, gauge = into.setdefault(name, {}), METRICS[name].kind == "gauge"
        for labels, value in series.items():
            if gauge or labels not in merged:
                merged[labels] = list(value) if isinstance(value, list) else value
            else:
                merged[labels] += value


class Telemetry:
    """Counts events for vLLM's metrics, and reads the store's counters at most once a second. Never waits."""

    def __init__(self, store: TieredStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._samples = Samples()
        self._before: Sequence[TierCounters] = ()
        self._next = float("-inf")
        self.loads_off = False
        """Whether an audit has switched loads off."""
        self.predicted: Callable[[], Mapping[str, Any]] = lambda: {"tiers": ()}
        """A function that returns the estimated hits with other sizes of the tiers."""

    def take(self) -> Values:
        """Return the metrics' values since the last call."""
        if self._clock() >= self._next:
            self._next = self._clock() + _INTERVAL
            self._snapshot()
        return self._samples.take()

    # -- events -------------------------------------------------------------------------------------------

    def looked_up(self, tokens: Mapping[str, int], chunks: Mapping[str, int], miss: Miss | None) -> None:
        """Count a scheduled request's hit and miss. `tokens`, `chunks`: number of tokens and chunks in the hit, by
        tier.
        """
        add = self._samples.add
        for tier, count in tokens.items():
            add("lmkv_hit_tokens", count, tier)
        for tier, count in chunks.items():
            add("lmkv_hit_chunks", count, tier)
        if miss is not None:
            # Anybody may read metrics, and must not learn the beginnings of other salts' prompts.
            reason = miss.public_reason
            add("lmkv_missed_tokens", miss.looked_up, reason)
            add("lmkv_missed_requests", 1, reason)
        add("lmkv_lookup_tokens", sum(tokens.values()) + (miss.looked_up if miss is not None else 0))

    def lookup_took(self, seconds: float) -> None:
        self._samples.observe("vllm:kv_offload_lookup_sync_delay_seconds", seconds)

    def lookup_was_deferred(self, seconds: float) -> None:
        self._samples.observe("vllm:kv_offload_lookup_async_delay_seconds", seconds)

    def promoted(self, tier: str, seconds: float) -> None:
        """Record that the promotion of chunks from `tier` took `seconds` seconds. Thread-safe."""
        self._samples.observe("lmkv_promotion_seconds", seconds, tier)

    def loaded(self, tokens: int, report: JobReport) -> None:
        if report.ok:
            self._samples.add("lmkv_loaded_tokens", tokens)
            self._samples.observe("lmkv_load_seconds", report.seconds)
        else:
            self._samples.add("lmkv_failed_loads")

    def stored(self, counts: Mapping[str, int], report: JobReport, *, kept: bool) -> None:
        """Count a store. `counts`: the stored amounts by the names "tokens" and "chunks", or by the name "states".
        `kept`: False if the store failed or was discarded.
        """
        if kept:
            for kind, count in counts.items():
                self._samples.add(f"lmkv_stored_{kind}", count)
            self._samples.observe("lmkv_store_seconds", report.seconds)
        else:
            self._samples.add("lmkv_failed_stores")

    def audited(self, tokens: int, seconds: float) -> None:
        """Count an audited hit of `tokens` tokens, which vLLM computes in an estimated time of `seconds` seconds."""
        self._samples.add("lmkv_audited_hits")
        self._samples.add("lmkv_audited_tokens", tokens)
        self._samples.add("lmkv_audit_seconds", seconds)

    def compared(self, tiers: Sequence[str], wrong: Sequence[str], *, states: bool) -> None:
        """Count the compared chunks or states of an audit. `tiers`: the tier of each compared chunk or state. `wrong`:
        the tier of each wrong one. `states`: whether states were compared.
        """
        for tier in tiers:
            self._samples.add("lmkv_audited_states" if states else "lmkv_audited_chunks", 1, tier)
        for tier in wrong:
            self._samples.add("lmkv_wrong_chunks", 1, tier)

    def audited_load(self, *, wrong: bool, again: bool = False) -> None:
        """Count a load with blocks that were read back and compared. `again`: True for a second comparison, which
        follows when the request has released the blocks.
        """
        if not again:
            self._samples.add("lmkv_audited_loads")
        if wrong:
            self._samples.add("lmkv_wrong_loads")

    def found_no_room(self) -> None:
        """Count a step that had chunks to store but not enough slots for them."""
        self._samples.add("vllm:kv_offload_allocation_failure")

    # -- once a second ------------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        stats, put = self._store.stats(), self._samples.set
        before = self._before or [TierCounters() for _ in stats.tiers]
        for tier, counters in zip(stats.tiers, before, strict=True):
            self._tier(tier, counters)
        self._before = stats.tiers
        for name, operation, seconds in self._store.catalog.drain_latencies():
            self._samples.observe("lmkv_tier_operation_seconds", seconds, name, operation)
        for name, tenants in self._store.hints.used_bytes().items():
            for tenant, used in tenants.items():
                put("lmkv_tenant_used_bytes", used, name, tenant)
        for each in self.predicted()["tiers"]:
            for point in each["points"]:
                put("lmkv_predicted_hit_ratio", point["hit_ratio"], each["name"], f"{point['bytes'] / each['bytes']:g}")
        put("lmkv_loads_off", float(self.loads_off))
        put("lmkv_leased_chunks", stats.leased)
        put("lmkv_host_states", stats.primary.states)
        put("lmkv_pinned_chunks", stats.pinned)
        put("lmkv_pending_io", stats.pending_io)
        slots = self._store.slab.num_slots
        put("vllm:kv_offload_cpu_cache_usage_perc", stats.leased / slots)
        put("vllm:kv_offload_cpu_cache_write_usage_perc", stats.writing / slots)
        put("vllm:kv_offload_cpu_cache_read_usage_perc", max(0, stats.leased - stats.writing) / slots)

    def _tier(self, tier: TierStats, before: TierCounters) -> None:
        put, name = self._samples.set, tier.name
        put("lmkv_tier_used_bytes", tier.used_bytes, name)
        if tier.capacity_bytes is not None:
            put("lmkv_tier_capacity_bytes", tier.capacity_bytes, name)
        put("lmkv_tier_chunks", tier.chunks, name)
        put("lmkv_tier_breaker", _BREAKER[tier.breaker], name, "read")
        put("lmkv_tier_breaker", _BREAKER[tier.write_breaker], name, "write")
        for counter, metric, labels in _TOTALS:
            self._samples.add(metric, getattr(tier, counter) - getattr(before, counter), name, *labels)
        if name == self._store.primary_name:
            for counter, metric in _PREFETCH:
                self._samples.add(metric, getattr(tier, counter) - getattr(before, counter))
