"""Computes the identity of the model in the workers, from weights, constants of layers, configuration and code.

The process of vLLM's engine core asks the workers for this identity, at the start and after calls that may change the
model. lmkv does not read the weight files, because their content may have changed since vLLM loaded the weights.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from lmkv.errors import printable, safe_repr
from lmkv.memory.comparison import factors
from lmkv.vllm import code
from lmkv.vllm.code import as_json
from lmkv.vllm.model import config_digest, source_of
from lmkv.vllm.plan.identity import Adapter, folder_of, stamps
from lmkv.vllm.scheduler.changes import WeightChanges

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("lmkv.vllm")

ByLayer = WeakKeyDictionary["nn.Module", dict[str, str]]

_constants_of: ByLayer = WeakKeyDictionary()
"""For each layer, its constants and code when vLLM built it, updated after calls that change constants. Constants that
change while the model computes do not count.
"""
_before_call: ByLayer = WeakKeyDictionary()
_emptied: ByLayer = WeakKeyDictionary()
"""Digests, by layer and name, of parameters whose content vLLM has moved into another form and then emptied or
deleted.
"""

KEEPS_WEIGHTS = frozenset({
    *("check_health", "compute_weight_checksums", "get_model_inspection", "get_kv_cache_spec", "list_loras"),
    *("profile", "save_sharded_state", "save_tensorized_model", "synchronize_device", "reset_mm_cache"),
    *("reset_encoder_cache", "get_node_and_gpu_ids", "determine_available_memory", "execute_dummy_batch"),
    *("get_encoder_timing_stats", "shutdown_weight_transfer_engine"),
})  # fmt: skip
"""Worker methods of vLLM that do not change weights, so that lmkv need not check the weights after a call."""


# -- in a worker ------------------------------------------------------------------------------------------------------


@functools.cache
def watch_packing() -> None:
    """Patch `torch.nn.Module` to record the digest of each parameter that is about to be emptied or deleted.
    Idempotent.

    The model's identity needs these digests: vLLM's CPU build empties the weights of a linear layer when it passes them
    to oneDNN.
    """
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    register_module_parameter_registration_hook(_registered)
    # torch calls no hook where a parameter becomes None or is deleted.
    register, delete = nn.Module.register_parameter, nn.Module.__delattr__

    @functools.wraps(register)
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None:
            _registered(module, name, None)
        register(module, name, param)

    @functools.wraps(delete)
    def delattr_(module: nn.Module, name: str) -> None:
        _registered(module, name, None)
        delete(module, name)

    for name, function in (("register_parameter", register_parameter), ("__delattr__", delattr_)):
        setattr(nn.Module, name, function)


def _registered(module: nn.Module, name: str, new: Any) -> None:
    """Record the digest of a parameter that a module empties or deletes. Never raises, because every module in this
    process calls this function.
    """
    with suppress(Exception):
        # Parameters without a size yet raise here.
        if new is not None and new.numel():
            return
        old = module._parameters.get(name)
        if old is None:
            # It has been empty from the beginning.
            if new is not None:
                _emptied.setdefault(module, {}).setdefault(name, "")
        elif old.numel() and not old.is_meta:
            _emptied.setdefault(module, {}).pop(name, None)
            _emptied[module][name] = _digest(old)


def identity(worker: Any) -> str:
    """Return the identity of a worker's model, a digest. If the identity is unknown, log a warning and return "". Never
    raises.
    """
    try:
        runner = worker.model_runner
        if getattr(runner, "lora_manager", None) is not None:
            _watch_adapters(runner.lora_manager)
        return _identity(worker.vllm_config, _layers(runner), (worker, runner))
    except Exception as error:
        logger.warning("lmkv: a worker cannot identify its weights, so lmkv caches nothing: %r", error)
        return ""


def note_constants(worker: Any) -> None:
    """Record the constants of all layers (numbers outside tensors) before a call that may change constants."""
    _before_call.update((layer, _changeable(layer)) for _, layer in _layers(worker.model_runner))


def fold_constants(worker: Any) -> None:
    """Compare the layers' constants with those that `note_constants` recorded. Add the changed constants to the
    identity.
    """
    for _, layer in _layers(worker.model_runner):
        before = _before_call.pop(layer, None)
        if before is None:
            # The engine slept: take its layers' present constants.
            _constants_of.pop(layer, None)
            continue
        after = _changeable(layer)
        changed = {name: after.get(name, "") for name in before.keys() | after if before.get(name) != after.get(name)}
        if layer in _constants_of:
            _constants_of[layer].update(changed)


def _changeable(layer: nn.Module) -> dict[str, str]:
    """Return a layer's constants, and digests of its stacked LoRA weights."""
    stacked = {name: getattr(layer, name, ()) for name in ("lora_a_stacked", "lora_b_stacked")}
    return _constants(layer) | {name: " ".join(map(_digest, each)) for name, each in stacked.items() if len(each)}


