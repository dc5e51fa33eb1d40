"""Code that is not vLLM's and that computes KV: models, layers and backends of plug-ins, and what these import."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

KNOWN = frozenset({"vllm", "torch", "lmkv", "builtins", *sys.stdlib_module_names})
"""Packages whose version is part of every key already, or that compute nothing."""
_PLUG_INS = ("vllm.general_plugins", "vllm.platform_plugins")


def package_of(thing: Any) -> str:
    """The package of a class, a function, a module, or else of an object's class; "" if it has none."""
    with suppress(Exception):  # Some objects are loaded when they are looked at.
        if isinstance(thing, ModuleType):
            name = thing.__name__
        elif inspect.isfunction(thing):
            # A wrapper calls itself what it wraps.
            name = thing.__globals__["__name__"]
        else:
            name = thing.__module__
        return str(name).partition(".")[0]
    return ""


def packages_of(*things: object) -> set[str]:
    """The packages that define the classes of these."""
    return {package_of(kind) for thing in things for kind in type(thing).__mro__} - KNOWN


@functools.cache
def packages_of_plug_ins() -> frozenset[str]:
    """Those of the plug-ins that vLLM has loaded in this process."""
    entries = [entry for group in _PLUG_INS for entry in importlib.metadata.entry_points(group=group)]
    return frozenset(entry.module.partition(".")[0] for entry in entries if entry.module in sys.modules) - KNOWN


def foreign_methods(kind: type) -> set[str]:
    """The packages whose functions stand in a class of another package. Raises ValueError where no file has them."""
    found = {package_of(call) for method in vars(kind).values() for call in _calls_of(method)}
    found -= KNOWN | {package_of(kind), ""} | packages_of_plug_ins()
    if "__main__" in found:
        raise ValueError(f"a method of {kind.__name__} was replaced by one that is in no package")
    return {package for package in found if not _version(package)}


def check_calls(place: str, layer: Any, parts: Sequence[object]) -> None:
    """Raise ValueError where a function was hung into a layer that is neither its model's nor a plug-in's.

    Hooks and replaced functions have values of their own, which nothing tells. `parts`: the layer, its backend...
    """
    hung = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    hung += [*torch_modules._global_forward_hooks.values(), *torch_modules._global_forward_pre_hooks.values()]
    hung += [each for part in parts for each in getattr(part, "__dict__", {}).values()]
    own = KNOWN | packages_of(*parts) | packages_of_plug_ins() | {""}
    for call in (call for each in hung for call in _calls_of(each)):
        package = package_of(call)
        if package not in own and not _version(package):
            raise ValueError(f"{place} calls {call!r}, which is neither vLLM's nor its model's")


def _calls_of(value: Any) -> Iterator[object]:
    """What is called where this is: itself, and what it wraps."""
    while callable(value) or isinstance(value, (classmethod, staticmethod)):
        if isinstance(value, (type, torch.nn.Module, torch.Tensor)):
            return
        yield value if inspect.isroutine(value) else type(value)
        fields = getattr(value, "__dict__", {})
        value = getattr(value, "__func__", None) or getattr(value, "func", None) or fields.get("__wrapped__")


def digest(packages: Iterable[str]) -> str:
    """A digest of the loaded code of packages, and of what they import: by version where that is installed."""
    found, asked = dict[str, str](), sorted(set(packages) - KNOWN - {""})
    own = set(asked) - {"transformers"}
    while asked:
        package = asked.pop()
        if package in found:
            continue
        if package not in own and _version(package):
            found[package] = _version(package)
            continue
        sources, imported = hashlib.sha256(), set[str]()
        loaded = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
        for name, module in ((name, sys.modules[name]) for name in sorted(loaded)):
            # A module of None is one that must not be imported.
            with suppress(OSError, TypeError):
                imported |= {package_of(value) for value in list(vars(module).values())}
                path = inspect.getsourcefile(module)
                sources.update(name.encode() + (Path(path).read_bytes() if path else b""))
        found[package] = sources.hexdigest()
        asked += imported - KNOWN - {""}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


@functools.cache
def _version(package: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        return importlib.metadata.version(package)
    return ""
