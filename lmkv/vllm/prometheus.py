"""`LMKVStats` and `LMKVPromMetrics`: lmkv's metrics as vLLM carries them, and as Prometheus scrapes them.

vLLM aggregates the stats of all ranks and of the scheduler side, and observes them in its API server.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmkv.vllm.scheduler.telemetry import METRICS, Values, merge

logger = logging.getLogger("lmkv.vllm")

_LOGGED = ("lmkv_hit_tokens", "lmkv_missed_tokens", "lmkv_stored_tokens", "lmkv_tier_used_bytes")


class LMKVStats(KVConnectorStats):
    """Values counted in an interval; `data` is a `lmkv.vllm.scheduler.telemetry.Values`."""

    def reset(self) -> None:
        self.data: Values = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers that vLLM logs periodically."""
        return {
            " ".join([name.removeprefix("lmkv_").replace("_", " "), *labels]): value
            for name in _LOGGED
            for labels, value in self.data.get(name, {}).items()
            if value
        }

    def is_empty(self) -> bool:
        return not self.data


class LMKVPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of every engine that this process serves. No method raises: a missing metric is no failure."""

    _registered: ClassVar[list[Any]] = []

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._types = metric_types
        self._metrics: dict[str, Any] = {}
        self._series: dict[tuple[str, int, tuple[str, ...]], Any] = {}
        self._left_out: set[str] = set()
        self._unregister()
        for name in METRICS:
            # Register metrics with vLLM's names at their first observation: another connector may register them too.
            if not name.startswith("vllm:"):
                self._begin(name)

    @classmethod
    def _unregister(cls) -> None:
        """Forget the metrics of an earlier engine of this process, as vLLM does with its own."""
        registered, cls._registered = cls._registered, []
        for metric in registered:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(metric)

    def _begin(self, name: str) -> None:
        """Start known series at 0, or Prometheus misses the first increase."""
        metric = METRICS[name]
        with contextlib.suppress(Exception):
            for engine in self.per_engine_labelvalues:
                for known in metric.known:
                    self._labelled(name, engine, (known,))
                if not metric.labels:
                    self._labelled(name, engine, ())

    def _labelled(self, name: str, engine: int, labels: tuple[str, ...]) -> Any:
        series = self._series.get((name, engine, labels))
        if series is None:
            metric = self._metrics[name] = self._metrics.get(name) or self._register(name)
            series = metric.labels(*self.per_engine_labelvalues[engine], *labels)
            self._series[name, engine, labels] = series
        return series

    def _register(self, name: str) -> Any:
        described = METRICS[name]
        options: dict[str, Any] = {"labelnames": [*self._labelnames, *described.labels]}
        if described.kind == "histogram":
            metric = self._types[Histogram](name, described.help, buckets=described.buckets, **options)
        elif described.kind == "gauge":
            metric = self._types[Gauge](name, described.help, multiprocess_mode="mostrecent", **options)
        else:
            metric = self._types[Counter](name, described.help, **options)
        self._registered.append(metric)
        return metric

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values: Values = transfer_stats_data
        for name, series in values.items():
            try:
                for labels, value in series.items():
                    self._observe(name, engine_idx, tuple(labels), value)
            except Exception:
                if name not in self._left_out:
                    self._left_out.add(name)
                    logger.warning("lmkv: the metric %s is left out", name, exc_info=True)

    def _observe(self, name: str, engine: int, labels: tuple[str, ...], value: Any) -> None:
        series, kind = self._labelled(name, engine, labels), METRICS[name].kind
        if kind == "counter":
            series.inc(value)
        elif kind == "gauge":
            series.set(value)
        else:
            for observation in value:
                series.observe(observation)
