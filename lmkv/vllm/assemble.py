"""Builds the two sides of the connector from vLLM's configuration and lmkv's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from lmkv.build import build_store
from lmkv.config import Config
from lmkv.memory.slab import slab_name
from lmkv.vllm import compat, kv_events
from lmkv.vllm.loaded import Loaded
from lmkv.vllm.model import ServedModel
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.scheduler.events import EventRecorder
from lmkv.vllm.scheduler.scheduler import Scheduler
from lmkv.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("lmkv.vllm")


def config_of(vllm_config: VllmConfig) -> Config:
    """lmkv's settings from the environment, its file, and `kv_connector_extra_config`."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return Config.load(extra=transfer.kv_connector_extra_config)


def warn(vllm_config: VllmConfig, config: Config, model: ServedModel) -> None:
    """Warn about settings with unexpected effects."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "lmkv: kv_load_failure_policy is %r: a request whose KV cannot be loaded fails; set it to 'recompute'",
            transfer.kv_load_failure_policy,
        )
    if config.audit_rate and compat.draft_lookahead(vllm_config):
        logger.warning("lmkv: only loads are audited: the KV of draft layers differs between equal chunks")
    elif config.audit_rate and not all(model.numbers):
        logger.warning("lmkv: only loads are audited of layers whose KV has scales between its numbers")
    if model.block_map.states:
        size = model.block_map.chunk_size
        logger.info("lmkv: with recurrent layers a chunk is vLLM's block of %d tokens, whatever chunk_size says", size)
    elif model.block_map.chunk_size != config.chunk_size:
        sizes = config.chunk_size, model.block_map.chunk_size
        logger.warning("lmkv: chunk_size %d is not a multiple of vLLM's block size, using %d", *sizes)


def make_scheduler(
    vllm_config: VllmConfig, config: Config, model: ServedModel, describe_blocks: kv_events.BlockDescriber | None
) -> Scheduler:
    """The scheduler side, with a store of its own. `describe_blocks`: for KV events; None, vLLM publishes none."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    has_device = vllm_config.device_config.device_type != "cpu"
    layerwise = _is_layerwise(vllm_config, config)
    options = SchedulerOptions.of(
        config,
        ranks=model.ranks.total,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        save_decode=config.save_decode_cache,
        # A recurrent layer has no state within a block.
        save_unfull_chunk=config.save_unfull_chunk and not model.block_map.states,
        whole_blocks=layerwise and model.block_map.one_full_table,
        load_mode=_load_mode(vllm_config, config),
        concurrent_copies=has_device,
        lookahead=compat.draft_lookahead(vllm_config),
        longest=vllm_config.model_config.max_model_len,
    )
    engines = vllm_config.parallel_config.data_parallel_size_local
    name = slab_name(str(transfer.engine_id), model.layout)
    store = build_store(config, model.namespace, model.layout, engine=name, engines=engines)
    try:
        events = None if describe_blocks is None else EventRecorder(store, model.block_map, describe_blocks)
        loaded = Loaded(compat.calling_core())
        scheduler = Scheduler(store, model.namespace, model.block_map, options, events, loaded, loaded.adapter)
        loaded.watch(scheduler)
        scheduler.matcher.stop_at = compat.stop_at
    except BaseException:
        store.close()
        raise
    return scheduler


def _load_mode(vllm_config: VllmConfig, config: Config) -> Literal["auto", "sync", "async"]:
    if not compat.recomputes_within_step(vllm_config):
        return "async"
    layerwise = config.load_mode == "auto" and _is_layerwise(vllm_config, config)
    return "sync" if layerwise else config.load_mode


def _is_layerwise(vllm_config: VllmConfig, config: Config) -> bool:
    """Whether the scheduler side expects copies by layers. A worker may still copy whole steps."""
    return config.use_layerwise and not compat.no_layerwise(vllm_config)


def make_worker(vllm_config: VllmConfig, config: Config, model: ServedModel) -> Worker:
    """The worker side of this process's rank."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    single = model.block_map.one_full_table
    shard, replica = model.ranks.place(*compat.worker_ranks()) if model.ranks.total > 1 else (0, 0)
    obstacle = compat.no_layerwise(vllm_config, model.layers) if config.use_layerwise else ""
    if obstacle:
        logger.warning("lmkv: use_layerwise is off: %s", obstacle)
    return Worker(
        shard,
        model.layout,
        (replica, model.ranks.replicas),
        block_level_failures=single,
        # With several block tables, or with windows, all loads are between steps.
        layerwise=config.use_layerwise and single and not obstacle,
        engine=slab_name(str(transfer.engine_id), model.layout),
        staging_bytes=config.device_staging_bytes,
    )