def adapter(worker: Any, lora: Any) -> Adapter | None:
    """Return the digest and files of a LoRA adapter as the worker has loaded it. Return None if lmkv cannot identify
    the adapter. Never raises.

    If the worker has not loaded the adapter, read its files without loading it into vLLM. Loading might evict the
    adapter of a running request.
    """
    try:
        manager = worker.model_runner.lora_manager
        if lora.lora_int_id in manager.list_adapters():
            path, found = manager.lmkv_adapters.get(lora.lora_int_id, ("", None))
            return found if path == str(lora.lora_path) else None
        before = stamps(folder_of(str(lora.lora_path)))
        return _adapter_digest(manager.lmkv_load(lora)), before
    except Exception as error:
        names = printable(str(lora.lora_path)), safe_repr(error)
        logger.warning("lmkv: a worker cannot identify the adapter %s, so its requests are not cached: %s", *names)
        return None


_loads: set[tuple[int, str]] = set()


def take_loads() -> set[tuple[int, str]]:
    """Return the adapters that this process has loaded since the last call, as pairs (adapter number, digest). The
    digest is "" if unknown.
    """
    taken = set(_loads)
    _loads.difference_update(taken)
    return taken


def _watch_adapters(manager: Any) -> None:
    """Patch vLLM's LoRA manager, so that it records each adapter that it loads. Idempotent."""
    if hasattr(manager, "lmkv_adapters"):
        return
    _loads.clear()
    load = manager.lmkv_load = manager._load_adapter
    manager.lmkv_adapters = {}

    def load_adapter(lora: Any) -> Any:
        before = stamps(folder_of(str(lora.lora_path)))
        found, digest = load(lora), ""
        with suppress(Exception):
            # Before vLLM merges weights and scales.
            digest = _adapter_digest(found)
        manager.lmkv_adapters[lora.lora_int_id] = str(lora.lora_path), (digest, before)
        _loads.add((lora.lora_int_id, digest))
        return found

    manager._load_adapter = load_adapter


def _adapter_digest(found: Any) -> str:
    digest = hashlib.sha256(str(getattr(found, "is_3d_lora_weight", "")).encode())
    for name, weights in sorted(found.loras.items()):
        parts = [name, type(weights).__qualname__]
        for field, value in sorted(vars(weights).items()):
            tensors = value if isinstance(value, (list, tuple)) else [value]
            parts += [
                f"{field} {_digest(each) if hasattr(each, 'untyped_storage') else repr(each)}" for each in tensors
            ]
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def draft_model(runner: Any) -> Any | None:
    """Return the draft model if the runner has one with separate layers, else None."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    return getattr(model, "unwrap", lambda: model)()


def _layers(runner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield `(place, layer)` for the layers of the model and of the draft model."""
    if not hasattr(runner.get_model(), "named_modules"):
        raise ValueError(f"lmkv cannot find the layers of model class {type(runner.get_model()).__name__}")
    for name, model in (("model", runner.get_model()), ("draft", draft_model(runner))):
        # A drafter may have no model.
        for place, layer in getattr(model, "named_modules", tuple)():
            yield f"{name}.{place}", layer


