"""Finds code outside vLLM that computes KV (models, layers and backends of plug-ins), and hashes this code."""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

KEY: dict[str, tuple[str, ...]] = {
    "": ("additional_config",),
    "model_config": (
        *("dtype", "quantization", "quantization_config", "model_impl", "trust_remote_code", "code_revision"),
        "model_class_overrides",
    ),
    "model_config.multimodal_config": (
        *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
        "mm_encoder_attn_dtype",
    ),
    "cache_config": ("cache_dtype", "kv_cache_dtype_skip_layers"),
    "attention_config": (
        *("backend", "backend_per_kind", "indexer_kv_dtype", "indexer_sparse_logits", "use_trtllm_attention"),
        *("disable_flashinfer_q_quantization", "use_prefill_query_quantization"),
        # Before vLLM 0.30, and from 0.33 on.
        *("use_fp4_indexer_cache", "trtllm_ragged_backend"),
    ),
    "kernel_config": ("moe_backend", "linear_backend", "linear_backend_per_quant"),
    "parallel_config": ("dcp_kv_cache_interleave_size", "all2all_backend", "worker_cls", "sd_worker_cls"),
    "lora_config": (
        *("lora_dtype", "target_modules", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        "enable_tower_connector_lora",
    ),
    "compilation_config": ("inductor_passes",),
    "ec_manager_config": ("encoder_cache_manager_cls", "manager_config"),
}
"""Fields of vLLM's configuration that are part of every chunk key, by the path of their object below `VllmConfig`."""

DRAFT_KEY = (
    *("method", "draft_tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype"),
    *("code_revision", "disable_eagle_block_drop", "use_heterogeneous_vocab", "parallel_drafting", "max_model_len"),
)
"""Fields of `speculative_config` that are part of every chunk key if draft layers have separate KV."""

ENVIRONMENT = (
    *("VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_PLUGINS", "VLLM_CPU_INT4_W4A8", "VLLM_MARLIN_INPUT_DTYPE"),
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_HUMMING_USE_F16_ACCUM"),
    *("VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION", "VLLM_B12X_MOE_FP4_FORCE_A16"),
    *("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"),
    *("VLLM_USE_DEEP_GEMM_E8M0", "VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_ROCM_USE_AITER"),
    *("VLLM_ROCM_USE_AITER_MOE_SITUV2", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4", "VLLM_ROCM_USE_AITER_FP8BMM"),
    *("VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS", "VLLM_ROCM_FP8_MFMA_PAGE_ATTN"),
    *("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_MEDIA_CONNECTOR"),
    *("VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB"),
    *("VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB"),
    *("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"),
    *("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", "VLLM_VIDEO_LOADER_BACKEND", "NVIDIA_TF32_OVERRIDE"),
    *("INKLING_SPLIT_KV", "INKLING_GFX950_GLUON", "FORCE_NUM_KV_SPLITS", "AITER_BF16_FP8_MOE_BOUND", "USE_FLAGOS"),
    "XHS_VIDEO_JPEG_QUALITY",
)


KNOWN = frozenset({"vllm", "torch", "lmkv", "builtins", *sys.stdlib_module_names})
"""Packages whose code `digest` does not read, because they compute no KV or their version is part of every chunk key
anyway.
"""
_PLUG_INS = ("vllm.general_plugins", "vllm.platform_plugins")
_WRAPPED = 20
"""Largest number of wrappers to follow around a function. Some objects return another callable for every attribute, so
following could go on forever.
"""
_IMPORTS = {"import_module", "__import__"}


def described(vllm_config: Any, *, drafts: bool) -> str:
    """Return the names and values of all vLLM options that affect KV, as text. `drafts`: whether draft layers have
    separate KV, so that their options are included.
    """
    found: dict[str, Any] = {}
    for path, names in {**KEY, **({"speculative_config": DRAFT_KEY} if drafts else {})}.items():
        config = vllm_config
        for step in path.split(".") if path else ():
            config = getattr(config, step, None)
        found |= {f"{path}.{name}": value for name in names if (value := getattr(config, name, None)) is not None}
    found |= {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return as_json(found)


def as_json(value: Any) -> str:
    """Return a value as JSON text. Equal values give the same text in every process."""
    return json.dumps(_with_text_keys(value), sort_keys=True, default=lambda part: _with_text_keys(_plain(part)))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(part) for key, part in value.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Return a configuration value in a form that JSON can encode, without memory addresses."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return vars(value) if hasattr(value, "__dict__") else str(value)


def package_of(thing: Any) -> str:
    """Return the top-level package that defines a class or function, or the class of another object. Return "" if
    unknown.
    """
    with suppress(Exception):  # Some objects are loaded when they are looked at.
        # A wrapper has the names of the wrapped function.
        name = thing.__globals__["__name__"] if inspect.isfunction(thing) else thing.__module__
        return str(name or "").partition(".")[0]
    return ""


def packages_of(*things: object) -> set[str]:
    """Return the packages that define the classes (and base classes) of these objects. Leave out vLLM, torch, lmkv and
    Python (`KNOWN`).
    """
    return {package_of(kind) for thing in things for kind in type(thing).__mro__} - KNOWN


@functools.cache
def packages_of_plug_ins() -> frozenset[str]:
    """Return the packages of the vLLM plug-ins that are loaded in this process."""
    entries = [entry for group in _PLUG_INS for entry in importlib.metadata.entry_points(group=group)]
    return frozenset(entry.module.partition(".")[0] for entry in entries if entry.module in sys.modules) - KNOWN


def foreign_methods(kind: type) -> set[str]:
    """Return the packages that have replaced or added methods of the class `kind`.

    Leave out the package that defines `kind`, vLLM plug-ins, vLLM, torch, lmkv and Python (`KNOWN`), and packages with
    an installed version that identifies their code. Raises ValueError if a replaced or added method comes from
    `__main__`, or has bound arguments or other values that its source code does not show.
    """
    package = package_of(kind)
    calls = [(package_of(call), call) for method in vars(kind).values() for call in _calls_of(method)]
    foreign = {place: call for place, call in calls if place not in KNOWN | {package, ""}}
    own = [call for place, call in calls if place == package and not (package in KNOWN or _version(package))]
    if "__main__" in foreign or any(map(_has_values, [*foreign.values(), *own])):
        raise ValueError(f"a method of {kind.__name__} is in no package, or uses values that no file has")
    return {place for place in foreign if not _version(place)} - packages_of_plug_ins()


def check_calls(place: str, layer: Any, parts: Sequence[object], places: Mapping[int, str]) -> list[str]:
    """Check that a layer's hooks and attributes call only code that lmkv can identify. Return the calls of other
    layers' methods, as texts with method and layer.

    Allowed are functions of vLLM, torch, lmkv and Python (`KNOWN`), and of packages that define one of `parts`. A
    function that is no hook and replaces no method may also come from a package with an installed version that
    identifies the code. Raises ValueError for any other function. Also raises ValueError if a function outside `KNOWN`
    has values that its source code does not show, such as bound arguments.

    `place`: the layer's name in the model. `parts`: the layer, its backend and other objects that compute for the
    layer. `places`: the name of each layer in the model, by Python's `id(layer)`.
    """
    everywhere = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    hooks: list[Mapping[int, Any]] = [layer._forward_hooks, layer._forward_pre_hooks, *everywhere]
    hung = [(True, hook) for each in hooks for hook in each.values()]
    for part in parts:
        hung += [(hasattr(type(part), name), each) for name, each in getattr(part, "__dict__", {}).items()]
    own, found = packages_of(*parts), list[str]()
    for replaces, each in hung:
        for call in _calls_of(each):
            package, of = package_of(getattr(call, "func", call)), getattr(call, "__self__", None)
            if package in KNOWN | {""}:
                if isinstance(of, torch.nn.Module) and of is not layer:
                    found.append(f"{getattr(call, '__qualname__', '')} of {places.get(id(of), 'another model')}")
            elif _has_values(call, parts) or not (package in own or (not replaces and _version(package))):
                raise ValueError(f"layer {place} calls {call!r}, which belongs neither to vLLM nor to the model")
    return found


def _calls_of(value: Any) -> Iterator[object]:
    """Yield a callable, and then every callable that it wraps, from the outside in. Yield nothing for a class, a layer
    or data.

    Raises ValueError if there are more than `_WRAPPED` wrappers.
    """
    for _ in range(_WRAPPED):
        if not callable(value) and not isinstance(value, (classmethod, staticmethod)):
            return
        if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
            return
        yield value
        fields = getattr(value, "__dict__", {})
        value = getattr(value, "__func__", None) or getattr(value, "func", None) or fields.get("__wrapped__")
    raise ValueError("a callable of a layer wraps other callables without an end")


def _has_values(call: Any, parts: Sequence[object] = ()) -> bool:
    """Return whether a function uses values that its source code does not show, such as bound arguments. Default values
    of plain types do not count, because the source code shows them.
    """
    cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or () if cell != type(cell)()]
    given = [*(getattr(call, "__defaults__", None) or ()), *(getattr(call, "__kwdefaults__", None) or {}).values()]
    if not inspect.isroutine(call) and not isinstance(call, functools.partial) and getattr(call, "__dict__", None):
        return True
    owner = getattr(call, "__self__", None)
    known = owner is None or inspect.ismodule(owner) or isinstance(owner, (type, torch.nn.Module))
    of_object = not known and all(owner is not part for part in parts)
    made_with = bool(getattr(call, "args", ()) or getattr(call, "keywords", {}))
    of_code = all(inspect.isroutine(value) or isinstance(value, type) for value in cells)
    return of_object or made_with or not of_code or not all(map(_is_told, given))


def _is_told(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_told, value))
    told = (type(None), bool, int, float, str, bytes, type, torch.dtype)
    return isinstance(value, told) or inspect.isroutine(value)


def digest(packages: Iterable[str]) -> str:
    """Return a digest of the code of `packages` and of all modules that this code imports. If an imported module
    belongs to another installed package, only the version of that package is hashed.

    Raises OSError or ValueError if code cannot be read, for example because the code comes from no file.
    """
    own = set(packages) - KNOWN - {"", "transformers"}
    asked = [name for name in sorted(sys.modules) if name.partition(".")[0] in own]
    found, seen = {package: _version(package) for package in packages}, set[str]()
    while asked:
        name = asked.pop()
        package = name.partition(".")[0]
        if name in seen or package in KNOWN:
            continue
        seen.add(name)
        if package not in own and _version(package):
            found[package] = _version(package)
            continue
        asked += [name.rpartition(".")[0]] if "." in name else []
        path = _file_of(name)
        found[name] = ""
        if path is not None:
            found[name], imports = _read(path, path.stat().st_mtime_ns, name)
            asked += imports
        elif package in own and _has_code(name):
            raise ValueError(f"lmkv cannot read the code of module {name}")
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def digest_of_vllm(kinds: Iterable[type]) -> str:
    """Return a digest of the vLLM files that define these classes. vLLM's version does not identify these files,
    because a fork or an edited file may keep a release's version.
    """
    names = {kind.__module__ for kind in kinds if package_of(kind) == "vllm"}
    paths = [(name, path) for name in sorted(names) if (path := _file_of(name)) is not None]
    found = [(name, _read(path, path.stat().st_mtime_ns, name)[0]) for name, path in paths]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _has_code(name: str) -> bool:
    """Return whether a module is loaded and is not a namespace package."""
    module = sys.modules.get(name)
    return module is not None and not (hasattr(module, "__path__") and getattr(module, "__file__", None) is None)


@functools.lru_cache(10_000)
def _read(path: Path, _changed: int, name: str) -> tuple[str, tuple[str, ...]]:
    """Return `(digest, imports)`: a digest of a module's file, and the names that the file imports, which need not be
    modules.
    """
    data, imports = path.read_bytes(), set[str]()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    with suppress(SyntaxError, ValueError, ImportError):
        for node in ast.walk(ast.parse(data)) if path.suffix == ".py" else ():
            if isinstance(node, ast.Import):
                imports.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
                imports |= {module, *(f"{module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _IMPORTS:
                imports.update(str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))
    return hashlib.sha256(data).hexdigest(), tuple(imports)


def _file_of(name: str) -> Path | None:
    """Find the file of a module without importing the module. Returns None for a module without a file."""
    with suppress(Exception):
        spec = _spec_of(name)
        origin = spec.origin if spec is not None else sys.modules[name].__file__
        return Path(origin) if origin and Path(origin).is_file() else None
    return None


def _spec_of(name: str) -> ModuleSpec | None:
    if name in sys.modules:
        return sys.modules[name].__spec__
    parent = name.rpartition(".")[0]
    inside = _spec_of(parent) if parent else None
    if parent and inside is None:
        return None
    return PathFinder.find_spec(name, inside.submodule_search_locations if inside is not None else None)


@functools.cache
def _version(package: str) -> str:
    """Return a package's version. Return "" if the code may change without a new version: not installed, or
    editable.
    """
    with suppress(Exception):
        found = [importlib.metadata.distribution(name) for name in _distributions()[package]]
        if not any("editable" in (each.read_text("direct_url.json") or "") for each in found):
            return " ".join(f"{each.name} {each.version}" for each in found)
    return ""


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
