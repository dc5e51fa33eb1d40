"""Decides which models and requests lmkv caches, and reads a request's `kv_transfer_params` and `agent_hint`."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from attrs import define, field

from lmkv.errors import short_repr

_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")
"""Kinds of KV cache whose blocks hold only the KV of a prefix's tokens, in the order of the tokens."""

_NOT_BATCH_INVARIANT = ("FLASHINFER", "TRITON_MLA")
"""Attention backends with which vLLM caches no prefixes if it must be batch-invariant."""

STATES_WITH_DRAFTS_ON_V1 = False
"""Whether lmkv caches recurrent layers with drafts on the V1 runner. Tests set this value.

If a request is preempted a few generated tokens after a block boundary, vLLM 0.32's V1 runner continues from a wrong
state, even without lmkv. lmkv would store the wrong states that follow. The V2 runner continues from the right state.
"""
_DEFAULT_TTL = 300.0
_MAX_PRIORITY = 9
_MAX_EDITS = 64
_MAX_SESSION = 1024
"""Largest number of edits in an `agent_hint`, and largest number of characters in a session id."""
MAX_TOKENS: Final = 1 << 20
"""Length of the longest prompt in tokens, if the server does not say how long prompts may be."""
MAX_TAGS: Final = 64
MAX_TAG_CHARACTERS: Final = 4096
"""Largest number of tags of a request, and largest number of characters in all their names and values together."""
_MAX_KEYS: Final = 256
_MAX_NUMBER: Final = 1 << 32
_TAGS: Final = ("lmkv.tag.", "lmcache.tag.")
_OPTIONS: Final = {
    *(
        f"lmkv.{name}"
        for name in ("skip_save", "skip_load", "report", "prefetch", "prefetch_tokens", "pin", "wait_for")
    ),
    *(f"lmcache.{name}" for name in ("skip_save", "skip_load", "max_offload_tokens", "token_drop")),
}
_MAX_SAID: Final = 20
"""Largest number of different unknown options to log."""
_NUMBERS: Final = (int, float, bool, type(None))


def check_model(vllm_config: Any) -> None:
    """Raise ValueError if vLLM cannot cache prefixes of this model or cannot split its prefill. The message says
    why.
    """
    from vllm import envs

    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not (model.is_prefix_caching_supported and model.is_chunked_prefill_supported):
        pooler = getattr(model, "pooler_config", None)
        kinds = [str(getattr(pooler, name, None)) for name in ("seq_pooling_type", "tok_pooling_type")]
        pooling = f" with {'/'.join(kinds)} pooling" if pooler is not None else ""
        raise ValueError(f"vLLM computes each prompt in one step for a model of type {model.attn_type!r}{pooling}")
    if getattr(model, "rswa_window", None) is not None:
        raise ValueError("the KV of a generated token depends on where the prompt ended (rswa_window)")
    if returns_routed_experts(vllm_config):
        raise ValueError(
            "--enable-return-routed-experts must return experts, which loaded tokens do not have: leave out this option"
        )
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    named = getattr(backend, "name", None)
    if envs.VLLM_BATCH_INVARIANT and (named in _NOT_BATCH_INVARIANT or (named is None and model.use_mla)):
        raise ValueError(
            f"vLLM caches no prefix with VLLM_BATCH_INVARIANT and the attention backend {named or 'of MLA models'}: "
            "unset the variable, or choose another backend"
        )
    if getattr(envs, "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", ""):
        raise ValueError("VLLM_MOE_ROUTING_SIMULATION_STRATEGY routes tokens to experts at random: unset it")
    if getattr(model, "is_diffusion", False):
        raise ValueError("KV of a diffusion model changes each time that vLLM computes a token again")
    if getattr(model, "is_mm_prefix_lm", False) and not vllm_config.scheduler_config.disable_chunked_mm_input:
        raise ValueError("the tokens of an image attend to each other: set --disable-chunked-mm-input")
    encoders = getattr(vllm_config, "ec_transfer_config", None)
    if encoders is not None and encoders.is_ec_consumer:
        raise ValueError("embeddings come from another engine (--ec-transfer-config), whose weights are unknown")
    if platform.machine().startswith("riscv") and not cache.enable_prefix_caching:
        raise ValueError("vLLM caches no prefix on RISC-V")