def _identity(vllm_config: Any, layers: Iterable[tuple[str, nn.Module]], workers: Sequence[Any] = ()) -> str:
    """Return the identity of these layers. `workers`: vLLM objects with code that may also affect the layers'
    results.
    """
    scattered = experts_are_scattered(vllm_config)
    files = stamps(folder_of(source_of(vllm_config.model_config), "config.json")) if scattered else ()
    if scattered and not files:
        raise ValueError("each data parallel engine has only some of the experts, and no file identifies the others")
    config = vllm_config.model_config.hf_config
    digest = hashlib.sha256(config_digest(vllm_config.model_config).encode())
    seen, source, methods = dict[Any, str](), functools.cache(code.digest), functools.cache(code.foreign_methods)
    packages = frozenset(
        code.packages_of(*workers) | code.packages_of_plug_ins() | code.packages_of(config) - {"transformers"}
    )
    kinds = set(type(config).__mro__)
    parts, layers = list[Any](), list(layers)
    places = {id(layer): place for place, layer in layers}
    for place, layer in layers:
        if scattered and _EXPERTS & {kind.__name__ for kind in type(layer).__mro__}:
            continue
        owners = [*_parts_of(layer).values()]
        parts += code.check_calls(place, layer, owners, places)
        if layer not in _constants_of:
            own = source(frozenset(code.packages_of(*owners) | packages))
            _constants_of[layer] = _constants(layer) | {"code": own}
        parts += [place, type(layer).__qualname__, *sorted(_constants_of[layer].items()), *_tensors(layer, seen)]
        of_layer = {kind for owner in owners for kind in type(owner).__mro__}
        if others := frozenset().union(*map(methods, of_layer)):
            parts.append(source(others))
        kinds |= of_layer
    digest.update(json.dumps([parts, code.digest_of_vllm(kinds), files]).encode())
    return digest.hexdigest()


_EXPERTS = {"FusedMoE", "RoutedExperts"}
"""Class names, in several versions of vLLM, of layers that hold the weights of experts."""


def experts_are_scattered(vllm_config: Any) -> bool:
    """Return whether the experts are spread over several data parallel engines, so that no engine has all of them."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return parallel.data_parallel_size > 1 and bool(getattr(model, "is_moe", True))


_ADDRESSES = 1 << 40
"""Smallest number that counts as a memory address. Addresses differ between processes, so they are no constants."""


_HOW = re.compile("compile|guards|nvtx|_is_encoder|use_aiter|use_flashinfer|torchao_reload")
"""Names of attributes that decide how a layer computes, but not the result. Engines with and without compilation have
different values.
"""


def _parts_of(layer: nn.Module) -> dict[str, Any]:
    names = ("impl", "quant_method", "scheme")
    parts = {"": layer, **{name: getattr(layer, name, None) for name in names}}
    return {name: part for name, part in parts.items() if part is not None}


def _constants(layer: nn.Module) -> dict[str, str]:
    """Return the numbers and names, other than tensors, that a layer uses: scales, windows, limits, backends."""
    found = {}
    for part, owner in _parts_of(layer).items():
        found[part] = type(owner).__qualname__
        for name, value in _values_of(owner):
            if _is_constant(value) and not _HOW.search(name):
                found[f"{part}.{name}"] = repr(value)
    return found


_DEPTH = 4
"""Largest nesting depth of dictionaries, lists and objects to examine in a layer of a plug-in."""
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})


def _values_of(owner: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a layer or its backend. For layers of plug-ins, also return nested values."""
    own = code.packages_of(owner)
    fields = [(name, value) for name, value in getattr(owner, "__dict__", {}).items() if name not in _OF_TORCH]
    return [leaf for name, value in fields for leaf in _leaves(name, value, own)] if own else fields


