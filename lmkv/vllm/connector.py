"""`LMKVConnector`: implements vLLM's interface of KV connectors with lmkv's scheduler side and worker side.

The scheduler side never waits for I/O and never raises into vLLM: if a lookup fails, vLLM computes the tokens. If a
load fails, the worker side reports the blocks or requests that vLLM must recompute.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from lmkv.config import Config
from lmkv.errors import UsageError
from lmkv.memory.copiers import check_device
from lmkv.memory.paged import block_rows
from lmkv.vllm import assemble, compat
from lmkv.vllm.assemble import start_agent
from lmkv.vllm.model import ServedModel, describe
from lmkv.vllm.plan import StepPlan, WorkerReport
from lmkv.vllm.publishing import BlockDescriber, LMKVPromMetrics, LMKVStats, wants_kv_events
from lmkv.vllm.scheduler import Scheduler
from lmkv.vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmkv.agent.server import AgentServer

compat.check_version(compat.vllm_version())
compat.adopt_logging()

logger = logging.getLogger("lmkv.vllm")


class LMKVConnectorMetadata(KVConnectorMetadata):
    """The plan of one step (`StepPlan`: which chunks to copy) in the form in which vLLM passes metadata to the
    workers.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class LMKVWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's report (`WorkerReport`: which copies have ended) in the form in which vLLM passes metadata to the
    scheduler.
    """

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, LMKVWorkerMetadata)
        return LMKVWorkerMetadata(self.report.merge(other.report))


class Sides(NamedTuple):
    """The scheduler side, the worker side and the served model of a connector. A connector has at most one of the two
    sides; the other is None.
    """

    scheduler: Scheduler | None
    worker: Worker | None
    model: ServedModel | None


_CONNECTORS: WeakValueDictionary[tuple[KVConnectorRole, int], LMKVConnector] = WeakValueDictionary()
"""The connectors in this process, by role and by the `id` of the model's configuration.

