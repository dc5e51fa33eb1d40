"""`Telemetry`: the scheduler side's counters, for vLLM's `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmkv.protocols import Clock
from lmkv.store.tiered import TieredStore
from lmkv.store.tiers.stats import TierCounters, TierStats
from lmkv.vllm.metadata import JobReport
from lmkv.vllm.observe.metrics import Samples, Values
from lmkv.vllm.requests.miss import Miss

_INTERVAL = 1.0
"""Seconds between two looks at the store's own counters, at least."""

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
"""Counters of a tier, and their metrics."""

_PREFETCH = (
    ("prefetched", "lmkv_prefetched_chunks"),
    ("prefetch_hits", "lmkv_prefetch_hit_chunks"),
    ("prefetch_expired", "lmkv_prefetch_expired_chunks"),
)


class Telemetry:
    """Counts events as they happen, and reads the store's counters once a second. Never waits."""

    def __init__(self, store: TieredStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._samples = Samples()
        self._before: Sequence[TierCounters] = ()
        self._next = float("-inf")
        self.loads_off = False
        """Whether an audit has switched loads off."""
        self.predicted: Callable[[], Mapping[str, Any]] = lambda: {"tiers": ()}
        """Gives estimates of the hits with other sizes of the tiers."""

    def take(self) -> Values:
        """Values counted since the last call."""
        if self._clock() >= self._next:
            self._next = self._clock() + _INTERVAL
            self._snapshot()
        return self._samples.take()

    # -- events -------------------------------------------------------------------------------------------

    def looked_up(self, tokens: Mapping[str, int], chunks: Mapping[str, int], miss: Miss | None) -> None:
        """A request is scheduled: count its hit, by tier, and its miss."""
        add = self._samples.add
        for tier, count in tokens.items():
            add("lmkv_hit_tokens", count, tier)
        for tier, count in chunks.items():
            add("lmkv_hit_chunks", count, tier)
        if miss is not None:
            # Anybody may read metrics, and must not learn what other salts' prompts begin with.
            reason = miss.told
            add("lmkv_missed_tokens", miss.looked_up, reason)
            add("lmkv_missed_requests", 1, reason)
        add("lmkv_lookup_tokens", sum(tokens.values()) + (miss.looked_up if miss is not None else 0))

    def lookup_took(self, seconds: float) -> None:
        self._samples.observe("vllm:kv_offload_lookup_sync_delay_seconds", seconds)

    def lookup_was_deferred(self, seconds: float) -> None:
        self._samples.observe("vllm:kv_offload_lookup_async_delay_seconds", seconds)

    def promoted(self, tier: str, seconds: float) -> None:
        """Observe the time of a promotion, on any thread."""
        self._samples.observe("lmkv_promotion_seconds", seconds, tier)

    def loaded(self, tokens: int, report: JobReport) -> None:
        if report.ok:
            self._samples.add("lmkv_loaded_tokens", tokens)
            self._samples.observe("lmkv_load_seconds", report.seconds)
        else:
            self._samples.add("lmkv_failed_loads")

    def stored(self, tokens: int, chunks: int, report: JobReport, *, kept: bool) -> None:
        if kept:
            self._samples.add("lmkv_stored_tokens", tokens)
            self._samples.add("lmkv_stored_chunks", chunks)
            self._samples.observe("lmkv_store_seconds", report.seconds)
        else:
            self._samples.add("lmkv_failed_stores")

    def stored_states(self, entries: int, report: JobReport, *, kept: bool) -> None:
        if kept:
            self._samples.add("lmkv_stored_states", entries)
            self._samples.observe("lmkv_store_seconds", report.seconds)
        else:
            self._samples.add("lmkv_failed_stores")

    def audited(self, tokens: int, seconds: float) -> None:
        """A hit of `tokens` is computed all the same, in `seconds`."""
        self._samples.add("lmkv_audited_hits")
        self._samples.add("lmkv_audited_tokens", tokens)
        self._samples.add("lmkv_audit_seconds", seconds)

    def compared(self, tiers: Sequence[str], wrong: Sequence[str], *, states: bool) -> None:
        """Chunks or states of these tiers were compared, and some were wrong."""
        for tier in tiers:
            self._samples.add("lmkv_audited_states" if states else "lmkv_audited_chunks", 1, tier)
        for tier in wrong:
            self._samples.add("lmkv_wrong_chunks", 1, tier)

    def audited_load(self, *, wrong: bool, again: bool = False) -> None:
        """The blocks of a load were read back; `again`: once more."""
        if not again:
            self._samples.add("lmkv_audited_loads")
        if wrong:
            self._samples.add("lmkv_wrong_loads")

    def found_no_room(self) -> None:
        """Count a step whose chunks did not all get slots."""
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