def _leaves(name: str, value: Any, own: Set[str], depth: int = 0) -> Iterator[tuple[str, Any]]:
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, (list, tuple)) and not _is_constant(value):
        inside = enumerate(value)
    elif isinstance(value, SimpleNamespace) or (code.packages_of(value) & own and not hasattr(value, "named_modules")):
        inside = getattr(value, "__dict__", {}).items()
    yield name, value
    for key, each in list(inside) if depth < _DEPTH else ():
        yield from _leaves(f"{name}.{key}", each, own, depth + 1)


_COUNTS, _OF_PLUG_INS = re.compile("scale|slope|bias|sink|zero"), re.compile("^(?!kv_cache)")
"""Patterns for names of tensors, outside parameters and buffers, that affect results: in vLLM's layers, and in other
layers. All other tensors are working memory.
"""


def _is_constant(value: Any) -> bool:
    if isinstance(value, str):
        return "/" not in value
    if isinstance(value, (list, tuple)):
        return all(map(_is_constant, value))
    return isinstance(value, (int, float)) and abs(value) < _ADDRESSES


def _tensors(module: nn.Module, seen: dict[Any, str]) -> Iterator[str]:
    """Yield a text line with the digest of each parameter and buffer of a layer, and of each other tensor that affects
    results.

    `seen`: digests of tensors that several layers share.
    """
    for part, owner in _parts_of(module).items():
        counts = _OF_PLUG_INS if code.packages_of(owner) else _COUNTS
        for name, value in sorted(_values_of(owner), key=itemgetter(0)):
            if hasattr(value, "untyped_storage") and counts.search(name):
                yield f"{part}.{name} {_digest_once(value, seen)}"
    for name, tensor in sorted([*module._parameters.items(), *module._buffers.items()], key=itemgetter(0)):
        if tensor is None or tensor.is_meta:
            # Another rank has this layer, or it is packed.
            continue
        if not tensor.numel():
            emptied = _emptied.get(module, {})
            if name in module._parameters and name not in emptied:
                raise ValueError(f"{type(module).__name__}.{name} is empty, and lmkv does not know its former content")
            yield f"{name} {emptied.get(name, '')}"
            continue
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {_digest_once(tensor, seen)}"
    for name, known in sorted(_emptied.get(module, {}).items()):
        if module._parameters.get(name) is None:
            yield f"{name} {known}"


