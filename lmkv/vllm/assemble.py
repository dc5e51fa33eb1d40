"""Builds the connector's scheduler side, worker side and agent API from the configurations of vLLM and lmkv."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lmkv.backends import disk
from lmkv.backends.disk import folder
from lmkv.build import stored_namespace
from lmkv.config import Config, server_warnings
from lmkv.errors import BackendError, ConfigError, UsageError, how_to_install
from lmkv.vllm import compat
from lmkv.vllm.model import ServedModel
from lmkv.vllm.publishing import BlockDescriber
from lmkv.vllm.scheduler import Scheduler

if TYPE_CHECKING:
    from lmkv.agent.server import AgentServer
from typing import TYPE_CHECKING, Literal

from lmkv.build import build_store
from lmkv.memory.slab import slab_name
from lmkv.vllm.loaded import LoadedModel
from lmkv.vllm.scheduler.context import SchedulerOptions
from lmkv.vllm.scheduler.events import EventRecorder
from lmkv.vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("lmkv.vllm")
_FOR_TEMPLATES = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
"""Arguments of `apply_chat_template` that a request may set. All other arguments affect tokenization, which vLLM
decides.
"""


def tokenizer(vllm_config: Any) -> Callable[[Any, Mapping[str, Any]], list[int]]:
    """Return a function that tokenizes a text or a chat as vLLM does. The first call of the returned function loads the
    tokenizer.
    """

    def tokenize(prompt: Any, template: Mapping[str, Any]) -> list[int]:
        from vllm.tokenizers import cached_tokenizer_from_config

        found: Any = cached_tokenizer_from_config(vllm_config.model_config)
        if found is None:
            raise UsageError("this engine has no tokenizer (skip_tokenizer_init): send token ids, not text")
        if isinstance(prompt, str):
            return list(found.encode(prompt))
        if theirs := sorted(_of_the_tokenizer(found) & template.keys()):
            raise UsageError(f"chat_template_kwargs cannot have {', '.join(theirs)}: vLLM sets these arguments")
        given = {**template, "tokenize": True, "return_dict": False}
        if template.get("tools"):
            given["tools"] = _tools(template["tools"])
        return list(found.apply_chat_template([_message(each) for each in prompt], **given))

    return tokenize


def _of_the_tokenizer(tokenizer: Any) -> set[str]:
    """Return the arguments of `apply_chat_template` that a request must not set, because they affect tokenization."""
    from transformers import PreTrainedTokenizerBase

    # A tokenizer's own method may pass on arguments that it does not name.
    methods = (PreTrainedTokenizerBase.apply_chat_template, type(tokenizer).apply_chat_template)
    return {name for each in methods for name in inspect.signature(each).parameters} - _FOR_TEMPLATES


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as vLLM passes them to a chat template, with the same order of fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    return [ChatCompletionToolsParam(**each).model_dump() for each in given]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to a chat template: with a text as content, and tool calls with parsed
    arguments.
    """
    message = {**given, "content": given.get("content") or ""}
    calls = message.pop("tool_calls", None) or []
    return {**message, "tool_calls": [_call(each) for each in calls]} if calls else message


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    arguments = given["function"].get("arguments")
    with suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**given, "function": {**given["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def start_agent(config: Config, vllm_config: Any, scheduler: Scheduler, model: ServedModel) -> AgentServer | None:
    """Start the agent API (lmkv's HTTP API) and return its server. Return None if `agent_listen` is not set.

    If the API cannot listen at the address `agent_listen`, log an error and return None. Raises ConfigError unless the
    address is a loopback port or a unix socket.
    """
    if config.agent_listen is None:
        return None
    try:
        from lmkv.agent.http import application
        from lmkv.agent.peers import Peers
        from lmkv.agent.server import Address, AgentServer
        from lmkv.agent.service import CacheService
    except ImportError as error:
        raise ConfigError(f"agent_listen needs fastapi and uvicorn: {how_to_install('agent')} ({error})") from error
    stored = stored_namespace(model.namespace, config.authentication_bytes)
    longest = vllm_config.model_config.max_model_len

    evictions = scheduler.observer.explainer.evictions

    def clear_own() -> int:
        count = scheduler.store.clear()
        evictions.forget()
        return count

    service = CacheService(
        scheduler.store,
        scheduler.keys_of,
        tokenizer(vllm_config),
        chunk_size=model.block_map.chunk_size,
        pin_ttl=config.pin_ttl,
        root_of=scheduler.root_of,
        requests=scheduler.observer.recent.snapshot,
        clear_namespace=partial(clear_namespace, clear_own, stored.digest, config.local_disk),
        deleted=evictions.forget,
        states=model.block_map.states,
        longest=longest,
        trace=scheduler.observer.recorder.since,
        loads_off=lambda: scheduler.audit.loads_off,
        value=lambda: scheduler.observer.value.report(scheduler.timing.cost.prefill_speed),
    )
    # Read once, because its file may be a pipe.
    token = config.token
    first, number = Address(config.agent_listen), compat.local_engine(vllm_config)
    address = first.of_engine(number)
    inside = first.private if first.is_known else None
    peers = Peers(number, inside and (lambda other: first.private(other).url), token)
    try:
        server = AgentServer(
            lambda: application(service, token, peers, longest, about(vllm_config)),
            address,
            inside and partial(inside, number),
        )
    except (OSError, RuntimeError) as error:
        # RuntimeError: there is no thread left.
        logger.error("lmkv: the agent API cannot listen at %s: %s; lmkv runs without this API", address.text, error)
        return None
    logger.info("lmkv: the agent API is at %s", server.url)
    return server


def about(vllm_config: Any) -> dict[str, str]:
    """Return the model's name and the versions of vLLM and lmkv, for clients of the agent API."""
    names = vllm_config.model_config.served_model_name or vllm_config.model_config.model
    found = {"model": str(names if isinstance(names, str) else names[0]), "vllm": compat.vllm_version()}
    with suppress(PackageNotFoundError):
        found["lmkv"] = version("lmkv")
    return found


def clear_namespace(clear_own: Callable[[], int], own: bytes, root: str | None, beginning: str) -> int:
    """Delete all chunks of one namespace, and return the number of deleted chunks.

    `beginning`: the first hexadecimal digits of the digest of the namespace to delete. `own`: the digest of this
    engine's namespace, which `clear_own()` deletes. `root`: the disk tier's folder, which may also have other
    namespaces; None without a disk tier.
    """
    try:
        found = {own, *(folder.digests(root) if root else ())}
    except OSError as error:
        raise BackendError("disk", "listing the namespaces", reason=str(error)) from error
    matching = [digest for digest in found if digest.hex().startswith(beginning.lower())]
    match matching:
        case [digest] if digest == own:
            return clear_own()
        case [digest] if root:
            return disk.clear_namespace(root, digest)
    raise UsageError(
        f"the digits {beginning} must match exactly one namespace, and match {len(matching)}: lmkv inspect FOLDER "
        "lists all namespaces"
    )


def config_of(vllm_config: VllmConfig) -> Config:
    """Return lmkv's settings from the environment, the settings file, and `kv_connector_extra_config`."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    # Of a latent that all tensor ranks have alike, LMCache keeps the first rank's alone.
    ranks = parallel.pipeline_parallel_size if model is not None and model.use_mla else parallel.world_size
    return Config.load(extra=transfer.kv_connector_extra_config, ranks=ranks)


def warn(vllm_config: VllmConfig, config: Config, model: ServedModel) -> None:
    """Log a warning about each setting that has no effect, that lmkv changes, or that lets requests fail."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "lmkv: kv_load_failure_policy is %r: a request fails if its load fails; set the policy to 'recompute'",
            transfer.kv_load_failure_policy,
        )
    for doubt in server_warnings(config, str(transfer.kv_role), vllm_config.model_config.max_model_len):
        logger.warning("lmkv: %s", doubt)
    if config.audit_rate and compat.draft_lookahead(vllm_config):
        logger.warning("lmkv: audit_rate audits loads only: draft layers compute different KV for equal tokens")
    elif config.audit_rate and not all(model.numbers):
        logger.warning("lmkv: audit_rate audits loads only: audits cannot compare a KV cache that has scales")
    if model.block_map.states:
        size = model.block_map.chunk_size
        logger.info(
            "lmkv: the model has recurrent layers, so lmkv ignores chunk_size: a chunk is a block of %d tokens", size
        )
    elif model.block_map.chunk_size != config.chunk_size:
        sizes = config.chunk_size, model.block_map.chunk_size
        logger.warning("lmkv: chunk_size %d is not a multiple of vLLM's block size; lmkv uses %d", *sizes)


def make_scheduler(
    vllm_config: VllmConfig, config: Config, model: ServedModel, describe_blocks: BlockDescriber | None
) -> Scheduler:
    """Make the scheduler side and its store. `describe_blocks`: a function that describes blocks for KV events, or None
    if vLLM publishes no events.
    """
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
        loaded = LoadedModel(compat.calling_core())
        scheduler = Scheduler(store, model.namespace, model.block_map, options, events, loaded, loaded.adapter)
        loaded.watch(scheduler.changes)
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
    """Return whether the scheduler side expects workers to copy layer by layer. A worker may still copy all layers at
    once.
    """
    return config.use_layerwise and not compat.no_layerwise(vllm_config)


def make_worker(vllm_config: VllmConfig, config: Config, model: ServedModel) -> Worker:
    """Make the worker side for the rank of this process."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    single = model.block_map.one_full_table
    shard, replica = model.ranks.place(*compat.worker_ranks()) if model.ranks.total > 1 else (0, 0)
    obstacle = compat.no_layerwise(vllm_config, model.layers) if config.use_layerwise else ""
    if obstacle:
        logger.warning("lmkv: use_layerwise has no effect: %s", obstacle)
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