An engine may have only one of them: a second one in a MultiConnector would also return a report for `lmkv.report`, and
vLLM would fail.
"""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _never_raises(fallback: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Decorate a method so that it never raises. An exception is logged, and the method returns `fallback()`
    instead.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def guarded(self: LMKVConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("lmkv: %s failed; vLLM continues without lmkv's answer", method.__name__)
                return fallback()

        return cast(_Method, guarded)

    return decorate


class LMKVConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector for vLLM that offloads KV to host memory and lower tiers, and loads KV from them.

    A server uses the connector if its `--kv-transfer-config` has `"kv_connector": "LMKVConnector"`. vLLM then makes one
    instance in the scheduler's process, and one in each worker. A model that lmkv does not cache (see
    docs/compatibility.md) is served without lmkv, with one warning.

    Parameters
    ----------
    vllm_config : vllm.config.VllmConfig
        The engine's configuration. lmkv's own settings are read from the environment, the file that
        `LMKV_CONFIG_FILE` names, and `kv_transfer_config.kv_connector_extra_config`.
    role : KVConnectorRole
        The side of this instance: `SCHEDULER`, which has the index and the I/O threads, or `WORKER`, which copies.
    kv_cache_config : vllm.v1.kv_cache_interface.KVCacheConfig
        The KV cache groups and the number of blocks, in the layout that vLLM has chosen.

    Raises
    ------
    lmkv.errors.ConfigError
        A setting is unknown or has an invalid value, or host memory cannot hold one chunk.
    ImportError
        The installed vLLM is outside the supported range; raised by the import of the module.

    Notes
    -----
    Not thread-safe: vLLM calls the methods of each role from one thread. On the scheduler side no method waits for I/O
    or a copy. An unexpected exception is logged, and counts as a miss. If an exception prevents a load that vLLM
    already counts on, the load fails. vLLM then recomputes the tokens if `kv_load_failure_policy` is "recompute".
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = assemble.config_of(vllm_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._agent: AgentServer | None = None
        self._model: ServedModel | None = None
        self._layer_numbers: dict[str, int] = {}
        self._vllm_scheduler: Any | None = None
        self._describe_blocks: BlockDescriber | None = None
        try:
            self._place = role, id(vllm_config.model_config)
            if _CONNECTORS.setdefault(self._place, self) is not self:
                raise ValueError("this engine already has another LMKVConnector: configure only one")
            check_device(vllm_config.device_config.device_type)
            pipelined = role is KVConnectorRole.WORKER and vllm_config.parallel_config.pipeline_parallel_size > 1
            stage = compat.worker_ranks()[0] if pipelined else 0
            self._model = describe(vllm_config, kv_cache_config, config.chunk_size, stage)
        except (UsageError, ValueError) as error:
            logger.warning("lmkv: the KV of this model is not cached: %s", error)
            if role is KVConnectorRole.WORKER:
                # The scheduler side sees less of the model. If it caches the model, requests wait for the answers to
                # its tasks.
                one_table = len(kv_cache_config.kv_cache_groups) == 1
                self._worker = Worker(0, None, block_level_failures=one_table)
                self._worker.refuse(f"a worker cannot cache the model's KV: {error}")
            return
        if role is KVConnectorRole.SCHEDULER:
            assemble.warn(vllm_config, config, self._model)
            if wants_kv_events(vllm_config):
                self._describe_blocks = BlockDescriber.of(kv_cache_config, self._model.block_map)
            self._scheduler = assemble.make_scheduler(vllm_config, config, self._model, self._describe_blocks)
            try:
                self._agent = start_agent(config, vllm_config, self._scheduler, self._model)
            except BaseException:
                self._scheduler.close()
                raise
        else:
            self._worker = assemble.make_worker(vllm_config, config, self._model)
            layers = self._model.layers if config.use_layerwise else ()
            self._layer_numbers = {name: number for number, name in enumerate(layers)}

    @property
    def sides(self) -> Sides:
        """The side of this connector (the other side is None), and the served model."""
        return Sides(self._scheduler, self._worker, self._model)

    # -- before there is an instance ----------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether vLLM must split CUDA graphs at each layer. True with `use_layerwise`, because a graph of the
        whole model makes no calls to the connector between layers.
        """
        return Config.load(extra=extra_config).use_layerwise

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return "BLHNC", a KV layout in which all layers of a block are adjacent, if `block_major` is set and vLLM can
        use this layout. Otherwise, return None to let vLLM choose.
        """
        config = assemble.config_of(vllm_config)
        wanted = config.block_major and not config.use_layerwise and compat.may_be_block_major(vllm_config)
        return "BLHNC" if wanted and vllm_config.device_config.device_type == "cuda" else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LMKVStats:
        return LMKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> LMKVPromMetrics:
        return LMKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- both sides ---------------------------------------------------------------------------------------

    @_never_raises(lambda: None)
    def get_kv_connector_stats(self) -> LMKVStats | None:
        side = self._scheduler or self._worker
        values = {} if side is None else side.take_samples()
        return LMKVStats(values) if values else None

    # -- scheduler side -----------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Always False: a preempted request need not wait until its KV is stored."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            pool = gpu_block_pool
            self._scheduler.watch_blocks(pool.get_num_free_blocks, pool.evict_blocks, pool.num_gpu_blocks)
            self._vllm_scheduler = theirs = compat.calling_scheduler()
            if theirs is not None and self._model is not None and not self._model.block_map.one_full_table:
                self._scheduler.loads.on_failed_load = functools.partial(compat.recompute, theirs)
        if self._describe_blocks is not None:
            self._describe_blocks.block_pool = gpu_block_pool

    @_never_raises(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is None:
            return
        tables = blocks.get_block_ids()
        try:
            self._scheduler.update_state_after_alloc(request, tables, num_external_tokens)
        except Exception:
            # vLLM counts these tokens as computed by now: to return would serve blocks that nothing fills.
            logger.exception("lmkv: a load could not begin; vLLM counts the load as failed")
            if num_external_tokens > 0:
                self._scheduler.fail_load(request.request_id, tables, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return the number of loaded tokens by vLLM's `CacheHitSource` (host memory, disk or other), for vLLM's
        metrics.
        """
        counts = {} if self._scheduler is None else self._scheduler.hit_sources(request.request_id)
        return compat.hit_sources(counts, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return LMKVConnectorMetadata(StepPlan())
        self._republish()
        try:
            self._plan_stores(self._scheduler, scheduler_output)
        except Exception:
            logger.exception("lmkv: planning the copies of a step failed; lmkv cancels the waiting loads")
            # vLLM keeps a request that loads until the load is reported as ended.
            self._scheduler.loads.cancel()
        # Also after an error: vLLM counts on the loads that were promised.
        plan = self._scheduler.take_plan()
        if not (scheduler_output.total_num_scheduled_tokens or plan.loads):
            compat.yield_gil()
        return LMKVConnectorMetadata(plan)

    @_never_raises(lambda: None)
    def _republish(self) -> None:
        """Publish all of lmkv's chunks again if vLLM is about to publish that all blocks are removed, because lmkv
        still has its chunks.
        """
        if self._scheduler is not None and self._describe_blocks is not None and self._describe_blocks.all_cleared:
            self._scheduler.republish()

    def _plan_stores(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        tables = compat.block_tables(output, self._vllm_scheduler)
        computed, scheduled = compat.computed_tokens(output), output.total_num_scheduled_tokens
        mixed = self._model is not None and not self._model.block_map.one_full_table
        lost = compat.preempted(output), compat.written_early(output, every=mixed)
        scheduler.plan_step(computed, tables, scheduled, compat.state_offers(output), *lost)

    @_never_raises(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, LMKVWorkerMetadata):
            self._scheduler.on_report(meta.report)

    @_never_raises(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_never_raises(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Workers copy in the order of the steps, so that a later step's reuse of the blocks comes after it.
        return False, None if self._scheduler is None else self._scheduler.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    @_never_raises(lambda: False)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @_never_raises(list)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return vLLM's KV events for the chunks that tiers have gained and lost. Return nothing unless KV events are
        on.
        """
        if self._scheduler is None or self._describe_blocks is None:
            return []
        return self._describe_blocks.as_vllm_events(self._scheduler.take_events())

    # -- worker side --------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None or self._model is None:
            return
        model = self._model
        try:
            named = compat.tensors_by_layer(kv_caches, model.layers, model.num_blocks)
            rows = [block_rows(tensor, name) for name, tensor in named]
            self._worker.register(model.paged_memory(rows), model.parts(rows))
        except Exception as error:
            logger.exception("lmkv: a worker cannot use vLLM's KV tensors, so lmkv caches nothing")
            self._worker.refuse(f"a worker cannot use its KV tensors: {error}")

    def unregister_kv_caches(self) -> None:
        """Release lmkv's device memory before the engine sleeps (vLLM 0.33)."""
        if self._worker is not None:
            self._worker.suspend()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.resume()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, LMKVConnectorMetadata):
            self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        number = self._layer_numbers.get(layer_name)
        if self._worker is not None and number is not None:
            self._worker.wait_for_layer(number)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        number = self._layer_numbers.get(layer_name)
        if self._worker is not None and number is not None:
            self._worker.save_layer(number)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return `KVConnectorTransferResults` with the ended and failed loads, for vLLM 0.30 and later."""
        return compat.transfer_results(*self._finished())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return two sets for vLLM 0.29: an empty set, and the ids of requests with ended loads, including failed
        loads.
        """
        finished, _ = self._finished()
        return set(), finished

    def _finished(self) -> tuple[set[str], set[str]]:
        if self._worker is None:
            return set(), set()
        # Copies that have ended since the last step are reported with this one.
        self._worker.poll()
        return self._worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        report = self._worker.take_report()
        return None if report is None else LMKVWorkerMetadata(report)

    def shutdown(self) -> None:
        logger.debug("lmkv: shutting down in process %d", os.getpid())
        if _CONNECTORS.get(self._place) is self:
            del _CONNECTORS[self._place]
        if self._agent is not None:
            self._agent.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            # vLLM gives its own processes a few seconds to end.
            self._worker.close(process_ends=multiprocessing.parent_process() is not None)