def _digest_once(tensor: torch.Tensor, seen: dict[Any, str]) -> str:
    if hasattr(tensor, "__tensor_flatten__"):
        # Made of other tensors, like torchao's quantized ones, without separate memory.
        names, context = tensor.__tensor_flatten__()
        parts = [as_json(context), *(f"{name} {_digest_once(getattr(tensor, name), seen)}" for name in names)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()
    place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    if place not in seen:
        seen[place] = _digest(tensor)
    return seen[place]


def _digest(tensor: torch.Tensor) -> str:
    found = [_digest_of_part(part.contiguous().flatten()) for part in _parts(tensor.detach())]
    return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a tensor that is not contiguous, so that contiguous copies of the pieces need little device memory."""
    if tensor.is_contiguous():
        return [tensor]
    row = max(1, tensor[0].numel() * tensor.element_size())
    parts: Sequence[torch.Tensor] = tensor.split(max(1, 4 * _BLOCK // row))
    return parts


def _digest_of_part(data: torch.Tensor) -> str:
    if data.device.type != "cpu":
        return digest_on_device(data)
    import torch

    return hashlib.sha256(data.view(torch.uint8).numpy().data).hexdigest()


_BLOCK = 1 << 20
"""Number of 32-bit words (4 MiB) that are summed at once, which needs 16 MiB."""


def digest_on_device(data: torch.Tensor) -> str:
    """Return the digest of a flat tensor, computed on the tensor's device.

    Each 32-bit word is multiplied by an odd 64-bit factor for its position, and the products of every 4 MiB are added
    up. This is done twice, with different factors. Each time, different tensors have equal sums with a probability of
    about 2**-32. The digest is the SHA-256 of all sums.
    """
    import torch

    octets = data.view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()
    whole = octets[: octets.numel() // 4 * 4].view(torch.int32)
    rest = octets[whole.numel() * 4 :].to(torch.int64)
    rows = [factors(row, min(_BLOCK, whole.numel()), data.device) for row in (1, 2)]
    sums = [(block.to(torch.int64) * row[: block.numel()]).sum() for row in rows for block in whole.split(_BLOCK)]
    found = torch.cat([torch.stack(sums) if sums else rest[:0], rest]).cpu().numpy()
    return hashlib.sha256(b"%d " % octets.numel() + found.tobytes()).hexdigest()


# -- on the scheduler's side ------------------------------------------------------------------------------------------


class LoadedModel:
    """Asks the workers of one engine for the identity of their model. Only the scheduling thread calls its methods.

    `core`: vLLM's engine core, which has the workers; None if there is no engine core.
    """

    def __init__(self, core: Any | None) -> None:
        self._core = ref(core) if core is not None else lambda: None
        self._asked = False

    def __call__(self) -> str | None:
        """Return the identity of the model in all workers, or None if a worker cannot identify its model. Waits for the
        running step.
        """
        core, again, self._asked = self._core(), self._asked, True
        try:
            found = [] if core is None else core.model_executor.collective_rpc(identity)
        except Exception as error:
            logger.warning("lmkv: nothing is cached until the workers can identify their weights: %r", error)
            found = []
        if core is None or not found or not all(found):
            logger.warning("lmkv: nothing is cached, because not all workers have identified their weights")
            return None
        if again and experts_are_scattered(core.vllm_config):
            found.append(secrets.token_hex(16))
        return hashlib.sha256(" ".join(found).encode()).hexdigest()

    def adapter(self, lora: Any) -> Adapter | None:
        """Return the digest and files of an adapter, if all workers have the same files. Return None otherwise."""
        core, found = self._core(), list[Adapter | None]()
        with suppress(Exception):
            found = [] if core is None else core.model_executor.collective_rpc(adapter, args=(lora,))
        known = [each for each in found if each is not None]
        if not known or len(known) < len(found) or {files for _, files in known} != {known[0][1]}:
            return None
        return " ".join(sorted({digest for digest, _ in known})), known[0][1]

    def watch(self, changes: WeightChanges) -> None:
        """Patch the engine core to notify `changes` of every call that may change weights or adapters, or that clears
        vLLM's encoder cache.
        """
        core = self._core()
        if core is None:
            return

        def around(name: str, after: Callable[..., None], before: Callable[..., None] = lambda *_, **__: None) -> None:
            original = getattr(core, name, None)
            if original is None:
                return

            # vLLM reads the signatures of methods that clients call.
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                guarded(before, *args, **kwargs)
                try:
                    return original(*args, **kwargs)
                finally:
                    guarded(after, *args, **kwargs)

            def guarded(told: Callable[..., None], *args: Any, **kwargs: Any) -> None:
                try:
                    told(*args, **kwargs)
                except Exception:
                    logger.exception("lmkv: vLLM called %s in an unknown way; lmkv hashes the weights again", name)
                    changes.suspect()

            setattr(core, name, call)

        def keeps_weights(method: Any) -> bool:
            return isinstance(method, str) and method in KEEPS_WEIGHTS

        def before_rpc(method: Any = None, *_: Any, **__: Any) -> None:
            # A sleeping device has no memory to read.
            if not keeps_weights(method) and not core.model_executor.is_sleeping:
                core.model_executor.collective_rpc(note_constants)

        def after_rpc(method: Any = None, *_: Any, **__: Any) -> None:
            if not keeps_weights(method):
                changes.suspect()
                core.model_executor.collective_rpc(fold_constants)

        def after_reset(running: bool = False, connector: bool = False, **given: Any) -> None:
            # The connector's own reset reports itself.
            if not given.get("reset_connector", connector):
                changes.suspect()

        around("collective_rpc", after_rpc, before_rpc)
        around("reset_prefix_cache", after_reset)
        around("reset_encoder_cache", changes.forget_media)
        around("add_lora", lambda lora_request: changes.forget_adapter(lora_request.lora_int_id))
        around("remove_lora", changes.forget_adapter)
