"""Publishes lmkv's metrics and KV events through vLLM.

vLLM collects statistics of all ranks and of the scheduler side, and adds them to the metrics of its API server.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from attrs import define
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmkv.vllm.plan.block_map import BlockMap
from lmkv.vllm.scheduler.events import Blocks, BlocksRemoved, BlocksStored, Event
from lmkv.vllm.scheduler.telemetry import METRICS, Values, merge

logger = logging.getLogger("lmkv.vllm")

_LOGGED = ("lmkv_hit_tokens", "lmkv_missed_tokens", "lmkv_stored_tokens", "lmkv_tier_used_bytes")


class LMKVStats(KVConnectorStats):
    """lmkv's metrics since the last report, in the class that vLLM expects. `data`: the values by metric, of type
    `telemetry.Values`.
    """

    def reset(self) -> None:
        self.data: Values = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers that vLLM writes to its log periodically, by name."""
        return {
            " ".join([name.removeprefix("lmkv_").replace("_", " "), *labels]): value
            for name in _LOGGED
            for labels, value in self.data.get(name, {}).items()
            if value
        }

    def is_empty(self) -> bool:
        return not self.data


class LMKVPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of all engines of this process. No method raises: a failure only leaves out a metric."""

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
        """Unregister the metrics of an earlier engine in this process, as vLLM does with its own metrics."""
        registered, cls._registered = cls._registered, []
        for metric in registered:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(metric)

    def _begin(self, name: str) -> None:
        """Start a metric's series with known labels at 0. Otherwise Prometheus would miss the first increase of each
        series.
        """
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
                    logger.warning("lmkv: publishing %s failed; /metrics lacks this metric", name, exc_info=True)

    def _observe(self, name: str, engine: int, labels: tuple[str, ...], value: Any) -> None:
        series, kind = self._labelled(name, engine, labels), METRICS[name].kind
        if kind == "counter":
            series.inc(value)
        elif kind == "gauge":
            series.set(value)
        else:
            for observation in value:
                series.observe(observation)


def wants_kv_events(vllm_config: Any) -> bool:
    """Return whether vLLM publishes KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


@define
class BlockDescriber:
    """Describes a request's blocks by vLLM's hashes, and makes vLLM's KV events about these blocks.

    `block_sizes`, `kinds` and `groups` have one element for each block table that lmkv caches. `block_sizes`: number of
    tokens in a block. `kinds`: vLLM's name for the kind of attention. `groups`: the index of the KV cache group.
    `block_pool`: vLLM's block pool; None until vLLM has made the pool.
    """

    block_sizes: Sequence[int]
    kinds: Sequence[str]
    groups: Sequence[int]
    block_pool: Any = None

    @classmethod
    def of(cls, kv_cache_config: Any, block_map: BlockMap) -> BlockDescriber:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

        numbers = [group.table or 0 for group in block_map.groups]
        specs = [kv_cache_config.kv_cache_groups[number].kv_cache_spec for number in numbers]
        kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        return cls([group.block_size for group in block_map.groups], kinds, numbers)

    @property
    def all_cleared(self) -> bool:
        """Whether vLLM's queue of KV events has an event that all blocks are removed."""
        from vllm.distributed.kv_events import AllBlocksCleared

        return any(isinstance(event, AllBlocksCleared) for event in self.block_pool.kv_event_queue)

    def __call__(self, request: Any, group: int, start: int, end: int) -> Blocks | None:
        """Return the blocks of tokens `start` to `end - 1` in block table `group`. Return None if vLLM has not hashed
        all these blocks yet.
        """
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, resolve_block_hashes

        size, lora = self.block_sizes[group], request.lora_request
        # vLLM may hash smaller blocks than a group has.
        hashes = resolve_block_hashes(request.block_hashes, self.block_pool.hash_block_size, size)
        if len(hashes) * size < end:
            return None
        return Blocks(
            group=self.groups[group],
            block_size=size,
            hashes=tuple(map(maybe_convert_block_hash, hashes[start // size : end // size])),
            parent=maybe_convert_block_hash(hashes[start // size - 1]) if start else None,
            tokens=array("I", request.all_token_ids[start:end]),
            lora_id=None if lora is None else lora.adapter_id,
            lora_name=None if lora is None else lora.name,
            extra_keys=_extra_keys(request, size, start, end),
        )

    def as_vllm_events(self, events: Iterable[Event]) -> list[Any]:
        """Convert `events` to vLLM's `BlockStored` and `BlockRemoved`."""
        return [self._stored(event) if isinstance(event, BlocksStored) else _removed(event) for event in events]

    def _stored(self, event: BlocksStored) -> Any:
        from vllm.distributed.kv_events import BlockStored

        blocks = event.blocks
        return BlockStored(
            block_hashes=list(blocks.hashes),
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.tokens),
            block_size=blocks.block_size,
            lora_id=blocks.lora_id,
            lora_name=blocks.lora_name,
            extra_keys=list(blocks.extra_keys) or None,
            group_idx=blocks.group,
            kv_cache_spec_kind=self.kinds[self.groups.index(blocks.group)],
            **event.place._asdict(),
        )


def _removed(event: BlocksRemoved) -> Any:
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=list(event.hashes), group_idx=event.group, **event.place._asdict())


def _extra_keys(request: Any, size: int, start: int, end: int) -> tuple[tuple[Any, ...] | None, ...]:
    """Return for each block the extra keys that vLLM has hashed with it, such as images. Return () if no block has
    extra keys.
    """
    from vllm.v1.core import kv_cache_utils

    keys, image = [], 0
    for at in range(start, end, size):
        found, image = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + size, image)
        keys.append(found)
    # Newer versions hash each value with its kind, and publish it without.
    published = getattr(kv_cache_utils, "to_event_extra_keys", lambda tagged: tagged)
    return tuple(published(keys)) if any(keys) else ()