def returns_routed_experts(vllm_config: Any) -> bool:
    """Return whether responses include the experts of each prompt token. lmkv does not cache such a model, because lmkv
    does not store experts.
    """
    places = (vllm_config.model_config, getattr(vllm_config, "aux_output_config", None))
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def check_parallel(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError with the reason if lmkv does not support the parallel configuration, such as ranks on several
    machines.
    """
    parallel, speculative = vllm_config.parallel_config, getattr(vllm_config, "speculative_config", None)
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ValueError(
            "each rank runs its own engine (external_launcher), which does not see the copies of other ranks"
        )
    # Ray chooses machines later: a rank that cannot map the slab says so.
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ValueError(
            "the ranks of an engine are on several machines and cannot share host memory: keep them on one machine; "
            "engines on several machines share KV through remote_url"
        )
    if parallel.pipeline_parallel_size > 1:
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("pipeline parallel ranks of a model with several block tables are not supported yet")
        if speculative is not None and has_draft_layers(speculative):
            raise ValueError("a draft model with pipeline parallel ranks is not supported yet")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        spread = getattr(parallel, name, 1) > 1
        if spread and not all(hasattr(group.kv_cache_spec, "dcp_sharded") for group in kv_cache_config.kv_cache_groups):
            raise ValueError(f"{name} > 1 needs vLLM 0.32 or later: install such a vLLM, or set {name} to 1")


def has_draft_layers(speculative: Any) -> bool:
    """Return whether draft tokens come from layers with separate KV. False if they come from earlier tokens alone, as
    with ngram.
    """
    return speculative.method not in ("ngram", "ngram_gpu", "suffix")


def is_scratch(group: Any) -> bool:
    """Return whether a KV cache group cannot be cached, because vLLM computes the content of its blocks anew after
    every hit.
    """
    return not getattr(group.kv_cache_spec, "prefix_cacheable", True)


def is_replayed(group: Any) -> bool:
    """Return whether a KV cache group makes vLLM recompute the last tokens of each hit."""
    return getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) > 0


def check_group(group: Any) -> None:
    """Raise ValueError with the layers' names if lmkv cannot copy the blocks of a KV cache group, because vLLM keeps
    them in host memory or excludes them from transfers.
    """
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise ValueError(f"vLLM keeps the blocks of {', '.join(group.layer_names)} outside its block tables")


def is_state(spec: Any) -> bool:
    """Return whether layers keep a recurrent state instead of KV per token, as Mamba, gated delta nets and short
    convolutions do.
    """
    return type(spec).__name__ == "MambaSpec"


def has_runner_v2(vllm_config: Any) -> bool:
    """Return whether vLLM uses its Model Runner V2."""
    return getattr(vllm_config, "use_v2_model_runner", False)


def check_states(vllm_config: Any, recurrent: Sequence[bool], *, replayed: bool) -> None:
    """Raise ValueError with the reason if lmkv cannot store and load the states of recurrent layers.

    `recurrent`: for each cached KV cache group, whether its layers are recurrent. `replayed`: whether vLLM recomputes
    the last tokens of each hit (see `is_replayed`).
    """
    from vllm.v1.core.sched.output import KVConnectorBlockState

    if not any(recurrent):
        return
    if replayed:
        raise ValueError("for this model vLLM recomputes a hit's end, but a recurrent layer's state cannot go back")
    if all(recurrent):
        raise ValueError("lmkv does not support a model that has only recurrent layers")
    mode = getattr(vllm_config.cache_config, "mamba_cache_mode", "none")
    if mode != "align":
        raise ValueError(
            f"vLLM keeps no states at the ends of blocks (mamba_cache_mode {mode!r}): start vLLM with "
            "--enable-prefix-caching"
        )
    if "boundary_state_offloads" not in getattr(KVConnectorBlockState, "__annotations__", {}):
        raise ValueError("this vLLM does not say which blocks have a recurrent layer's state; use vLLM 0.32 or later")
    parallel = vllm_config.parallel_config
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    if spread := [name for name in sizes if getattr(parallel, name, 1) > 1]:
        raise ValueError(f"recurrent layers with {' and '.join(spread)} > 1 are not supported yet")
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ValueError("with --use-replayssm a block does not contain the whole state: leave out --use-replayssm")
    drafted = getattr(vllm_config, "speculative_config", None) is not None
    if drafted and not (STATES_WITH_DRAFTS_ON_V1 or has_runner_v2(vllm_config)):
        raise ValueError(
            "with speculative decoding vLLM's V1 runner may continue from a wrong state: set VLLM_USE_V2_MODEL_RUNNER=1"
        )


def check_spec(spec: Any) -> None:
    """Raise ValueError with the reason if lmkv cannot cache layers with this KV cache specification, because their KV
    depends on more than the tokens of a prefix.
    """
    kind = type(spec).__name__
    if (kind not in _KINDS and not is_state(spec)) or not getattr(spec, "prefix_cacheable", True):
        raise ValueError(f"the KV of {kind} layers depends on more than a prefix's tokens")
    if getattr(spec, "non_causal", False):
        raise ValueError("tokens of a prompt attend to later tokens, so a prefix's KV depends on later tokens")


def has_tokens(request: Any) -> bool:
    """Return whether the request's prompt has token ids. False for a prompt of embeddings."""
    return getattr(request, "prompt_embeds", None) is None


def must_be_computed(request: Any) -> bool:
    """Return whether vLLM must compute every prompt token, for log probabilities or an embedding per token."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


@define
class AgentHint:
    """The fields of an `agent_hint` that lmkv supports.

    `ttl`: seconds after the request's end during which its chunks are evicted last. `prefetch`: whether to load the
    prompt's chunks from lower tiers into host memory. `session`: the session's id. `ended`: whether the session ends
    with this request (`session_ended`, or an edit of type `evict`). Chunks that no other session shares are then
    evicted first. `priority`: if above 0, the request's chunks are evicted last. `waits`: expected seconds until the
    session's next request, for example while a tool runs; until then, the request's chunks are evicted last.

    lmkv ignores all other fields, lists of more than 64 edits, and session ids of more than 1,024 characters.
    """

    ttl: float = 0.0
    prefetch: bool = False
    session: str = ""
    ended: bool = False
    priority: int = 0
    waits: float = 0.0

    @classmethod
    def of(cls, value: object) -> Self:
        """Read the hint from a mapping, or from an object with the same fields."""
        control = _field(value, "cache_control")
        ttl = _field(control, "ttl") if control is not None else None
        edits = _field(_field(value, "context_management"), "edits")
        edits = edits if isinstance(edits, list | tuple) and len(edits) <= _MAX_EDITS else ()
        kinds = [_field(edit, "type") for edit in edits]
        session, priority = _field(value, "session_id"), _field(value, "priority")
        return cls(
            session=session if isinstance(session, str) and len(session) <= _MAX_SESSION else "",
            ended="evict" in kinds or _field(value, "session_ended") is True,
            priority=max(0, min(priority, _MAX_PRIORITY)) if type(priority) is int else 0,
            waits=seconds(_field(value, "waits_seconds")),
            ttl=seconds(_DEFAULT_TTL if control is not None and ttl is None else ttl),
            prefetch="prefetch" in kinds,
        )


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 86_400 else 0.0


@define
class RequestOptions:
    """The options of a request in its `kv_transfer_params`, under keys with the prefix `lmkv.` or `lmcache.`.

    `skip_save`, `skip_load`: whether to store nothing, and whether to load nothing. `report`: whether the response
    includes a report about the load. `prefetch`: whether to promote this prompt's chunks and keep them in host memory
    for a while. `prefetch_tokens`: token ids of another prompt to prefetch. `pin`: seconds for which the request's
    chunks are pinned after the request's end. `tag.<name>`: a text, a number, a boolean or null; only requests with
    equal tags share KV. `wait_for`: how many of the prompt's first tokens the request waits for, because another server
    is storing their KV.

    A request is not cached if a tag has another type, tags are too many or too long, or there are more than 256 keys.
    If lmkv ignored a tag, requests with different tags could share KV. A request with `lmcache.token_drop` is not
    cached either.

    lmkv also reads four options without a prefix, which vLLM defines. `max_load_tokens`: largest number of tokens to
    load after vLLM's own hit. `max_offload_tokens`: how many of the first tokens may be stored. `agent_hint` (RFC
    52113): see `AgentHint`. `do_remote_decode`: whether another server will decode. A prefill server (`kv_producer`)
    then returns the value of `wait_for` for that server.
    """

    skip_save: bool = False
    skip_load: bool = False
    report: bool = False
    prefetch: bool = False
    prefetch_tokens: tuple[int, ...] = ()
    pin_seconds: float = 0.0
    hint: AgentHint = field(factory=AgentHint)
    wait_for: int = 0
    max_load_tokens: int | None = None
    max_offload_tokens: int | None = None
    remote_decode: bool = False
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, request: Any, longest: int = MAX_TOKENS) -> Self:
        """Read the options of a vLLM request. `longest`: length of the longest prompt in tokens; longer
        `prefetch_tokens` are ignored.
        """
        params = getattr(request, "kv_transfer_params", None)
        params = params if isinstance(params, Mapping) else {}
        tags = _tags(params)
        _name_unknown(params)
        if params.get("lmcache.token_drop"):
            _say_that_none_is_dropped()
            tags = None
        if tags is None:
            return cls(skip_save=True, skip_load=True, report=_is_true(params.get("lmkv.report")))
        nameless, whole = not has_tokens(request), must_be_computed(request)
        hint = AgentHint.of(getattr(request, "agent_hint", None) or params.get("agent_hint"))
        return cls(
            skip_save=nameless or any(map(_is_true, map(params.get, ("lmkv.skip_save", "lmcache.skip_save")))),
            skip_load=nameless or whole or any(map(_is_true, map(params.get, ("lmkv.skip_load", "lmcache.skip_load")))),
            report=_is_true(params.get("lmkv.report")),
            prefetch=_is_true(params.get("lmkv.prefetch")) or hint.prefetch,
            prefetch_tokens=_token_ids(params.get("lmkv.prefetch_tokens"), longest),
            pin_seconds=seconds(params.get("lmkv.pin")),
            hint=hint,
            wait_for=_tokens(params.get("lmkv.wait_for")),
            max_load_tokens=_limit(params.get("max_load_tokens")),
            max_offload_tokens=_limit(params.get("max_offload_tokens", params.get("lmcache.max_offload_tokens"))),
            remote_decode=_is_true(params.get("do_remote_decode")),
            tags=tags,
        )


def _name_unknown(params: Mapping[Any, Any]) -> None:
    """Log each unknown option once."""
    for key in params if len(params) <= _MAX_KEYS else ():
        unknown = isinstance(key, str) and key.startswith(("lmkv.", "lmcache.")) and key not in _OPTIONS
        if unknown and not key.startswith(_TAGS) and key not in _said and len(_said) < _MAX_SAID:
            _said.add(key)
            said = "lmkv: a request has the unknown option %s; lmkv ignores this option"
            logging.getLogger(__name__).warning(said, short_repr(key))


_said: Final[set[str]] = set()


@functools.cache
def _say_that_none_is_dropped() -> None:
    logging.getLogger(__name__).warning(
        "lmkv: lmcache.token_drop is not supported; requests with this option are neither stored nor loaded"
    )


def _tags(params: Mapping[Any, Any]) -> tuple[tuple[str, str], ...] | None:
    """Return the tags as pairs (name, value). Return None if a value has a wrong type, or if tags are too many or too
    long.
    """
    if len(params) > _MAX_KEYS:
        return None
    found, room = dict[str, str](), MAX_TAG_CHARACTERS
    for key, value in params.items():
        if isinstance(key, str) and key.startswith(_TAGS):
            name, text = key.partition(".tag.")[2], _text(value)
            if text is None or (room := room - len(name) - len(text)) < 0 or found.setdefault(name, text) != text:
                return None
    return tuple(sorted(found.items())) if len(found) <= MAX_TAGS else None


def _text(value: object) -> str | None:
    """Return a tag's value as text. Return None if the value is too large, or no text, number, boolean or null."""
    if isinstance(value, str):
        return str.__str__(value)
    small = type(value) is not int or value.bit_length() <= MAX_TAG_CHARACTERS
    return repr(value) if type(value) in _NUMBERS and small else None


def _is_true(value: object) -> bool:
    return (
        value is True
        or (type(value) is int and value == 1)
        or (isinstance(value, str) and len(value) <= 4 and value.lower() in ("1", "true", "yes", "on"))
    )


def _token_ids(value: object, longest: int) -> tuple[int, ...]:
    """Return the token ids of a list. Return () for anything else, because a client's mistake must not fail the
    request.
    """
    if not isinstance(value, list | tuple) or len(value) > longest:
        return ()
    valid = all(isinstance(token, int) and 0 <= token < _MAX_NUMBER for token in value)
    return tuple(value) if valid else ()


def _tokens(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < _MAX_NUMBER else 0


def _limit(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_NUMBER else None
